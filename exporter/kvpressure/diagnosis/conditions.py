"""Findings beside the verdict, which nothing is judged by, each with the numbers in its sentence: conditions, and what
alerts read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from kvpressure.diagnosis import oom, signature
from kvpressure.diagnosis.evaluate import Grade
from kvpressure.diagnosis.finding import Finding, View, least
from kvpressure.diagnosis.numbers import counted, minutes, number, percent, seconds, size
from kvpressure.model.signals import Signals
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.latency import FLOORS

FROZEN_ROWS: Final = ("No progress: frozen", "No progress: stalled or left-over gauges")
EXPLAINS_QUEUE: Final = frozenset({"kv_pressure", "concurrency_limited", "compute_bound", "host_bound", "stalled"})


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
        return True if self._moves or self._held_stretches >= thresholds["several_min"] else None


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


def _held(v: View) -> bool | None:
    """KV blocks held without a running request, even if requests wait. True once there has been no progress for as
    long as freeing blocks may take, else unknown.
    """
    s, t = v.s, v.t
    usage, running, stuck = s.kv.kv_used_ratio, s.load.running, s.progress.seconds_without_progress
    if running != 0 or not s.progress.work_present or usage is None or usage < t["kv_held_ratio"]:
        return v.held
    return True if usage >= t["kv_near_full_ratio"] and (stuck or 0.0) >= t["kv_held_seconds"] else None


def _prefix_collapsed(v: View) -> bool | None:
    """Whether the prefix cache hits about a third or less (``hit_ratio_collapsed_ratio``) of its usual share."""
    now, usual = v.s.kv.prefix_hit_ratio_recent, v.s.kv.prefix_hit_ratio_usual
    if now is None or usual is None:
        return None
    return usual >= v.t["hit_ratio_usual_ratio"] and now <= v.t["hit_ratio_collapsed_ratio"] * usual


def _fragmentation(v: View) -> bool | None:
    """Whether reserved minus allocated memory of torch's allocator exceeds the documented 2 GB.

    Cached blocks alone are not fragmentation: where inactive split blocks are known, they must make up a real share.
    """
    difference, split = _unallocated(v), v.s.memory.allocator_inactive_split_bytes
    if difference is None or difference < v.t["fragmentation_warning_bytes"]:
        return None if difference is None else False
    return True if split is None else split >= v.t["fragmented_split_ratio"] * difference


def _unallocated(v: View) -> float | None:
    """Bytes that torch's allocator has reserved and not allocated."""
    reserved, allocated = v.s.memory.allocator_reserved_bytes, v.s.memory.allocator_allocated_bytes
    return None if reserved is None or allocated is None else reserved - allocated


def _baseline_too_high(v: View) -> bool | None:
    used, most = v.s.memory.own_used_ratio, _baseline_limit(v)
    return None if used is None or most is None else used > most


def _baseline_limit(v: View) -> float | None:
    """Used share of a GPU above which something beside the engine must be on it. ``None`` where the engine may take
    so much that a GPU cannot show the difference.
    """
    full = v.t["baseline_full_ratio"]
    if v.utilization is None or v.utilization >= full:
        return None
    return min(v.utilization + v.t["baseline_excess_ratio"], full)


def _oom_killed(v: View) -> bool | None:
    """Whether the container was OOM-killed recently: by the time it ended, else by the restarts seen."""
    host = v.s.host
    if host.restarts is None and host.last_termination_reason is None:
        return None
    if host.last_termination_reason != "OOMKilled":
        return False
    if host.terminated_seconds_ago is not None:
        return host.terminated_seconds_ago <= v.t["crash_loop_window_seconds"]
    return host.restarts_recent > 0 if host.restarts_recent is not None else None


def _gpu_fault(v: View) -> bool | None:
    """Hardware faults; kernel errors only where the engine went down with them, because any program may cause one."""
    s = v.s
    if s.gpu_faults is None or s.gpu_faults > 0 or not s.kernel_faults:
        return None if s.gpu_faults is None else s.gpu_faults > 0
    down = v.answer.grade is Grade.NOTHING or (s.host.restarts_recent or 0.0) > 0
    if s.compute.gpus_of_others or (not down and s.host.restarts_recent is None):
        return None
    return down


