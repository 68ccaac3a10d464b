"""Pages of real vLLM servers of many versions, and everything that other versions and writers do differently."""

from __future__ import annotations

import math
import time

import pytest

import tests.helpers.vllm_pages as pages
from kvpressure.model.readings import EngineReading, Histogram
from kvpressure.sources.scrape import layout
from kvpressure.sources.scrape.layout import MAX_BUCKETS, MAX_ENGINES, MAX_VALUES, SMALL_PAGE_BYTES, ScrapeLimits
from kvpressure.sources.scrape.scanner import MAX_LINES, Scanner, parse_scrape


def scan(text):
    return Scanner().scan(text)


def engine_of(text) -> EngineReading:
    """The only engine of a page that has nothing bad in it."""
    result = scan(text)
    assert (result.error, result.bad_lines) == (None, 0)
    (engine,) = result.engines
    return engine


def series(name, value="1.0", **labels):
    labels = {"engine": "0", "model_name": "m", **labels}
    inner = ",".join(f'{key}="{text}"' for key, text in labels.items() if text is not None)
    return f"vllm:{name}{{{inner}}} {value}\n"


RUNNING = series("num_requests_running", "3.0")


# --- real pages ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("capture", pages.CAPTURES[::2])
@pytest.mark.parametrize("dialect", ["openmetrics", "underscores", "ray", "old ray", "quoted", "crlf", "timestamps"])
def test_the_same_page_in_another_dialect_gives_the_same_engines(capture, dialect):
    text = pages.text_of(capture)
    translated = {
        "openmetrics": lambda: pages.to_openmetrics(text),
        "underscores": lambda: pages.to_openmetrics(text, underscores=True),
        "ray": lambda: text.replace("vllm:", "ray_vllm_"),
        "old ray": lambda: text.replace("vllm:", "ray_vllm:"),
        "quoted": lambda: pages.to_quoted(text),
        "crlf": lambda: text.replace("\n", "\r\n"),
        "timestamps": lambda: "\n".join(
            line if line.startswith("#") or not line else f"{line} 1700000000000" for line in text.split("\n")
        ),
    }[dialect]()
    assert translated != text
    scanner, plain = Scanner(), scan(text)
    assert (plain.bad_lines, plain.error, plain.flavour) == (0, None, "v1")
    for result in (scanner.scan(translated), scanner.scan(translated)):  # unknown and known layout
        assert result.engines == plain.engines
        assert result.page == plain.page
        assert result.bad_lines == 0


def test_what_a_gpu_computes_reads_and_writes_is_told_apart():
    """The pages of real servers without such a GPU have 0 in all three."""
    counted = {"estimated_flops": 1.0, "estimated_read_bytes": 2.0, "estimated_write_bytes": 3.0}
    page = "".join(series(f"{name}_per_gpu_total", str(value)) for name, value in counted.items())
    assert engine_of(page).counters == counted


# --- versions --------------------------------------------------------------------------------------------


def test_the_newer_spelling_wins_whatever_the_order_unless_it_cannot_be_read():
    new, old = series("kv_cache_usage_perc", "0.7"), series("gpu_cache_usage_perc", "0.2")
    assert engine_of(new + old).gauges == engine_of(old + new).gauges == {"kv_usage": 0.7}
    new, old = series("inter_token_latency_seconds_sum", "5"), series("time_per_output_token_seconds_sum", "9")
    assert engine_of(new + old).histograms["inter_token"].sum == engine_of(old + new).histograms["inter_token"].sum == 5
    result = scan(series("kv_cache_usage_perc", "NaN") + series("gpu_cache_usage_perc", "0.2"))
    assert result.engines[0].gauges == {"kv_usage": 0.2}
    assert result.bad_lines == 1


def test_a_pid_label_is_dropped_and_the_largest_value_counts():
    text = "".join(
        series("kv_cache_usage_perc", value, pid=pid) for pid, value in (("7", "0.1"), ("9", "0.8"), ("8", "0"))
    )
    result = scan(RUNNING + text)
    assert result.engines[0].gauges["kv_usage"] == 0.8


