"""What a finding is (a sentence about an engine that is true, false or unknown), what it is found in, GPU activity by
the best evidence, and every number in its sentences: by name, and the one way to write it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from string import Formatter
from typing import Final

from kvpressure.diagnosis.logic import GRADE_CONFIDENCE, Answer, Grade
from kvpressure.engines.registry import dialect
from kvpressure.model import reasons
from kvpressure.model.arguments import OF_PROCESS
from kvpressure.model.frozen import frozen
from kvpressure.model.log_events import ALLOCATION_EVENTS
from kvpressure.model.signals import NO_ACTIVITY, PROFILING, ComputeSignals, Signals, Slow
from kvpressure.printable import UNKNOWN, say
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.kv import MEASURED, UNTIL, full_from
from kvpressure.signals.requests import slow_phases, slow_queue

NO_GPU: Final = "no GPU mapped to this engine, or none readable"


class GpuFacts:
    """Starved, saturated, works (busy units), computes, low, idle: each true, false or ``None``; ``unseen``: no
    activity read; ``between``: it is unknown which of the pod's GPUs are this engine's.
    """

    __slots__ = ("between", "computes", "idle", "low", "saturated", "starved", "unseen", "works")

    def __init__(self, gpu: ComputeSignals, t: Thresholds) -> None:
        self.between = False
        self.unseen = gpu.activity_level == NO_ACTIVITY
        self.starved, self.saturated = _activity(gpu, t)
        self.works = _works(gpu, t)
        self.computes = _computes(gpu, t)
        used, low, high = gpu.gpu_utilization, gpu.gpu_utilization_low, gpu.gpu_utilization_high
        light = t["signature_utilization_ratio"]
        still = t["gpu_idle_ratio"]
        busy = t["compute_bound_utilization_ratio"]
        self.low = None if used is None else used < light
        self.idle = None if used is None else used <= still
        if gpu.gpus_shared and low is not None and high is not None:
            self.between = True
            self.low = _of_some(low < light, high < light)
            self.idle = _of_some(low <= still, high <= still)
            self.starved = _of_some(low < t["gpu_starved_ratio"], self.starved)
            self.saturated = _of_some(self.saturated or high >= busy, low >= busy)
        if gpu.gpus_of_others:  # this engine's activity is at most the GPU's, and may be 0
            self.starved, self.low, self.idle = self.starved or None, self.low or None, self.idle or None
            self.saturated, self.works = (False if said is False else None for said in (self.saturated, self.works))


def _of_some(any_gpu: bool | None, every_gpu: bool | None) -> bool | None:
    """A fact about one engine's GPUs where it is unknown which of the pod's these are."""
    if every_gpu:
        return True
    return None if any_gpu else any_gpu


def _at_least(value: float | None, level: float) -> bool:
    return value is not None and value >= level


def _activity(gpu: ComputeSignals, t: Thresholds) -> tuple[bool | None, bool | None]:
    """Starved and saturated: by profiling where available, else by all other evidence.

    Without profiling, only utilization (no kernel ran) proves a starved GPU: small models draw little power and do
    little work at their best, so high values disprove it and low ones mean nothing. Any one of them proves
    saturation; a small estimate alone does not disprove it.
    """
    if gpu.activity_level == PROFILING and gpu.tensor_activity is not None:
        busiest = max(gpu.tensor_activity, gpu.dram_activity or 0.0, gpu.sm_activity or 0.0)
        return (
            busiest < t["gpu_starved_ratio"],
            gpu.tensor_activity >= t["tensor_busy_ratio"] or _at_least(gpu.dram_activity, t["most_ratio"]),
        )
    used, power, work = gpu.gpu_utilization, gpu.power_ratio, gpu.estimated_peak_ratio
    busiest_gpu = _highest(gpu)
    starved = None if busiest_gpu is None else busiest_gpu < t["gpu_starved_ratio"]
    if used is None and (_at_least(power, t["power_starved_ratio"]) or _at_least(work, t["gpu_starved_ratio"])):
        starved = False
    saturated = None if used is None and power is None else False
    if (
        _at_least(used, t["compute_bound_utilization_ratio"])
        or _at_least(power, t["power_prefill_ratio"])
        or _at_least(work, t["most_ratio"])
    ):
        saturated = True
    return starved, saturated


def _works(gpu: ComputeSignals, t: Thresholds) -> bool | None:
    """Whether the GPU works hard: by busy units, power or vLLM's estimate. Utilization (a duty cycle) can only deny
    it.
    """
    if gpu.activity_level == PROFILING:
        parts = ((gpu.tensor_activity, "tensor_busy_ratio"), (gpu.dram_activity, "most_ratio"))
    else:
        parts = ((gpu.power_ratio, "power_prefill_ratio"), (gpu.estimated_peak_ratio, "most_ratio"))
    known = [value >= t[least] for value, least in parts if value is not None]
    return any(known) if known else _denied(gpu, min(t["tensor_busy_ratio"], t["most_ratio"]))


def _computes(gpu: ComputeSignals, t: Thresholds) -> bool | None:
    """Whether the GPU computes at its peak. Busy memory does not count: a larger batch reads the weights once for
    more requests.
    """
    if gpu.activity_level == PROFILING:
        return None if gpu.tensor_activity is None else gpu.tensor_activity >= t["tensor_busy_ratio"]
    if gpu.power_ratio is None:
        return _denied(gpu, t["tensor_busy_ratio"])
    return gpu.power_ratio >= t["power_prefill_ratio"]


def _denied(gpu: ComputeSignals, busy: float) -> bool | None:
    """False if kernels ran for too little of the time to keep any unit busy for the share ``busy`` of it, else
    unknown.
    """
    highest = _highest(gpu)
    return False if highest is not None and highest < busy else None


def _highest(gpu: ComputeSignals) -> float | None:
    return gpu.gpu_utilization if gpu.gpu_utilization_high is None else gpu.gpu_utilization_high


class Recent:
    """The queue over the recent samples: number of samples, share with a queue (0-1), mean and most requests waiting;
    over the ``newest`` samples, recent or not, whether any shows a queue (``None`` = too few samples to tell); and
    whether the engine ran out of requests between two samples of those ``running`` (``None`` = there are not two).
    """

    __slots__ = ("newest_waited", "ran_out", "samples", "waiting_mean", "waiting_most", "waiting_share")

    def __init__(
        self, waiting: Sequence[float], newest: Sequence[float] | None = None, running: Sequence[float] = ()
    ) -> None:
        self.samples = len(waiting)
        self.ran_out = any(before and not after for before, after in pairwise(running)) if running[1:] else None
        self.newest_waited = None if newest is None else any(newest)
        self.waiting_share = sum(1 for value in waiting if value > 0) / len(waiting) if waiting else None
        self.waiting_mean = sum(waiting) / len(waiting) if waiting else None
        self.waiting_most = max(waiting, default=None)


class View:
    """Inputs of every finding: signals, recent queue, thresholds, number of readings (``None`` = unknown) and the
    configured gpu_memory_utilization (0-1); ``held`` and ``ahead``: what is followed from tick to tick; ``answer`` and
    ``stage``: the published verdict, which no rule may read.
    """

    __slots__ = ("_gpu", "ahead", "answer", "held", "readings", "recent", "s", "stage", "t", "utilization")

    def __init__(
        self, s: Signals, recent: Recent, t: Thresholds, readings: int | None, utilization: float | None = None
    ) -> None:
        self.s, self.recent, self.t, self.readings, self.utilization = s, recent, t, readings, utilization
        self.held: bool | None = None
        self.ahead: bool | None = None
        self.stage: str | None = None
        self.answer = Answer("unknown", Grade.NOTHING)
        self._gpu: GpuFacts | None = None

    @property
    def gpu(self) -> GpuFacts:
        """What is known about the GPUs' activity."""
        if self._gpu is None:
            self._gpu = GpuFacts(self.s.compute, self.t)
        return self._gpu


