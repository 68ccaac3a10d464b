"""What holds for the scanner on every page there can be, checked on pages that nobody would have thought of."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.helpers.vllm_pages as pages
from kvpressure.engines.vllm.aliases import SAMPLES
from kvpressure.model.reasons import REASONS
from kvpressure.sources.scrape.scanner import Scanner, parse_scrape

pytestmark = pytest.mark.slow

many = settings(derandomize=True, deadline=None, max_examples=150)
some = settings(derandomize=True, deadline=None, max_examples=40)

CAPTURE = pages.text_of("d_kv_pressure")
CAPTURE_LINES = CAPTURE.split("\n")
DIALECTS = (CAPTURE, pages.to_openmetrics(CAPTURE), pages.to_quoted(CAPTURE), pages.text_of("l_dp2"))

# Text from the characters that the format is made of, so that quotes, braces and escapes meet.
_spiced = st.text(st.sampled_from('vllm:_{}",=\\ \t\n#0123456789.eE+-NaInf"\r\x00é'), max_size=200)
_value = st.one_of(
    st.floats().map(str),
    st.sampled_from(["NaN", "+Inf", "", "1_0", "0x1", "1 1700000000", '1 # {a="b"} 1']),
    st.text(max_size=5),
)
_label = st.sampled_from(["engine", "model_name", "le", "reason", "finished_reason", "pid", "ReplicaId", "status", "x"])
_text_of_label = st.one_of(
    st.sampled_from(["0", "1", "m", "0.5", "+Inf", "capacity", "2xx", "}", '\\"', "\\", '"']), st.text(max_size=8)
)
_labels = st.lists(st.tuples(_label, _text_of_label), max_size=4).map(
    lambda items: "{" + ",".join(f'{name}="{text}"' for name, text in items) + "}"
)
_almost_series = st.builds(
    lambda name, labels, gap, value: f"{name}{labels}{gap}{value}",
    st.sampled_from(sorted(SAMPLES)),
    st.one_of(st.just(""), _labels),
    st.sampled_from([" ", "  ", "\t", ""]),
    _value,
)
_line = st.one_of(_spiced, _almost_series, st.sampled_from(CAPTURE_LINES))
_page = st.lists(_line, max_size=25).map("\n".join)


@many
@given(st.lists(st.one_of(_page, st.text(), st.binary()), max_size=4))
def test_nothing_raises_and_the_past_of_a_scanner_never_shows(texts):
    scanner = Scanner()
    for text in texts:
        result = scanner.scan(text)
        assert result == Scanner().scan(text)
        assert result.error is None or result.error in REASONS
        assert (result.error is None) == bool(result.engines)
        assert 0 <= result.bad_lines <= 2 * (text.count(b"\n" if isinstance(text, bytes) else "\n") + 1)


_number = st.one_of(
    st.integers(0, 9).map(float).map(str), st.sampled_from(["NaN", "x", "1_0", "-1.0", "1.0 1700000000"])
)
_edit = st.tuples(
    st.sampled_from(["number", "delete", "repeat", "insert", "swap"]), st.integers(0, 999), _number, _line
)


def edited(lines: list[str], edits: list[tuple[str, int, str, str]]) -> list[str]:
    lines = lines.copy()
    for what, at, number, other in edits:
        place = at % len(lines)
        if what == "number":
            lines[place] = f"{lines[place].rpartition(' ')[0]} {number}"
        elif what == "delete" and len(lines) > 1:
            del lines[place]
        elif what == "repeat":
            lines.insert(at % 7, lines[place])
        elif what == "insert":
            lines.insert(place, other)
        elif what == "swap":
            lines[place], lines[0] = lines[0], lines[place]
    return lines


@many
@given(
    st.sampled_from([text.split("\n")[:120] for text in DIALECTS]),
    st.lists(st.lists(_edit, max_size=4), min_size=2, max_size=6),
)
def test_a_page_that_differs_in_some_lines_is_read_as_if_it_were_the_first(lines, steps):
    """Of a page like the last one only the lines are read that differ."""
    scanner = Scanner()
    for edits in ([], [], *steps):
        lines = edited(lines, edits)
        text = "\n".join(lines)
        assert scanner.scan(text) == Scanner().scan(text)


@many
@given(_page)
def test_values_make_sense_whatever_the_page_says(text):
    for engine in Scanner().scan(text).engines:
        assert all(0 <= value < float("inf") for value in (*engine.gauges.values(), *engine.counters.values()))
        assert engine.gauges.get("kv_usage", 0) <= 1.0001
        for histogram in engine.histograms.values():
            assert len(histogram.bounds) == len(histogram.counts)
            assert list(histogram.bounds) == sorted(set(histogram.bounds))
            assert list(histogram.counts) == sorted(histogram.counts)
            assert not histogram.bounds or histogram.bounds[-1] == float("inf")


_garbage = st.one_of(
    _spiced,
    st.text(max_size=60),
    st.sampled_from(["# TYPE vllm:num_requests_running histogram", "# EOF", "\x00", "{"]),
).map(lambda text: text.replace("\n", " ").replace("vllm", "v").replace("num_requests", "n"))


@some
@given(st.sampled_from(DIALECTS), st.lists(st.tuples(st.integers(0, 700), _garbage), max_size=30))
def test_wanted_lines_survive_among_garbage(capture, garbage):
    lines = capture.split("\n")
    for place, text in garbage:
        lines.insert(place, text)
    expected = Scanner().scan(capture)
    result = Scanner().scan("\n".join(lines))
    assert result.engines == expected.engines
    assert result.bad_lines == 0


@some
@given(
    st.lists(st.integers(0, 600), min_size=1, max_size=20, unique=True), st.sampled_from(["", "x", "NaN", "-1", "1 y"])
)
def test_every_spoiled_wanted_line_is_counted(places, value):
    from prometheus_client.parser import text_string_to_metric_families

    wanted = [
        line
        for line in CAPTURE_LINES
        if line.partition("{")[0].partition(" ")[0] in SAMPLES and "bucket" not in line and "cache_config" not in line
    ]
    spoiled = {wanted[place % len(wanted)] for place in places}
    text = "\n".join(f"{line.rpartition(' ')[0]} {value}" if line in spoiled else line for line in CAPTURE_LINES)
    result = Scanner().scan(text)
    unread = sum('state="awake"' in line or ('source="' in line and "local_compute" not in line) for line in spoiled)
    assert len(spoiled) - unread <= result.bad_lines <= len(spoiled)
    rest = "\n".join(line for line in CAPTURE_LINES if line not in spoiled)
    assert list(text_string_to_metric_families(rest))  # the page without those lines is sound,
    assert result.engines == Scanner().scan(rest).engines  # and it is all that was read


@some
@given(st.permutations([line for line in CAPTURE_LINES if not line.startswith("#")]))
def test_the_order_of_lines_does_not_matter(lines):
    result = Scanner().scan("\n".join(lines))
    assert result.engines == Scanner().scan(CAPTURE).engines
    assert result.bad_lines == 0


@many
@given(_page)
def test_live_and_replayed_pages_are_the_same(text):
    def page(body):
        return parse_scrape(body, target="t", time=1.0, keep_text=True)

    try:
        live = page(text.encode())
    except UnicodeEncodeError:
        return
    assert live == page(live.exposition)


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
