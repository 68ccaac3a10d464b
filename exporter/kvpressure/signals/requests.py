"""Requests that finish, fail or wait, over the last five minutes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvpressure.model import readings as r
from kvpressure.model.signals import LatencySignals, RequestSignals
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.window import FIVE_MINUTES, EngineWindow, Sample

_ENDED_BADLY: Final = frozenset(r.FINISHED_PREFIX + reason for reason in ("abort", "error"))
_WAITS: Final = ("ttft", "queue")
_FAILURES: Final = (r.FINISHED_PREFIX + "error", r.HTTP_PREFIX + "5xx")


def compute(window: EngineWindow, latency: LatencySignals, t: Thresholds) -> RequestSignals:
    """Rates and the wait over five minutes, or since the first sample where that is less."""
    finished = finished_per_second(window)
    return RequestSignals(
        requests_finished_per_second=finished,
        requests_failed_ratio=_failed_ratio(window, finished or 0.0, t),
        wait_measured_seconds=_measured_wait(window, latency, t),
        wait_estimated_seconds=None if finished is None else _estimated_wait(window, finished, t),
        waited_before=_waited_before(window, t),
    )


def finished_per_second(window: EngineWindow) -> float | None:
    """Requests per second that finished, aborts and errors left out; ``None`` where they are not counted."""
    if window.last is None or window.last.finished is None:
        return None
    return _per_second(window, _finished_well)


def _finished_well(sample: Sample) -> float:
    return (sample.finished or 0.0) - sum(sample.counters.get(name, 0.0) for name in _ENDED_BADLY)


def _failed_ratio(window: EngineWindow, finished: float, t: Thresholds) -> float | None:
    """Share of failed requests, 0-1: of the counts of failures the largest, because they may count the same requests.
    ``None`` below ``failed_min_per_second``.
    """
    if window.last is None:
        return None
    names = {name for name in window.last.counters if name.startswith(r.REJECTED_PREFIX)}.union(_FAILURES)
    rates = [_per_second(window, _count_of(name)) or 0.0 for name in names]
    failed = max(rates)
    return failed / (failed + finished) if failed > 0 and failed >= t["failed_min_per_second"] else None


def _count_of(name: str) -> Callable[[Sample], float]:
    """The counter, 0 before it appeared."""
    return lambda sample: sample.counters.get(name, sample.page.get(name, 0.0))


def _per_second(window: EngineWindow, count: Callable[[Sample], float]) -> float | None:
    pair = window.pair(FIVE_MINUTES)
    if pair is None:
        return None
    first, last = pair
    return max(0.0, count(last) - count(first)) / (last.t - first.t)


def _measured_wait(window: EngineWindow, latency: LatencySignals, t: Thresholds) -> float | None:
    """p95 of the wait for the first token or in the queue, in seconds, where it is slow and requests wait now.
    ``None`` where a baseline is known.
    """
    phases = [phase for phase in _WAITS if phase in latency.slow_p95]
    if not phases or any(phase in latency.slow_ratios for phase in _WAITS) or window.last is None:
        return None
    waiting = (window.last.waiting or 0.0) >= t["traffic_min_requests"]
    return max(latency.slow_p95[phase] for phase in phases) if waiting else None


def _estimated_wait(window: EngineWindow, finished: float, t: Thresholds) -> float | None:
    """Estimated wait in seconds where too few requests finish for quantiles: requests waiting, divided by the finish
    rate, which counts as at least one request in five minutes. ``None`` with less than five minutes of history.
    """
    if finished >= t["latency_min_finished_per_second"] or _first(window) is None:
        return None
    waiting = max(window.waiting(FIVE_MINUTES), default=0.0)
    return waiting / max(finished, 1.0 / FIVE_MINUTES) if waiting >= t["traffic_min_requests"] else None


def _waited_before(window: EngineWindow, t: Thresholds) -> bool | None:
    """Whether requests already waited five minutes ago."""
    first = _first(window)
    return None if first is None or first.waiting is None else first.waiting >= t["traffic_min_requests"]


def _first(window: EngineWindow) -> Sample | None:
    """The sample of five minutes ago; ``None`` where the window does not reach back so far."""
    if window.last is None or window.first_t is None or window.last.t - window.first_t < FIVE_MINUTES:
        return None
    return window.since(FIVE_MINUTES)[0]