def _crash_loop(v: View) -> bool | None:
    """Whether the container restarts repeatedly; unknown where restarts from before the exporter started may decide."""
    host, many = v.s.host, v.t["crash_loop_restarts"]
    if host.restarts is not None and host.restarts < many:
        return False
    if host.restarts_recent is not None and host.restarts_recent >= many:
        return True
    return False if host.restarts_recent is not None and host.restarts_all_known else None


def _frozen(v: View) -> bool | None:
    if v.answer.row in FROZEN_ROWS:
        return True
    progress = v.s.progress
    if v.answer.verdict == "stalled" or least(progress.seconds_without_progress, v.t["no_progress_seconds"]):
        return None
    if progress.work_present is False:
        return False
    return None if progress.progressing is None or progress.tokens_flow is None else False  # nothing to compare yet


def _enough_finish(v: View) -> bool:
    """Whether enough requests finish for quantiles of their latency."""
    finished = v.s.requests.requests_finished_per_second
    return finished is not None and finished >= v.t["latency_min_finished_per_second"]


def _slower(phase: str, ratio: str, v: View) -> bool | None:
    """Whether the p95 of a phase is above its floor, and ``ratio`` times its baseline."""
    latency = v.s.latency
    if phase not in latency.baseline_ratios or not _enough_finish(v):
        return None
    return latency.slow_p95.get(phase, 0.0) >= v.t[FLOORS[phase]] and latency.baseline_ratios[phase] >= v.t[ratio]


def _always_slow(v: View) -> bool | None:
    """Whether tokens are slow without a baseline to tell by, or the first token is many times slower than usual below
    its floor.
    """
    if not _enough_finish(v):
        return None
    latency, t = v.s.latency, v.t
    slow = (
        latency.slow_p95.get(phase, 0.0) >= t[FLOORS[phase]] for phase in _TOKENS if phase not in latency.slow_ratios
    )
    much = latency.slow_ratios.get("ttft", 0.0) >= t["latency_critical_ratio"]
    return any(slow) or (much and latency.slow_p95["ttft"] >= t["objective_ttft_seconds"])


def _wait(v: View) -> float | None:
    """Seconds that requests wait on an engine without a baseline."""
    return v.s.requests.wait(v.answer.verdict, _frozen(v))


def _wait_too_long(v: View) -> bool | None:
    wait, in_flight = _wait(v), v.s.load.in_flight
    if wait is None or in_flight is None:
        return False if in_flight == 0 else None
    return wait >= v.t["wait_page_seconds"] and in_flight > 0


def _failing(level: str, v: View) -> bool | None:
    """Whether at least this share of the requests fails; false where hardly any does."""
    ratio, finished = v.s.requests.requests_failed_ratio, v.s.requests.requests_finished_per_second
    return least(0.0 if ratio is None and finished is not None else ratio, v.t[level])


def _confident(v: View) -> bool:
    return v.answer.grade >= Grade.LIKELY


def _queue_explained(v: View) -> bool | None:
    waiting = v.s.load.waiting
    return None if waiting is None else waiting > 0 and _confident(v) and v.answer.verdict in EXPLAINS_QUEUE


# Numbers in the sentences

_TOKENS: Final = {"ttft": "time to first token", "inter_token": "time between tokens"}
_PHASES: Final = {**_TOKENS, "queue": "time in the queue"}


def _latency(phase: str, v: View) -> str:
    """p95 of a phase, and as a multiple of its baseline, as far as known."""
    p95, ratio = getattr(v.s.latency, phase).get("0.95"), v.s.latency.baseline_ratios.get(phase)
    than = "" if ratio is None else f", {number(ratio, 1)} × its baseline"
    return "" if p95 is None else f"{_PHASES[phase]} p95 {seconds(p95)}{than}"


def _device_now(v: View) -> str:
    used = _device(v)
    return "" if used is None else f": {percent(used)} used"


def _device(v: View) -> float | None:
    memory = v.s.memory
    return memory.device_used_ratio if memory.own_used_ratio is None else memory.own_used_ratio


def _held_now(v: View) -> str:
    """KV usage and requests in flight, as far as known."""
    used, in_flight = v.s.kv.kv_used_ratio, v.s.load.in_flight
    parts = [] if used is None else [f"KV cache {percent(used)} used"]
    parts += [] if in_flight is None else [f"{counted(in_flight, 'request')} in flight"]
    return f" ({', '.join(parts)})" if parts else ""


