"""The one table from the sample names of any vLLM version to the canonical names of ``readings``.

Names differ by engine (V0, V1), by release, by exporter (Python, Rust, Ray) and by dialect. A family lists its
spellings newest first; when a page carries several, the newest counts. Spellings are written without prefix and
without a counter's ``_total``; every prefix and both counter forms are accepted.

Sources: source distributions of vLLM 0.5.5 to 0.33.0; captures under ``tests/fixtures/vllm``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from kvpressure import readings as r

Kind = Literal["gauge", "counter", "histogram", "page", "config"]
Part = Literal["value", "bucket", "sum", "count"]

PREFIXES: Final = ("vllm:", "vllm_", "ray_vllm:", "ray_vllm_")
LARGEST: Final = sys.float_info.max  # ceiling of an ordinary value: everything finite

# NVIDIA NIM serves these of vLLM's gauges without any prefix.
BARE_NAMES: Final = ("num_requests_running", "num_requests_waiting", "gpu_cache_usage_perc")

# Labels of cache_config_info that somebody needs; each release has others (37 in 0.33).
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
    }
)


@dataclass(frozen=True, slots=True)
class Family:
    """One metric of vLLM under all its names.

    ``canonical`` is its name here. A family that a label splits has ``label`` instead, with the label values that
    count in ``values`` (value -> canonical name), or ``canonical`` as a prefix of whatever the value is.
    ``ceiling`` is the largest value that makes sense. ``per_model`` families have no engine label: what they say
    holds for every engine of the model.
    """

    kind: Kind
    names: tuple[str, ...]
    canonical: str = ""
    label: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    ceiling: float = LARGEST
    per_model: bool = False

    def canonical_for(self, labels: Mapping[str, str]) -> str | None:
        """The canonical name of a series with these labels; ``None`` when nobody wants that series."""
        if not self.label:
            return self.canonical
        value = labels.get(self.label)
        if value is None:
            return None
        return self.values.get(value) if self.values else self.canonical + value


@dataclass(frozen=True, slots=True)
class Sample:
    """What one sample name means: part of which family, and how old that spelling is (0 = newest)."""

    family: Family
    age: int
    part: Part = "value"


def _gauge(canonical: str, *names: str, ceiling: float = LARGEST) -> Family:
    return Family("gauge", names, canonical, ceiling=ceiling)


def _counter(canonical: str, *names: str) -> Family:
    return Family("counter", names, canonical)


def _histogram(canonical: str, *names: str) -> Family:
    return Family("histogram", names, canonical)


ENGINE_FAMILIES: Final = (
    _gauge(r.RUNNING, "num_requests_running"),
    _gauge(r.WAITING, "num_requests_waiting"),
    _gauge(r.SWAPPED, "num_requests_swapped"),  # V0 up to 0.7
    Family(
        "gauge",
        ("num_requests_waiting_by_reason",),
        label="reason",
        values={"capacity": r.WAITING_CAPACITY, "deferred": r.WAITING_DEFERRED},
    ),  # 0.20
    _gauge(r.KV_USAGE, "kv_cache_usage_perc", "gpu_cache_usage_perc", ceiling=1.0001),  # both from 0.9.2 to 0.11
    _gauge(r.GENERATION_RATE, "avg_generation_throughput_toks_per_s"),  # V0 before 0.7.3
    _gauge(r.PROMPT_RATE, "avg_prompt_throughput_toks_per_s"),  # V0 before 0.7.3
    Family(
        "gauge",
        ("engine_sleep_state",),
        label="sleep_state",
        values={"weights_offloaded": r.ASLEEP, "discard_all": r.ASLEEP},
    ),  # 0.11
    _counter(r.PREEMPTIONS, "num_preemptions"),
    _counter(r.PROMPT_TOKENS, "prompt_tokens"),
    Family(
        "counter", ("prompt_tokens_by_source",), label="source", values={"local_compute": r.PROMPT_TOKENS_COMPUTED}
    ),  # 0.16
    _counter(r.GENERATION_TOKENS, "generation_tokens"),
    _counter(r.PREFIX_QUERIES, "prefix_cache_queries", "gpu_prefix_cache_queries"),  # renamed in 0.9.2
    _counter(r.PREFIX_HITS, "prefix_cache_hits", "gpu_prefix_cache_hits"),
    _counter(r.ESTIMATED_FLOPS, "estimated_flops_per_gpu"),
    _counter(r.ESTIMATED_READ_BYTES, "estimated_read_bytes_per_gpu"),
    _counter(r.ESTIMATED_WRITE_BYTES, "estimated_write_bytes_per_gpu"),
    Family("counter", ("request_success",), r.FINISHED_PREFIX, label="finished_reason"),
    Family("counter", ("admission_rejections",), r.REJECTED_PREFIX, label="reason", per_model=True),  # 0.32
    _histogram(r.TTFT, "time_to_first_token_seconds"),
    _histogram(r.INTER_TOKEN, "inter_token_latency_seconds", "time_per_output_token_seconds"),  # renamed in 0.10.2
    _histogram(r.E2E, "e2e_request_latency_seconds"),
    _histogram(r.QUEUE, "request_queue_time_seconds", "time_in_queue_requests"),  # the old one V0 0.6.6 to 0.8
    _histogram(r.PREFILL, "request_prefill_time_seconds"),
    _histogram(r.DECODE, "request_decode_time_seconds"),
    _histogram(r.INFERENCE, "request_inference_time_seconds"),
    _histogram(r.ITERATION_TOKENS, "iteration_tokens_total"),  # a histogram in spite of its name
    _histogram(r.REQUEST_PROMPT, "request_prompt_tokens"),
    _histogram(r.REQUEST_OUTPUT, "request_generation_tokens"),
    _histogram(r.REQUEST_MAX_TOKENS, "request_params_max_tokens"),
    Family("config", ("cache_config_info",)),
)

# Status is a class ("2xx") by default and a code ("200") when the instrumentation does not group.
_STATUSES: Final = {
    f"{c}{rest}": f"{r.HTTP_PREFIX}{c}xx" for c in "12345" for rest in ("xx", *(f"{n:02d}" for n in range(100)))
}
PAGE_FAMILIES: Final = (
    Family("page", ("process_cpu_seconds_total",), r.PROCESS_CPU_SECONDS),
    Family("page", ("process_resident_memory_bytes",), r.PROCESS_RSS_BYTES),
    Family("page", ("process_start_time_seconds",), r.PROCESS_START),
    Family("page", ("process_open_fds",), r.PROCESS_OPEN_FDS),
    Family("page", ("http_requests_total",), label="status", values=_STATUSES),
)


def _suffixes(kind: Kind) -> tuple[tuple[str, Part], ...]:
    """The endings under which samples of a kind appear. A counter has ``_total`` or, from old clients, nothing."""
    if kind == "histogram":
        return ("_bucket", "bucket"), ("_sum", "sum"), ("_count", "count")
    if kind == "counter":
        return ("_total", "value"), ("", "value")
    return (("", "value"),)


def _samples() -> dict[str, Sample]:
    table: dict[str, Sample] = {}
    for family in ENGINE_FAMILIES:
        for age, name in enumerate(family.names):
            prefixes = (*PREFIXES, "") if name in BARE_NAMES else PREFIXES
            for suffix, part in _suffixes(family.kind):
                table.update({prefix + name + suffix: Sample(family, age, part) for prefix in prefixes})
    for family in PAGE_FAMILIES:
        table.update({name: Sample(family, 0) for name in family.names})
    return table


SAMPLES: Final[Mapping[str, Sample]] = _samples()
"""Every sample name that is read, as it stands on a page. What is not here (``_created`` too) is not looked at."""