def test_flavour_is_named_only_on_evidence():
    flavours = {
        series("num_requests_running", engine=None): None,
        RUNNING: "v1",
        series("kv_cache_usage_perc", "0.5", engine=None): "v1",
        series("gpu_prefix_cache_queries_total", engine=None): "v1",
        series("num_preemptions_total", engine=None): "v0",
        series("num_preemptions_total", engine=None).replace("vllm:", "ray_vllm_"): None,
        RUNNING + "# EOF\n": "rust",
        RUNNING + series("cache_config_info", block_size="16") + "# EOF\n": "v1",
        RUNNING.replace("vllm:", "vllm_") + "# EOF\n": "v1",
    }
    assert {text: scan(text).flavour for text in flavours} == flavours


def test_a_rust_page_with_types_that_do_not_fit_its_samples():
    text = (
        "# TYPE vllm:prompt_tokens counter\n# HELP vllm:prompt_tokens Prompt tokens.\n"
        + series("prompt_tokens_total", "5")
        + RUNNING
        + "# TYPE vllm:time_to_first_token_seconds gauge\n"
        + series("time_to_first_token_seconds_bucket", '3 # {trace_id="abc"} 0.2 1700000000.1', le="+Inf")
        + series("time_to_first_token_seconds_sum", "2.5")
        + "# EOF\n"
    )
    engine = engine_of(text)
    assert engine.counters == {"prompt_tokens": 5}
    assert engine.histograms == {"ttft": Histogram((math.inf,), (3,), 2.5, 3)}


# --- values ----------------------------------------------------------------------------------------------


@pytest.mark.attack("absurd running and waiting requests", "the values are absent and counted")
@pytest.mark.fault("engines", "impossible values", "the value is absent", "`page_bad_lines`", "next good value")
@pytest.mark.parametrize(
    "value", ["NaN", "+Inf", "-Inf", "-1", "1e308", "1e400", "abc", "", "0x10", "1_0", "1 2 3", "--1"]
)
def test_a_value_that_cannot_be_costs_its_line_and_is_counted(value):
    text = RUNNING + series("num_requests_waiting", value)
    scanner = Scanner()
    for result in (scanner.scan(text), scanner.scan(RUNNING + series("num_requests_waiting", "2")), scanner.scan(text)):
        if result.bad_lines:
            assert result.bad_lines == 1
            assert result.engines[0].gauges == {"running": 3}
        else:
            assert result.engines[0].gauges == {"running": 3, "waiting": 2}


def test_usage_is_a_ratio():
    for value in ("0", "1.0", "1.0001"):
        assert "kv_usage" in engine_of(RUNNING + series("kv_cache_usage_perc", value)).gauges
    for value in ("1.0002", "-0.1", "97.5"):
        result = scan(RUNNING + series("kv_cache_usage_perc", value))
        assert (dict(result.engines[0].gauges), result.bad_lines) == ({"running": 3}, 1)


@pytest.mark.parametrize(
    "line",
    [
        'vllm:num_requests_waiting{engine="0",model_name="m" 1',
        'vllm:num_requests_waiting{engine="0",model_name=m} 1',
        'vllm:num_requests_waiting{engine="0",engine="1",model_name="m"} 1',
        'vllm:num_requests_waiting{engine="0"} 1 nonsense',
        'vllm:num_requests_waiting{engine="0"}',
        "vllm:num_requests_waiting",
        'vllm:num_requests_waiting{model_name="' + "x" * 1025 + '"} 1',
        'vllm:num_requests_waiting{model_name="m"} ' + "0" * 20_000 + "4",
        'vllm:num_requests_waiting{model_name="' + "x" * 1_000_000 + '"} 1',
        "vllm:num_requests_waiting{" + ",".join(f'l{n}="x"' for n in range(200)) + "} 1",
        'vllm:time_to_first_token_seconds_bucket{engine="0",model_name="m"} 1',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="x",model_name="m"} 1',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="NaN",model_name="m"} 1',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="-1",model_name="m"} 1',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="1e308",model_name="m"} 1',
    ],
)
def test_a_wanted_line_that_cannot_be_read_is_counted_and_costs_nothing_else(line):
    result = scan(f"{line}\n{RUNNING}{line}")
    assert result.engines == scan(RUNNING).engines
    assert result.bad_lines == 2


def test_of_duplicates_the_last_counts():
    text = series("num_requests_running", "1") + series("num_requests_running", "2")
    assert engine_of(text).gauges["running"] == 2
    reordered = 'vllm:num_requests_running{model_name="m",engine="0"} 9\n'
    assert engine_of(text + reordered).gauges["running"] == 9


