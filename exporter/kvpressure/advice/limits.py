"""Recommended limits of one engine, in the order and sizes of the guide "Emergency Mitigation"."""

from __future__ import annotations

from math import floor

from kvpressure.capacity.load import context_limit
from kvpressure.model.signals import Signals
from kvpressure.model.state import STEP_TOKENS
from kvpressure.settings.thresholds import Thresholds


def max_num_seqs(s: Signals, verdict: str, t: Thresholds, stage: str | None = None) -> float | None:
    """Recommended ``max_num_seqs``, or ``None``. Under KV pressure a cut: 25-50 % (documented) of the concurrency
    reached, sized by what the cache holds at the current request lengths; none if one request runs. Where the limit
    binds, a raise: to what the cache holds, at most doubled.
    """
    if verdict == "concurrency_limited":
        return None if stage == STEP_TOKENS else _raised_num_seqs(s, t)
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
    """Requests that run at once: ``measured``, within ``limit``; if not measured, what ``fits`` into the cache,
    because a limit above that has no effect.
    """
    bound = measured if measured is not None else fits
    return min((value for value in (bound, limit) if value is not None), default=None)


def _raised_num_seqs(s: Signals, t: Thresholds) -> float | None:
    """The raise; ``None`` where limit or cache are unknown, the cache does not hold more than the limit, or was
    nearly full recently, because it would then bind instead.
    """
    limit, fits, peak = s.load.max_num_seqs, s.load.limits.get("kv_capacity"), s.kv.kv_used_ratio_max
    if limit is None or fits is None or floor(fits) <= limit or (peak is not None and peak >= t["kv_near_full_ratio"]):
        return None
    return float(min(floor(fits), floor(t["max_num_seqs_raise_ratio"] * limit)))


def past_peak(s: Signals) -> float | None:
    """``max_num_seqs`` at which the most tokens came, of the last 15 minutes; ``None`` where it is unknown or not below
    the limit.
    """
    peak, limit = s.batch.peak_batch, s.load.max_num_seqs
    return None if peak is None or limit is None or round(peak) >= limit else float(max(1, round(peak)))


def max_num_batched_tokens(current: float | None, verdict: str, stage: str | None, t: Thresholds) -> float | None:
    """Under KV pressure, half of the current token budget, at least the floor. Where steps use it up, the usual budget,
    or double of one that is as large. ``None`` otherwise, or without a known budget.
    """
    if current is None:
        return None
    if stage == STEP_TOKENS and verdict == "concurrency_limited":
        return max(t["max_num_batched_tokens_usual"], t["max_num_seqs_raise_ratio"] * current)
    least = t["max_num_batched_tokens_floor"]
    if verdict != "kv_pressure" or current <= least:
        return None
    return float(max(least, floor(current * (1 - t["max_num_seqs_cut_max_ratio"]))))


def gpu_memory_utilization(
    s: Signals, current: float | None, out_of_memory: bool | None, t: Thresholds
) -> float | None:
    """The documented 0.7, or 0.6 for long-context or bursty traffic and where 0.7 is set already; ``None`` unless
    allocations fail on the GPU.

    Not for a full cache: less memory means a smaller KV pool.
    """
    if not out_of_memory:
        return None
    bursty = (s.load.arrival_burst_ratio or 0.0) >= t["arrival_burst_ratio_high"]
    long_context = (s.context.context_spike_ratio or 0.0) >= t["context_spike_ratio"]
    usual, lower = t["gpu_memory_utilization_recommended"], t["gpu_memory_utilization_long_context"]
    first = lower if bursty or long_context else usual
    return next((target for target in (first, lower) if current is None or current > target), None)


def max_model_len(longest: float | None, current: float | None, verdict: str, t: Thresholds) -> float | None:
    """The ``longest`` request in tokens (of the last hour, ``diagnosis.diagnose``) plus a margin, under KV
    pressure and where the current limit is larger; else ``None``.
    """
    if verdict != "kv_pressure" or current is None or longest is None:
        return None
    target = float(context_limit(longest, t))
    return target if target < current else None
