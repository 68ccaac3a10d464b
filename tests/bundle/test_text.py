"""Numbers, durations and texts as they are written."""

from __future__ import annotations

import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.bundle.text import duration, number, to_yaml

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


@given(st.integers(min_value=1, max_value=10**7))
def test_duration_is_exact(seconds: int) -> None:
    match = re.fullmatch(r"(\d+)([dhms])", duration(seconds))
    assert match is not None
    assert int(match[1]) * UNITS[match[2]] == seconds


@given(st.floats(min_value=0, max_value=1e15, allow_nan=False))
def test_number_has_no_exponent_and_reads_back(value: float) -> None:
    text = number(value)
    assert re.fullmatch(r"\d+(\.\d+)?", text)
    assert float(text) == value


@pytest.mark.slow
@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_yaml_reads_back(document: object) -> None:
    assert yaml.safe_load(to_yaml(document)) == document
