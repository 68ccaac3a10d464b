"""The closed set of events that an inference server's log can report, whichever server it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Final

from kvpressure.model.arguments import EngineArgs
from kvpressure.model.frozen import frozen

# Characters of a line that are looked at; the longest start-up line of a real server has about 6 000
MAX_LINE: Final = 16384


@frozen
class LogEvent:
    """One recognised line. ``event``: a key of ``EVENTS``, which lists its possible ``values``. ``facts``: what a
    start-up line reports and no metric does, by name of ``FACTS``; bytes are per worker. ``arguments``, ``version``:
    of the server, where the line has them.
    """

    event: str
    values: Mapping[str, float | str] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)
    arguments: EngineArgs | None = None
    version: str | None = None


FACTS: Final = (
    "pool_bytes",
    "weights_bytes",
    "graphs_bytes",
    "activations_bytes",
    "capacity_tokens",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
)
"""Facts that a start-up line may state."""


@frozen
class EventKind:
    """What an event means, and the ``values`` its line can give."""

    means: str
    values: str = ""


EVENTS: Final[Mapping[str, EventKind]] = {
    "cuda_oom": EventKind(
        "out of GPU memory while serving",
        "runtime, requested_bytes, total_bytes, free_bytes, allocated_bytes, private_pool_bytes, "
        "reserved_unallocated_bytes",
    ),
    "warmup_oom": EventKind("out of GPU memory while warming up", "stage, dummy_requests"),
    "load_oom": EventKind("out of GPU memory while loading the model"),
    "no_kv_blocks": EventKind("start failed: no GPU memory left for the KV cache"),
    "context_too_long": EventKind(
        "start failed: one request of max_model_len does not fit into the KV cache",
        "max_model_len, needed_bytes, available_bytes, estimated_max_model_len, capacity_tokens",
    ),
    "memory_profiling_failed": EventKind(
        "start failed: other processes hold memory of the GPU", "free_bytes, total_bytes, utilization, desired_bytes"
    ),
    "host_oom": EventKind("a worker was killed because the node ran low on memory (Ray)"),
    "preemption": EventKind("requests were preempted (vLLM V0: the first time and every 50th)", "mode, cumulative"),
    "engine_dead": EventKind("the engine process failed or is gone"),
    "start_failed": EventKind("the engine did not start"),
    "broadcast_wait": EventKind("a process of the server waits for another", "seconds"),
    "stats": EventKind(
        "periodic line with the load",
        "flavour (v0, v1, rust), engine, engines, prompt_rate, generation_rate (tokens/s), running, waiting, deferred, "
        "swapped, preemptions (of the interval), kv_usage, cpu_kv_usage, prefix_hit_ratio",
    ),
    "iteration": EventKind(
        "one engine step",
        "index, context_requests, context_tokens, generation_requests, generation_tokens, elapsed_seconds, kv_usage",
    ),
    "capacity": EventKind("size of the KV cache", "tokens, max_model_len, max_concurrency, device_blocks, cpu_blocks"),
    "pool_bytes": EventKind("memory of one worker for the KV cache", "bytes, or shortfall_bytes when negative"),
    "weights_bytes": EventKind("memory of one worker for the weights", "bytes, seconds"),
    "graphs_bytes": EventKind("memory of one worker for CUDA graphs", "bytes, seconds"),
    "breakdown": EventKind(
        "memory of one worker after profiling",
        "consumed_bytes (weights and non-torch), weights_bytes, non_torch_bytes, activation_bytes, graphs_bytes, "
        "kv_bytes",
    ),
    "max_num_batched_tokens": EventKind("token budget of a step in force", "tokens"),
    "max_model_len": EventKind("context limit in force", "tokens"),
    "args": EventKind("arguments at start", "form (non_default, all) and every argument by name"),
    "engine_config": EventKind(
        "configuration in force",
        "version, model, max_model_len, tensor_parallel_size, pipeline_parallel_size, data_parallel_size, "
        "kv_cache_dtype, ...",
    ),
    "sleep": EventKind("sleep mode was entered", "freed_bytes, used_bytes, seconds"),
    "kv_padding": EventKind("KV blocks of a hybrid model are padded", "waste_ratio, an upper bound"),
}
"""A value is absent when the line does not give it."""

ALLOCATION_EVENTS: Final = frozenset(
    {"cuda_oom", "warmup_oom", "load_oom", "no_kv_blocks", "context_too_long", "memory_profiling_failed"}
)
"""Events that mean a failed allocation (the log check of the documented triage)."""

FACT_EVENTS: Final = frozenset(
    {
        "capacity",
        "pool_bytes",
        "weights_bytes",
        "graphs_bytes",
        "breakdown",
        "max_num_batched_tokens",
        "max_model_len",
        "args",
        "engine_config",
        "kv_padding",
    }
)
"""Events that stay true for the life of the engine, however old the line."""