# --- histograms ------------------------------------------------------------------------------------------


def ttft(*buckets, count="7", total="1.5"):
    text = "".join(series("time_to_first_token_seconds_bucket", value, le=le) for le, value in buckets)
    if count is not None:
        text += series("time_to_first_token_seconds_count", count)
    return text + (series("time_to_first_token_seconds_sum", total) if total is not None else "")


@pytest.mark.parametrize(
    "buckets",
    [
        [("0.1", "1"), ("0.5", "2")],  # no +Inf
        [("0.1", "3"), ("0.5", "2"), ("+Inf", "7")],  # falls
        [("0.1", "1"), ("+Inf", "NaN")],
    ],
)
def test_unsound_buckets_are_dropped_while_sum_and_count_stay(buckets):
    result = scan(ttft(*buckets))
    assert result.engines[0].histograms["ttft"] == Histogram((), (), 1.5, 7)
    assert result.bad_lines >= 1


def test_a_bad_bucket_costs_only_itself():
    result = scan(ttft(("0.1", "1"), ("0.5", "x"), ("+Inf", "7")))
    assert result.engines[0].histograms["ttft"] == Histogram((0.1, math.inf), (1, 7), 1.5, 7)
    assert result.bad_lines == 1


# --- not a vLLM page -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("", "empty"),
        (" \n\t\r\n", "empty"),
        ("<!DOCTYPE html><html>vllm:num_requests_running 1</html>", "html"),
        ("\n\n  <?xml?>", "html"),
        ('{"detail":"Not Found"}', "json"),
        ("[]", "json"),
        (' \n{\n  "a": 1}', "json"),
        ('{"other_metric"} 5', "no_engine_metrics"),
        ("process_cpu_seconds_total 5\npython_info 1\n", "no_engine_metrics"),
        (series("cache_config_info", block_size="16"), "no_engine_metrics"),
        ("garbage", "no_engine_metrics"),
        ("\n" * 200_000, "too_large"),
        (b"\xff\xfe", "invalid_utf8"),
        (RUNNING.encode() + b"\xc3", "invalid_utf8"),
        (b"", "empty"),
    ],
)
def test_why_there_are_no_engines(body, error):
    result = scan(body)
    assert (result.error, result.engines) == (error, ())


# --- the scanner's memory --------------------------------------------------------------------------------


def test_only_families_that_differ_from_the_last_page_are_read(monkeypatch):
    read, scan_lines = [], Scanner._scan_lines

    def recorded(self, lines, *more):
        read.extend(lines)
        scan_lines(self, lines, *more)

    monkeypatch.setattr(Scanner, "_scan_lines", recorded)
    text = pages.text_of("d_kv_pressure")
    scanner = Scanner()
    scanner.scan(text)
    whole = scan(text)
    read.clear()
    assert scanner.scan(text).engines == whole.engines
    assert read == [], "nothing differs"
    line = next(line for line in text.split("\n") if line.startswith("vllm:num_requests_running"))
    changed = text.replace(line, f"{line.rpartition(' ')[0]} 77")
    assert scanner.scan(changed).engines[0].gauges["running"] == 77
    assert f"{line.rpartition(' ')[0]} 77" in read
    assert len(read) <= 3, "the family with its comments"
    assert scanner.scan(text.replace(line, "")).engines == scan(text.replace(line, "")).engines, "a series that is gone"
    assert scanner.scan(text.replace(line, f"{line}\n{line}")).engines == scan(text).engines, "a series given twice"


def test_a_small_page_is_not_read_as_the_beginning_of_a_large_one():
    beginning = series("num_requests_running", "3.0") + "".join(f"# {n} {'x' * 100}\n" for n in range(1_100))
    large = beginning + "# y\n" * 10_000 + series("num_requests_running", "5.0", engine="1")
    assert len(beginning) < SMALL_PAGE_BYTES < len(large)
    cut = large.find("\n", SMALL_PAGE_BYTES)
    for begins_alike in (large[:cut], beginning):
        scanner = Scanner()
        scanner.scan(begins_alike)
        assert scanner.scan(large) == scan(large)