@frozen
class Finding:
    """One sentence about an engine. ``title`` states it and ``denied`` its opposite, in docs and on the page; ``seen``:
    the numbers behind either, the most telling first; ``needs``: numbers without which it is unknown; ``why``: the
    reason where none of them is missing; ``question``: what is unknown then ("" = whether ``title``). ``{names}`` are
    numbers, words of the engine or thresholds; in ``seen`` and ``why``, a part between commas with an unknown number is
    left out.

    ``fresh``: unknown while the engine's metrics are stale. ``published``: as ``kvpressure_finding``, because a rule
    or a dashboard reads it. ``serious``: bad news by itself. ``runbook``: the page that explains it ("" = that of the
    verdict).
    """

    name: str
    title: str
    denied: str
    find: Callable[[View], bool | None]
    seen: str = ""
    why: str = ""
    question: str = ""
    needs: tuple[str, ...] = ()
    fresh: bool = False
    published: bool = False
    serious: bool = False
    runbook: str = ""

    def sentence(self, value: bool | None, numbers: Mapping[str, str], missing: str = "") -> str:
        """The sentence for this value. ``numbers``: in words, "" = unknown or nothing to say; ``missing``: which of
        ``needs`` are.
        """
        if value is None:
            question = (self.question or f"whether {self.title}").format_map(numbers)
            return f"{question}: unknown ({missing or parts_known(self.why, numbers)})"
        said, seen = (self.title if value else self.denied).format_map(numbers), parts_known(self.seen, numbers)
        return f"{said}: {seen}" if seen else said


