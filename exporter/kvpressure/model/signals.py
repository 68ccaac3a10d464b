"""What the signals say about one engine at one moment: frozen, one class a signal file.

``None`` means that an input is missing, so the signal is not known. Field names are unique over all classes:
flattened they are the names under ``signals`` in the JSON of ``replay`` and ``/api/v1/diagnosis``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class KvSignals:
    """KV cache: level, capacity, slope, exhaustion and preemption (``signals.kv``)."""

    kv_recorded: bool | None = None  # False = gauge missing, or constantly 0 while requests run
    kv_used_ratio: float | None = None
    kv_used_ratio_max: float | None = None  # over the last 60 s
    kv_used_ratio_recent_max: float | None = None  # over the last 10 s
    kv_used_ratio_recent_min: float | None = None
    kv_watermark_ratio: float | None = None  # share of the blocks kept free when a request is admitted
    kv_capacity_tokens: float | None = None
    kv_used_tokens: float | None = None
    kv_slope_per_second: float | None = None
    kv_seconds_to_full: float | None = None
    kv_overcommit_ratio: float | None = None
    preemption_rate: float | None = None  # per second over 60 s, larger of counter and immediate sign
    preemptions_counted: float | None = None  # by the counter in the last 60 s
    preemptions_silent: float | None = (
        None  # by the immediate sign in the last 60 s, as far as the counter bears it out
    )
    preemptions_recent: float | None = None  # in the last 15 s, larger of counter and immediate sign
    preemptions_per_running_minute: float | None = None
    recomputed_tokens_rate: float | None = None
    prefix_hit_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class BatchSignals:
    """Effective batch size and its collapse (``signals.batch``)."""

    batch_mean: float | None = None
    batch_p50: float | None = None
    batch_p95: float | None = None
    batch_p99: float | None = None
    batch_collapse_ratio: float | None = None
    step_seconds: float | None = None  # mean inter-token latency over the last 30 s
    running_histogram: Mapping[float, int] = field(default_factory=dict)  # cumulative since start, by bound
    running_samples_sum: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadSignals:
    """Requests in flight against the limits (``signals.concurrency``)."""

    running: float | None = None
    waiting: float | None = None
    waiting_capacity: float | None = None
    waiting_deferred: float | None = None
    lora: bool = False  # adapters are served, for whose slots requests may wait
    waits_for_blocks: bool = (
        False  # requests may wait for KV blocks of other servers, or hold theirs until those have pulled them
    )
    kv_role: str | None = (
        None  # of a server whose KV blocks come from others or go to them; empty = one that is not told
    )
    in_flight: float | None = None
    limits: Mapping[str, float] = field(default_factory=dict)  # max concurrent by source of the limit
    max_num_seqs: float | None = None
    max_num_seqs_source: str | None = None  # args, log, default, observed
    concurrency_ratio: float | None = None
    running_at_limit: bool | None = None  # in most of the recent samples
    running_at_limit_now: bool | None = None
    running_stands_still: bool | None = None  # at its highest, while requests wait and the cache has room
    arrival_rate: float | None = None  # requests per second over 60 s
    arrival_burst_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class ContextSignals:
    """Length and shape of requests over five minutes (``signals.context``)."""

    context_max_5m: float | None = None
    context_mean: float | None = None
    context_spike_ratio: float | None = None
    prompt_mean: float | None = None
    output_mean: float | None = None
    context_limit: float | None = None  # max_model_len: no request is longer
    prompt_quantiles: Mapping[str, float] = field(default_factory=dict)
    output_quantiles: Mapping[str, float] = field(default_factory=dict)
    max_tokens_quantiles: Mapping[str, float] = field(default_factory=dict)
    stream_quantiles: Mapping[str, float] = field(default_factory=dict)
    two_humps: bool | None = None


@dataclass(frozen=True, slots=True)
class LatencySignals:
    """Latency by phase over the last minute against the engine's own baseline (``signals.latency``)."""

    ttft: Mapping[str, float] = field(default_factory=dict)  # quantile -> seconds
    inter_token: Mapping[str, float] = field(default_factory=dict)
    e2e: Mapping[str, float] = field(default_factory=dict)
    queue: Mapping[str, float] = field(default_factory=dict)
    baseline_ratios: Mapping[str, float] = field(default_factory=dict)  # phase -> p95 / baseline p95
    queue_mean_seconds: float | None = None
    outside_engine_seconds: float | None = None
    outside_engine_share: float | None = None  # of mean e2e


@dataclass(frozen=True, slots=True)
class ThroughputSignals:
    """Token rates and their trend against demand (``signals.throughput``)."""

    prompt_tokens_per_second: float | None = None
    prompt_tokens_computed_per_second: float | None = None  # without those that the prefix cache or another server had
    generation_tokens_per_second: float | None = None
    generation_tokens_per_running: float | None = None
    finished_per_second: float | None = None
    throughput_trend_ratio: float | None = None  # last minute / best minute of 15, demand not lower
    throughput_flat: bool | None = None  # did not follow rising demand, or fell while demand did not


