"""Conditions: facts beside the verdict, each true, false or unknown on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvpressure.diagnosis import oom
from kvpressure.diagnosis.evaluate import Answer, Grade
from kvpressure.diagnosis.facts import forms, prefix_collapsed
from kvpressure.model.frozen import frozen
from kvpressure.model.signals import Signals
from kvpressure.settings.thresholds import Thresholds

FROZEN_ROWS: Final = ("No progress: frozen", "No progress: stalled or left-over gauges")


class HeldCache:
    """Follows KV blocks that stay occupied while nothing runs or waits.

    An idle engine makes no step, so its gauge may be left over from aborted requests. The cache counts as held only
    after several idle periods with load between them, or where the gauge still moves.
    """

    __slots__ = ("_counted", "_held_stretches", "_idle_since", "_low", "_moves", "_usage")

    def __init__(self) -> None:
        self._idle_since: float | None = None
        self._low: float | None = None
        self._usage = 0.0
        self._held_stretches = 0
        self._counted = self._moves = False

    def observe(self, t: float, work: bool | None, usage: float | None, thresholds: Thresholds) -> bool | None:
        """Take whether requests are in flight, and KV usage (0-1); return the condition now."""
        if work is None or usage is None:
            return None
        if work:
            self._idle_since, self._low, self._counted, self._moves = None, None, False, False
            return False if self._held_stretches == 0 else None
        if self._idle_since is None or t < self._idle_since:
            self._idle_since, self._low = t, usage
        self._low = min(self._low if self._low is not None else usage, usage)
        if self._low < thresholds["kv_held_ratio"]:
            self._held_stretches = 0
            return False
        before, self._usage = self._usage, usage
        if t - self._idle_since < thresholds["kv_held_seconds"]:
            return None
        self._moves = self._moves or usage != before
        if not self._counted:
            self._counted = True
            self._held_stretches += 1
        return True if self._moves or self._held_stretches >= thresholds["kv_held_stretches"] else None


class Ahead:
    """Follows a cache that fills. True after the forecast has been short for ``kv_ahead_seconds``, because most rises
    stop, and until it is well above again, because a ramp is uneven. False under KV pressure: the forecast has come
    true.
    """

    __slots__ = ("_said", "_since")

    def __init__(self) -> None:
        self._since: float | None = None
        self._said = False

    def observe(self, s: Signals, verdict: str, thresholds: Thresholds) -> bool | None:
        """Take the newest signals and the published verdict; return the condition now."""
        usage, seconds = s.kv.kv_used_ratio, s.kv.kv_seconds_to_full
        near = usage is not None and usage >= thresholds["kv_ahead_ratio"]
        most = thresholds["kv_seconds_to_full_warning"] * (thresholds["kv_ahead_stays_ratio"] if self._said else 1.0)
        if not near or seconds is None or seconds > most or verdict == "kv_pressure":
            self._since, self._said = None, False
            return None if usage is None else False
        if self._since is None or s.time < self._since:
            self._since = s.time
        self._said = s.time - self._since >= thresholds["kv_ahead_seconds"]
        return self._said


@frozen
class Moment:
    """Inputs of every condition. ``utilization`` is the configured gpu_memory_utilization (0-1)."""

    s: Signals
    finding: Answer
    held: bool | None
    ahead: bool | None
    utilization: float | None
    signature: bool | None
    t: Thresholds


@frozen
class Declared:
    """A condition: how it is found, its sentence for each value (``{names}`` are those of ``advice.condition_text``),
    the runbook that explains it, and whether it is bad news by itself (``serious``).
    """

    name: str
    find: Callable[[Moment], bool | None]
    true: str
    false: str
    unknown: str
    runbook: str
    serious: bool = False


def evaluate(moment: Moment) -> dict[str, bool | None]:
    """All conditions of one engine, by name."""
    return {name: one.find(moment) for name, one in _BY_NAME.items()}


def of(name: str) -> Declared:
    """The condition of this name. Raises ``KeyError``."""
    return _BY_NAME[name]


def _held(s: Signals, held: bool | None, t: Thresholds) -> bool | None:
    """KV blocks held without a running request, even if requests wait. True once there has been no progress for as
    long as freeing blocks may take, else unknown.
    """
    usage, running, stuck = s.kv.kv_used_ratio, s.load.running, s.progress.seconds_without_progress
    if running != 0 or not s.progress.work_present or usage is None or usage < t["kv_held_ratio"]:
        return held
    return True if usage >= t["kv_near_full_ratio"] and (stuck or 0.0) >= t["kv_held_seconds"] else None


def fragmentation(s: Signals, t: Thresholds) -> bool | None:
    """Whether reserved minus allocated memory of torch's allocator exceeds the documented 2 GB.

    Cached blocks alone are not fragmentation: where inactive split blocks are known, they must make up a real share.
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
    """Used share of a GPU above which something beside the engine must be on it. ``None`` where the engine may take
    so much that a GPU cannot show the difference.
    """
    return (
        None
        if utilization >= t["baseline_full_ratio"]
        else min(utilization + t["baseline_excess_ratio"], t["baseline_full_ratio"])
    )


