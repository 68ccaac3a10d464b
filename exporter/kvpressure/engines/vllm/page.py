"""vLLM's metrics page: sample names of all versions, mapped to the canonical names of ``readings``; which vLLM
published it, and whether several API servers share the endpoint.

Names differ by engine (V0, V1), release and frontend (Python, Rust, Ray). Sources: source distributions of vLLM 0.5.5
to 0.33.0; captures under ``tests/fixtures/vllm``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from kvpressure.engines.base import Family, SampleName, counter, gauge, histogram, table
from kvpressure.model import ceilings
from kvpressure.model import readings as r
from kvpressure.model.readings import (
    GENERATION_RATE,
    PREEMPTIONS,
    PREFIX_QUERIES,
    PROMPT_RATE,
    SWAPPED,
    EngineReading,
    PageText,
)

PREFIXES: Final = ("vllm:", "vllm_", "ray_vllm:", "ray_vllm_")
SERIES_PATTERN: Final = "(ray_)?vllm[:_].+"
SERIES_LABELS: Final = frozenset(
    {"engine", "reason", "finished_reason", "source", "sleep_state", "stage", "tier", "outcome", "transfer_type"}
)

# NVIDIA NIM serves these without any prefix, the last two and the limit as names of its own.
BARE_NAMES: Final = (
    "num_requests_running",
    "num_requests_waiting",
    "gpu_cache_usage_perc",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "time_to_first_token_seconds",
    "time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "num_request_max",
    "request_failure",
)

# Labels of cache_config_info that are used; each release has others (37 in 0.33).
CONFIG_LABELS: Final = frozenset(
    {
        "block_size",
        "num_gpu_blocks",
        "num_gpu_blocks_override",
        "kv_cache_size_tokens",
        "kv_cache_max_concurrency",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
        "cache_dtype",
        "sliding_window",
        "enable_prefix_caching",
        "effective_attention_block_size",
        "_block_size_resolved",
        "cpu_kv_cache_size_bytes",
        "cpu_kv_cache_size_tokens",
        "capacity_blocks",
    }
)

_BEHIND_HOST: Final = {"fs": "disk", "obj": "remote", "p2p": "remote"}  # a tier's type, in the label "1:fs"


def _tier(prefix: str) -> Callable[[Mapping[str, str]], str]:
    """The name of a tier's series, with what lies behind host memory by its type."""
    return lambda labels: prefix + _BEHIND_HOST.get(labels.get("tier", "").partition(":")[2], "other")


def _refused(name: str, label: str = "", **values: str) -> Family:
    return Family("counter", (name,), r.TIER_REFUSED, label, values, join="sum", copies=("tier", "pid"))


TIER_FAMILIES: Final = (
    counter(r.TIER_STORED, "kv_offload_store_bytes", ceiling=ceilings.WORK),  # 0.26, as the next two
    counter(r.TIER_LOADED, "kv_offload_load_bytes", ceiling=ceilings.WORK),
    counter(r.TIER_LOAD_SECONDS, "kv_offload_load_time"),
    gauge(r.TIER_PINNED, "kv_offload_cpu_cache_usage_perc", ceiling=ceilings.RATIO),
    _refused("kv_offload_allocation_failure"),
    *(
        _refused(f"kv_offload_tiering_{name}")
        for name in (
            "promotion_allocation_failures",
            "promotion_job_failures",
            "cascade_job_failures",
            "backpressure_stores_dropped",  # 0.31
        )
    ),  # 0.29
    *(
        Family(
            "counter",
            (f"kv_offload_tiering_{moved}_bytes",),
            named=_tier(prefix),
            join="sum",
            copies=("tier", "pid"),
            ceiling=ceilings.WORK,
        )
        for moved, prefix in (("write", r.TIER_STORED_PREFIX), ("read", r.TIER_LOADED_PREFIX))
    ),
    Family(
        "counter",
        ("simple_kv_offload_save_outcomes",),
        label="outcome",
        values={"stored": r.TIER_STORED, "dropped_cpu_full": r.TIER_REFUSED},
    ),  # 0.31, in blocks
    counter(r.TIER_LOADED, "simple_kv_offload_load_blocks"),
    Family("config", ("kv_offload_config_info", "simple_kv_offload_info")),
    Family("counter", ("prompt_tokens_cached_by_source",), r.CACHED_PREFIX, label="source"),  # 0.32
)
OLDER_TIER_FAMILIES: Final = (
    Family(
        "counter",
        ("kv_offload_total_bytes",),
        label="transfer_type",
        values={"CPU_to_GPU": r.TIER_LOADED, "GPU_to_CPU": r.TIER_STORED},
        ceiling=ceilings.WORK,
    ),
    Family("counter", ("kv_offload_total_time",), label="transfer_type", values={"CPU_to_GPU": r.TIER_LOAD_SECONDS}),
    counter(r.CACHED_PREFIX + "external_unspecified", "external_prefix_cache_hits"),
)
"""What newer releases still publish beside the names above, which take precedence."""