def names_in(text: str) -> Iterable[str]:
    """The names in braces, in order."""
    return (name for _, name, _, _ in Formatter().parse(text) if name)


def parts_known(text: str, numbers: Mapping[str, str]) -> str:
    """The parts of a text, without those that name something unknown."""
    parts = (part for part in text.split(", ") if all(numbers[name] for name in names_in(part)))
    return ", ".join(part.format_map(numbers) for part in parts)


def least(value: float | None, at_least: float) -> bool | None:
    """Whether a value is at least ``at_least``; ``None`` if it is unknown."""
    return None if value is None else value >= at_least


PHASES: Final = {
    "ttft": "time to first token",
    "inter_token": "time between tokens",
    "queue": "time in the queue",
    "e2e": "time of a whole answer",
}
FROZEN_ROWS: Final = ("No progress: frozen", "No progress: stalled or left-over gauges")


@frozen
class Number:
    """A number of one engine. ``unit``: ratio, bytes, seconds or multiple, "" = a count or rate, whose unit is in the
    sentence; ``words``: what it is, "" = said by the sentence alone; ``read`` gives ``None`` while it is unknown.
    """

    name: str
    unit: str
    words: str
    read: Callable[[View], float | None]

    def text(self, view: View) -> str:
        """The number in words; "" if it is unknown."""
        value = self.read(view)
        return "" if value is None else say(value, self.unit)


# --- numbers that are no signal


def long_prompt(v: View) -> float | None:
    """p95 of prompt tokens, else the mean: vLLM admits a request when its whole prompt fits, and one that does not
    fit blocks all behind it.
    """
    return v.s.context.prompt_quantiles.get("0.95", v.s.context.prompt_mean)


def longest_prompt(v: View) -> float | None:
    """Length of a long prompt, or the largest that the server allows."""
    long = long_prompt(v)
    return v.s.context.context_limit if long is None else long


def free_tokens(v: View) -> float | None:
    """KV tokens that were free for a new request at the recent peak."""
    kv = v.s.kv
    if kv.kv_used_ratio_recent_max is None or kv.kv_capacity_tokens is None:
        return None
    return max(0.0, 1.0 - (kv.kv_watermark_ratio or 0.0) - kv.kv_used_ratio_recent_max) * kv.kv_capacity_tokens


def _full_level(name: str) -> Callable[[View], float]:
    """The KV usage that a threshold means on this engine, which may keep some blocks free."""
    return lambda v: full_from(name, v.s.kv.kv_watermark_ratio, v.t)


def computed_tokens(v: View) -> float | None:
    """Prompt tokens per second that this server computed itself."""
    flow = v.s.throughput
    if flow.prompt_tokens_computed_per_second is None and v.s.load.kv_role in (None, "kv_producer"):
        return flow.prompt_tokens_per_second
    return flow.prompt_tokens_computed_per_second


def worst_latency(v: View) -> float | None:
    """Largest p95 latency as a multiple of its baseline."""
    return max(v.s.latency.baseline_ratios.values(), default=None)


def _for_some_tokens(read: Callable[[View], float | None]) -> Callable[[View], float | None]:
    """Seconds for ``hit_ratio_min_tokens``, of seconds for one."""
    return lambda v: None if (seconds := read(v)) is None else seconds * v.t["hit_ratio_min_tokens"]


