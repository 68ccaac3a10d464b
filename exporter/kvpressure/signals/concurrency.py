"""Requests in flight against the limit, and where the limit comes from."""

from __future__ import annotations

from typing import Final

from kvpressure import readings as r
from kvpressure.signals.model import LoadSignals
from kvpressure.signals.window import EngineWindow

PLATEAU_SECONDS: Final = 30.0
PLATEAU_MIN_SECONDS: Final = 14.0
PLATEAU_MIN_RUNNING: Final = 4.0
AT_LIMIT: Final = 0.95  # of max_num_seqs: the gauge is the last step's, finished requests leave gaps
SMALL_LIMIT: Final = 8  # above it, one short of the limit counts as reached
AT_LIMIT_SHARE: Final = 0.5  # of the recent samples
RECENT_SECONDS: Final = 15.0
ARRIVAL_SECONDS: Final = 300.0
BURST_SECONDS: Final = 10.0


def plateau(window: EngineWindow, kv_near_full: float) -> float | None:
    """The level of ``running`` if it stood still at its highest while requests waited and the cache had room: a limit
    that binds, whatever its name. ``None`` if it moved, nothing waited, or the cache may be what binds.
    """
    samples = [s for s in window.since(PLATEAU_SECONDS) if r.RUNNING in s.gauges]
    if len(samples) < 4 or samples[-1].t - samples[0].t < PLATEAU_MIN_SECONDS:
        return None
    running = [s.gauges[r.RUNNING] for s in samples]
    if any(s.gauges.get(r.WAITING, 0.0) <= 0 or s.gauges.get(r.KV_USAGE, 0.0) >= kv_near_full for s in samples):
        return None
    top = max(running)
    return top if top >= PLATEAU_MIN_RUNNING and min(running) >= top - max(1.0, 0.01 * top) else None


def at_limit(window: EngineWindow, limit: float | None) -> bool | None:
    """Whether ``running`` stood at the limit in most of the recent samples; ``None`` without a limit."""
    running = window.gauge_values(r.RUNNING, RECENT_SECONDS)
    if limit is None or not running:
        return None
    return sum(1 for value in running if reaches(value, limit)) >= AT_LIMIT_SHARE * len(running)


def reaches(running: float, limit: float) -> bool:
    """Whether this many running requests count as standing at the limit."""
    return running >= limit * AT_LIMIT or (limit > SMALL_LIMIT and running >= limit - 1)


def compute(window: EngineWindow, configured: float | None, source: str | None, capacity: float | None,
            mean_context: float | None, kv_near_full: float) -> LoadSignals:
    """Load against the limits. ``configured`` is ``max_num_seqs`` from ``source`` (args, log or default)."""
    running, waiting = window.gauge(r.RUNNING), window.gauge(r.WAITING)
    if waiting is not None:
        waiting += window.gauge(r.SWAPPED) or 0.0
    level = plateau(window, kv_near_full)
    limits: dict[str, float] = {}
    if configured is not None and source is not None:
        limits[source] = configured
    if level is not None and (configured is None or (source == "default" and level < configured)):
        limits["observed"] = level
    if capacity is not None and mean_context:
        limits["kv_capacity"] = max(1.0, capacity / mean_context)
    sequence_limit = limits.get("observed", configured)
    in_flight = None if running is None else running + (waiting or 0.0)
    smallest = min(limits.values(), default=None)
    arrivals = arrival_rate(window)
    return LoadSignals(
        running=running, waiting=waiting, waiting_capacity=window.gauge(r.WAITING_CAPACITY),
        waiting_deferred=window.gauge(r.WAITING_DEFERRED), in_flight=in_flight, limits=limits,
        max_num_seqs=sequence_limit, max_num_seqs_source="observed" if "observed" in limits else source,
        concurrency_ratio=None if in_flight is None or not smallest else in_flight / smallest,
        running_at_limit=at_limit(window, sequence_limit),
        running_at_limit_now=None if running is None or sequence_limit is None else reaches(running, sequence_limit),
        arrival_rate=arrivals,
        arrival_burst_ratio=burst_ratio(window),
    )


def arrival_rate(window: EngineWindow) -> float | None:
    """Requests per second that arrived over the last minute."""
    samples = window.since(60.0)
    points = [(s.t, a) for s in samples if (a := s.arrived) is not None]
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return None
    return max(0.0, points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])


def burst_ratio(window: EngineWindow) -> float | None:
    """Arrivals in the busiest 10 s (or the shortest longer span that was sampled) against the mean, over five minutes.

    ``None`` with less than a minute of history or without arrivals.
    """
    points = [(s.t, a) for s in window.since(ARRIVAL_SECONDS) if (a := s.arrived) is not None]
    if len(points) < 4 or points[-1][0] - points[0][0] < 60.0:
        return None
    mean = (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
    if mean <= 0:
        return None
    busiest, begin = 0.0, 0
    for end in range(1, len(points)):
        while points[end][0] - points[begin + 1][0] >= BURST_SECONDS:
            begin += 1
        span = points[end][0] - points[begin][0]
        if span >= BURST_SECONDS:
            busiest = max(busiest, (points[end][1] - points[begin][1]) / span)
    return busiest / mean if busiest > 0 else None
