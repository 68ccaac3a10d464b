"""What to set: limits computed for this engine, in the order and sizes of the mitigation guide."""

from __future__ import annotations

from math import floor

from kvpressure.capacity.rounding import context_limit
from kvpressure.model.signals import Signals
from kvpressure.settings.thresholds import Thresholds


def max_num_seqs(s: Signals, verdict: str, t: Thresholds) -> float | None:
    """Where the cache is the problem, the cut: 25-50 % (documented) of the concurrency that is really reached, sized by
    what the cache holds at the present request lengths. Where the limit itself is the problem, the raise: what the
    cache holds, in one step at most twice the limit. Else, and where one request at a time is left, ``None``.
    """
    if verdict == "concurrency_limited":
        return _raised_num_seqs(s, t)
    if verdict != "kv_pressure" or s.load.kv_role == "kv_producer":  # its blocks wait to be pulled, whatever runs
        return None
    fits = s.load.limits.get("kv_capacity")
    measured = s.batch.batch_p99 if s.batch.batch_p99 is not None else s.load.running
    reached = at_once(measured, s.load.max_num_seqs, fits)
    if reached is None or reached <= 1:
        return None
    most, least = reached * (1 - t["max_num_seqs_cut_min_ratio"]), reached * (1 - t["max_num_seqs_cut_max_ratio"])
    target = most if fits is None else min(most, max(least, fits))
    return float(max(1, floor(target)))


def at_once(measured: float | None, limit: float | None, fits: float | None) -> float | None:
    """Requests that run at once: as ``measured``, within the ``limit``. Not measured, the cache bounds it: a limit
    above what ``fits`` binds nothing, and a cut that stays above it would change nothing.
    """
    bound = measured if measured is not None else fits
    return min((value for value in (bound, limit) if value is not None), default=None)


def _raised_num_seqs(s: Signals, t: Thresholds) -> float | None:
    """``None`` where limit or cache are unknown, the cache does not hold more than the limit, or was nearly full
    recently: with more requests at once it would be the limit.
    """
    limit, fits, peak = s.load.max_num_seqs, s.load.limits.get("kv_capacity"), s.kv.kv_used_ratio_max
    if limit is None or fits is None or floor(fits) <= limit or (peak is not None and peak >= t["kv_near_full_ratio"]):
        return None
    return float(min(floor(fits), floor(t["max_num_seqs_raise_ratio"] * limit)))


def max_num_batched_tokens(current: float | None, verdict: str, t: Thresholds) -> float | None:
    """Half of the present token budget, but at least the floor. ``None`` unless the cache is the problem and the budget
    is known.
    """
    least = t["max_num_batched_tokens_floor"]
    if verdict != "kv_pressure" or current is None or current <= least:
        return None
    return float(max(least, floor(current * (1 - t["max_num_batched_tokens_cut_ratio"]))))


def gpu_memory_utilization(
    s: Signals, current: float | None, out_of_memory: bool | None, t: Thresholds
) -> float | None:
    """The documented 0.7, or 0.6 for long-context or bursty traffic and where 0.7 is set already, when allocations fail
    on the device.

    Not for a full cache: less memory means a smaller KV pool, which makes that worse.
    """
    if not out_of_memory:
        return None
    bursty = (s.load.arrival_burst_ratio or 0.0) >= t["arrival_burst_ratio_high"]
    long_context = (s.context.context_spike_ratio or 0.0) >= t["context_spike_ratio"]
    usual, lower = t["gpu_memory_utilization_recommended"], t["gpu_memory_utilization_long_context"]
    first = lower if bursty or long_context else usual
    return next((target for target in (first, lower) if current is None or current > target), None)


def max_model_len(longest: float | None, current: float | None, verdict: str, t: Thresholds) -> float | None:
    """The ``longest`` request (of the last hour, see ``diagnosis.longest``) with some to spare, rounded up, when the
    cache is the problem and the present limit is larger.
    """
    if verdict != "kv_pressure" or current is None or longest is None:
        return None
    target = float(context_limit(longest, t))
    return target if target < current else None