def load_seconds(v: View) -> float | None:
    """Seconds in which a GPU loads a token from the tier; ``None`` also where its number of GPUs is unknown."""
    tier = v.s.tier
    return (
        None
        if tier.load_seconds_per_token is None or not tier.tier_gpus
        else tier.load_seconds_per_token / tier.tier_gpus
    )


def _logged(*events: str) -> Callable[[View], int | None]:
    """Number of such log lines in the last ten minutes; ``None`` if no log was read."""
    return lambda v: sum(v.s.events.get(name, 0) for name in events) if v.s.events_known else None


allocation_failures: Final = _logged(*ALLOCATION_EVENTS)
oom_lines: Final = _logged("cuda_oom", "warmup_oom", "load_oom")


def unallocated(v: View) -> float | None:
    """Bytes that torch's allocator has reserved and not allocated."""
    reserved, allocated = v.s.memory.allocator_reserved_bytes, v.s.memory.allocator_allocated_bytes
    return None if reserved is None or allocated is None else reserved - allocated


def _gpu_memory_used(v: View) -> float | None:
    memory = v.s.memory
    return memory.device_used_ratio if memory.own_used_ratio is None else memory.own_used_ratio


def baseline_limit(v: View) -> float | None:
    """Used share of a GPU above which something beside the engine must be on it. ``None`` where the engine may take
    so much that a GPU cannot show the difference.
    """
    full = v.t["baseline_full_ratio"]
    if v.utilization is None or v.utilization >= full:
        return None
    return min(v.utilization + v.t["baseline_excess_ratio"], full)


def metrics_frozen(v: View) -> bool | None:
    """Whether gauges and counters stand still although requests are in flight."""
    if v.answer.row in FROZEN_ROWS:
        return True
    progress = v.s.progress
    if v.answer.verdict == "stalled" or least(progress.seconds_without_progress, v.t["no_progress_seconds"]):
        return None
    if progress.work_present is False:
        return False
    return None if progress.progressing is None or progress.tokens_flow is None else False  # nothing to compare yet


def slowest(v: View) -> Slow | None:
    """The slow phase that is furthest from usual, a badly slow one first; ``None`` = none is slow."""
    found = slow_phases(v.s, v.t)
    waited = v.answer.verdict != "idle" and (v.answer.verdict != "unknown" or v.s.requests.waited_before)
    if waited and not metrics_frozen(v) and (queue := slow_queue(v.s, v.t)) is not None:
        found.append(queue)
    return max(found, key=lambda slow: (slow.badly, slow.multiple), default=None)


def _of_slowest(read: Callable[[Slow], float | None]) -> Callable[[View], float | None]:
    return lambda v: None if (slow := slowest(v)) is None else read(slow)


def _where_counted(ratio: float | None, v: View) -> float | None:
    """A share of requests; 0 where so few are meant that none is known."""
    return 0.0 if ratio is None and v.s.requests.requests_finished_per_second is not None else ratio


def _step_output_usual(v: View) -> float | None:
    usual = v.s.throughput.drafts_accepted_usual
    return None if usual is None else 1.0 + usual


def _reuse_seconds(until: str) -> Callable[[View], float | None]:
    return lambda v: v.s.kv.reuse_seconds.get(until, v.s.kv.reuse_seconds_estimated.get(until))


def _of_torch(name: str) -> Callable[[View], float | None]:
    return lambda v: v.s.oom.get(name)


