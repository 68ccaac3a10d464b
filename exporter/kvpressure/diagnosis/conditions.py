"""Conditions: facts that stand beside the verdict, each true, false or not known on its own."""

from __future__ import annotations

from kvpressure.diagnosis import oom
from kvpressure.diagnosis.verdicts import Finding
from kvpressure.signals.model import Signals
from kvpressure.thresholds import Thresholds


class HeldCache:
    """Follows KV blocks that stay occupied while nothing runs or waits.

    An idle engine makes no step, so its gauge may merely be left over from aborted requests. Only a cache that is
    held in several separate idle stretches, with work between them, is called held.
    """

    __slots__ = ("_counted", "_held_stretches", "_idle_since", "_low")

    def __init__(self) -> None:
        self._idle_since: float | None = None
        self._low: float | None = None
        self._held_stretches = 0
        self._counted = False

    def observe(self, t: float, work: bool | None, usage: float | None, thresholds: Thresholds) -> bool | None:
        """Take whether work is present, and the newest usage; the condition now."""
        if work is None or usage is None:
            return None
        if work:
            self._idle_since, self._low, self._counted = None, None, False
            return False if self._held_stretches == 0 else None
        if self._idle_since is None or t < self._idle_since:
            self._idle_since, self._low = t, usage
        self._low = min(self._low if self._low is not None else usage, usage)
        if self._low < thresholds["kv_held_ratio"]:
            self._held_stretches = 0
            return False
        if t - self._idle_since < thresholds["kv_held_seconds"]:
            return None
        if not self._counted:
            self._counted = True
            self._held_stretches += 1
        return True if self._held_stretches >= thresholds["kv_held_stretches"] else None


def evaluate(
    s: Signals, finding: Finding, held: bool | None, utilization: float | None, signature: bool | None, t: Thresholds
) -> dict[str, bool | None]:
    """All conditions of one engine. ``utilization`` is the configured gpu_memory_utilization."""
    host = s.host
    oom_lines = oom.count(s)
    growth = s.memory.idle_growth_bytes_per_hour
    return {
        "memory_leak_idle": None if growth is None else growth >= t["memory_leak_bytes_per_hour"],
        "kv_held_without_load": held,
        "allocator_fragmentation": fragmentation(s, t),
        "baseline_too_high": _baseline_too_high(s, utilization, t),
        "host_memory_near_limit": None
        if host.memory_used_ratio is None
        else host.memory_used_ratio >= t["host_memory_limit_ratio"],
        "host_oom_killed": _oom_killed(s, t),
        "gpu_out_of_memory": None if oom_lines is None else oom_lines > 0,
        "crash_loop": _crash_loop(s, t),
        "gpu_fault": None if s.gpu_faults is None else s.gpu_faults > 0,
        "metrics_frozen": _frozen(s, finding, t),
        "documented_signature": signature,
    }


def fragmentation(s: Signals, t: Thresholds) -> bool | None:
    """Reserved minus allocated above the documented 2 GB, from torch's allocator only.

    Cached activations are not fragmentation: where the inactive split blocks are known, they must make up a real
    share of the difference.
    """
    reserved, allocated = s.memory.allocator_reserved_bytes, s.memory.allocator_allocated_bytes
    if reserved is None or allocated is None:
        return None
    difference = reserved - allocated
    if difference < t["fragmentation_warning_bytes"]:
        return False
    split = s.memory.allocator_inactive_split_bytes
    return True if split is None else split >= t["fragmented_split_ratio"] * difference


def _baseline_too_high(s: Signals, utilization: float | None, t: Thresholds) -> bool | None:
    if s.memory.own_used_ratio is None or utilization is None:
        return None
    most = baseline_limit(utilization, t)
    return None if most is None else s.memory.own_used_ratio > most


def baseline_limit(utilization: float, t: Thresholds) -> float | None:
    """The used share of a device from which on more than the engine is on it. ``None`` where the engine is allowed so much that
    a card cannot show it.
    """
    return (
        None
        if utilization >= t["baseline_full_ratio"]
        else min(utilization + t["baseline_excess_ratio"], t["baseline_full_ratio"])
    )


def _oom_killed(s: Signals, t: Thresholds) -> bool | None:
    """Killed for host memory lately: by the time it ended, else by the restarts that were seen."""
    host = s.host
    if host.restarts is None and host.last_termination_reason is None:
        return None
    if host.last_termination_reason != "OOMKilled":
        return False
    if host.terminated_seconds_ago is not None:
        return host.terminated_seconds_ago <= t["crash_loop_window_seconds"]
    return host.restarts_recent > 0 if host.restarts_recent is not None else None


def _crash_loop(s: Signals, t: Thresholds) -> bool | None:
    """Restarts lately; not known where those before the exporter started may be what makes it a loop."""
    host, many = s.host, t["crash_loop_restarts"]
    if host.restarts is not None and host.restarts < many:
        return False
    if host.restarts_recent is not None and host.restarts_recent >= many:
        return True
    return False if host.restarts_recent is not None and host.restarts_all_known else None


def _frozen(s: Signals, finding: Finding, t: Thresholds) -> bool | None:
    if finding.frozen:
        return True
    stuck = s.progress.seconds_without_progress
    if finding.verdict == "stalled" or (stuck is not None and stuck >= t["no_progress_seconds"]):
        return None
    return False if s.progress.progressing is not None or s.progress.work_present is False else None
