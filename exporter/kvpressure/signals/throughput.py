"""Token rates, and whether they still follow demand."""

from __future__ import annotations

from collections import deque
from typing import Final

from kvpressure.model import readings as r
from kvpressure.model.signals import ThroughputSignals
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.window import HALF_MINUTE, MINUTE, QUARTER_HOUR, EngineWindow

TREND_STEP_SECONDS: Final = 15.0


class Trend:
    """Generation throughput and demand of the last fifteen minutes, one point per quarter minute."""

    __slots__ = ("_points", "_thresholds")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._points: deque[tuple[float, float, float]] = deque()

    def observe(self, t: float, throughput: float | None, demand: float | None) -> None:
        """Take the last minute's throughput (tokens/s) and demand (requests in flight)."""
        points = self._points
        while points and points[0][0] < t - QUARTER_HOUR:
            points.popleft()
        if throughput is not None and demand is not None and (not points or t - points[-1][0] >= TREND_STEP_SECONDS):
            points.append((t, throughput, demand))

    def ratio(self, t: float, throughput: float | None, demand: float | None) -> float | None:
        """Throughput now divided by the best at no more than about the same demand (``trend_change_ratio``), at most
        1. ``None`` with less than two minutes of such history.
        """
        if throughput is None or demand is None:
            return None
        most = demand * (1 + self._thresholds["trend_change_ratio"])
        alike = [(at, rate) for at, rate, wanted in self._points if wanted <= most]
        if not alike or t - alike[0][0] < self._thresholds["trend_min_seconds"]:
            return None
        best = max(throughput, *(rate for _, rate in alike))
        return throughput / best if best > 0 else None

    def flat(self, t: float, throughput: float | None, demand: float | None) -> bool | None:
        """Whether throughput failed to follow demand: demand rose and throughput did not, or throughput fell while
        demand did not. ``None`` with less than two minutes of history.
        """
        if throughput is None or demand is None:
            return None
        known, change = self._thresholds, self._thresholds["trend_change_ratio"]
        earlier = [(rate, wanted) for at, rate, wanted in self._points if t - at >= known["trend_min_seconds"]]
        if not earlier:
            return None
        before = sum(rate for rate, _ in earlier) / len(earlier)
        wanted = sum(demanded for _, demanded in earlier) / len(earlier)
        if demand >= (1 + change) * wanted:
            return before > 0 and throughput <= (1 + known["most_ratio"] * change) * before
        fell = 1 - change
        return throughput < fell * before and demand >= fell * wanted


def compute(window: EngineWindow, trend: Trend) -> ThroughputSignals:
    """Rates over the last half minute, trend over fifteen minutes."""
    prompt, generation = window.rate(r.PROMPT_TOKENS, HALF_MINUTE), window.rate(r.GENERATION_TOKENS, HALF_MINUTE)
    if generation is None:
        generation = window.gauge(r.GENERATION_RATE)
    if prompt is None:
        prompt = window.gauge(r.PROMPT_RATE)
    running = window.gauge_values(r.RUNNING, HALF_MINUTE)
    mean_running = sum(running) / len(running) if running else None
    done = None
    if (pair := window.pair(HALF_MINUTE)) is not None:
        begin, end = (sample.finished for sample in pair)
        done = None if begin is None or end is None else max(0.0, end - begin) / (pair[1].t - pair[0].t)
    minute = window.rate(r.GENERATION_TOKENS, MINUTE)
    demand = _mean_demand(window)
    ratio = flat = None
    if window.last is not None:
        ratio, flat = trend.ratio(window.last.t, minute, demand), trend.flat(window.last.t, minute, demand)
        trend.observe(window.last.t, minute, demand)
    return ThroughputSignals(
        prompt_tokens_per_second=prompt,
        prompt_tokens_computed_per_second=_computed(window, prompt),
        generation_tokens_per_second=generation,
        finished_per_second=done,
        generation_tokens_per_running=None if generation is None or not mean_running else generation / mean_running,
        throughput_trend_ratio=ratio,
        throughput_flat=flat,
    )


def _computed(window: EngineWindow, prompt: float | None) -> float | None:
    """Prompt tokens/s that were computed: as counted, else all minus the prefix cache's hits; all where neither is
    published.
    """
    computed = window.rate(r.PROMPT_TOKENS_COMPUTED, HALF_MINUTE)
    if computed is not None or prompt is None:
        return computed
    queries, hits = window.increase(r.PREFIX_QUERIES, HALF_MINUTE), window.increase(r.PREFIX_HITS, HALF_MINUTE)
    if queries is None or hits is None or queries[0] <= 0:
        return prompt
    return prompt * (1.0 - min(1.0, hits[0] / queries[0]))


def _mean_demand(window: EngineWindow) -> float | None:
    values = window.in_flight(MINUTE)
    return sum(values) / len(values) if values else None