_NUMBERS: Final = (
    Number("confidence", "ratio", "", lambda v: GRADE_CONFIDENCE[v.answer.grade]),
    # --- the KV cache
    Number("kv_used_ratio", "ratio", "KV cache usage", lambda v: v.s.kv.kv_used_ratio),
    Number("kv_used_ratio_recent_max", "ratio", "KV cache usage", lambda v: v.s.kv.kv_used_ratio_recent_max),
    Number("kv_used_ratio_waiting", "ratio", "", lambda v: v.s.kv.kv_used_ratio_waiting),
    Number("kv_full", "ratio", "", _full_level("kv_full_ratio")),
    Number("kv_near_full", "ratio", "", _full_level("kv_near_full_ratio")),
    Number("kv_capacity_tokens", "", "KV capacity", lambda v: v.s.kv.kv_capacity_tokens),
    Number("free_tokens", "", "free tokens of KV cache", free_tokens),
    Number("kv_seconds_to_full", "seconds", "until the KV cache is full", lambda v: v.s.kv.kv_seconds_to_full),
    Number("prefix_hit_ratio_recent", "ratio", "prefix cache hits", lambda v: v.s.kv.prefix_hit_ratio_recent),
    Number("prefix_hit_ratio_usual", "ratio", "", lambda v: v.s.kv.prefix_hit_ratio_usual),
    Number("hit_ratio", "ratio", "prefix cache hits", lambda v: v.s.kv.prefix_hit_ratio.get(MEASURED)),
    Number("hit_ratio_twice", "ratio", "", lambda v: v.s.kv.prefix_hit_ratio.get("2")),
    Number("prefill_repeated", "ratio", "computed again after eviction", lambda v: v.s.kv.prefill_repeated_ratio),
    Number("working_set", "", "", lambda v: v.s.kv.kv_working_set_tokens),
    Number("kept_seconds", "seconds", "until an unused KV block is evicted", _reuse_seconds(UNTIL[0])),
    Number("wanted_seconds", "seconds", "from use to use of KV blocks", _reuse_seconds(UNTIL[1])),
    Number("preemptions_counted", "", "preemptions in the last minute", lambda v: v.s.kv.preemptions_counted),
    Number("preemptions_inferred", "", "inferred preemptions in a minute", lambda v: v.s.kv.preemptions_inferred),
    Number("preemptions_recent", "", "", lambda v: v.s.kv.preemptions_recent),
    Number("preemptions_recently", "", "", lambda v: v.s.kv.preemptions_recently),
    Number("preemptions_per_running", "", "", lambda v: v.s.kv.preemptions_per_running_minute),
    # --- the KV tier
    Number("tier_capacity", "", "", lambda v: v.s.tier.tier_capacity_tokens),
    Number("tier_used", "ratio", "", lambda v: v.s.tier.tier_used_ratio),
    Number("tier_pinned", "ratio", "", lambda v: v.s.tier.tier_pinned_ratio),
    Number("tier_turnover", "seconds", "", lambda v: v.s.tier.tier_turnover_seconds),
    Number("tier_reloaded", "ratio", "", lambda v: v.s.tier.tier_reloaded_ratio),
    Number("tier_refused", "", "", lambda v: v.s.tier.tier_refused),
    Number("tier_stored", "multiple", "", lambda v: v.s.tier.tier_stored_ratio),
    Number("tier_load", "seconds", "", _for_some_tokens(load_seconds)),
    Number("tier_load_most", "seconds", "", _for_some_tokens(lambda v: v.s.tier.load_seconds_per_token)),
    Number("tier_prefill", "seconds", "", _for_some_tokens(lambda v: v.s.tier.prefill_seconds_per_token)),
    # --- requests
    Number("running", "", "running requests", lambda v: v.s.load.running),
    Number("running_most", "", "running requests", lambda v: v.s.load.running_most),
    Number("waiting", "", "waiting requests", lambda v: v.s.load.waiting),
    Number("waiting_deferred", "", "deferred requests", lambda v: v.s.load.waiting_deferred),
    Number("in_flight", "", "requests in flight", lambda v: v.s.load.in_flight),
    Number("waiting_share", "ratio", "waiting requests", lambda v: v.recent.waiting_share),
    Number("waiting_mean", "", "", lambda v: v.recent.waiting_mean),
    Number("waiting_most", "", "", lambda v: v.recent.waiting_most),
    Number("queue_p95", "seconds", "queue time", lambda v: v.s.latency.queue.get("0.95")),
    Number("request_limit", "", "{max_num_seqs}", lambda v: v.s.load.max_num_seqs),
    Number("step_limit", "", "{max_num_batched_tokens}", lambda v: v.s.load.max_num_batched_tokens),
    Number("prompt_mean", "", "prompt lengths", lambda v: v.s.context.prompt_mean),
    Number("prompt_p95", "", "prompt lengths", lambda v: v.s.context.prompt_quantiles.get("0.95")),
    Number("long_prompt", "", "prompt lengths", long_prompt),
    Number("longest_prompt", "", "prompt lengths", longest_prompt),
    Number("context_limit", "", "", lambda v: v.s.context.context_limit),
    Number("context_longest", "", "", lambda v: v.s.context.context_max_5m),
    Number("context_mean", "", "", lambda v: v.s.context.context_mean),
    Number("context_spike", "multiple", "", lambda v: v.s.context.context_spike_ratio),
    Number("output_p95", "", "", lambda v: v.s.context.output_quantiles.get("0.95")),
    Number("max_tokens_p95", "", "", lambda v: v.s.context.max_tokens_quantiles.get("0.95")),
    Number("stream_p95", "seconds", "", lambda v: v.s.context.stream_quantiles.get("0.95")),
    Number("arrival_burst", "multiple", "", lambda v: v.s.load.arrival_burst_ratio),
    Number("requests_reached", "", "", lambda v: v.s.kv.requests_reached),
    Number("kv_overcommit", "multiple", "", lambda v: v.s.kv.kv_overcommit_ratio),
    # --- latency
    Number("ttft_p95", "seconds", "", lambda v: v.s.latency.ttft.get("0.95")),
    Number("ttft_p99", "seconds", "", lambda v: v.s.latency.ttft.get("0.99")),
    Number("inter_token_p95", "seconds", "", lambda v: v.s.latency.inter_token.get("0.95")),
    Number("inter_token_p99", "seconds", "", lambda v: v.s.latency.inter_token.get("0.99")),
    Number("e2e_p95", "seconds", "", lambda v: v.s.latency.e2e.get("0.95")),
    Number("e2e_p99", "seconds", "", lambda v: v.s.latency.e2e.get("0.99")),
    Number("slow_seconds", "seconds", "", _of_slowest(lambda slow: slow.seconds)),
    Number("usual_seconds", "seconds", "", _of_slowest(lambda slow: slow.usual)),
    Number("given_up", "ratio", "answers given up", lambda v: v.s.requests.given_up_ratio),
    Number("refused", "ratio", "requests aborted", lambda v: v.s.requests.refused_ratio),
    Number("failed_share", "ratio", "failed requests", lambda v: _where_counted(v.s.requests.failed_ratio, v)),
    Number("abandoned_more", "ratio", "", lambda v: _where_counted(v.s.requests.abandoned_more_ratio, v)),
    Number("abandoned_usual", "ratio", "", lambda v: v.s.requests.abandoned_usual_ratio),
    # --- tokens and progress
    Number("batch_p95", "", "p95 batch size", lambda v: v.s.batch.batch_p95),
    Number("batch_mean", "", "mean batch size", lambda v: v.s.batch.batch_mean),
    Number("peak_batch", "", "batch size with the most tokens", lambda v: v.s.batch.peak_batch),
    Number("batch_unused", "ratio", "", lambda v: v.s.batch.batch_collapse_ratio),
    Number("step_tokens", "", "tokens in a step", lambda v: v.s.batch.step_tokens),
    Number("prompt_tokens", "", "prompt tokens/s", lambda v: v.s.throughput.prompt_tokens_per_second),
    Number("computed_tokens", "", "computed prompt tokens/s", computed_tokens),
    Number("output_tokens", "", "output tokens/s", lambda v: v.s.throughput.generation_tokens_per_second),
    Number("output_per_running", "", "", lambda v: v.s.throughput.generation_tokens_per_running),
    Number("throughput_trend", "ratio", "", lambda v: v.s.throughput.throughput_trend_ratio),
    Number("step_slowdown", "multiple", "step time of the fastest steps", lambda v: v.s.batch.step_ratio),
    Number("worst_latency", "multiple", "the baseline of p95 latency", worst_latency),
    Number(
        "outside_seconds", "seconds", "outside the engine per request", lambda v: v.s.latency.outside_engine_seconds
    ),
    Number(
        "outside_share", "ratio", "of a request's time outside the engine", lambda v: v.s.latency.outside_engine_share
    ),
    Number("fresh_seconds", "seconds", "", lambda v: v.s.progress.fresh_seconds),
    Number("connected_seconds", "seconds", "", lambda v: v.s.progress.connected_seconds),
    Number("stuck_seconds", "seconds", "without progress", lambda v: v.s.progress.seconds_without_progress),
    Number("still_seconds", "seconds", "", lambda v: v.s.progress.seconds_still),
    Number("prefill_seconds", "seconds", "", lambda v: v.s.progress.prefill_usual_seconds),
    # --- transfers between servers, and speculation
    Number("loads", "", "requests whose KV blocks are on their way", lambda v: v.s.transfers.loads),
    Number("loads_to_start", "", "", lambda v: v.s.transfers.loads_to_start),
    Number("loads_kv", "ratio", "of the KV cache held by them", lambda v: v.s.transfers.loads_kv_ratio),
    Number("loads_stuck", "seconds", "without a load that ended", lambda v: v.s.transfers.loads_stuck_seconds),
    Number("transfer_seconds", "seconds", "for a transfer of KV blocks", lambda v: v.s.transfers.transfer_seconds),
    Number("transfer_slowdown", "multiple", "", lambda v: v.s.transfers.transfer_slowdown),
    Number("transfers_failed", "ratio", "of transfers failed", lambda v: v.s.transfers.transfers_failed_ratio),
    Number("leases_expired", "ratio", "of prompts thrown away", lambda v: v.s.transfers.leases_expired_ratio),
    Number("read_after_expiry", "", "", lambda v: v.s.transfers.read_after_expiry),
    Number("prompts_computed", "ratio", "", lambda v: v.s.transfers.prompts_computed_ratio),
    Number("step_output", "", "output tokens a step", lambda v: v.s.throughput.step_output_tokens),
    Number("step_output_usual", "", "", _step_output_usual),
    # --- the GPU and its memory
    Number("tensor_activity", "ratio", "tensor activity", lambda v: v.s.compute.tensor_activity),
    Number("sm_activity", "ratio", "SM activity", lambda v: None if v.gpu.unseen else v.s.compute.sm_activity),
    Number("dram_activity", "ratio", "DRAM activity", lambda v: None if v.gpu.unseen else v.s.compute.dram_activity),
    Number("gpu_utilization", "ratio", "GPU utilization", lambda v: v.s.compute.gpu_utilization),
    Number("gpu_lowest", "ratio", "", lambda v: v.s.compute.gpu_utilization_low if v.gpu.between else None),
    Number("gpu_highest", "ratio", "", lambda v: v.s.compute.gpu_utilization_high if v.gpu.between else None),
    Number("power", "ratio", "of the GPU's power limit", lambda v: v.s.compute.power_ratio),
    Number("estimated_peak", "ratio", "of the GPU's peak (estimate)", lambda v: v.s.compute.estimated_peak_ratio),
    Number("gpu_memory_high", "ratio", "GPU memory used", lambda v: v.s.memory.device_used_ratio),
    Number("gpu_memory_needed", "ratio", "GPU memory required", lambda v: v.s.memory.device_demand_ratio),
    Number("gpu_memory_used", "ratio", "GPU memory used", _gpu_memory_used),
    Number("gpu_memory_share", "ratio", "gpu_memory_utilization", lambda v: v.utilization),
    Number("baseline_limit", "ratio", "", baseline_limit),
    Number("idle_growth", "bytes", "memory growth while idle", lambda v: v.s.memory.idle_growth_bytes_per_hour),
    Number("unallocated", "bytes", "reserved but unallocated memory", unallocated),
    Number("split", "bytes", "", lambda v: v.s.memory.allocator_inactive_split_bytes),
    Number("gpu_faults", "", "GPU faults", lambda v: v.s.gpu_faults or v.s.kernel_faults or None),
    Number("oom_requested", "bytes", "", _of_torch("requested_bytes")),
    Number("oom_free", "bytes", "", _of_torch("free_bytes")),
    Number("oom_total", "bytes", "", _of_torch("total_bytes")),
    Number("oom_allocated", "bytes", "", _of_torch("allocated_bytes")),
    Number("oom_pools", "bytes", "", _of_torch("private_pool_bytes")),
    Number("oom_unallocated", "bytes", "", _of_torch("reserved_unallocated_bytes")),
    # --- the host and the log
    Number("cpu_throttled", "ratio", "of CFS periods throttled", lambda v: v.s.host.cpu_throttled_ratio),
    Number("cpu_contended", "ratio", "of the time waiting for a CPU", lambda v: v.s.host.cpu_pressure_ratio),
    Number("cpu_used", "ratio", "of the CPU limit used", lambda v: v.s.host.cpu_used_ratio),
    Number("api_server_cores", "", "CPU cores used by the API server", lambda v: v.s.host.api_cpu_cores),
    Number("host_memory", "ratio", "container memory used", lambda v: v.s.host.memory_used_ratio),
    Number("restarts", "", "restarts in half an hour", lambda v: v.s.host.restarts_recent),
    Number("exit_code", "", "exit code", lambda v: v.s.host.last_exit_code),
    Number("allocation_failures", "", "allocation failures", allocation_failures),
    Number("oom_lines", "", "GPU memory errors in the log", oom_lines),
)
NUMBERS: Final[Mapping[str, Number]] = {number.name: number for number in _NUMBERS}


