"""One formatter writes every number of sentences, and one table names them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.diagnosis.finding import names_in
from kvpressure.diagnosis.findings import ROWS
from kvpressure.diagnosis.numbers import NUMBERS, TEXTS, duration, say


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "", "unknown"),
        (float("inf"), "ratio", "unknown"),
        (0, "", "0"),
        (0.25, "", "0.25"),
        (3.0, "", "3"),
        (12.34, "", "12.3"),
        (123.4, "", "123"),
        (1_368, "", "1 368"),
        (5**12, "", "244 140 625"),
        (0.976, "ratio", "98 %"),
        (2.5, "multiple", "2.5 ×"),
        (0, "bytes", "0 B"),
        (1023, "bytes", "1023 B"),
        (-2048, "bytes", "-2.0 KiB"),
        (80 * 2**30, "bytes", "80.0 GiB"),
        (2e9, "bytes", "2 GB"),
        (2**60, "bytes", "1048576 TiB"),
        (0.0421, "seconds", "42 ms"),
        (2.25, "seconds", "2.2 s"),
        (8.0, "seconds", "8 s"),
        (90, "seconds", "90 s"),
        (600, "seconds", "10 min"),
        (90_061, "seconds", "1 d 1 h"),
    ],
)
def test_a_number_has_its_unit_and_few_digits(value: float | None, unit: str, text: str) -> None:
    assert say(value, unit) == text


@given(st.floats(allow_nan=True, allow_infinity=True), st.sampled_from(["", "ratio", "bytes", "seconds", "multiple"]))
def test_every_number_can_be_said(value: float, unit: str) -> None:
    assert say(value, unit)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (0, "0 s"), (59.9, "59 s"), (60, "1 min"), (90, "1 min 30 s"), (3600, "1 h"), (90_061, "1 d 1 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_name_is_that_of_one_number_or_one_text_and_what_a_finding_needs_has_words() -> None:
    assert not NUMBERS.keys() & TEXTS.keys()
    assert [name for row in ROWS.values() for name in row.needs if not NUMBERS[name].words] == []


def test_every_number_and_text_stands_in_a_sentence_or_decides() -> None:
    texts = (text for row in ROWS.values() for text in (row.title, row.denied, row.seen, row.why))
    said = {name for text in texts for name in names_in(text)}
    package = Path(__file__).parents[2] / "exporter/kvpressure"
    others = "".join(path.read_text() for name in ("advice", "diagnosis") for path in (package / name).glob("*.py"))
    for name in (NUMBERS.keys() | TEXTS.keys()) - said:
        assert re.search(rf"\{{{name}\}}", others) or others.count(f'"{name}"') > 1, name
