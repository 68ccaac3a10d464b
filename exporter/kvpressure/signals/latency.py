"""Latency by phase against the engine's own baseline, time spent outside the engine, and objectives met."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Final

from kvpressure.model import readings
from kvpressure.model import readings as r
from kvpressure.model.readings import EngineReading, Histogram
from kvpressure.model.signals import LatencySignals
from kvpressure.model.state import Objective
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.window import FIVE_MINUTES, HALF_MINUTE, MINUTE, TWICE, EngineWindow

PHASES: Final = (("ttft", r.TTFT), ("inter_token", r.INTER_TOKEN), ("e2e", r.E2E), ("queue", r.QUEUE))
FLOORS: Final = {
    "ttft": "ttft_floor_seconds",
    "inter_token": "inter_token_floor_seconds",
    "queue": "ttft_floor_seconds",
}
BASELINE_VALUES: Final = 240  # kept: two hours of calm half-minutes


class Baseline:
    """The engine's usual p95 latency: the median of the p95 of calm minutes.

    Only calm moments enter (no lasting queue, cache not near full), so that an incident does not move it. Unknown
    until there are ``baseline_min_values``.
    """

    __slots__ = ("_last_t", "_thresholds", "_values")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._values: dict[str, deque[float]] = {phase: deque(maxlen=BASELINE_VALUES) for phase, _ in PHASES}
        self._last_t = float("-inf")

    def learn(self, t: float, calm: bool, p95: Mapping[str, float]) -> None:
        """Take the last minute's p95 in seconds by phase if calm; at most once in half a minute."""
        if not calm or 0 <= t - self._last_t < HALF_MINUTE or not self._good(p95):
            return
        self._last_t = t
        for phase, value in p95.items():
            self._values[phase].append(value)

    def _good(self, p95: Mapping[str, float]) -> bool:
        """Whether no phase is both much slower than usual and above its alert threshold; else a slow incident without
        a queue would become the baseline it is measured against.
        """
        t = self._thresholds
        for phase, floor in FLOORS.items():
            usual, now = self.value(phase), p95.get(phase)
            if usual is not None and now is not None and now >= t["latency_rising_ratio"] * usual and now >= t[floor]:
                return False
        return True

    def value(self, phase: str) -> float | None:
        """The baseline p95 in seconds; ``None`` before there are enough values."""
        values, t = self._values[phase], self._thresholds
        if len(values) < t["baseline_min_values"]:
            return None
        return max(t["baseline_floor_seconds"], sorted(values)[(len(values) - 1) // 2])


def latency_signals(
    window: EngineWindow, baseline: Baseline, calm: bool, finished: float | None, t: Thresholds
) -> LatencySignals:
    """Latency over the last minute; ``calm``: it may enter the baseline. ``finished``: requests per second."""
    by_phase: dict[str, Mapping[str, float]] = {}
    enough: dict[str, float] = {}
    for phase, name in PHASES:
        found = window.observed(name, MINUTE)
        if found is None or not found[0].count:
            continue
        by_phase[phase] = window.quantiles(name, MINUTE)
        if found[0].count >= t["latency_min_requests"] and "0.95" in by_phase[phase]:
            enough[phase] = by_phase[phase]["0.95"]
    if window.last is not None:
        baseline.learn(window.last.t, calm, enough)
    ratios = {phase: p95 / base for phase, p95 in enough.items() if (base := baseline.value(phase)) is not None}
    slow = slow_phases(finished, {phase: found.get("0.95") for phase, found in by_phase.items()}, ratios, t)
    outside, share = outside_engine(window)
    if share is None:
        share = before_engine(window, t)
    return LatencySignals(
        ttft=by_phase.get("ttft", {}),
        inter_token=by_phase.get("inter_token", {}),
        e2e=by_phase.get("e2e", {}),
        queue=by_phase.get("queue", {}),
        baseline_ratios=ratios,
        slow_p95=slow,
        slow_ratios={phase: ratio for phase, ratio in ratios.items() if phase in slow},
        outside_engine_seconds=outside,
        outside_engine_share=share,
    )


def slow_phases(
    finished: float | None, p95: Mapping[str, float | None], ratios: Mapping[str, float], t: Thresholds
) -> dict[str, float]:
    """The p95 of each slow phase: at or above its floor, or a first token many times slower than usual. Empty where too
    few requests finish for a quantile.
    """
    if finished is None or finished < t["latency_min_finished_per_second"]:
        return {}
    floors = {phase: t[floor] for phase, floor in FLOORS.items()}
    if ratios.get("ttft", 0.0) >= t["latency_critical_ratio"]:
        floors["ttft"] = min(floors["ttft"], t["objective_ttft_seconds"])
    return {phase: now for phase, floor in floors.items() if (now := p95.get(phase)) is not None and now >= floor}


def outside_engine(window: EngineWindow) -> tuple[float | None, float | None]:
    """Mean seconds per finished request outside the engine (tokenizer, API server, network), and their share of the
    end-to-end time: e2e - queue - inference, whose sums are observed for the same requests.
    """
    parts = [window.observed(name, MINUTE) for name in (r.E2E, r.QUEUE, r.INFERENCE)]
    sums = [part[0].sum for part in parts if part is not None and part[0].sum is not None]
    count = parts[0][0].count if parts[0] is not None else None
    if len(sums) < len(parts) or not count or sums[0] <= 0:
        return None, None
    whole, queued, computed = sums
    outside = max(0.0, whole - queued - computed)
    return outside / count, outside / whole


def before_engine(window: EngineWindow, t: Thresholds) -> float | None:
    """Least share of the time to first token, over five minutes, that requests spent before they reached the engine.
    By Little's law the engine would otherwise have shown more in flight. ``None`` where it may have had all of them.
    """
    found, lately = window.observed(r.TTFT, FIVE_MINUTES), window.in_flight(MINUTE)
    if found is None or not found[0].count or not found[0].sum or not lately or window.first_t is None:
        return None
    waited, span = found[0].sum, found[1]
    reach = span + min(FIVE_MINUTES, TWICE * waited / found[0].count)  # what ended in the window began before it
    if waited / span <= sum(lately) / len(lately) or window.last is None or window.last.t - reach < window.first_t:
        return None
    inside = 0.0
    for before, after in pairwise(window.since(reach)):
        if before.in_flight is None or after.in_flight is None:
            return None
        inside += (after.t - before.t) * max(before.in_flight, after.in_flight)
    share = 1.0 - inside / waited
    several = (waited - inside) / span >= t["several_min"]
    return share if several and share >= t["outside_engine_share_ratio"] else None


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
        good = readings.count_answered(counters)
        yield Objective("availability", good, good + readings.count_failed(counters), None, target)


def _latency(name: str, histogram: Histogram, objective: float, target: float) -> Iterator[Objective]:
    """Nothing where no bucket bound is at or below the objective."""
    known = [pair for pair in zip(histogram.bounds, histogram.counts, strict=False) if pair[0] <= objective]
    if known and histogram.counts:
        bound, good = known[-1]
        yield Objective(name, good, histogram.counts[-1], bound, target)