def when_known(test: Callable[..., bool], *names: str) -> Callable[[View], bool | None]:
    """How to find what these numbers decide: ``test`` of the view and them; ``None`` while one is unknown."""
    numbers = tuple(NUMBERS[name] for name in names)

    def find(v: View) -> bool | None:
        values = [number.read(v) for number in numbers]
        return None if None in values else test(v, *values)

    return find


def at_least(name: str, threshold: str) -> Callable[[View], bool | None]:
    """Whether a number is at least a threshold; ``None`` while it is unknown."""
    read = NUMBERS[name].read
    return lambda v: None if (value := read(v)) is None else value >= v.t[threshold]


def any_of(name: str) -> Callable[[View], bool | None]:
    """Whether a number is above 0; ``None`` while it is unknown."""
    read = NUMBERS[name].read
    return lambda v: None if (value := read(v)) is None else value > 0


# --- words in sentences that depend on the engine; "" = nothing to say


def limit_source(source: str | None) -> str:
    """Where a limit was read, in words."""
    return _LIMIT_SOURCES.get(source, source) if source else "source: unknown"


_LIMIT_SOURCES: Final = {
    "args": "set in the arguments",
    OF_PROCESS: "set in the arguments of its process",
    "log": "from the start-up log",
    "default": "the default",
    "observed": "inferred",
}