def test_a_page_that_stays_the_same_grows_old():
    text = series("num_requests_running", "3.0 1772445600000")
    scanner = Scanner()
    assert scanner.scan(text, 1772445600.0).engines
    assert scanner.scan(text, 1772445800.0).error == "bad_timestamps"


def test_engines_are_limited_and_the_choice_does_not_depend_on_order():
    lines = [series("num_requests_running", engine=str(n)) for n in range(MAX_ENGINES + 6)]
    result, reverse = scan("".join(lines)), scan("".join(lines[::-1]))
    assert [engine.engine for engine in result.engines] == [str(n) for n in range(MAX_ENGINES)]
    assert reverse == result
    assert (result.bad_lines, result.cut) == (0, {"engines": 6})


def test_buckets_are_limited():
    text = ttft(*((str(n), str(n)) for n in range(MAX_BUCKETS + 50)))
    result = scan(text)
    assert (result.bad_lines, result.cut) == (1, {"series": 50})  # and what is left has no +Inf
    scanner = Scanner()
    for _ in range(2):
        assert scanner.scan(text) == result
    assert scanner.scan(RUNNING) == scan(RUNNING)


def test_series_are_limited_for_a_page_not_for_a_life(monkeypatch):
    monkeypatch.setattr(layout, "MAX_SERIES", 100)

    def page(mark, number):
        return RUNNING + "".join(series("kv_cache_usage_perc", "0.5", pid=f"{mark}-{n}") for n in range(number))

    scanner = Scanner()
    assert [scanner.scan(page(generation, 60)).cut for generation in range(3)] == [{}] * 3
    assert scanner.scan(page("all", 110)).cut == {"series": 11}


def test_reasons_are_limited_for_a_page_not_for_a_life():
    def page(mark, number):
        return RUNNING + "".join(series("request_success_total", finished_reason=f"{mark}-{n}") for n in range(number))

    scanner = Scanner()
    for generation in range(3):
        assert scanner.scan(page(generation, MAX_VALUES)).bad_lines == 0
    result = scanner.scan(page("all", MAX_VALUES + 10) + series("num_preemptions_total", "7.0"))
    assert (result.bad_lines, result.cut) == (0, {"series": 10})
    assert len(result.engines[0].counters) == MAX_VALUES + 1, "what else is on the page is read"


def test_what_one_target_leaves_is_there_for_the_others():
    bounds = ScrapeLimits()
    page = "".join(series("num_requests_running", engine=str(n)) for n in range(MAX_ENGINES))
    first, second = Scanner(bounds), Scanner(bounds)
    assert len(first.scan(page).engines) == MAX_ENGINES
    result = second.scan(page)
    assert (len(result.engines), result.cut) == (MAX_ENGINES // 2, {"engines": MAX_ENGINES // 2})
    assert len(first.scan(page).engines) == MAX_ENGINES // 2, "an equal part each"
    assert first.scan(RUNNING).cut == {}
    assert len(second.scan(page).engines) == MAX_ENGINES - 1, "what the others do not need"
    first.close()
    assert len(second.scan(page).engines) == MAX_ENGINES
    assert first.scan(RUNNING).engines, "a page that was under way when its target went is still read"
    assert len(second.scan(page).engines) == MAX_ENGINES, "and takes nothing"


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(RUNNING.replace("3.0", "9.0") + "# TYPE x \udcff\n", id="fails half way"),
        pytest.param(RUNNING.replace("3.0", "9.0") + "# TYPE x counter\n", id="another comment"),
        pytest.param(RUNNING.replace("3.0", '9.0 # {trace="a"} 7.0') + "# TYPE x gauge\n", id="an exemplar"),
        pytest.param(RUNNING.replace("3.0", "9.0") + "\n# TYPE x gauge\n", id="another line"),
        pytest.param(
            RUNNING + "# TYPE x gauge\n" + series("num_requests_waiting").replace(" ", "").strip(), id="no blank"
        ),
        pytest.param("# TYPE x gauge\n" + RUNNING.replace("3.0", "9.0"), id="another order"),
    ],
)
def test_what_is_remembered_of_a_page_changes_none_after_it(between):
    scanner, page = Scanner(), RUNNING + "# TYPE x gauge\n"
    for text in (page, between, page, between, between.replace("7.0", "8.0"), page):
        raw = text.encode(errors="surrogateescape")
        assert scanner.scan(raw) == Scanner().scan(raw)


