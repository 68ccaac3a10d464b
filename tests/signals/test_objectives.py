"""Good and total counters of objectives, from the engine's own buckets."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvpressure.model.readings import EngineReading, Histogram
from kvpressure.settings.thresholds import Thresholds, builtin
from kvpressure.signals.requests import objectives

TTFT = Histogram((0.5, 1.0, 2.5, math.inf), (10.0, 40.0, 90.0, 100.0), 120.0, 100.0)
READING = EngineReading("m", "0", histograms={"ttft": TTFT})


def thresholds(**changed: float) -> Thresholds:
    entries = {entry.name: entry for entry in builtin().entries()}
    return Thresholds({name: replace(entry, value=changed.get(name, entry.value)) for name, entry in entries.items()})


def test_none_is_set_by_default() -> None:
    assert not [*objectives(READING, {"finished:stop": 5.0}, builtin())]


@pytest.mark.parametrize(("objective", "bound", "good"), [(2.0, 1.0, 40.0), (2.5, 2.5, 90.0), (9.0, 2.5, 90.0)])
def test_the_largest_bound_not_above_the_objective_counts(objective: float, bound: float, good: float) -> None:
    (found,) = objectives(READING, {}, thresholds(objective_ttft_ratio=0.95, objective_ttft_seconds=objective))
    assert (found.name, found.bound_seconds, found.good, found.total, found.target) == ("ttft", bound, good, 100, 0.95)


def test_an_objective_below_every_bound_is_not_judged() -> None:
    assert not [*objectives(READING, {}, thresholds(objective_ttft_ratio=0.95, objective_ttft_seconds=0.1))]


def test_a_latency_that_the_engine_does_not_serve_is_not_judged() -> None:
    assert not [*objectives(READING, {}, thresholds(objective_e2e_ratio=0.95))]


@pytest.mark.parametrize(
    ("counters", "good", "total"),
    [
        ({"finished:any": 95.0, "http:5xx": 5.0}, 95, 100),  # SGLang gives no reasons
        ({"finished:stop": 95.0, "finished:abort": 40.0, "finished:error": 5.0, "http:5xx": 5.0}, 95, 100),
        ({"finished:stop": 95.0, "http:5xx": 5.0, "rejected:a": 3.0, "rejected:b": 2.0}, 95, 100),
        ({"finished:stop": 90.0, "http:5xx": 5.0, "rejected:a": 6.0, "rejected:b": 4.0}, 90, 100),
        ({"finished:stop": 90.0, "http:4xx": 5.0}, 90, 90),
    ],
)
def test_availability_counts_what_the_failed_share_counts(
    counters: dict[str, float], good: float, total: float
) -> None:
    (found,) = objectives(READING, counters, thresholds(objective_availability_ratio=0.99))
    assert (found.good, found.total, found.bound_seconds) == (good, total, None)