def _deferred_where(v: View) -> str:
    engine = dialect(v.s.dialect)
    since = engine.deferred_since
    return (
        f"{engine.title} reports deferred requests only in {since} and later"
        if since
        else "the metrics endpoint does not show deferred requests"
    )


def _scrape_error(v: View) -> str:
    """Why the last scrape failed; "" = it did not fail."""
    return reasons.in_words(v.s.progress.page_error or "")


def _failing(v: View) -> str:
    failing = int(v.s.progress.pages_failing or 0)
    times = "attempt" if failing == 1 else f"{failing} attempts"
    return f"last {times} failed ({_scrape_error(v) or UNKNOWN})" if failing else ""


def _gpu_unclear(v: View) -> str:
    """Why the GPU's numbers do not decide."""
    return NO_GPU if v.gpu.unseen else "which does not decide"


def _worst_phase(v: View) -> str:
    return max(v.s.latency.baseline_ratios.items(), key=lambda item: item[1], default=(UNKNOWN, 0.0))[0]


def _oom_fragmented(v: View) -> str:
    """Whether an allocation failed although much was reserved unused: torch frees whole unused blocks first, so what
    remains are pieces of blocks in use.
    """
    left = v.s.oom.get("reserved_unallocated_bytes", 0.0)
    return "probably fragmented" if left >= v.t["fragmentation_warning_bytes"] else ""


TEXTS: Final[Mapping[str, Callable[[View], str]]] = {
    "deferred_where": _deferred_where,
    "kv_why": lambda v: "the engine does not report it" if v.s.kv.kv_recorded is False else "not read yet",
    "max_num_seqs_flag": lambda v: dialect(v.s.dialect).flag("max_num_seqs"),
    "limit_source": lambda v: limit_source(v.s.load.max_num_seqs_source) if v.s.load.max_num_seqs_source else "",
    "engine": lambda v: dialect(v.s.dialect).title,
    "scrape_error": _scrape_error,
    "failing": _failing,
    "never_scraped": lambda v: ": ".join(filter(None, ("never scraped", _scrape_error(v)))),
    "gpu_unclear": _gpu_unclear,
    "gpu_of_others": lambda v: "shared with other pods" if v.s.compute.gpus_of_others else "",
    "worst_phase": _worst_phase,
    "stage": lambda v: v.stage or "",
    "slow_phase": lambda v: PHASES[slow.phase] if (slow := slowest(v)) is not None else "",
    "oom_fragmented": _oom_fragmented,
    "termination": lambda v: v.s.host.last_termination_reason or "",
}