def _movement(v: View) -> str:
    """Whether gauges and counters move, where they are not frozen."""
    progress = v.s.progress
    if progress.work_present is False:
        return "unchanged gauges and counters are normal: no requests are in flight"
    if progress.seconds_still:
        frozen = seconds(v.t["no_progress_seconds"])
        return f"no gauge or counter has moved for {seconds(progress.seconds_still)} (frozen at {frozen})"
    return "gauges or counters are moving"


def _ended(v: View) -> str:
    host = v.s.host
    code = "" if host.last_exit_code is None else f", exit code {number(host.last_exit_code)}"
    return f"{host.last_termination_reason}{code}" if host.last_termination_reason else "none seen"


def _oom_seen(v: View) -> str:
    if not oom.happened(v.s):
        return ""
    return f"{oom.times(v.s)} in the last {minutes(v.t['log_window_seconds'])}{oom.figures(v.s, v.t)}"


NUMBERS: Final[Mapping[str, Callable[[View], str]]] = {
    "leak": lambda v: size(v.s.memory.idle_growth_bytes_per_hour),
    "leak_from": lambda v: size(v.t["memory_leak_bytes_per_hour"]),
    "requests_in_flight": lambda v: counted(v.s.load.in_flight, "request"),
    "held_from": lambda v: percent(v.t["kv_held_ratio"]),
    "held_now": _held_now,
    "to_full": lambda v: number(v.s.kv.kv_seconds_to_full),
    "hits": lambda v: percent(v.s.kv.prefix_hit_ratio_recent),
    "usual_hits": lambda v: percent(v.s.kv.prefix_hit_ratio_usual),
    "fragmented": lambda v: size(_unallocated(v)),
    "fragmented_from": lambda v: size(v.t["fragmentation_warning_bytes"]),
    "split": lambda v: size(v.s.memory.allocator_inactive_split_bytes),
    "split_from": lambda v: percent(v.t["fragmented_split_ratio"]),
    "device": lambda v: percent(_device(v)),
    "device_now": _device_now,
    "utilization": lambda v: percent(v.utilization),
    "baseline_from": lambda v: percent(_baseline_limit(v)),
    "host_memory": lambda v: percent(v.s.host.memory_used_ratio),
    "host_memory_from": lambda v: percent(v.t["container_limit_ratio"]),
    "ended": _ended,
    "restarts": lambda v: f"{counted(v.s.host.restarts_recent, 'restart')} in half an hour",
    "oom_seen": _oom_seen,
    "faults": lambda v: number(v.s.gpu_faults or v.s.kernel_faults),
    "movement": _movement,
    "still": lambda v: seconds(v.s.progress.seconds_still),
    "still_from": lambda v: seconds(v.t["no_progress_seconds"]),
    **{f"{phase}_p95": partial(_latency, phase) for phase in _PHASES},
    "tokens_p95": lambda v: "; ".join(filter(None, (_latency(phase, v) for phase in _TOKENS))),
    "underused": lambda v: percent(v.s.batch.batch_collapse_ratio),
    "underused_from": lambda v: percent(v.t["most_ratio"]),
    "failed": lambda v: percent(v.s.requests.requests_failed_ratio) if v.s.requests.requests_failed_ratio else "",
    "failed_from": lambda v: percent(v.t["rejected_warning_ratio"]),
    "failed_much_from": lambda v: percent(v.t["rejected_critical_ratio"]),
    "wait": lambda v: seconds(_wait(v)) if _wait(v) is not None else "",
    "wait_from": lambda v: seconds(v.t["wait_page_seconds"]),
    "certainty": lambda v: percent(v.answer.confidence),
}

