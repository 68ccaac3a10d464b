"""Numbers, durations and texts as they are written."""

from __future__ import annotations

import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.bundle.text import duration, number, span, to_yaml, words
from kvpressure.settings.thresholds import builtin

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


@given(st.integers(min_value=1, max_value=10**7))
def test_duration_is_exact(seconds: int) -> None:
    match = re.fullmatch(r"(\d+)([dhms])", duration(seconds))
    assert match is not None
    assert int(match[1]) * UNITS[match[2]] == seconds


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (90, "90s"), (300, "5m"), (3600, "1h"), (1.5, "1500ms"), (86400, "1d")]
)
def test_duration_in_the_largest_exact_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(min_value=0, max_value=1e15, allow_nan=False))
def test_number_has_no_exponent_and_reads_back(value: float) -> None:
    text = number(value)
    assert re.fullmatch(r"\d+(\.\d+)?", text)
    assert float(text) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("memory_warning_ratio", "80 %"),
        ("fragmentation_warning_bytes", "2 GB"),
        ("memory_leak_bytes_per_hour", "1 GiB"),
        ("context_window_seconds", "5 minutes"),
        ("context_spike_ratio", "2 times"),
        ("signature_batch_size", "2 requests"),
    ],
)
def test_words(name: str, text: str) -> None:
    assert words(builtin().entry(name)) == text


def test_span() -> None:
    assert [span(value) for value in (1, 60, 7200, 61, 1.5)] == [
        "1 second",
        "1 minute",
        "2 hours",
        "61 seconds",
        "1.5 seconds",
    ]


@pytest.mark.slow
@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_yaml_reads_back(document: object) -> None:
    assert yaml.safe_load(to_yaml(document)) == document