TRANSFERS: Final[Mapping[str, Mapping[str, str]]] = {
    "nixl": {  # 0.13: pull: the decode server records the first four, push: the prefill server
        "xfer_time_seconds_count": r.TRANSFERS,
        "xfer_time_seconds_sum": r.TRANSFER_SECONDS,
        "bytes_transferred_sum": r.TRANSFER_BYTES,
        "num_failed_transfers": r.TRANSFERS_FAILED,  # from 0.31 with handshakes and notifications; push: both sides
        "num_kv_expired_reqs": r.LEASES_EXPIRED,  # prefill
        "num_notifications_after_expiry": r.READ_AFTER_EXPIRY,  # 0.32; pull: prefill, push: decode
    },
    "mooncake": {  # 0.33: the prefill server records all but num_failed_recvs
        "xfer_time_seconds_count": r.TRANSFERS,
        "xfer_time_seconds_sum": r.TRANSFER_SECONDS,
        "bytes_transferred_sum": r.TRANSFER_BYTES,
        "num_failed_transfers": r.TRANSFERS_FAILED,
        "num_failed_recvs": r.TRANSFERS_FAILED,
        "num_kv_expired_reqs": r.LEASES_EXPIRED,
    },
}
"""By connector: name behind its prefix -> meaning. The other side's stay 0 for ever, so 0 is no reading of them. Those
without metrics of their own: MoRIIO, LMCache (on a page of its own), P2P NCCL, FlexKV.
"""

ENGINE_FAMILIES: Final = (
    gauge(r.RUNNING, "num_requests_running"),
    Family("page", ("lora_requests_info",), r.LORA_MOMENT, ceiling=ceilings.MOMENT),  # no label of a model or an engine
    gauge(r.WAITING, "num_requests_waiting"),
    gauge(r.SWAPPED, "num_requests_swapped"),  # V0 up to 0.7
    Family("gauge", ("num_request_max",), r.RUNNING_LIMIT, ceiling=ceilings.REQUESTS, per_model=True),  # NIM's
    Family(
        "gauge",
        ("num_requests_waiting_by_reason",),
        label="reason",
        values={"capacity": r.WAITING_CAPACITY, "deferred": r.WAITING_DEFERRED},
        ceiling=ceilings.REQUESTS,
    ),  # 0.20
    Family(
        "gauge",
        ("num_requests_kv_fetch_by_stage",),
        label="stage",
        values={"waiting_to_start": r.LOADS_TO_START, "in_progress": r.LOADS},
        ceiling=ceilings.REQUESTS,
    ),  # 0.32
    *(
        Family("counter", (f"{connector}_{name}",), meaning, ceiling=ceilings.WORK, join="sum")
        for connector, names in TRANSFERS.items()
        for name, meaning in names.items()
    ),
    counter(r.DRAFTS, "spec_decode_num_drafts"),
    counter(r.DRAFTS_ACCEPTED, "spec_decode_num_accepted_tokens"),
    gauge(r.KV_USAGE, "kv_cache_usage_perc", "gpu_cache_usage_perc", ceiling=ceilings.RATIO),  # both from 0.9.2 to 0.11
    gauge(r.GENERATION_RATE, "avg_generation_throughput_toks_per_s", ceiling=ceilings.RATE),  # V0 before 0.7.3
    gauge(r.PROMPT_RATE, "avg_prompt_throughput_toks_per_s", ceiling=ceilings.RATE),  # V0 before 0.7.3
    Family(
        "gauge",
        ("engine_sleep_state",),
        label="sleep_state",
        values={"weights_offloaded": r.ASLEEP, "discard_all": r.ASLEEP},
    ),  # 0.11
    *(
        Family("page", (f"{kind}_operations_in_flight",), f"{r.OPERATIONS_PREFIX}{kind}", ceiling=ceilings.REQUESTS)
        for kind in ("sleep_mode", "rl_weight_update")
    ),  # 0.32, once such an operation was asked for; no label of a model or an engine
    counter(r.PREEMPTIONS, "num_preemptions"),
    counter(r.PROMPT_TOKENS, "prompt_tokens"),
    Family(
        "counter", ("prompt_tokens_by_source",), label="source", values={"local_compute": r.PROMPT_TOKENS_COMPUTED}
    ),  # 0.16
    counter(r.GENERATION_TOKENS, "generation_tokens"),
    counter(r.PREFIX_QUERIES, "prefix_cache_queries", "gpu_prefix_cache_queries"),  # renamed in 0.9.2
    counter(r.PREFIX_HITS, "prefix_cache_hits", "gpu_prefix_cache_hits"),
    counter(r.ESTIMATED_FLOPS, "estimated_flops_per_gpu", ceiling=ceilings.WORK),
    counter(r.ESTIMATED_READ_BYTES, "estimated_read_bytes_per_gpu", ceiling=ceilings.WORK),
    counter(r.ESTIMATED_WRITE_BYTES, "estimated_write_bytes_per_gpu", ceiling=ceilings.WORK),
    Family("counter", ("request_success",), r.FINISHED_PREFIX, label="finished_reason"),
    counter(r.FINISHED_PREFIX + "error", "request_failure"),  # NIM's
    Family("counter", ("admission_rejections",), r.REJECTED_PREFIX, label="reason", per_model=True),  # 0.32
    histogram(r.TTFT, "time_to_first_token_seconds"),
    histogram(r.INTER_TOKEN, "inter_token_latency_seconds", "time_per_output_token_seconds"),  # renamed in 0.10.2
    histogram(r.E2E, "e2e_request_latency_seconds"),
    histogram(r.QUEUE, "request_queue_time_seconds", "time_in_queue_requests"),  # the old one V0 0.6.6 to 0.8
    histogram(r.PREFILL, "request_prefill_time_seconds"),
    histogram(r.INFERENCE, "request_inference_time_seconds"),
    histogram(r.ITERATION_TOKENS, "iteration_tokens_total"),  # a histogram in spite of its name
    histogram(r.REQUEST_PROMPT, "request_prompt_tokens"),
    histogram(r.REQUEST_OUTPUT, "request_generation_tokens"),
    histogram(r.REQUEST_MAX_TOKENS, "request_params_max_tokens"),
    histogram(r.KV_IDLE, "kv_block_idle_before_evict_seconds"),  # 0.13, with --kv-cache-metrics
    histogram(r.KV_REUSE_GAP, "kv_block_reuse_gap_seconds"),
    Family("config", ("cache_config_info",)),
)

