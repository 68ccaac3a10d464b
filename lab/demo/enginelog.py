"""The log of a simulated engine: start-up lines and periodic statistics."""

from __future__ import annotations

from collections import deque
from typing import Final

from lab.demo.simulator import SimulatedEngine

STATS_SECONDS: Final = 10.0
_KEPT_LINES: Final = 1000  # lines that nobody takes are dropped, oldest first

_PREFIX: Final = "(EngineCore pid=97) INFO "


class EngineLog:
    """Collects lines until they are taken. vLLM logs no preemptions, so neither does this."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._next_stats = 0.0
        self._prompt = 0
        self._generated = 0

    def take(self) -> list[str]:
        """The lines since the last call."""
        lines = list(self._lines)
        self._lines.clear()
        return lines

    def started(self, engine: SimulatedEngine) -> None:
        """The lines of a start."""
        config = engine.config
        tokens = config.num_blocks * config.block_size
        weights = config.model.weight_bytes / 2**30
        pool = tokens * config.model.kv_bytes_per_token / 2**30
        arguments = {
            "model_tag": config.model.name,
            "served_model_name": [config.served_name],
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "gpu_memory_utilization": config.gpu_memory_utilization,
        }
        self._lines += (
            f"(APIServer pid=1) INFO non-default args: {arguments}",
            f"{_PREFIX}Chunked prefill is enabled with max_num_batched_tokens={config.max_num_batched_tokens}.",
            f"{_PREFIX}Model loading took {weights:.2f} GiB memory and 11.204 seconds",
            f"{_PREFIX}Available KV cache memory: {pool:.2f} GiB",
            (
                f"{_PREFIX}GPU KV cache size: {tokens:,} tokens, Maximum concurrency for {config.max_model_len:,}"
                f" tokens per request: {tokens / config.max_model_len:.2f}x"
            ),
        )
        self._next_stats = engine.now + STATS_SECONDS
        self._prompt = self._generated = 0

    def advance(self, engine: SimulatedEngine, to: float) -> None:
        """Write the statistics line when it is due; an idle or stalled engine writes none."""
        if to < self._next_stats:
            return
        self._next_stats = to + STATS_SECONDS
        books = engine.books
        prompt, generated = books.prompt_tokens - self._prompt, books.generation_tokens - self._generated
        self._prompt, self._generated = books.prompt_tokens, books.generation_tokens
        if prompt or generated:
            self._lines.append(
                f"(APIServer pid=1) INFO Engine 000: Avg prompt throughput: {prompt / STATS_SECONDS:.1f} tokens/s, Avg "
                f"generation throughput: {generated / STATS_SECONDS:.1f} tokens/s, Running: {books.running} reqs, "
                f"Waiting: {books.waiting} reqs, GPU KV cache usage: {books.kv_usage:.1%}, "
                f"Prefix cache hit rate: 0.0%"
            )
