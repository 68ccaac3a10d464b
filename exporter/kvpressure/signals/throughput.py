"""Token rates, and whether they still follow demand."""

from __future__ import annotations

from collections import deque
from typing import Final

from kvpressure import readings as r
from kvpressure.signals.model import ThroughputSignals
from kvpressure.signals.window import EngineWindow

RATE_SECONDS: Final = 30.0
MINUTE: Final = 60.0
TREND_STEP_SECONDS: Final = 15.0
TREND_SECONDS: Final = 900.0
FLAT_AFTER_SECONDS: Final = 120.0
DEMAND_ROSE: Final = 1.1
FLAT: Final = 1.05
FELL: Final = 0.9


class Trend:
    """Generation throughput and demand by quarter-minutes over the last fifteen minutes."""

    __slots__ = ("_points",)

    def __init__(self) -> None:
        self._points: deque[tuple[float, float, float]] = deque()

    def observe(self, t: float, throughput: float | None, demand: float | None) -> None:
        """Take the present minute's throughput (tokens/s) and demand (requests in flight)."""
        points = self._points
        while points and points[0][0] < t - TREND_SECONDS:
            points.popleft()
        if throughput is not None and demand is not None and (not points or t - points[-1][0] >= TREND_STEP_SECONDS):
            points.append((t, throughput, demand))

    def ratio(self, t: float, throughput: float | None, demand: float | None) -> float | None:
        """Present throughput against the best of the history at no higher demand, at most 1. ``None`` with less than two
        minutes of history or without throughput in it.
        """
        if throughput is None or demand is None or not self._points or t - self._points[0][0] < FLAT_AFTER_SECONDS:
            return None
        best = max((rate for _, rate, wanted in self._points if wanted <= demand * DEMAND_ROSE), default=0.0)
        return throughput / max(best, throughput) if max(best, throughput) > 0 else None

    def flat(self, t: float, throughput: float | None, demand: float | None) -> bool | None:
        """True if throughput did not follow demand: demand rose and throughput did not, or throughput fell while
        demand did not. ``None`` with less than two minutes of history.
        """
        if throughput is None or demand is None:
            return None
        earlier = [(rate, wanted) for at, rate, wanted in self._points if t - at >= FLAT_AFTER_SECONDS]
        if not earlier:
            return None
        before = sum(rate for rate, _ in earlier) / len(earlier)
        wanted = sum(demanded for _, demanded in earlier) / len(earlier)
        if demand >= DEMAND_ROSE * wanted:
            return before > 0 and throughput <= FLAT * before
        return throughput < FELL * before and demand >= FELL * wanted


def compute(window: EngineWindow, trend: Trend) -> ThroughputSignals:
    """Rates over the last half minute, trend over fifteen minutes."""
    prompt, generation = window.rate(r.PROMPT_TOKENS, RATE_SECONDS), window.rate(r.GENERATION_TOKENS, RATE_SECONDS)
    if generation is None:
        generation = window.gauge(r.GENERATION_RATE)
    if prompt is None:
        prompt = window.gauge(r.PROMPT_RATE)
    running = window.gauge_values(r.RUNNING, RATE_SECONDS)
    mean_running = sum(running) / len(running) if running else None
    samples = window.since(RATE_SECONDS)
    done = None
    if len(samples) > 1 and samples[-1].t > samples[0].t:
        begin, end = samples[0].finished, samples[-1].finished
        done = None if begin is None or end is None else max(0.0, end - begin) / (samples[-1].t - samples[0].t)
    minute = window.rate(r.GENERATION_TOKENS, MINUTE)
    demand = _mean_demand(window)
    ratio = flat = None
    if window.last is not None:
        ratio, flat = trend.ratio(window.last.t, minute, demand), trend.flat(window.last.t, minute, demand)
        trend.observe(window.last.t, minute, demand)
    return ThroughputSignals(
        prompt_tokens_per_second=prompt, generation_tokens_per_second=generation, finished_per_second=done,
        generation_tokens_per_running=None if generation is None or not mean_running else generation / mean_running,
        throughput_trend_ratio=ratio, throughput_flat=flat,
    )


def _mean_demand(window: EngineWindow) -> float | None:
    values = [s.gauges[r.RUNNING] + s.gauges.get(r.WAITING, 0.0)
              for s in window.since(MINUTE) if r.RUNNING in s.gauges]
    return sum(values) / len(values) if values else None