def test_as_many_lines_as_allowed():
    assert scan(RUNNING + "\n" * (MAX_LINES - 1)).error is None
    assert scan(RUNNING + "\n" * MAX_LINES).error == "too_large"


# --- pages -----------------------------------------------------------------------------------------------


def test_page_from_text_or_why_there_is_none():
    page = parse_scrape(RUNNING.encode(), target="t", time=5.0, keep_text=True)
    assert page == parse_scrape(page.exposition, target="t", time=5.0, keep_text=True, scanner=Scanner())
    assert page.engines[0].gauges == {"running": 3}
    refused = parse_scrape(None, target="t", time=1, error="refused", duration_seconds=0.1)
    assert (refused.error, refused.engines, refused.duration_seconds, refused.exposition) == ("refused", (), 0.1, None)
    assert parse_scrape(None, target="t", time=1).error == "empty"
    assert parse_scrape(RUNNING, target="t", time=1, error="timeout").engines == ()
    assert parse_scrape(b"\xff", target="t", time=1, keep_text=True).exposition == "\ufffd"


def test_a_page_emptied_by_series_that_collide_says_so() -> None:
    stages = [f'vllm:num_requests_running{{engine="0",model_name="q",stage="{stage}"}} 1' for stage in ("a", "b")]
    found = Scanner().scan("\n".join(["# stages", *stages]) + "\n")
    assert (found.error, found.rival_label) == ("series_collide", "stage")
    assert Scanner().scan(stages[0] + "\n").error is None


@pytest.mark.slow
@pytest.mark.attack("adversarial lines, 99 000 series, any bytes as a scrape", "linear time, no exception")
def test_time_is_bounded_on_the_worst_pages():
    """Each of these is as large as a page may be. No form of line may cost more than its length."""
    size = 4_000_000
    worst = [
        "vllm:num_requests_running{" * (size // 26),
        'vllm:num_requests_running{a="' + "\\" * size,
        ('vllm:num_requests_running{a="' + "\\" * 15_000 + "\n") * (size // 15_000),
        ("vllm:num_requests_running{" + 'a="b",' * 2_000 + "\n") * (size // 12_000),
        (" \t" * 8_000 + "\n") * (size // 16_000),
        ("vllm:num_requests_running" + " " * 15_000 + "x\n") * (size // 15_000),
        '{"' * (size // 2),
        "vllm:num_requests_running 1\n" * 90_000,
        "".join(f'vllm:request_success_total{{finished_reason="{n}"}} 1\n' for n in range(70_000)),
        "".join(f'vllm:e2e_request_latency_seconds_bucket{{le="{n}"}} 1\n' for n in range(70_000)),
        "".join(f'vllm:num_requests_running{{engine="{n}"}} 1\n' for n in range(70_000)),
    ]
    for text in worst:
        started = time.thread_time()
        Scanner().scan(text)
        assert time.thread_time() - started < 3, text[:60]


# --- another dialect -------------------------------------------------------------------------------------


def test_parts_of_a_histogram_add_up_and_with_other_buckets_lose_these_alone():
    page = "".join(
        f'sglang:time_to_first_token_seconds{name}{{model_name="m",is_streaming="{streaming}"{le}}} {value}\n'
        for streaming, values in (("true", ("3", "4", "2.5")), ("false", ("1", "1", "0.5")))
        for (name, le), value in zip(
            (("_bucket", ',le="1.0"'), ("_bucket", ',le="+Inf"'), ("_sum", "")), values, strict=True
        )
    )
    page += 'sglang:num_running_reqs{model_name="m"} 5\n'
    assert engine_of(page).histograms["ttft"] == Histogram((1.0, math.inf), (4, 5), 3.0, 5)
    other = page.replace('is_streaming="false",le="1.0"', 'is_streaming="false",le="2.0"')
    assert engine_of(other).histograms["ttft"] == Histogram((), (), 3.0, 5)


def test_a_failed_page_keeps_what_discovery_took_the_server_for():
    assert parse_scrape(None, target="t", time=0.0, error="refused", dialect="sglang").dialect == "sglang"
    assert parse_scrape(RUNNING, target="t", time=0.0, dialect="sglang").dialect == "vllm"