def _oom_killed(s: Signals, t: Thresholds) -> bool | None:
    """Whether the container was OOM-killed recently: by the time it ended, else by the restarts seen."""
    host = s.host
    if host.restarts is None and host.last_termination_reason is None:
        return None
    if host.last_termination_reason != "OOMKilled":
        return False
    if host.terminated_seconds_ago is not None:
        return host.terminated_seconds_ago <= t["crash_loop_window_seconds"]
    return host.restarts_recent > 0 if host.restarts_recent is not None else None


def _leak(m: Moment) -> bool | None:
    growth = m.s.memory.idle_growth_bytes_per_hour
    return None if growth is None else growth >= m.t["memory_leak_bytes_per_hour"]


def _near_limit(m: Moment) -> bool | None:
    used = m.s.host.memory_used_ratio
    return None if used is None else used >= m.t["host_memory_limit_ratio"]


def _out_of_memory(m: Moment) -> bool | None:
    return oom.happened(m.s)


def _gpu_fault(m: Moment) -> bool | None:
    """Hardware faults; kernel errors only where the engine went down with them, because any program may cause one."""
    s = m.s
    if s.gpu_faults is None or s.gpu_faults > 0 or not s.kernel_faults:
        return None if s.gpu_faults is None else s.gpu_faults > 0
    down = m.finding.grade is Grade.NOTHING or (s.host.restarts_recent or 0.0) > 0
    if s.compute.gpus_of_others or (not down and s.host.restarts_recent is None):
        return None
    return down


def _crash_loop(s: Signals, t: Thresholds) -> bool | None:
    """Whether the container restarts repeatedly; unknown where restarts from before the exporter started may decide."""
    host, many = s.host, t["crash_loop_restarts"]
    if host.restarts is not None and host.restarts < many:
        return False
    if host.restarts_recent is not None and host.restarts_recent >= many:
        return True
    return False if host.restarts_recent is not None and host.restarts_all_known else None


def _frozen(s: Signals, finding: Answer, t: Thresholds) -> bool | None:
    if finding.row in FROZEN_ROWS:
        return True
    stuck = s.progress.seconds_without_progress
    if finding.verdict == "stalled" or (stuck is not None and stuck >= t["no_progress_seconds"]):
        return None
    if s.progress.work_present is False:
        return False
    return None if s.progress.progressing is None or s.progress.tokens_flow is None else False  # nothing to compare yet


