"""What holds for the scanner on every page there can be, checked on pages that nobody would have thought of."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.helpers.vllm_pages as pages
from kvpressure.engines.vllm.page import SAMPLES
from kvpressure.sources.scrape.scanner import Scanner

pytestmark = pytest.mark.slow

some = settings(derandomize=True, deadline=None, max_examples=40)

CAPTURE = pages.text_of("d_kv_pressure")
CAPTURE_LINES = CAPTURE.split("\n")
DIALECTS = (CAPTURE, pages.to_openmetrics(CAPTURE), pages.to_quoted(CAPTURE), pages.text_of("l_dp2"))

# Text from the characters that the format is made of, so that quotes, braces and escapes meet.
_spiced = st.text(st.sampled_from('vllm:_{}",=\\ \t\n#0123456789.eE+-NaInf"\r\x00é'), max_size=200)


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