@dataclass(frozen=True, slots=True)
class ProgressSignals:
    """Does anything move? (``signals.progress``)"""

    work_present: bool | None = None
    progressing: bool | None = None  # token or request counters moved in the last seconds
    seconds_without_progress: float | None = None
    seconds_still: float | None = None  # neither counters nor gauges moved while work is said to be there
    http_moved: bool | None = None  # the API server answered requests since nothing moves
    connections_dropped: bool | None = None  # most clients went away since something last came out
    connections_came: bool | None = None  # clients came since then
    ever_useful: bool | None = None  # a token came out since this process started
    prompt_at_once: bool = (
        False  # the last thing that moved let in a prompt, which one step or its blocks do not show growing
    )
    asleep: bool | None = None  # sleep mode has offloaded the weights
    fresh_seconds: float | None = None  # age of the newest page
    pages_failing: float | None = None  # consecutive failed scrapes
    page_error: str | None = None  # why the last of them failed
    tokens_flow: bool | None = None  # in the last 15 s
    tokens_lately: bool | None = None  # in the last few seconds
    finished_flow: bool | None = None


@dataclass(frozen=True, slots=True)
class MemorySignals:
    """Device memory and what it holds (``signals.memory``)."""

    device_used_ratio: float | None = None  # largest of the engine's GPUs
    own_used_ratio: float | None = None  # the same without what other pods hold on them
    device_demand_ratio: float | None = None
    kv_pool_bytes: float | None = None  # per GPU
    kv_pool_used_bytes: float | None = None
    kv_block_waste_bytes: float | None = None
    allocator_reserved_bytes: float | None = None  # largest rank
    allocator_allocated_bytes: float | None = None
    allocator_inactive_split_bytes: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    idle_growth_bytes_per_hour: float | None = None
    device_growth_bytes: float | None = None  # since readiness


@dataclass(frozen=True, slots=True)
class HostSignals:
    """CPU, memory and restarts of the pod around the engine (``signals.host``)."""

    api_cpu_cores: float | None = None  # process_cpu_seconds rate of the API server
    cpu_used_ratio: float | None = None
    cpu_throttled_ratio: float | None = None
    cpu_pressure_ratio: float | None = None
    memory_used_ratio: float | None = None
    memory_growth_per_hour_ratio: float | None = None
    restarts: float | None = None
    restarts_recent: float | None = None  # in the last 30 minutes, as far as they are known
    restarts_all_known: bool = True  # not so in the first half hour after the exporter started
    terminated_seconds_ago: float | None = None  # when the container ended last
    last_termination_reason: str | None = None
    last_exit_code: float | None = None


@dataclass(frozen=True, slots=True)
class ComputeSignals:
    """GPU activity as evidence, best level first (``signals.score``)."""

    gpu_utilization: float | None = None  # mean over those of the engine's GPUs that do anything, last 15 s
    gpu_utilization_low: float | None = None  # smallest
    gpu_utilization_high: float | None = None  # largest
    gpus_shared: bool = False  # some of the pod's GPUs may not be this engine's
    gpus_of_others: bool = False  # other pods have some of them too
    sm_activity: float | None = None
    tensor_activity: float | None = None
    dram_activity: float | None = None
    power_ratio: float | None = None
    estimated_flops_per_second: float | None = None
    estimated_bytes_per_second: float | None = None
    estimated_peak_ratio: float | None = None  # the larger of both against the card's data sheet
    activity_level: str = "none"  # profiling, power, estimated_flops, utilization_weak, none
    score_memory_factor: float | None = None
    score_compute_factor: float | None = None
    score_demand_factor: float | None = None
    memory_high_compute_low_score: float | None = None


@dataclass(frozen=True, slots=True)
class Signals:
    """All signals of one engine at ``time``."""

    time: float
    kv: KvSignals = KvSignals()
    batch: BatchSignals = BatchSignals()
    load: LoadSignals = LoadSignals()
    context: ContextSignals = ContextSignals()
    latency: LatencySignals = LatencySignals()
    throughput: ThroughputSignals = ThroughputSignals()
    progress: ProgressSignals = ProgressSignals()
    memory: MemorySignals = MemorySignals()
    host: HostSignals = HostSignals()
    compute: ComputeSignals = ComputeSignals()
    events: Mapping[str, int] = field(default_factory=dict)  # log events in the last 10 minutes
    events_known: bool = False  # a log of this container has been seen
    oom: Mapping[str, float] = field(default_factory=dict)  # what the last out-of-memory text among them says, in bytes
    gpu_faults: int | None = None  # XID and lost-GPU events of its GPUs lately

    def flat(self) -> dict[str, float | None]:
        """Every signal as name -> number; booleans as 0/1, mappings as ``name:key``, texts left out."""
        flat: dict[str, float | None] = {}
        for group in (
            self.kv,
            self.batch,
            self.load,
            self.context,
            self.latency,
            self.throughput,
            self.progress,
            self.memory,
            self.host,
            self.compute,
        ):
            for name, value in _named(group):
                if isinstance(value, Mapping):
                    flat.update((f"{name}:{key}", float(item)) for key, item in value.items())
                elif value is None or isinstance(value, bool | int | float):
                    flat[name] = None if value is None else float(value)
        flat.update((f"log_events:{name}", float(count)) for name, count in self.events.items())
        flat.update((f"oom:{name}", value) for name, value in self.oom.items())
        return flat


def _named(group: object) -> Iterator[tuple[str, object]]:
    for item in fields(group):  # type: ignore[arg-type]  # every group is a dataclass
        yield item.name, getattr(group, item.name)
