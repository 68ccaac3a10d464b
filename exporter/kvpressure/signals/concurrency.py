"""Requests in flight against the limit, and where the limit comes from."""

from __future__ import annotations

from typing import Final

from kvpressure.model import readings as r
from kvpressure.model.frozen import frozen
from kvpressure.model.signals import KvSignals, LoadSignals
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.kv import full_from
from kvpressure.signals.window import FIVE_MINUTES, HALF_MINUTE, MINUTE, EngineWindow

BURST_SECONDS: Final = 10.0  # of arrival_burst_ratio, as it is published


@frozen
class SequenceLimit:
    """``max_num_seqs`` as configured, and where it was read: args, log or default."""

    value: float | None = None
    source: str | None = None


def plateau(window: EngineWindow, full: float, t: Thresholds) -> float | None:
    """Running requests where their number stayed at its highest while requests waited and KV cache was free: some
    limit binds. ``None`` if it moved, nothing waited, or KV usage reached ``full``.
    """
    samples = [s for s in window.since(HALF_MINUTE) if r.RUNNING in s.gauges]
    if len(samples) < t["trend_min_samples"] or samples[-1].t - samples[0].t < t["plateau_min_seconds"]:
        return None
    running = [s.gauges[r.RUNNING] for s in samples]
    if any((s.waiting or 0.0) <= 0 or s.gauges.get(r.KV_USAGE, 0.0) >= full for s in samples):
        return None
    top = max(running)
    stood = min(running) >= top - max(1.0, t["plateau_tolerance_ratio"] * top)
    return top if stood and top >= t["plateau_min_requests"] else None


def at_limit(window: EngineWindow, limit: float | None, t: Thresholds) -> bool | None:
    """Whether ``running`` was at the limit in most of the recent samples; ``None`` without a limit."""
    running = window.gauge_values(r.RUNNING, t["recent_window_seconds"])
    if limit is None or not running:
        return None
    reached = reaching(limit, t)
    return sum(1 for value in running if value >= reached) >= t["most_ratio"] * len(running)


def reaching(limit: float, t: Thresholds) -> float:
    """Number of running requests that counts as at the limit."""
    level = limit * t["at_limit_ratio"]
    return min(level, limit - 1) if limit > t["at_limit_small_requests"] else level


def compute(
    window: EngineWindow,
    configured: SequenceLimit,
    cache: KvSignals,
    mean_context: float | None,
    t: Thresholds,
) -> LoadSignals:
    """Requests in flight against each known limit."""
    running, waiting = window.gauge(r.RUNNING), window.last.waiting if window.last else None
    level = plateau(window, full_from("kv_near_full_ratio", cache.kv_watermark_ratio, t), t)
    limits: dict[str, float] = {}
    if configured.value is not None and configured.source is not None:
        limits[configured.source] = configured.value
    if level is not None and (
        configured.value is None or (configured.source == "default" and level < configured.value)
    ):
        limits["observed"] = level
    if cache.kv_capacity_tokens is not None and mean_context:
        limits["kv_capacity"] = max(1.0, cache.kv_capacity_tokens / mean_context, _fits_as_seen(window, t))
    sequence_limit = limits.get("observed", configured.value)
    in_flight = window.last.in_flight if window.last else None
    smallest = min(limits.values(), default=None)
    return LoadSignals(
        running=running,
        waiting=waiting,
        running_plateau=None if running is None else level is not None,
        waiting_capacity=window.gauge(r.WAITING_CAPACITY),
        waiting_deferred=window.gauge(r.WAITING_DEFERRED),
        in_flight=in_flight,
        limits=limits,
        max_num_seqs=sequence_limit,
        max_num_seqs_source="observed" if "observed" in limits else configured.source,
        concurrency_ratio=None if in_flight is None or not smallest else in_flight / smallest,
        running_at_limit=at_limit(window, sequence_limit, t),
        running_at_limit_now=None
        if running is None or sequence_limit is None
        else running >= reaching(sequence_limit, t),
        arrival_burst_ratio=burst_ratio(window, t),
    )


def _fits_as_seen(window: EngineWindow, t: Thresholds) -> float:
    """Requests that would fill the cache at the recent usage per request, which shared prefixes and half-grown
    requests make smaller than their lengths suggest. 0 where nothing runs or usage is unknown.
    """
    peak = max(window.gauge_values(r.KV_USAGE, t["kv_recent_seconds"]), default=0.0)
    most = max(window.gauge_values(r.RUNNING, t["kv_recent_seconds"]), default=0.0)
    return most / peak if peak > 0 else 0.0


def burst_ratio(window: EngineWindow, t: Thresholds) -> float | None:
    """Arrival rate in the busiest 10 s (or the shortest longer span between samples) divided by the mean of five
    minutes. ``None`` with too little history or without arrivals.
    """
    known = window.arrivals(FIVE_MINUTES)
    if len(known) < t["trend_min_samples"] or known[-1][0] - known[0][0] < MINUTE:
        return None
    (begin, before), (end, in_all) = known[0], known[-1]
    mean, first = (in_all - before) / (end - begin), begin + BURST_SECONDS
    if mean <= 0:
        return None
    busiest, older = 0.0, iter(known[1:])
    following = next(older)
    for now, so_far in known:
        if now < first:
            continue
        while following[0] <= now - BURST_SECONDS:
            (begin, before), following = following, next(older)
        if so_far - before > busiest * (now - begin):
            busiest = (so_far - before) / (now - begin)
    return busiest / mean if busiest > 0 else None
