"""Work that an engine gave its GPU: sums from which activity, power and utilization over any time follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from lab.demo.model import GPU_BANDWIDTH, GPU_FLOPS, ModelProfile

# Watts of a 700 W GPU while kernels run: measured 310-350 at batch 1, 360-504 with a full cache, about 650 in prefill
_BATCH_ONE_WATTS: Final = 320.0
_FULL_BATCH_EXTRA_WATTS: Final = 250.0
_PREFILL_WATTS: Final = 650.0
IDLE_WATTS: Final = 75.0
_GAP_WATTS: Final = 130.0  # between two steps: clocks up, nothing resident


class Totals(NamedTuple):
    """Sums since the engine started: seconds in steps, seconds with a kernel resident, seconds of prompt compute,
    shares of peak bandwidth and FLOPs times seconds, joules.
    """

    step_seconds: float = 0.0
    kernel_seconds: float = 0.0
    prefill_seconds: float = 0.0
    dram_seconds: float = 0.0
    tensor_seconds: float = 0.0
    joules: float = 0.0

    def since(self, earlier: Totals) -> Totals:
        """The sums after ``earlier``."""
        return Totals(*(max(0.0, now - then) for now, then in zip(self, earlier, strict=True)))

    def plus(self, other: Totals, share: float) -> Totals:
        """These sums plus ``share`` times others."""
        return Totals(*(mine + share * more for mine, more in zip(self, other, strict=True)))

    def divided(self, seconds: float) -> Totals:
        """Averages over ``seconds``."""
        return Totals(*(value / seconds for value in self))


@dataclass(frozen=True, slots=True)
class Work:
    """One step, or ``steps`` equal ones together. ``seconds`` is their duration, ``gap_seconds`` of it without a
    kernel and ``prefill_seconds`` of it prompt compute; ``kv_tokens`` are the KV tokens read.
    """

    steps: int
    seconds: float
    gap_seconds: float
    kv_tokens: int
    decoded_tokens: int
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0


def cost(model: ModelProfile, work: Work) -> Totals:
    """The GPU sums for ``work`` of ``model``."""
    kernel = work.seconds - work.gap_seconds
    decode = kernel - work.prefill_seconds
    weights_seconds = work.steps * model.step_base_ms / 1000
    beside_weights = max(0.0, 1 - weights_seconds / decode) if decode > 0 else 0.0
    decode_watts = _BATCH_ONE_WATTS + _FULL_BATCH_EXTRA_WATTS * beside_weights
    return Totals(
        step_seconds=work.seconds,
        kernel_seconds=kernel,
        prefill_seconds=work.prefill_seconds,
        dram_seconds=(work.steps * model.weight_bytes + work.kv_tokens * model.kv_bytes_per_token) / GPU_BANDWIDTH,
        tensor_seconds=2 * model.parameters * (work.decoded_tokens + work.prefill_tokens) / GPU_FLOPS,
        joules=decode_watts * decode + _PREFILL_WATTS * work.prefill_seconds + _GAP_WATTS * work.gap_seconds,
    )