CONDITIONS: Final = (
    Finding(
        "memory_leak_idle",
        "device memory grows by {leak} an hour while idle (leak threshold {leak_from})",
        "device memory grows by {leak} an hour while idle, below the leak threshold of {leak_from}",
        lambda v: least(v.s.memory.idle_growth_bytes_per_hour, v.t["memory_leak_bytes_per_hour"]),
        why="not idle long enough, or no GPU mapped to this engine",
        question="memory growth while idle",
        fresh=True,
        serious=True,
        published=True,
        runbook="InferenceMemoryHeld",
    ),
    Finding(
        "kv_held_without_load",
        "KV cache {kv} used with {requests_in_flight} in flight (threshold {held_from}, in {several_min} idle"
        " periods of {kv_held_seconds} s)",
        "KV blocks are in use only while requests are in flight{held_now}",
        _held,
        why="no idle period yet",
        question="whether KV blocks are held without requests",
        fresh=True,
        serious=True,
        published=True,
        runbook="InferenceMemoryHeld",
    ),
    Finding(
        "kv_exhaustion_ahead",
        "KV cache {kv} used, full in about {to_full} s at the current rate (threshold {kv_seconds_to_full_warning} s)",
        "the KV cache is not forecast to be full soon",
        lambda v: v.ahead,
        why="KV cache usage: unknown",
        question="whether the KV cache is about to be full",
        fresh=True,
        after_verdict=True,
        runbook="InferenceKVCachePressure",
    ),
    Finding(
        "prefix_cache_collapsed",
        "prefix cache hits collapsed",
        "prefix cache hits did not collapse",
        _prefix_collapsed,
        "hit ratio {hits} in the last 30 s, best in 15 minutes {usual_hits}",
        "too few prompts looked up, or prefix caching is off",
        fresh=True,
        runbook="InferenceTimeToFirstTokenHigh",
    ),
    Finding(
        "allocator_fragmentation",
        "{fragmented} reserved but not allocated, {split} of it in split blocks (thresholds {fragmented_from} and"
        " {split_from})",
        "{fragmented} reserved but not allocated, so not fragmented (threshold {fragmented_from})",
        _fragmentation,
        why="only the plugin inside vLLM reports it",
        question="allocator fragmentation",
        fresh=True,
        published=True,
        runbook="InferenceMemoryFragmentation",
    ),
    Finding(
        "baseline_too_high",
        "device memory used {device}: more than the {baseline_from} that gpu_memory_utilization {utilization} allows",
        "device memory use is as configured{device_now} (with gpu_memory_utilization {utilization}, up to"
        " {baseline_from} is expected)",
        _baseline_too_high,
        why="no GPU mapped to this engine, or no memory share set",
        question="whether device memory is used as configured",
        fresh=True,
        published=True,
        runbook="GpuMemoryHigh",
    ),
    Finding(
        "host_memory_near_limit",
        "container memory is near its limit: {host_memory} used (threshold {host_memory_from})",
        "container memory is not near its limit: {host_memory} used (threshold {host_memory_from})",
        lambda v: least(v.s.host.memory_used_ratio, v.t["container_limit_ratio"]),
        why="the container has no memory limit, or memory was not read",
        question="container memory",
        published=True,
        runbook="InferenceHostMemoryNearLimit",
    ),
    Finding(
        "host_oom_killed",
        "last termination of the container: {ended}; {restarts}",
        "the container was not OOM-killed recently (last termination: {ended}; {restarts})",
        _oom_killed,
        why="the pod's status was not read, or does not say when",
        question="last termination of the container",
        serious=True,
        published=True,
        runbook="InferenceOOMKilled",
    ),
    Finding(
        "gpu_out_of_memory",
        oom.TRUE,
        oom.FALSE,
        lambda v: oom.happened(v.s),
        "{oom_seen}",
        "no log read",
        oom.QUESTION,
        serious=True,
        published=True,
        runbook="InferenceAllocationFailure",
    ),
    Finding(
        "crash_loop",
        "{restarts} (crash loop: {crash_loop_restarts} or more)",
        "{restarts}, too few for a crash loop ({crash_loop_restarts} or more)",
        _crash_loop,
        why="the pod's status was not read, or the exporter has not run for so long",
        question="restarts in half an hour",
        serious=True,
        runbook="InferenceCrashLoop",
    ),
    Finding(
        "gpu_fault",
        "{faults} recent XID events or lost GPUs (threshold 1)",
        "no lost GPUs, and no recent XID events from the hardware or this engine",
        _gpu_fault,
        why=("this engine has no mapped GPU, or its GPU reports only XID events that other programs may have caused"),
        question="GPU faults",
        fresh=True,
        after_verdict=True,
        serious=True,
        runbook="GpuXidError",
    ),
    Finding(
        "metrics_frozen",
        "no gauge or counter has moved for {still} (threshold {still_from})",
        "{movement}",
        _frozen,
        why="nothing to compare yet, or requests make no progress",
        question="movement of gauges",
        fresh=True,
        after_verdict=True,
        published=True,
        runbook="InferenceEngineStalled",
    ),
    Finding(
        "documented_signature",
        'most conditions of the guide "KV Cache Diagnostics" hold',
        'most conditions of the guide "KV Cache Diagnostics" do not hold',
        lambda v: signature.met(signature.conditions(v.s, v.t)),
        why="too many of its conditions are unknown",
        question="documented signature",
        fresh=True,
        published=True,
        runbook="InferenceDocumentedSignature",
    ),
)
NAMES: Final = tuple(row.name for row in CONDITIONS)


