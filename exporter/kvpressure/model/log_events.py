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
    """One recognised line. ``event``: a key of ``EVENTS``. ``facts``: what a start-up line reports and no metric does,
    by name of ``FACTS``; bytes are per worker. ``allocator``: of a failed allocation: bytes, and what would fit.
    ``arguments``, ``version``: of the server, where the line has them.
    """

    event: str
    facts: Mapping[str, float] = field(default_factory=dict)
    allocator: Mapping[str, float] = field(default_factory=dict)
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


EVENTS: Final[Mapping[str, str]] = {
    "cuda_oom": "out of GPU memory while serving",
    "warmup_oom": "out of GPU memory while warming up",
    "load_oom": "out of GPU memory while loading the model",
    "no_kv_blocks": "start failed: no GPU memory left for the KV cache",
    "context_too_long": "start failed: one request of max_model_len does not fit into the KV cache",
    "too_few_blocks": "start failed: fewer state blocks fit into GPU memory than requests may run at once",
    "memory_profiling_failed": "start failed: other processes hold memory of the GPU",
    "host_oom": "a worker was killed because the node ran low on memory (Ray)",
    "preemption": "requests were preempted (vLLM V0: the first time and every 50th)",
    "engine_dead": "the engine process failed or is gone",
    "start_failed": "the engine did not start",
    "broadcast_wait": "a process of the server waits for another",
    "stats": "periodic line with the load",
    "iteration": "one engine step",
    "capacity": "size of the KV cache",
    "pool_bytes": "memory of one worker for the KV cache",
    "weights_bytes": "memory of one worker for the weights",
    "graphs_bytes": "memory of one worker for CUDA graphs",
    "breakdown": "memory of one worker after profiling",
    "max_num_batched_tokens": "token budget of a step in force",
    "max_model_len": "context limit in force",
    "args": "arguments at start",
    "engine_config": "configuration in force",
    "sleep": "sleep mode was entered",
    "pause": "the server was told to pause or to sleep",
    "resume": "the server was told to go on",
    "kv_padding": "KV blocks of a hybrid model are padded",
}
"""What each event means."""

ALLOCATION_EVENTS: Final = frozenset(
    {
        "cuda_oom",
        "warmup_oom",
        "load_oom",
        "no_kv_blocks",
        "context_too_long",
        "too_few_blocks",
        "memory_profiling_failed",
    }
)
"""Events that mean a failed allocation (the log check of the documented triage)."""

OUT_OF_MEMORY: Final[Mapping[str, str]] = {
    "cuda_oom": "gpu",
    "warmup_oom": "load",
    "load_oom": "load",
    "memory_profiling_failed": "load",
    "no_kv_blocks": "kv_blocks",
    "context_too_long": "kv_blocks",
    "too_few_blocks": "kv_blocks",
    "host_oom": "host",
}
"""Which memory ran out, by event."""

PAUSING: Final = {"pause": True, "resume": False, "args": False}
"""Whether the server is to stand still after such a line; it starts awake."""

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
