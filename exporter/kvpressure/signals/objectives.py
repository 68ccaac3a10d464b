"""Requests that met an objective, counted from the engine's own histograms and counters.

The objectives are thresholds, so that the exporter and the rules read the same numbers. A latency is judged by the
largest bucket bound that is not above its objective, because the engine counts in buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvpressure.model import readings as r
from kvpressure.model.readings import EngineReading, Histogram
from kvpressure.model.state import Objective
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals import outcomes

_LATENCIES = {"ttft": r.TTFT, "inter_token": r.INTER_TOKEN, "e2e": r.E2E}


def objectives(reading: EngineReading, counters: Mapping[str, float], thresholds: Thresholds) -> tuple[Objective, ...]:
    """Every objective whose target is above 0 and that the engine's metrics can measure."""
    return tuple(_each(reading, counters, thresholds))


def _each(reading: EngineReading, counters: Mapping[str, float], t: Thresholds) -> Iterator[Objective]:
    for name, histogram in _LATENCIES.items():
        target = t[f"objective_{name}_ratio"]
        found = reading.histograms.get(histogram)
        if target > 0 and found is not None:
            yield from _latency(name, found, t[f"objective_{name}_seconds"], target)
    target = t["objective_availability_ratio"]
    if target > 0:
        good = outcomes.answered(counters)
        yield Objective("availability", good, good + outcomes.failed(counters), None, target)


def _latency(name: str, histogram: Histogram, objective: float, target: float) -> Iterator[Objective]:
    """Nothing where no bucket bound is at or below the objective."""
    known = [pair for pair in zip(histogram.bounds, histogram.counts, strict=False) if pair[0] <= objective]
    if known and histogram.counts:
        bound, good = known[-1]
        yield Objective(name, good, histogram.counts[-1], bound, target)