CONDITIONS: Final = (
    Declared(
        "memory_leak_idle",
        _leak,
        "device memory grows by {leak} an hour while idle (leak threshold {leak_from})",
        "device memory grows by {leak} an hour while idle, below the leak threshold of {leak_from}",
        "memory growth while idle: unknown (not idle long enough, or no GPU mapped to this engine)",
        "InferenceMemoryLeak",
        serious=True,
    ),
    Declared(
        "kv_held_without_load",
        lambda m: _held(m.s, m.held, m.t),
        "KV cache {kv} used with {in_flight} in flight (threshold {held_from}, in {held_stretches} idle"
        " periods of {held_seconds})",
        "KV blocks are in use only while requests are in flight{held_now}",
        "whether KV blocks are held without requests: unknown (no idle period yet)",
        "InferenceKVHeldWithoutLoad",
        serious=True,
    ),
    Declared(
        "kv_exhaustion_ahead",
        lambda m: m.ahead,
        "KV cache {kv} used, full in about {to_full} s at the current rate (threshold {to_full_from} s)",
        "the KV cache is not forecast to be full soon",
        "whether the KV cache is about to be full: unknown (KV cache usage: unknown)",
        "InferenceKVCacheExhaustionAhead",
    ),
    Declared(
        "prefix_cache_collapsed",
        lambda m: prefix_collapsed(m.s, m.t),
        *forms("prefix_cache_collapsed"),
        "InferenceTimeToFirstTokenHigh",
    ),
    Declared(
        "allocator_fragmentation",
        lambda m: fragmentation(m.s, m.t),
        "{fragmented} reserved but not allocated, {split} of it in split blocks (thresholds {fragmented_from} and"
        " {split_from})",
        "{fragmented} reserved but not allocated, so not fragmented (threshold {fragmented_from})",
        "allocator fragmentation: unknown (only the plugin inside vLLM reports it)",
        "InferenceMemoryFragmentation",
    ),
    Declared(
        "baseline_too_high",
        lambda m: _baseline_too_high(m.s, m.utilization, m.t),
        "device memory used {device}: more than the {baseline_from} that gpu_memory_utilization {utilization} allows",
        "device memory use is as configured{device_now} (with gpu_memory_utilization {utilization}, up to"
        " {baseline_from} is expected)",
        "whether device memory is used as configured: unknown (no GPU mapped to this engine, or no memory share set)",
        "InferenceBaselineTooHigh",
    ),
    Declared(
        "host_memory_near_limit",
        _near_limit,
        "container memory is near its limit: {host_memory} used (threshold {host_memory_from})",
        "container memory is not near its limit: {host_memory} used (threshold {host_memory_from})",
        "container memory: unknown (the container has no memory limit, or memory was not read)",
        "InferenceHostMemoryNearLimit",
    ),
    Declared(
        "host_oom_killed",
        lambda m: _oom_killed(m.s, m.t),
        "last termination of the container: {ended}; {restarts}",
        "the container was not OOM-killed recently (last termination: {ended}; {restarts})",
        "last termination of the container: unknown",
        "InferenceOOMKilled",
        serious=True,
    ),
    Declared(
        "gpu_out_of_memory",
        _out_of_memory,
        f"{oom.TRUE}: {{oom_times}} in the last {{log_window}}",
        oom.FALSE,
        f"whether {oom.TRUE}: unknown (no log read)",
        "InferenceAllocationFailure",
        serious=True,
    ),
    Declared(
        "crash_loop",
        lambda m: _crash_loop(m.s, m.t),
        "{restarts} (crash loop: {loop_from} or more)",
        "{restarts}, too few for a crash loop ({loop_from} or more)",
        "restarts in half an hour: unknown",
        "InferenceCrashLoop",
        serious=True,
    ),
    Declared(
        "gpu_fault",
        _gpu_fault,
        "{faults} recent XID events or lost GPUs (threshold 1)",
        "no lost GPUs, and no recent XID events from the hardware or this engine",
        "GPU faults: unknown (this engine has no mapped GPU, or its GPU reports only XID events that other programs"
        " may have caused)",
        "GpuXidError",
        serious=True,
    ),
    Declared(
        "metrics_frozen",
        lambda m: _frozen(m.s, m.finding, m.t),
        "no gauge or counter has moved for {still} (threshold {still_from})",
        "{movement}",
        "movement of gauges: unknown",
        "InferenceEngineStalled",
    ),
    Declared(
        "documented_signature",
        lambda m: m.signature,
        'most conditions of the guide "KV Cache Diagnostics" hold',
        'most conditions of the guide "KV Cache Diagnostics" do not hold',
        "documented signature: unknown (too many of its conditions are unknown)",
        "InferenceDocumentedSignature",
    ),
)
NAMES: Final = tuple(condition.name for condition in CONDITIONS)
_BY_NAME: Final = {condition.name: condition for condition in CONDITIONS}