def _latency_row(phase: str, much: bool) -> Finding:
    title, ratio = _PHASES[phase], "latency_critical_ratio" if much else "latency_multiplied_ratio"
    bound = f"{{{ratio}}} × its baseline"
    return Finding(
        f"{_NAMES.get(phase, phase)}_{'very_high' if much else 'high'}",
        f"{title} is at least {bound} and {{{FLOORS[phase]}}} s",
        f"{title} is below {bound}, or below {{{FLOORS[phase]}}} s",
        partial(_slower, phase, ratio),
        f"{{{phase}_p95}}",
        "no baseline yet, or too few requests finish",
        f"{title} compared with its baseline",
        fresh=True,
        published=True,
        runbook=_RUNBOOKS[phase],
    )


_NAMES: Final = {"queue": "queue_time"}
_RUNBOOKS: Final = {
    "ttft": "InferenceTimeToFirstTokenHigh",
    "inter_token": "InferenceTokenLatencyHigh",
    "queue": "InferenceQueueTimeHigh",
}
ALERTED: Final = (
    *(_latency_row(phase, much) for phase in _PHASES for much in (False, True)),
    Finding(
        "always_slow",
        "tokens are slow and there is no baseline, or the first token takes at least {latency_critical_ratio} × its"
        " baseline and {objective_ttft_seconds} s",
        "tokens are not slow, or slow only compared with the baseline",
        _always_slow,
        "{tokens_p95}",
        "too few requests finish",
        "whether tokens were always slow",
        fresh=True,
        published=True,
        runbook="InferenceSlow",
    ),
    Finding(
        "wait_too_long",
        "requests wait {wait} (threshold {wait_from})",
        "requests do not wait as long as {wait_from}",
        _wait_too_long,
        why="no request waits long, the queue does not move, or there is a baseline",
        question="how long requests wait",
        fresh=True,
        after_verdict=True,
        published=True,
        runbook="InferenceRequestsWaitTooLong",
    ),
    *(
        Finding(
            name,
            f"{{failed}} of the requests fail (threshold {{{level}}})",
            f"fewer than {{{level}}} of the requests fail",
            partial(_failing, threshold),
            why="finished requests are not counted",
            question="whether requests fail",
            fresh=True,
            published=True,
            runbook="InferenceRequestsFailing",
        )
        for name, level, threshold in (
            ("requests_failing", "failed_from", "rejected_warning_ratio"),
            ("requests_failing_much", "failed_much_from", "rejected_critical_ratio"),
        )
    ),
    Finding(
        "several_in_flight",
        "at least {batch_collapse_min_requests} requests are in flight",
        "fewer than {batch_collapse_min_requests} requests are in flight",
        lambda v: least(v.s.load.in_flight, v.t["batch_collapse_min_requests"]),
        "{in_flight}",
        "the engine does not report running or waiting requests",
        "requests in flight",
        fresh=True,
        published=True,
    ),
    Finding(
        "batch_underused",
        "{underused} of the possible batch is unused (threshold {underused_from})",
        "{underused} of the possible batch is unused, below the threshold of {underused_from}",
        lambda v: least(v.s.batch.batch_collapse_ratio, v.t["most_ratio"]),
        why="no request is in flight that could run, or too few samples",
        question="unused share of the possible batch",
        fresh=True,
        published=True,
    ),
    Finding(
        "verdict_confident",
        "the verdict is confident",
        "the verdict is not confident",
        _confident,
        "{certainty}",
        after_verdict=True,
        fresh=True,
        published=True,
    ),
    Finding(
        "queue_explained",
        "a confident verdict explains why requests wait",
        "no request waits, or no confident verdict explains it",
        _queue_explained,
        why="the engine does not report waiting requests",
        fresh=True,
        after_verdict=True,
        published=True,
    ),
)
"""What alerts read beside conditions."""
