"""What to set: limits computed for this engine, in the order and sizes of the mitigation guide."""

from __future__ import annotations

from math import ceil, floor
from typing import Final

from kvpressure.signals.model import Signals
from kvpressure.thresholds import Thresholds

CONTEXT_STEP: Final = 1024
MIN_BATCHED_TOKENS: Final = 512


def max_num_seqs(s: Signals, verdict: str, t: Thresholds) -> float | None:
    """The cut of ``max_num_seqs``: 25-50 % (documented) of the concurrency that is really reached, sized by what the
    cache holds at the present request lengths. ``None`` unless the cache is the problem.
    """
    if verdict != "kv_pressure":
        return None
    reached = s.batch.batch_p99 if s.batch.batch_p99 is not None else s.load.running
    if s.load.max_num_seqs is not None:
        reached = min(reached, s.load.max_num_seqs) if reached is not None else s.load.max_num_seqs
    if reached is None or reached < 1:
        return None
    most, least = reached * (1 - t["max_num_seqs_cut_min_ratio"]), reached * (1 - t["max_num_seqs_cut_max_ratio"])
    fits = s.load.limits.get("kv_capacity")
    target = most if fits is None else min(most, max(least, fits))
    return float(max(1, floor(target)))


def max_num_batched_tokens(current: float | None, verdict: str) -> float | None:
    """Half of the present token budget, at least 512. ``None`` unless the cache is the problem and the budget is known."""
    if verdict != "kv_pressure" or current is None or current <= MIN_BATCHED_TOKENS:
        return None
    return float(max(MIN_BATCHED_TOKENS, int(current) // 2))


def gpu_memory_utilization(s: Signals, current: float | None, out_of_memory: bool | None, t: Thresholds) -> float | None:
    """The documented 0.7, or 0.6 for long-context or bursty traffic, when allocations fail on the device.

    Not for a full cache: less memory means a smaller KV pool, which makes that worse.
    """
    if not out_of_memory:
        return None
    bursty = (s.load.arrival_burst_ratio or 0.0) >= t["arrival_burst_ratio_high"]
    long_context = (s.context.context_spike_ratio or 0.0) >= t["context_spike_ratio"]
    target = t["gpu_memory_utilization_long_context" if bursty or long_context else "gpu_memory_utilization_recommended"]
    return target if current is None or current > target else None


def max_model_len(s: Signals, current: float | None, verdict: str) -> float | None:
    """The longest context of the last five minutes with a quarter to spare, rounded up, when the cache is the problem and
    the present limit is larger.
    """
    longest = s.context.context_max_5m
    if verdict != "kv_pressure" or current is None or longest is None or not s.context.prompt_quantiles:
        return None
    target = float(ceil(longest * 1.25 / CONTEXT_STEP) * CONTEXT_STEP)
    return target if target < current else None
