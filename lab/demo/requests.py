"""Limits of a simulated engine, and its requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lab.demo.model import ModelProfile


class SimulationError(ValueError):
    """A configuration with which vLLM would not start, or requests out of order."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine, named as on vLLM's command line. ``max_num_queued_reqs`` ``None`` = no limit (vLLM's
    default); requests beyond it get 503.
    """

    model: ModelProfile
    served_name: str
    max_model_len: int = 4096
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.9
    block_size: int = 16
    kv_pool_tokens: int | None = None
    watermark: float = 0.0
    async_scheduling: bool = True
    max_num_queued_reqs: int | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool; one of them is the null block that no request gets."""
        return (self.kv_pool_tokens or self.model.kv_pool_tokens) // self.block_size

    def check(self) -> None:
        """Raise ``SimulationError`` for limits that vLLM refuses."""
        needed = -(-self.max_model_len // self.block_size)
        if needed > self.num_blocks - 1:
            fits = (self.num_blocks - 1) * self.block_size
            raise SimulationError(
                f"to serve at least one request with max_model_len {self.max_model_len}, {needed} KV "
                f"blocks are needed; the estimated maximum model length is {fits}"
            )
        if not 0 < self.max_num_seqs <= self.max_num_batched_tokens:
            raise SimulationError(
                f"max_num_seqs is {self.max_num_seqs}; allowed: from 1 to max_num_batched_tokens "
                f"({self.max_num_batched_tokens})"
            )


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request. ``output_tokens``: what the model would generate; ``max_tokens``: what the client allows. Other
    fields are the engine's; times are seconds, ``None`` = not yet.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    on_finish: Callable[[SimulatedRequest], None] | None = None
    number: int = 0
    queued: float = 0.0
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    outputs: int = 0
    output_target: int = 0
    finish_reason: str | None = None
    computed: int = 0  # tokens computed while in prefill
    preemptions: int = 0
    unbooked_preemptions: int = 0
    base: int = 0  # the last three belong to DecodeBatch
    output_base: int = 0
    finish_step: int = -1

    @property
    def known_tokens(self) -> int:
        """Prompt and output so far: what a (resumed) prefill has to compute."""
        return self.prompt_tokens + self.outputs
