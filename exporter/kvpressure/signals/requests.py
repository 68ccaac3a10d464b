"""Requests that finish, fail or wait, over the last five minutes."""

from __future__ import annotations

from typing import Final

from kvpressure.model.signals import LatencySignals, RequestSignals
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals import outcomes
from kvpressure.signals.window import FIVE_MINUTES, EngineWindow, Sample

_WAITS: Final = ("ttft", "queue")


def compute(window: EngineWindow, finished: float | None, latency: LatencySignals, t: Thresholds) -> RequestSignals:
    """Rates and the wait over five minutes, or since the first sample where that is less. ``finished``: of
    ``finished_per_second``.
    """
    return RequestSignals(
        requests_finished_per_second=finished,
        requests_failed_ratio=_failed_ratio(window, finished or 0.0, t),
        wait_measured_seconds=_measured_wait(window, latency),
        wait_estimated_seconds=None if finished is None else _estimated_wait(window, finished, t),
        waited_before=_waited_before(window),
    )


def finished_per_second(window: EngineWindow) -> float | None:
    """Requests per second that finished, aborts and errors left out; ``None`` where they are not counted."""
    pair = window.pair(FIVE_MINUTES)
    if pair is None or pair[1].answered is None:
        return None
    first, last = pair
    return max(0.0, (last.answered or 0.0) - (first.answered or 0.0)) / (last.t - first.t)


def _failed_ratio(window: EngineWindow, finished: float, t: Thresholds) -> float | None:
    """Share of failed requests, 0-1. A counter is 0 before it appears. ``None`` below ``failed_min_per_second``."""
    pair = window.pair(FIVE_MINUTES)
    if pair is None:
        return None
    first, last = pair
    rises = {
        name: count - before.get(name, 0.0)
        for counts, before in ((last.counters, first.counters), (last.page, first.page))
        for name, count in counts.items()
        if name.startswith(outcomes.FAILURES)
    }
    failed = outcomes.failed(rises) / (last.t - first.t)
    return failed / (failed + finished) if failed > 0 and failed >= t["failed_min_per_second"] else None


def _measured_wait(window: EngineWindow, latency: LatencySignals) -> float | None:
    """p95 of the wait for the first token or in the queue, in seconds, where it is slow and requests wait now.
    ``None`` where a baseline is known.
    """
    if not latency.slow_p95 or window.last is None or any(phase in latency.slow_ratios for phase in _WAITS):
        return None
    slow = [latency.slow_p95[phase] for phase in _WAITS if phase in latency.slow_p95]
    return max(slow, default=None) if (window.last.waiting or 0.0) >= 1 else None


def _estimated_wait(window: EngineWindow, finished: float, t: Thresholds) -> float | None:
    """Estimated wait in seconds where too few requests finish for quantiles: requests waiting, divided by the finish
    rate, which counts as at least one request in five minutes. ``None`` with less than five minutes of history.
    """
    if finished >= t["latency_min_finished_per_second"] or _first(window) is None:
        return None
    waiting = max(sample.waiting or 0.0 for sample in window.since(FIVE_MINUTES))
    return waiting / max(finished, 1.0 / FIVE_MINUTES) if waiting >= 1 else None


def _waited_before(window: EngineWindow) -> bool | None:
    """Whether requests already waited five minutes ago."""
    first = _first(window)
    return None if first is None or first.waiting is None else first.waiting >= 1


def _first(window: EngineWindow) -> Sample | None:
    """The sample of five minutes ago; ``None`` where the window does not reach back so far."""
    if window.last is None or window.first_t is None or window.last.t - window.first_t < FIVE_MINUTES:
        return None
    return window.since(FIVE_MINUTES)[0]
