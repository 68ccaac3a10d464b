"""The sentences of facts and of advice write the same count the same way."""

from __future__ import annotations

import pytest

from kvpressure.advice.wording import number_text
from kvpressure.diagnosis.numbers import number

COUNTS = {
    0: "0",
    7: "7",
    999: "999",
    1_000: "1 000",
    1_368: "1 368",
    9_999: "9 999",
    10_000: "10 000",
    5**12: "244 140 625",
}


@pytest.mark.parametrize("count", COUNTS)
def test_facts_and_advice_separate_thousands_alike(count: int) -> None:
    assert number(count) == number_text(count) == COUNTS[count]
