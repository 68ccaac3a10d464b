"""Loads from numbers and quantiles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.capacity.load import from_quantiles, stated
from kvpressure.errors import InputError


def test_quantiles_are_met_again() -> None:
    found = stated("p50=1000,p95=4000,p99=8000", "200")
    assert found.quantile("prompt", 0.5) == pytest.approx(1000, rel=0.1)
    assert found.quantile("prompt", 0.95) == pytest.approx(4000, rel=0.25)
    assert found.longest == 8200


def test_a_steep_end_does_not_move_the_quantile_before_it() -> None:
    assert stated("p50=1000,p95=4000,p100=90000", "200").quantile("prompt", 0.95) == pytest.approx(4000, rel=0.02)


def test_long_answers_are_met_more_often() -> None:
    found = stated("0", "p50=100,p100=1000")
    plain = sum(request.output for request in found.requests) / len(found.requests)
    mean, deviation = found.mean_and_deviation({request.total: float(request.total) for request in found.requests})
    assert mean > plain
    assert deviation > 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        *("x", "-1", "1.5", "p50", "p50=", "p50=1,p50=2", "p95=1,p50=2", "p50=9,p95=1", "p101=1", "p50=1;p95=2"),
        *("9999999999",),
    ],
)
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--prompt: .*allowed"):
        stated(text, "1")


@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(0, 10**6)), min_size=1, max_size=6, unique_by=lambda p: p[0])
)
def test_quantile_samples_rise_and_stay_in_range(points: list[tuple[int, int]]) -> None:
    shares = sorted(share for share, _ in points)
    lengths = sorted(length for _, length in points)
    found = from_quantiles([(share / 100, float(length)) for share, length in zip(shares, lengths, strict=True)])
    assert list(found) == sorted(found)
    assert found[-1] == lengths[-1]
    assert found[0] >= 0
