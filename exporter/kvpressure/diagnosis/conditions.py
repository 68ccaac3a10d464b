"""Findings beside the verdict, which nothing is judged by: conditions, what alerts ask, and the documented signature,
condition by condition, as the guide "KV Cache Diagnostics" states it.

The signature is published because readers of the guide look for it. On recorded servers it finds no KV pressure;
``note`` explains a disagreement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from kvpressure.diagnosis.facts import for_capacity, held_for_others, of_pair, queue_short, waited
from kvpressure.diagnosis.finding import (
    FROZEN_ROWS,
    NO_GPU,
    Finding,
    View,
    any_of,
    at_least,
    baseline_limit,
    least,
    load_seconds,
    metrics_frozen,
    slowest,
    unallocated,
    when_known,
)
from kvpressure.diagnosis.logic import Grade
from kvpressure.diagnosis.rules import ASLEEP, LONG_PREFILL, NO_PROGRESS
from kvpressure.engines.registry import dialect
from kvpressure.model.signals import Signals
from kvpressure.model.state import ACTIONABLE, CALM, HARMFUL_STAGES, REUSE
from kvpressure.printable import say
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.window import TWICE

PREFIX: Final = "signature_"
_RUNBOOK: Final = "InferenceDocumentedSignature"


def _with_traffic(holds: Callable[[View], bool | None]) -> Callable[[View], bool | None]:
    """A condition that is false without traffic, and unknown without its number even then."""

    def find(v: View) -> bool | None:
        traffic, value = v.s.progress.work_present, holds(v)
        return None if traffic is None or value is None else traffic and value

    return find


SIGNATURE: Final = (
    Finding(
        "signature_gpu_memory_high",
        "more than {signature_memory_ratio} of GPU memory is used",
        "at most {signature_memory_ratio} of GPU memory is used",
        when_known(lambda v, used: used > v.t["signature_memory_ratio"], "gpu_memory_high"),
        "{gpu_memory_high}",
        NO_GPU,
        "GPU memory used",
        fresh=True,
        published=True,
        runbook=_RUNBOOK,
    ),
    Finding(
        "signature_gpu_utilization_low",
        "GPU utilization is below {signature_utilization_ratio} with traffic",
        "GPU utilization is at least {signature_utilization_ratio}, or there is no traffic",
        _with_traffic(when_known(lambda v, used: used < v.t["signature_utilization_ratio"], "gpu_utilization")),
        "{gpu_utilization}",
        f"traffic is unknown, or {NO_GPU}",
        "whether GPU utilization is low with traffic",
        fresh=True,
        published=True,
        runbook=_RUNBOOK,
    ),
    Finding(
        "signature_batch_collapsed",
        "the p95 batch size is {signature_batch_size} or less with traffic",
        "the p95 batch size is above {signature_batch_size}, or there is no traffic",
        _with_traffic(when_known(lambda v, size: size <= v.t["signature_batch_size"], "batch_p95")),
        "p95 {batch_p95}, mean {batch_mean}",
        "too few samples",
        "batch size",
        fresh=True,
        published=True,
        runbook=_RUNBOOK,
    ),
    Finding(
        "signature_latency_rising",
        "p95 latency is at least {latency_rising_ratio} its baseline",
        "p95 latency is below {latency_rising_ratio} its baseline",
        at_least("worst_latency", "latency_rising_ratio"),
        "{worst_phase} {worst_latency}",
        "no baseline yet, or too few requests",
        "p95 latency compared with its baseline",
        fresh=True,
        published=True,
        runbook=_RUNBOOK,
    ),
    Finding(
        "signature_throughput_flat",
        "throughput is flat or falling although demand is not",
        "throughput follows demand, or there is no traffic",
        lambda v: v.s.progress.work_present and v.s.throughput.throughput_flat,
        "now {throughput_trend} of the best recent minute",
        "less than two minutes of comparable load",
        "throughput compared with demand",
        fresh=True,
        published=True,
        runbook=_RUNBOOK,
    ),
)
"""Five conditions: GPU memory above 85 %, GPU utilization below 60 % while traffic is present, batch p95 down to about
1-2, p95/p99 latency rising, throughput flat or falling.
"""


def met(v: View) -> bool | None:
    """Whether most conditions hold; ``None`` where the unknown ones could change that."""
    return most([row.find(v) for row in SIGNATURE])


def most(found: Sequence[bool | None]) -> bool | None:
    """Whether most of these are true; ``None`` where the unknown ones could change that."""
    true, false, open_ = found.count(True), found.count(False), found.count(None)
    if true > false + open_:
        return True
    return False if true + open_ <= false else None


def note(s: Signals, verdict: str, is_met: bool | None) -> str:
    """Why signature and verdict differ, in words; "" when they agree or the signature is unknown."""
    if is_met is None or is_met == (verdict == "kv_pressure"):
        return ""
    level = s.kv.kv_used_ratio_max
    used = "KV cache usage: unknown" if level is None else f"KV cache peak {say(level, 'ratio')}"
    if is_met:
        return (
            f"Documented signature met, but no KV pressure ({used}). {dialect(s.dialect).title} reserves its memory"
            " at start, so device memory is high with an empty cache. A small model or a busy host keeps GPU"
            " utilization low."
        )
    return (
        f"Documented signature not met, but KV pressure ({used}, requests waiting). Decoding keeps a kernel running"
        " nearly all the time, so GPU utilization stays high under KV pressure."
    )


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


def _fragmentation(v: View) -> bool | None:
    """Whether reserved minus allocated memory of torch's allocator reaches the documented size.

    Cached blocks alone are not fragmentation: where inactive split blocks are known, they must make up a real share.
    """
    difference, split = unallocated(v), v.s.memory.allocator_inactive_split_bytes
    if difference is None or difference < v.t["fragmentation_warning_bytes"]:
        return None if difference is None else False
    return True if split is None else split >= v.t["fragmented_split_ratio"] * difference


def _baseline_too_high(v: View) -> bool | None:
    used, most = v.s.memory.own_used_ratio, baseline_limit(v)
    return None if used is None or most is None else used > most


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


def _slow(v: View) -> bool | None:
    """Whether a phase is slow; unknown where too few requests finish for a p95 and no wait can be estimated."""
    if slowest(v) is not None:
        return True
    finished = v.s.requests.requests_finished_per_second
    few = finished is None or finished < v.t["latency_min_finished_per_second"]
    return None if few and v.s.load.in_flight != 0 else False


def _slow_badly(v: View) -> bool | None:
    slow = slowest(v)
    return _slow(v) if slow is None else slow.badly


def _any(values: Iterable[bool | None]) -> bool | None:
    """Whether one holds; ``None`` where none is known to and one is unknown."""
    found = tuple(values)
    return any(found) or (None if None in found else False)


def _losing(failed: str, more: str, v: View) -> bool | None:
    return _any((at_least("failed_share", failed)(v), at_least("abandoned_more", more)(v)))


def _stuck(v: View) -> bool | None:
    """Whether requests get nothing, however certain the verdict: at once in a confident stall, else, and for a first
    request, so late that somebody is woken after twice the patience with a prefill: the alert waits
    ``alert_page_for_seconds``. What the verdict explains, or gauges alone show, counts only once it lasts far longer;
    what it was told, never.
    """
    s, t, (table, _, _) = v.s.progress, v.t, v.answer.row.partition(": ")
    seconds = s.seconds_without_progress
    if not s.work_present or seconds is None or (v.s.load.running is None and v.s.load.waiting is None):
        return None if s.work_present is not False else False
    if table == ASLEEP.title or v.answer.row == FROZEN_ROWS[0]:
        return None
    if v.answer.verdict == "stalled" and _confident(v) and s.ever_produced is not False:
        return True
    explained = v.answer.row == FROZEN_ROWS[1] or table == LONG_PREFILL.title
    explained = explained or (table == NO_PROGRESS.title and v.answer.verdict == "unknown")
    most = t["alert_ticket_for_seconds"] if explained else TWICE * t["prefill_patience_seconds"]
    return seconds >= most - t["alert_page_for_seconds"]


def _tier_too_small(v: View) -> bool | None:
    """Whether a tier passes on what it takes before it is asked for again. Unknown while it refuses: then it is not
    seen what a free one would give back.
    """
    tier, t = v.s.tier, v.t
    reloaded, turnover = tier.tier_reloaded_ratio, tier.tier_turnover_seconds
    if reloaded is None:
        return None
    if reloaded > t["hit_ratio_collapsed_ratio"]:
        return False
    if turnover is None or at_least("tier_refused", "several_min")(v):
        return None
    return turnover <= t["context_window_seconds"]


def _tier_slow(v: View) -> bool | None:
    """Whether a token is computed sooner than loaded. Where it is unknown over how many GPUs the times of transfers add
    up, they can only deny it.
    """
    prefill, most = v.s.tier.prefill_seconds_per_token, v.s.tier.load_seconds_per_token
    if prefill is None or most is None:
        return None
    return False if most < prefill else least(load_seconds(v), prefill) or None


def _tier_unused(v: View) -> bool | None:
    """Whether a tier has given nothing back although more was stored than the GPU's cache holds, all of which was
    evicted there since.
    """
    tier = v.s.tier
    if tier.tier_served is not False:
        return None if tier.tier_served is None else False
    if _tier_too_small(v):
        return False
    return None if tier.tier_stored_ratio is None else tier.tier_stored_ratio > 1


def _loads_stuck(v: View) -> bool | None:
    """Whether loads stand still; unknown where what runs stands still, too: then it is the engine that has stopped."""
    stuck = at_least("loads_stuck", "wait_page_seconds")(v)
    return None if stuck and v.s.load.running and v.s.progress.seconds_without_progress else stuck


def _prefill_wasted(v: View) -> bool | None:
    role = v.s.load.kv_role
    if role == "kv_consumer":
        return at_least("prompts_computed", "most_ratio")(v)
    return False if role == "kv_producer" else None


def _drafts_rejected(v: View) -> bool | None:
    flow, usual = v.s.throughput, v.s.throughput.drafts_accepted_usual
    if not flow.speculates or flow.step_output_tokens is None:
        return None if flow.speculates is not False else False
    accepted = flow.step_output_tokens - 1.0
    if accepted <= 0:
        return True
    return None if usual is None else usual >= v.t["latency_rising_ratio"] * accepted


def _transfers_fail(v: View) -> bool | None:
    return _any(row.find(v) for row in TRANSFER_FAULTS)


def _confident(v: View) -> bool:
    return v.answer.grade >= Grade.LIKELY


_OF_TIERS: Final = "InferenceKVCachePressure"
_NO_TIER: Final = "the engine reports no KV tier"
_OF_CAPACITY: Final = ("kv_pressure", "concurrency_limited", "compute_bound")
"""Verdicts that another replica helps."""


def _saturated(v: View) -> bool | None:
    """Whether requests wait for capacity that another engine of the pool could have. Not what waits for a transfer,
    nor where the verdict names what another engine does not help.
    """
    load = v.s.load
    if v.answer.verdict in ACTIONABLE and v.answer.verdict not in _OF_CAPACITY:
        return False
    if v.stage in HARMFUL_STAGES:
        return True if (load.waiting_deferred or 0.0) <= (load.running or 0.0) else None
    capacity, short = for_capacity(v), queue_short(v)
    return None if capacity is None else capacity and short is not True


def _spare(v: View) -> bool | None:
    """Whether the engine could take more requests. A prefill server's cache holds what decode has yet to fetch, so its
    usage does not count.
    """
    if v.answer.verdict == "unknown":
        return None
    queue, used = waited(v), v.s.kv.kv_used_ratio_recent_max
    if queue is None or used is None:
        return None
    room = used < v.t["most_ratio"] or held_for_others(v) is True
    return v.answer.verdict in CALM and not queue and room


CONDITIONS: Final = (
    Finding(
        "memory_leak_idle",
        "GPU memory grows by {memory_leak_bytes_per_hour} an hour or more while idle",
        "GPU memory grows by less than {memory_leak_bytes_per_hour} an hour while idle",
        at_least("idle_growth", "memory_leak_bytes_per_hour"),
        "{idle_growth} an hour",
        why="not idle long enough, or no GPU mapped to this engine",
        question="memory growth while idle",
        fresh=True,
        serious=True,
        published=True,
        runbook="InferenceMemoryHeld",
    ),
    Finding(
        "kv_held_without_load",
        "KV blocks are held without requests",
        "KV blocks are in use only while requests are in flight",
        _held,
        "KV cache {kv_used_ratio} used (held at {kv_held_ratio} in {several_min} idle periods of"
        " {kv_held_seconds}), {running} running, {waiting} waiting",
        why="no idle period yet",
        question="whether KV blocks are held without requests",
        fresh=True,
        serious=True,
        published=True,
        runbook="InferenceMemoryHeld",
    ),
    Finding(
        "kv_exhaustion_ahead",
        "the KV cache will be full in {kv_seconds_to_full_warning} or less at the current rate",
        "KV cache usage has not risen for long enough to fill the cache soon",
        lambda v: v.ahead,
        "{kv_used_ratio} used, full in about {kv_seconds_to_full}",
        why="KV cache usage: unknown",
        question="whether the KV cache is about to be full",
        fresh=True,
        runbook="InferenceKVCachePressure",
    ),
    Finding(
        "prefix_cache_collapsed",
        "prefix cache hits collapsed",
        "prefix cache hits did not collapse",
        when_known(
            lambda v, now, usual: (
                usual >= v.t["hit_ratio_usual_ratio"] and now <= v.t["hit_ratio_collapsed_ratio"] * usual
            ),
            "prefix_hit_ratio_recent",
            "prefix_hit_ratio_usual",
        ),
        "hit ratio {prefix_hit_ratio_recent} in the last 30 s, usually {prefix_hit_ratio_usual}",
        "too few prompts looked up, or prefix caching is off",
        fresh=True,
        runbook="InferenceSlow",
    ),
    Finding(
        "tier_too_small",
        "the KV tier evicts what it stores before it is used again",
        "the KV tier keeps what it stores for {context_window_seconds}, or gives it back before",
        _tier_too_small,
        "stores fill it every {tier_turnover}, {tier_reloaded} of what is stored is loaded again,"
        " it holds {tier_capacity} tokens, the longest request has {context_longest}",
        _NO_TIER + ", its size is unknown, or it refuses stores",
        "whether the KV tier is large enough",
        fresh=True,
        runbook=_OF_TIERS,
    ),
    Finding(
        "tier_saturated",
        "the KV tier refuses stores or loads",
        "the KV tier takes what is stored",
        at_least("tier_refused", "several_min"),
        "{tier_refused} refused or failed in 5 minutes, {tier_pinned} of it is held by transfers",
        _NO_TIER,
        "whether the KV tier refuses stores",
        fresh=True,
        runbook=_OF_TIERS,
    ),
    Finding(
        "tier_slow",
        "the KV tier loads tokens more slowly than the GPU computes them",
        "the KV tier loads tokens faster than the GPU computes them",
        _tier_slow,
        "{tier_prefill} to compute {hit_ratio_min_tokens} tokens, {tier_load} to load them, {tier_load_most} with the"
        " times of all GPUs added up",
        _NO_TIER + ", too little is loaded, or times are not published",
        "whether the KV tier is faster than the GPU",
        fresh=True,
        runbook=_OF_TIERS,
    ),
    Finding(
        "tier_unused",
        "the KV tier has given nothing back since the start",
        "the KV tier gives tokens back, or has not taken enough to tell",
        _tier_unused,
        "stored {tier_stored} the KV capacity of the GPU, {tier_used} of the tier is in use",
        _NO_TIER + ", or not its size in tokens",
        "whether the KV tier is used",
        fresh=True,
        runbook=_OF_TIERS,
    ),
    Finding(
        "transfer_failing",
        "at least {rejected_warning_ratio} of the transfers of KV blocks between servers fail",
        "fewer than {rejected_warning_ratio} of the transfers of KV blocks between servers fail",
        of_pair(at_least("transfers_failed", "rejected_warning_ratio")),
        "{transfers_failed} in the last 5 minutes",
        "none ended here: one of the two servers records them",
        "whether transfers of KV blocks between servers fail",
        fresh=True,
        serious=True,
        runbook="InferenceKVTransferFailing",
    ),
    Finding(
        "transfer_slow",
        "transfers of KV blocks take at least {latency_multiplied_ratio} as long as usual for their size",
        "transfers of KV blocks take about as long as usual for their size",
        of_pair(at_least("transfer_slowdown", "latency_multiplied_ratio")),
        "{transfer_slowdown} the usual time, {transfer_seconds} each",
        "no baseline yet, or too few ended here: one of the two servers records them",
        "how long transfers of KV blocks take",
        fresh=True,
        runbook="InferenceKVTransferFailing",
    ),
    Finding(
        "loads_stuck",
        "for {wait_page_seconds} no KV blocks have moved between this server and its peer, although requests wait",
        "KV blocks move between this server and its peer, or no request waits for it",
        of_pair(_loads_stuck),
        "{loads_stuck}, {loads} on their way, {loads_to_start} wait to be",
        "what runs makes no progress either",
        "whether KV blocks move between this server and its peer",
        fresh=True,
        serious=True,
        runbook="InferenceKVTransferFailing",
    ),
    Finding(
        "lease_expired",
        "at least {rejected_warning_ratio} of the prompts computed here are thrown away before another server has them",
        "fewer than {rejected_warning_ratio} of the prompts computed here are thrown away",
        of_pair(at_least("leases_expired", "rejected_warning_ratio")),
        "{leases_expired} in the last 5 minutes",
        "the server that computes prompts counts them",
        "share of prompts that are thrown away before another server has them",
        fresh=True,
        runbook="InferenceKVTransferFailing",
    ),
    Finding(
        "answers_suspect",
        "answers may be wrong: another server read KV blocks after they were freed",
        "no KV block was read after it was freed",
        of_pair(any_of("read_after_expiry")),
        "{read_after_expiry} reads in the last 5 minutes",
        "the other server of the pair may count them",
        "whether KV blocks were read after they were freed",
        fresh=True,
        serious=True,
        published=True,
        runbook="InferenceKVTransferCorrupt",
    ),
    Finding(
        "prefill_wasted",
        "the decode server computes most prompts itself",
        "the decode server computes few prompts itself, or this is none",
        of_pair(_prefill_wasted),
        "{prompts_computed} of the prompt tokens",
        "no prompt came, or its tokens are not counted by source",
        "whether the decode server computes prompts itself",
        fresh=True,
        serious=True,
        runbook="InferenceKVTransferFailing",
    ),
    Finding(
        "drafts_rejected",
        "speculative decoding: far fewer draft tokens are accepted than usual, or none",
        "speculative decoding is off, or about as many draft tokens are accepted as usual",
        _drafts_rejected,
        "{step_output} output tokens a step, usually {step_output_usual}",
        "no baseline yet, or nothing is generated",
        "whether draft tokens are accepted",
        fresh=True,
        runbook="InferenceSlow",
    ),
    Finding(
        "allocator_fragmentation",
        "GPU memory is fragmented",
        "GPU memory is not fragmented",
        _fragmentation,
        "{unallocated} reserved but not allocated (threshold {fragmentation_warning_bytes}), {split} of it in split"
        " blocks (threshold {fragmented_split_ratio} of it)",
        why="only the plugin inside vLLM reports it",
        question="allocator fragmentation",
        fresh=True,
        published=True,
        runbook="InferenceMemoryFragmentation",
    ),
    Finding(
        "baseline_too_high",
        "more GPU memory is used than gpu_memory_utilization allows",
        "GPU memory is used as configured",
        _baseline_too_high,
        "{gpu_memory_used} used, up to {baseline_limit} expected with gpu_memory_utilization {gpu_memory_share}",
        why="no GPU mapped to this engine, or no memory share set",
        question="whether device memory is used as configured",
        fresh=True,
        published=True,
        runbook="GpuMemoryHigh",
    ),
    Finding(
        "host_memory_near_limit",
        "container memory is near its limit",
        "container memory is not near its limit",
        at_least("host_memory", "container_limit_ratio"),
        "{host_memory} used (threshold {container_limit_ratio})",
        why="the container has no memory limit, or memory was not read",
        question="container memory",
        published=True,
        runbook="InferenceOutOfMemory",
    ),
    Finding(
        "host_oom_killed",
        "the container was OOM-killed recently",
        "the container was not OOM-killed recently",
        _oom_killed,
        "last termination {termination}, exit code {exit_code}, restarts in half an hour: {restarts}",
        why="the pod's status was not read, or does not say when",
        question="last termination of the container",
        serious=True,
        published=True,
        runbook="InferenceOutOfMemory",
    ),
    Finding(
        "gpu_out_of_memory",
        "the log shows that GPU memory ran out",
        "the log does not show that GPU memory ran out",
        any_of("oom_lines"),
        "{oom_lines} × in the last {log_window_seconds}, last tried to allocate {oom_requested},"
        " {oom_free} free on the GPU, {oom_total} in all, PyTorch {oom_allocated} allocated,"
        " {oom_pools} of it in private pools, {oom_unallocated} reserved but unallocated, {oom_fragmented}",
        "no log read",
        "GPU memory errors in the log",
        serious=True,
        published=True,
        runbook="InferenceOutOfMemory",
    ),
    Finding(
        "crash_loop",
        "the container restarted {crash_loop_restarts} times or more in half an hour",
        "the container restarted fewer than {crash_loop_restarts} times in half an hour",
        _crash_loop,
        "{restarts}",
        why="the pod's status was not read, or the exporter has not run for so long",
        question="restarts in half an hour",
        serious=True,
        runbook="InferenceCrashLoop",
    ),
    Finding(
        "gpu_fault",
        "GPUs were lost, or had recent XID events",
        "no lost GPUs, and no recent XID events from the hardware or this engine",
        _gpu_fault,
        "{gpu_faults} events",
        why=("this engine has no mapped GPU, or its GPU reports only XID events that other programs may have caused"),
        question="GPU faults",
        fresh=True,
        serious=True,
        runbook="GpuXidError",
    ),
    Finding(
        "metrics_frozen",
        "no gauge or counter moves although requests are in flight",
        "gauges or counters are moving, or no requests are in flight",
        metrics_frozen,
        "last movement {still_seconds} ago (threshold {no_progress_seconds})",
        why="nothing to compare yet, or requests make no progress",
        question="movement of gauges",
        fresh=True,
        published=True,
        runbook="InferenceStalled",
    ),
    Finding(
        "documented_signature",
        'most conditions of the guide "KV Cache Diagnostics" hold',
        'most conditions of the guide "KV Cache Diagnostics" do not hold',
        met,
        why="too many of its conditions are unknown",
        question="documented signature",
        fresh=True,
        published=True,
        runbook="InferenceDocumentedSignature",
    ),
)
NAMES: Final = tuple(row.name for row in CONDITIONS)
TRANSFER_FAULTS: Final = tuple(
    row for row in CONDITIONS if row.name in ("loads_stuck", "transfer_failing", "lease_expired", "prefill_wasted")
)


_SLOW_SEEN: Final = "{slow_phase} {slow_seconds} at p95, usually {usual_seconds}"
_TOO_FEW: Final = "too few requests finish"

ALERTED: Final = (
    Finding(
        "slow",
        "latency is at least {latency_multiplied_ratio} its baseline, or long without one",
        "latency is near its baseline, or short",
        _slow,
        _SLOW_SEEN,
        _TOO_FEW,
        "whether answers are slow",
        fresh=True,
        published=True,
        runbook="InferenceSlow",
    ),
    Finding(
        "slow_badly",
        "latency is at least {latency_critical_ratio} its baseline and long, or several requests wait"
        " {wait_page_seconds} or longer",
        "latency is below {latency_critical_ratio} its baseline, and requests do not wait {wait_page_seconds}",
        _slow_badly,
        _SLOW_SEEN,
        _TOO_FEW,
        "whether answers are very slow",
        fresh=True,
        published=True,
        runbook="InferenceSlow",
    ),
    *(
        Finding(
            name,
            f"at least {{{failed}}} of the requests fail, or clients abandon {{{more}}} more of them than usual",
            f"fewer than {{{failed}}} of the requests fail, and clients abandon about as many as usual",
            partial(_losing, failed, more),
            "{failed_share} failed, {abandoned_more} more abandoned than usual",
            "finished requests are not counted",
            "whether requests end without an answer",
            fresh=True,
            published=True,
            runbook="InferenceRequestsFailing",
        )
        for name, failed, more in (
            ("losing_requests", "rejected_warning_ratio", "rejected_critical_ratio"),
            ("losing_requests_badly", "rejected_critical_ratio", "most_ratio"),
        )
    ),
    Finding(
        "stuck",
        "requests are in flight, and for minutes none has finished and no token has come",
        "requests in flight make progress",
        _stuck,
        "last progress {stuck_seconds} ago",
        "no request is in flight, or what is in flight may be left over from aborted requests",
        "whether requests in flight are stuck",
        fresh=True,
        published=True,
        runbook="InferenceStalled",
    ),
    Finding(
        "kv_pressure",
        "the verdict is kv_pressure and its stage is above building",
        "the verdict is not kv_pressure, or its stage is building",
        lambda v: v.stage in HARMFUL_STAGES,
        "stage {stage}",
        fresh=True,
        published=True,
        runbook="InferenceKVCachePressure",
    ),
    Finding(
        "reuse_lost",
        "users wait while prompts are computed again whose KV blocks were evicted",
        "prompts whose KV blocks were evicted do not make users wait",
        lambda v: v.stage == REUSE,
        "{prefill_repeated} of the computed prompt tokens, hit ratio {hit_ratio}",
        fresh=True,
        published=True,
        runbook="InferenceReuseLost",
    ),
    Finding(
        "host_bound",
        "the verdict is host_bound and confident",
        "the verdict is not host_bound, or not confident",
        lambda v: v.answer.verdict == "host_bound" and _confident(v),
        "confidence {confidence}",
        fresh=True,
        published=True,
        runbook="InferenceHostBound",
    ),
    Finding(
        "saturated",
        "requests wait for capacity",
        "no request waits for capacity, or no other engine could help",
        _saturated,
        "{waiting} waiting, {running} running, KV cache {kv_used_ratio} used",
        "{deferred_where}",
        fresh=True,
        published=True,
        runbook="InferencePoolImbalanced",
    ),
    Finding(
        "spare_capacity",
        "the engine could take more requests",
        "the engine could not take more requests",
        _spare,
        "{waiting} waiting, {running} running, KV cache {kv_used_ratio} used",
        "the verdict is unknown, or too few samples",
        fresh=True,
        published=True,
        runbook="InferencePoolImbalanced",
    ),
    Finding(
        "kv_transfers_failing",
        "KV blocks do not reach the server that needs them",
        "KV blocks reach the server that needs them, or none is exchanged",
        _transfers_fail,
        "{transfers_failed} of the transfers failed, {leases_expired} of the prompts thrown away",
        "one of the two servers records transfers",
        "whether KV blocks reach the server that needs them",
        fresh=True,
        published=True,
        runbook="InferenceKVTransferFailing",
    ),
)
"""What alerts read beside conditions."""


def _demanded(floor: str) -> Callable[[View], float | None]:
    """The largest required share of a GPU's memory, of GPUs where less than this threshold is in use without any KV
    cache: where more is, that is configuration.
    """
    return lambda v: max(
        (share for share, least in v.s.memory.gpu_demands if least is None or least < v.t[floor]), default=None
    )


_SEVERAL: Final = at_least("in_flight", "batch_collapse_min_requests")
_DOCUMENTED: Final[Mapping[str, tuple[Callable[[View], float | None], *tuple[Callable[[View], bool | None], ...]]]] = {
    "concurrency": (lambda v: v.s.load.concurrency_ratio, any_of("waiting")),
    "batch": (lambda v: v.s.batch.batch_p95, _SEVERAL, at_least("batch_unused", "most_ratio")),
    "context": (lambda v: v.s.context.context_spike_ratio, any_of("waiting")),
    "fragmentation": (unallocated, _fragmentation),
    "memory_warning": (_demanded("memory_warning_ratio"),),
    "memory_critical": (_demanded("memory_critical_ratio"),),
    "signature": (lambda _: 1.0, lambda v: not _confident(v), _SEVERAL, met),
}
"""Numbers that the guides set a threshold for, and what must hold beside it: without that, one user or a server at rest
would reach most of them.
"""


def documented(v: View) -> dict[str, float]:
    """The numbers that alerts with a documented threshold read: none while a confident verdict names a cause, because
    its own alert says more.
    """
    if _confident(v) and v.answer.verdict in ACTIONABLE:
        return {}
    return {
        name: value
        for name, (read, *conditions) in _DOCUMENTED.items()
        if (value := read(v)) is not None and all(holds(v) for holds in conditions)
    }
