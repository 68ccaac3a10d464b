"""The ``/metrics`` text of a current vLLM server, from what the engine has booked.

Structure (families, order, labels, types, ``_created`` lines) is that of a capture of vLLM 0.32.0; a test compares
them. Counters that the simulation never changes are 0, as on a real server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from lab.demo.counters import BucketCounts
from lab.demo.number_format import number
from lab.demo.simulator import SimulatedEngine

VLLM_VERSION: Final = "0.32.0"
CONTENT_TYPE: Final = "text/plain; version=1.0.0; charset=utf-8"
_HANDLER: Final = "/v1/completions"
_RESIDENT_BYTES: Final = 771_391_488.0

Labels = tuple[tuple[str, str], ...]

HELP: Final[Mapping[str, str]] = {
    "vllm:estimated_flops_per_gpu": (
        "Estimated number of floating point operations per GPU (for Model Flops Utilization calculations)."
    ),
    "vllm:estimated_read_bytes_per_gpu": (
        "Estimated number of bytes read from memory per GPU (for Model Flops Utilization calculations)."
    ),
    "vllm:estimated_write_bytes_per_gpu": (
        "Estimated number of bytes written to memory per GPU (for Model Flops Utilization calculations)."
    ),
    "vllm:num_requests_running": "Number of requests in model execution batches.",
    "vllm:num_requests_waiting": "Number of requests waiting to be processed.",
    "vllm:num_requests_waiting_by_reason": (
        "Number of waiting requests by reason. Reason labels: 'capacity' = waiting "
        "for scheduling capacity; 'deferred' = deferred by transient constraints "
        "(LoRA budget, KV transfer, blocked status). Sum of all reasons equals "
        "vllm:num_requests_waiting."
    ),
    "vllm:engine_sleep_state": (
        "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is "
        "awake; weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2."
    ),
    "vllm:kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
    "vllm:prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
    "vllm:prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
    "vllm:external_prefix_cache_queries": (
        "External prefix cache queries from KV connector cross-instance cache "
        "sharing, in terms of number of queried tokens."
    ),
    "vllm:external_prefix_cache_hits": (
        "External prefix cache hits from KV connector cross-instance cache sharing, in "
        "terms of number of cached tokens."
    ),
    "vllm:mm_cache_queries": "Multi-modal cache queries, in terms of number of queried items.",
    "vllm:mm_cache_hits": "Multi-modal cache hits, in terms of number of cached items.",
    "vllm:num_preemptions": "Cumulative number of preemption from the engine.",
    "vllm:prompt_tokens": "Number of prefill tokens processed.",
    "vllm:prompt_tokens_by_source": "Number of prompt tokens by source.",
    "vllm:prompt_tokens_cached": "Number of cached prompt tokens (local + external).",
    "vllm:prompt_tokens_cached_by_source": (
        "Prefix-cache hit tokens by the cache tier that supplied them: device (local "
        "HBM), host (offloaded to DRAM), disk, p2p (transferred from another vLLM "
        "instance) or external_unspecified. Counted at admission; sums to "
        "vllm:prefix_cache_hits + vllm:external_prefix_cache_hits."
    ),
    "vllm:generation_tokens": "Number of generation tokens processed.",
    "vllm:request_success": "Count of successfully processed requests.",
    "vllm:admission_rejections": "Number of admission attempts rejected by a queue limit, by reason.",
    "vllm:request_prompt_tokens": "Number of prefill tokens processed.",
    "vllm:request_generation_tokens": "Number of generation tokens processed.",
    "vllm:iteration_tokens_total": "Histogram of number of tokens per engine_step.",
    "vllm:request_max_num_generation_tokens": "Histogram of maximum number of requested generation tokens.",
    "vllm:request_params_n": "Histogram of the n request parameter.",
    "vllm:request_params_max_tokens": "Histogram of the max_tokens request parameter.",
    "vllm:time_to_first_token_seconds": "Histogram of time to first token in seconds.",
    "vllm:inter_token_latency_seconds": "Histogram of inter-token latency in seconds.",
    "vllm:request_time_per_output_token_seconds": "Histogram of time_per_output_token_seconds per request.",
    "vllm:e2e_request_latency_seconds": "Histogram of e2e request latency in seconds.",
    "vllm:request_queue_time_seconds": "Histogram of time spent in WAITING phase for request.",
    "vllm:request_inference_time_seconds": "Histogram of time spent in RUNNING phase for request.",
    "vllm:request_prefill_time_seconds": "Histogram of time spent in PREFILL phase for request.",
    "vllm:request_decode_time_seconds": "Histogram of time spent in DECODE phase for request.",
    "vllm:request_num_preemptions": "Histogram of the number of times a request was preempted.",
    "vllm:request_prefill_kv_computed_tokens": (
        "Histogram of new KV tokens computed during prefill (excluding cached tokens)."
    ),
    "vllm:cache_config_info": "Information of the LLMEngine CacheConfig",
}

_FLOPS_LIKE: Final = (
    "vllm:estimated_flops_per_gpu",
    "vllm:estimated_read_bytes_per_gpu",
    "vllm:estimated_write_bytes_per_gpu",
)
_CACHES: Final = (
    "vllm:external_prefix_cache_queries",
    "vllm:external_prefix_cache_hits",
    "vllm:mm_cache_queries",
    "vllm:mm_cache_hits",
)
_CACHED_SOURCES: Final = ("device", "host", "p2p", "disk", "external_unspecified")


@dataclass(slots=True)
class Page:
    """Renders one server's metrics. ``started``: Unix time of the process start, also for ``_created`` lines."""

    engine: SimulatedEngine
    started: float
    _prefixes: dict[tuple[str, Labels], str] = field(default_factory=dict)

    def render(self) -> str:
        """The text now."""
        lines: list[str] = []
        self._process(lines)
        self._counters_and_gauges(lines)
        self._histograms(lines)
        self._cache_config(lines)
        self._http(lines)
        return "\n".join(lines) + "\n"

    # --- line writers ---------------------------------------------------------------------------------------

    def _sample(self, lines: list[str], name: str, labels: Labels, value: float) -> None:
        key = (name, labels)
        prefix = self._prefixes.get(key)
        if prefix is None:
            body = ",".join(f'{label}="{text}"' for label, text in sorted(labels))
            prefix = self._prefixes[key] = f"{name}{{{body}}} " if body else f"{name} "
        lines.append(prefix + number(value))

    def _engine_labels(self, **extra: str) -> Labels:
        return (("engine", "0"), ("model_name", self.engine.config.served_name), *extra.items())

    def _gauge(self, lines: list[str], name: str, samples: Iterable[tuple[Labels, float]]) -> None:
        lines += (f"# HELP {name} {HELP[name]}", f"# TYPE {name} gauge")
        for labels, value in samples:
            self._sample(lines, name, labels, value)

    def _counter(self, lines: list[str], name: str, samples: Sequence[tuple[Labels, float]], help: str = "") -> None:
        text = help or HELP[name]
        lines += (f"# HELP {name}_total {text}", f"# TYPE {name}_total counter")
        for labels, value in samples:
            self._sample(lines, f"{name}_total", labels, value)
        self._created(lines, name, text, [labels for labels, _ in samples])

    def _histogram(self, lines: list[str], name: str, labels: Labels, histogram: BucketCounts, help: str = "") -> None:
        text = help or HELP[name]
        lines += (f"# HELP {name} {text}", f"# TYPE {name} histogram")
        below = 0
        for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
            below += count
            self._sample(lines, f"{name}_bucket", (*labels, ("le", number(bound))), below)
        self._sample(lines, f"{name}_count", labels, histogram.total)
        self._sample(lines, f"{name}_sum", labels, histogram.sum)
        self._created(lines, name, text, [labels])

    def _created(self, lines: list[str], name: str, help: str, labelled: Iterable[Labels]) -> None:
        lines += (f"# HELP {name}_created {help}", f"# TYPE {name}_created gauge")
        for labels in labelled:
            self._sample(lines, f"{name}_created", labels, self.started)

    # --- sections -------------------------------------------------------------------------------------------

    def _process(self, lines: list[str]) -> None:
        """Metrics of the API server process by prometheus_client."""
        for name, kind, help, value in (
            ("process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes.", 2_762_190_848.0),
            ("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.", _RESIDENT_BYTES),
            (
                "process_start_time_seconds",
                "gauge",
                "Start time of the process since unix epoch in seconds.",
                self.started,
            ),
            (
                "process_cpu_seconds_total",
                "counter",
                "Total user and system CPU time spent in seconds.",
                self.engine.books.cpu_seconds,
            ),
            ("process_open_fds", "gauge", "Number of open file descriptors.", 34.0 + self.engine.in_flight),
            ("process_max_fds", "gauge", "Maximum number of open file descriptors.", 1_048_576.0),
        ):
            lines += (f"# HELP {name} {help}", f"# TYPE {name} {kind}")
            self._sample(lines, name, (), value)

    def _counters_and_gauges(self, lines: list[str]) -> None:
        books, plain = self.engine.books, self._engine_labels()
        for name in _FLOPS_LIKE:  # move only with --enable-mfu-metrics
            self._counter(lines, name, [(plain, 0)])
        self._gauge(lines, "vllm:num_requests_running", [(plain, books.running)])
        self._gauge(lines, "vllm:num_requests_waiting", [(plain, books.waiting)])
        self._gauge(
            lines,
            "vllm:num_requests_waiting_by_reason",
            [(self._engine_labels(reason="capacity"), books.waiting), (self._engine_labels(reason="deferred"), 0)],
        )
        self._gauge(
            lines,
            "vllm:engine_sleep_state",
            [
                (self._engine_labels(sleep_state=state), state == "awake")
                for state in ("awake", "weights_offloaded", "discard_all")
            ],
        )
        self._gauge(lines, "vllm:kv_cache_usage_perc", [(plain, books.kv_usage)])
        self._counter(lines, "vllm:prefix_cache_queries", [(plain, books.prefix_queries)])
        self._counter(lines, "vllm:prefix_cache_hits", [(plain, 0)])
        for name in _CACHES:
            self._counter(lines, name, [(plain, 0)])
        self._counter(lines, "vllm:num_preemptions", [(plain, books.preemptions)])
        self._counter(lines, "vllm:prompt_tokens", [(plain, books.prompt_tokens)])
        self._counter(
            lines,
            "vllm:prompt_tokens_by_source",
            [
                (self._engine_labels(source="local_compute"), books.prompt_tokens),
                (self._engine_labels(source="local_cache_hit"), 0),
                (self._engine_labels(source="external_kv_transfer"), 0),
            ],
        )
        self._counter(lines, "vllm:prompt_tokens_cached", [(plain, 0)])
        self._counter(
            lines,
            "vllm:prompt_tokens_cached_by_source",
            [(self._engine_labels(source=source), 0) for source in _CACHED_SOURCES],
        )
        self._counter(lines, "vllm:generation_tokens", [(plain, books.generation_tokens)])
        self._counter(
            lines,
            "vllm:request_success",
            [(self._engine_labels(finished_reason=reason), count) for reason, count in books.finished.items()],
        )
        model = ("model_name", self.engine.config.served_name)  # this one has no engine label
        self._counter(
            lines,
            "vllm:admission_rejections",
            [
                ((model, ("reason", "max_num_queued_reqs")), books.rejected_requests),
                ((model, ("reason", "max_num_queued_tokens")), 0),
            ],
        )

    def _histograms(self, lines: list[str]) -> None:
        books, plain = self.engine.books, self._engine_labels()
        for name, histogram in (
            ("vllm:request_prompt_tokens", books.request_prompt),
            ("vllm:request_generation_tokens", books.request_output),
            ("vllm:iteration_tokens_total", books.iteration),
            ("vllm:request_max_num_generation_tokens", books.request_max_output),
            ("vllm:request_params_n", books.params_n),
            ("vllm:request_params_max_tokens", books.params_max_tokens),
            ("vllm:time_to_first_token_seconds", books.first_token),
            ("vllm:inter_token_latency_seconds", books.inter_token),
            ("vllm:request_time_per_output_token_seconds", books.per_output_token),
            ("vllm:e2e_request_latency_seconds", books.e2e),
            ("vllm:request_queue_time_seconds", books.queue),
            ("vllm:request_inference_time_seconds", books.inference),
            ("vllm:request_prefill_time_seconds", books.prefill),
            ("vllm:request_decode_time_seconds", books.decode),
            ("vllm:request_num_preemptions", books.request_preemptions),
            ("vllm:request_prefill_kv_computed_tokens", books.request_computed),
        ):
            self._histogram(lines, name, plain, histogram)

    def _cache_config(self, lines: list[str]) -> None:
        config = self.engine.config
        tokens = config.num_blocks * config.block_size
        values = {
            "_block_size_resolved": "True",
            "block_size": config.block_size,
            "cache_dtype": "auto",
            "cache_hit_alignment_tokens": None,
            "effective_attention_block_size": config.block_size,
            "enable_mamba_shared_prefix_checkpoint": False,
            "enable_prefix_caching": True,
            "engine": "0",
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "hash_block_size": None,
            "is_attention_free": False,
            "kv_cache_dtype_skip_layers": "[]",
            "kv_cache_layout": None,
            "kv_cache_max_concurrency": tokens / config.max_model_len,
            "kv_cache_memory_bytes": None,
            "kv_cache_size_tokens": tokens,
            "kv_offloading_backend": "native",
            "kv_offloading_size": None,
            "kv_sharing_fast_prefill": False,
            "mamba_block_size": None,
            "mamba_cache_dtype": "auto",
            "mamba_cache_mode": "none",
            "mamba_page_size_padded": None,
            "mamba_ssm_cache_dtype": "float32",
            "num_cpu_blocks": None,
            "num_gpu_blocks": config.num_blocks,
            "num_gpu_blocks_override": None,
            "prefix_cache_retention_interval": 0,
            "prefix_caching_hash_algo": "sha256",
            "prefix_match_unit": None,
            "replayssm_buffer_len": 16,
            "skip_page_size_padded": None,
            "sliding_window": None,
            "swa_bounded_replay": True,
            "use_kda_recoverssm": False,
            "use_replayssm": False,
            "user_specified_block_size": False,
        }
        labels = tuple((name, str(value)) for name, value in values.items())
        self._gauge(lines, "vllm:cache_config_info", [(labels, 1)])

    def _http(self, lines: list[str]) -> None:
        """Metrics of the HTTP layer before the API server."""
        books, method = self.engine.books, (("handler", _HANDLER), ("method", "POST"))
        self._counter(
            lines,
            "http_requests",
            [((*method, ("status", status)), count) for status, count in books.http.items() if count],
            "Total number of requests by method, status and handler.",
        )
        self._histogram(
            lines,
            "http_request_duration_highr_seconds",
            (),
            books.http_fine,
            "Latency with many buckets but no API specific labels.",
        )
        self._histogram(
            lines,
            "http_request_duration_seconds",
            method,
            books.http_coarse,
            "Latency with only few buckets by handler.",
        )
