"""Every metric this exporter publishes, declared once.

The collector renders from this table, the rules and boards may only use names from it, and the metrics
reference in ``docs/metrics.md`` is generated from it. Names are a contract (frozen by ``tests/golden/metric_names.txt``):
a rename keeps the old name for a release.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

PREFIX: Final = "kvpressure_"

# A summary is quantiles over a window here, without count and sum.
Kind = Literal["gauge", "counter", "info", "histogram", "summary"]

GPU: Final = ("uuid", "gpu", "vendor")
ENGINE: Final = ("namespace", "pod", "model_name", "engine")
CONTAINER: Final = ("namespace", "pod", "container")


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. ``name`` is without prefix; counters carry ``_total`` and infos ``_info`` in it. ``absent`` says
    when the series is missing, which is part of its meaning.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    absent: str = ""

    @property
    def full_name(self) -> str:
        """Name as it stands on ``/metrics``."""
        return PREFIX + self.name


def _m(name: str, kind: Kind, help: str, labels: tuple[str, ...] = (), absent: str = "") -> Metric:
    return Metric(name, kind, help, labels, absent)


_NO_KV = "the page carries no KV usage gauge, or it stays 0 while requests run (not recorded)"
_NO_POOL = "the size of the KV pool is not known"
_SPLIT = "on a card split by MIG or into partitions that tell it themselves"
_WARMUP = "too few samples in the window"

METRICS: Final[tuple[Metric, ...]] = (
    # --- device ---------------------------------------------------------------------------------------------
    _m("gpu_info", "info", "Identity of a GPU; value is always 1.", (*GPU, "name", "driver")),
    _m("gpu_up", "gauge", "1 if the GPU answered the last reading, 0 if it is known but could not be read.", GPU),
    _m("gpu_memory_total_bytes", "gauge", "Device memory.", GPU, f"unified-memory cards report none; {_SPLIT}"),
    _m(
        "gpu_memory_used_bytes",
        "gauge",
        "Device memory in use: total minus free, driver reservation included.",
        GPU,
        _SPLIT,
    ),
    _m(
        "gpu_memory_reserved_bytes",
        "gauge",
        "Device memory reserved by the driver and firmware.",
        GPU,
        f"only the second NVML memory structure tells; {_SPLIT}",
    ),
    _m(
        "gpu_memory_used_ratio",
        "gauge",
        "Used share of device memory, 0-1. Says nothing about KV pressure for an engine that preallocates.",
        GPU,
        "on a card that is split by MIG or into partitions",
    ),
    _m(
        "gpu_memory_demand_ratio",
        "gauge",
        "Share of device memory really needed, 0-1: used minus the part of the KV "
        "pools on this GPU that holds nothing.",
        GPU,
        _NO_POOL,
    ),
    _m(
        "gpu_utilization_ratio",
        "gauge",
        "Share of time in which some kernel ran, 0-1. A duty cycle, not an occupancy.",
        GPU,
        "not supported on MIG instances",
    ),
    _m("gpu_sm_activity_ratio", "gauge", "Share of SM time with a resident warp, 0-1.", GPU, "needs GPM (Hopper+)"),
    _m("gpu_tensor_activity_ratio", "gauge", "Share of time the tensor pipes were active, 0-1.", GPU, "needs GPM"),
    _m("gpu_dram_activity_ratio", "gauge", "Share of DRAM bandwidth in use, 0-1.", GPU, "needs GPM"),
    _m("gpu_power_watts", "gauge", "Power draw.", GPU),
    _m("gpu_power_limit_watts", "gauge", "Enforced power limit.", GPU),
    _m("gpu_throttled", "gauge", "1 while the driver names this reason for reduced clocks.", (*GPU, "reason")),
    _m("gpu_xid_errors_total", "counter", "XID events seen since start.", (*GPU, "xid")),
    _m("gpu_xid_last_timestamp_seconds", "gauge", "When this XID was seen last.", (*GPU, "xid")),
    _m("gpu_ecc_errors_total", "counter", "ECC error events seen since start, by kind.", (*GPU, "kind")),
    _m(
        "gpu_process_memory_bytes",
        "gauge",
        "Device memory of processes on this GPU by owning pod; empty pod = a process that no pod owns.",
        (*GPU, "namespace", "pod"),
        "the driver gives no per-process memory",
    ),
    _m(
        "gpu_pod_info",
        "info",
        "Which container owns a GPU; a shared GPU lists every one.",
        ("uuid", "namespace", "pod", "container", "shared"),
    ),
    _m("gpus_expected", "gauge", "GPUs the driver counts on this node.", ("vendor",)),
    _m("gpus_seen", "gauge", "GPUs that answered the last reading.", ("vendor",)),
    # --- engine ---------------------------------------------------------------------------------------------
    _m(
        "engine_up",
        "gauge",
        "1 if the engine's page was read and understood, 0 from the first failed attempt on (one late answer aside).",
        ENGINE,
    ),
    _m(
        "engine_info",
        "info",
        "What the engine is; value is always 1.",
        (*ENGINE, "version", "flavour", "container", "target"),
    ),
    _m("engine_gpu_info", "info", "GPU that belongs to this engine's pod.", (*ENGINE, "uuid")),
    _m("requests_running", "gauge", "Requests in the scheduler's running list.", ENGINE),
    _m("requests_waiting", "gauge", 'Requests waiting, by reason; reason "all" is the total.', (*ENGINE, "reason")),
    _m("kv_cache_used_ratio", "gauge", "KV blocks in use, 0-1; evictable prefix blocks count as free.", ENGINE, _NO_KV),
    _m(
        "kv_cache_used_ratio_max",
        "gauge",
        "Maximum of kv_cache_used_ratio over the last 60 s of samples.",
        ENGINE,
        _NO_KV,
    ),
    _m(
        "kv_cache_capacity_tokens",
        "gauge",
        "Tokens the KV cache holds.",
        ENGINE,
        "not in cache_config_info and not derivable from blocks (hybrid models)",
    ),
    _m("kv_cache_used_tokens", "gauge", "Capacity times usage: token slots in occupied blocks.", ENGINE, _NO_KV),
    _m("kv_cache_usage_slope_per_second", "gauge", "Change of KV usage per second over the last 15 s.", ENGINE, _NO_KV),
    _m(
        "kv_cache_seconds_to_full",
        "gauge",
        "Time until the cache is full at the present slope.",
        ENGINE,
        "KV usage is not rising",
    ),
    _m(
        "kv_overcommit_ratio",
        "gauge",
        "Tokens that the arriving load can reach within the limits, divided by "
        "capacity. Above 1 the configuration admits more than fits.",
        ENGINE,
        "request lengths or capacity not known",
    ),
    _m(
        "preemptions_total",
        "counter",
        "Requests pushed out of the batch for want of KV blocks, as vLLM counts them (can lag by tens of seconds).",
        ENGINE,
    ),
    _m(
        "preemption_rate",
        "gauge",
        "Preemptions per second over the last minute: the larger of the counter and the "
        "immediate sign (running falls, waiting rises as much, nothing finishes).",
        ENGINE,
    ),
    _m(
        "recomputed_tokens_estimate_rate",
        "gauge",
        "Tokens per second that preempted requests compute again (estimate: preemptions times mean context).",
        ENGINE,
        "no preemption rate or no request lengths",
    ),
    _m("prompt_tokens_total", "counter", "Prompt tokens of requests that passed prefill.", ENGINE),
    _m("generation_tokens_total", "counter", "Generated tokens.", ENGINE),
    _m("tokens_per_second", "gauge", "Token throughput over the last 30 s.", (*ENGINE, "kind")),
    _m(
        "throughput_trend_ratio",
        "gauge",
        "Generation throughput of the last minute against the best minute of the last 15, while demand has not fallen.",
        ENGINE,
        "too little history, or demand fell",
    ),
    _m("prefix_cache_hit_ratio", "gauge", "Prefix-cache hits per query over the last 5 minutes.", ENGINE),
    _m(
        "engine_progressing",
        "gauge",
        "1 if token or request counters moved lately, 0 if work is present and nothing moves.",
        ENGINE,
        "no work present",
    ),
    # --- score and signature ----------------------------------------------------------------------------------
    _m(
        "memory_high_compute_low_score",
        "gauge",
        "Product of three factors, 0-1: KV memory in demand, compute low, demand present.",
        ENGINE,
        "a factor cannot be known",
    ),
    _m(
        "score_factor",
        "gauge",
        "Factors of memory_high_compute_low_score.",
        (*ENGINE, "factor"),
        "the factor cannot be known",
    ),
    _m(
        "score_evidence_level",
        "gauge",
        "1 for the level of evidence behind the compute factor: profiling, power, "
        "estimated_flops, utilization_weak, none.",
        (*ENGINE, "level"),
    ),
    _m(
        "documented_signature",
        "gauge",
        "Condition of the documented KV-pressure signature, 1 or 0, exactly as the guides state it.",
        (*ENGINE, "condition"),
        "the condition cannot be evaluated",
    ),
    _m(
        "documented_signature_met",
        "gauge",
        "1 if most of the documented conditions that can be evaluated hold.",
        ENGINE,
        "fewer than three conditions can be evaluated",
    ),
    # --- batching -------------------------------------------------------------------------------------------
    _m(
        "effective_batch_size",
        "summary",
        "Quantiles of requests running over the last minute of samples.",
        (*ENGINE, "quantile"),
        _WARMUP,
    ),
    _m(
        "effective_batch_size_mean",
        "gauge",
        "Mean number of decoding requests: rate of the inter-token latency sum (Little's law).",
        ENGINE,
        "no inter-token histogram",
    ),
    _m(
        "batch_collapse_ratio",
        "gauge",
        "1 - batch p95 / min(demand, limit), 0-1: share of the wanted batch that is missing.",
        ENGINE,
        "no demand",
    ),
    _m("running_requests", "histogram", "Samples of requests running.", ENGINE),
    # --- load -----------------------------------------------------------------------------------------------
    _m("requests_in_flight", "gauge", "Running plus waiting.", ENGINE, "the page lacks one of them"),
    _m(
        "max_concurrent_requests",
        "gauge",
        "Most requests the engine can run at once, by where the limit comes from.",
        (*ENGINE, "source"),
    ),
    _m(
        "concurrency_ratio",
        "gauge",
        "Requests in flight divided by the smallest known limit.",
        ENGINE,
        "no limit is known",
    ),
    _m(
        "context_length_tokens",
        "gauge",
        "Prompt plus output tokens per request: max_5m and mean.",
        (*ENGINE, "stat"),
        _WARMUP,
    ),
    _m(
        "context_length_spike_ratio",
        "gauge",
        "Longest context of the last 5 minutes divided by the average.",
        ENGINE,
        _WARMUP,
    ),
    _m(
        "request_tokens",
        "summary",
        "Quantiles of request shape over 5 minutes.",
        (*ENGINE, "kind", "quantile"),
        _WARMUP,
    ),
    _m("request_shape_two_humps", "gauge", "1 if short- and long-prompt requests share this server.", ENGINE, _WARMUP),
    _m("arrival_burst_ratio", "gauge", "Arrivals in the busiest 10 s against the 5-minute mean.", ENGINE, _WARMUP),
    _m(
        "stream_seconds",
        "summary",
        "Quantiles of end-to-end duration of finished requests over 5 minutes.",
        (*ENGINE, "quantile"),
        _WARMUP,
    ),
    _m("requests_finished_total", "counter", "Finished requests by reason.", (*ENGINE, "reason")),
    _m(
        "requests_rejected_total",
        "counter",
        "Requests refused: admission limits (503) and 4xx answers.",
        (*ENGINE, "reason"),
    ),
    # --- latency --------------------------------------------------------------------------------------------
    _m(
        "latency_seconds",
        "summary",
        "Latency quantiles over the last minute from bucket differences.",
        (*ENGINE, "phase", "quantile"),
        "no finished observation in the window",
    ),
    _m(
        "latency_baseline_ratio",
        "gauge",
        "p95 latency against this engine's own baseline.",
        (*ENGINE, "phase"),
        "baseline not yet known",
    ),
    _m(
        "outside_engine_seconds",
        "gauge",
        "Mean time per finished request outside the engine: tokenizer, API server, network.",
        ENGINE,
        "no finished request in the window",
    ),
    # --- memory ---------------------------------------------------------------------------------------------
    _m(
        "fragmentation_bytes",
        "gauge",
        "Reserved minus allocated, by scope: allocator (torch, plugin only), kv_pool "
        "(pool minus used), kv_block (waste inside blocks, estimate).",
        (*ENGINE, "scope"),
        "scope not known",
    ),
    _m("memory_reserved_bytes", "gauge", "Reserved bytes by scope.", (*ENGINE, "scope"), "scope not known"),
    _m("memory_allocated_bytes", "gauge", "Allocated bytes by scope.", (*ENGINE, "scope"), "scope not known"),
    _m(
        "memory_component_bytes",
        "gauge",
        "Device memory by component, per GPU: weights, kv_pool, activations (peak), graphs, "
        "context (what a worker holds outside torch: driver context, NCCL, libraries), other.",
        (*ENGINE, "component"),
        "the start-up lines do not tell; context needs per-process memory of the driver and the plugin",
    ),
    # --- diagnosis ------------------------------------------------------------------------------------------
    _m("verdict", "gauge", "State set: 1 for the present verdict.", (*ENGINE, "verdict")),
    _m("verdict_confidence", "gauge", "Confidence of the verdict, 0-1; 0.7 and above counts as confident.", ENGINE),
    _m("verdict_since_timestamp_seconds", "gauge", "Since when the verdict has stood.", ENGINE),
    _m("evidence", "gauge", "Named evidence, 1 true or 0 false.", (*ENGINE, "evidence"), "not known"),
    _m(
        "pressure_stage",
        "gauge",
        "State set: 1 for the stage of KV pressure; all 0 without pressure.",
        (*ENGINE, "stage"),
    ),
    _m("condition", "gauge", "Named condition, 1 true or 0 false.", (*ENGINE, "condition"), "not known"),
    _m("limit", "gauge", "Limit in force.", (*ENGINE, "limit"), "not known"),
    _m(
        "limit_explicit",
        "gauge",
        "1 if the limit was set, 0 if it is a default.",
        (*ENGINE, "limit"),
        "the arguments were not seen",
    ),
    _m(
        "limit_recommended",
        "gauge",
        "Value to set, computed for this engine.",
        (*ENGINE, "limit"),
        "not enough is known to compute it",
    ),
    # --- the pod around the engine --------------------------------------------------------------------------
    _m("container_restarts_total", "counter", "Restarts of the container.", CONTAINER),
    _m("container_ready", "gauge", "1 if the container is ready.", CONTAINER),
    _m("container_last_termination_info", "info", "How the container ended last.", (*CONTAINER, "reason", "exit_code")),
    _m("container_cpu_throttled_ratio", "gauge", "CFS periods throttled over the last minute, 0-1.", CONTAINER),
    _m("container_cpu_used_ratio", "gauge", "CPU used divided by the CPU limit over the last minute.", CONTAINER),
    _m("container_memory_used_ratio", "gauge", "Working set divided by the memory limit.", CONTAINER),
    _m("log_events_total", "counter", "Events recognised in the container's log.", (*CONTAINER, "event")),
    _m("node_condition", "gauge", "Condition of this node, 1 true or 0 false.", ("condition",)),
    # --- the exporter itself --------------------------------------------------------------------------------
    _m("source_up", "gauge", "1 if the source's last reading succeeded.", ("source",)),
    _m("source_last_success_timestamp_seconds", "gauge", "When the source last succeeded.", ("source",)),
    _m("source_duration_seconds", "gauge", "Duration of the source's last reading.", ("source",)),
    _m("source_errors_total", "counter", "Failed readings by reason.", ("source", "reason")),
    _m("target_errors_total", "counter", "Failed scrapes of an engine by reason.", ("target", "reason")),
    _m("target_scrape_seconds", "gauge", "Duration of the last scrape of an engine.", ("target",)),
    _m("page_bad_lines", "gauge", "Lines of the engine's page that looked wanted and could not be read.", ("target",)),
    _m(
        "page_cut",
        "gauge",
        "What limits left out of the engine's page: engines (more than its part of the node's 64), series "
        "(more than a page or a histogram may have), plugin (1 if its lines were too many).",
        ("target", "reason"),
        "nothing was left out",
    ),
    _m(
        "recorder_up",
        "gauge",
        "1 if the flight recorder keeps up, 0 if it fails or loses ticks.",
        (),
        "no flight recorder is kept",
    ),
    _m("recorder_last_success_timestamp_seconds", "gauge", "When the flight recorder last wrote.", (), "it never did"),
    _m("recorder_errors_total", "counter", "Ticks that the flight recorder failed to take, by reason.", ("reason",)),
    _m(
        "recorder_dropped_ticks_total",
        "counter",
        "Ticks that are not in the recording.",
        (),
        "no flight recorder is kept",
    ),
    _m("ticks_total", "counter", "Ticks of the monitor loop."),
    _m("tick_lag_seconds", "gauge", "How late the last tick was."),
    _m("build_info", "info", "Build of the exporter; value is always 1.", ("version", "python")),
)

BY_NAME: Final[dict[str, Metric]] = {metric.name: metric for metric in METRICS}