SAMPLES: Final[Mapping[str, SampleName]] = {
    **{name: replace(sample, age=1) for name, sample in table("vllm", OLDER_TIER_FAMILIES, PREFIXES).items()},
    **table("vllm", (*ENGINE_FAMILIES, *TIER_FAMILIES), PREFIXES, BARE_NAMES),
}
"""Every sample name of vLLM that is read; others (such as ``_created``) are ignored."""


def identify(labels: Mapping[str, str]) -> tuple[str | None, str | None]:
    """(model, engine) of a series, each ``None`` if it has none.

    A router repeats its servers' gauges under vLLM's names without a model; every vLLM has a model label, and Triton
    has its backend's model and version.
    """
    model = labels.get("model_name") or (labels.get("model") if "version" in labels else None)
    return model, labels.get("engine")


def flavour(text: PageText, engines: Sequence[EngineReading]) -> str | None:
    """Which vLLM wrote the text (v0, v1, rust); ``None`` = unknown.

    Only V0 had swapping and throughput gauges. Of the rest, only the Rust frontend answers OpenMetrics under names
    with a colon, and it has no ``cache_config_info``. Only V1 has an engine label (0.8 and later), prefix cache
    counters and ``kv_cache_usage_perc``; before it had the label, V1 counted no preemptions. Ray relabels.
    """
    v0_only = {SWAPPED, GENERATION_RATE, PROMPT_RATE}
    if any(v0_only & engine.gauges.keys() for engine in engines):
        return "v0"
    openmetrics = text[-16:].rstrip().endswith(b"# EOF")
    if openmetrics and b"cache_config_info" not in text and b"vllm:num_requests_running" in text:
        return "rust"
    counters = {name for engine in engines for name in engine.counters}
    if b'{engine="' in text or b',engine="' in text or b"kv_cache_usage_perc" in text or PREFIX_QUERIES in counters:
        return "v1"
    return "v0" if PREEMPTIONS in counters and b"ray_vllm" not in text else None
