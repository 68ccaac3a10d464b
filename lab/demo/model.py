"""The cost of a step: measured laws of real models on a 64 GB H100, and the GPU itself.

Source of the laws: least squares over 1 Hz telemetry of vLLM on an H100 64 GB (FerranAgulloLopez/vLLMBatchingMemoryGap,
arXiv 2503.08311); mean error 0.8-3.4 %. They are laws of *measured* steps, so the host gap between two steps is
already in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GPU_NAME: Final = "NVIDIA H100 64GB HBM2"
GPU_MEMORY_BYTES: Final = 68_416_438_272
GPU_BANDWIDTH: Final = 2.0e12  # bytes per second, nominal
GPU_FLOPS: Final = 989e12  # dense bf16
GPU_POWER_LIMIT_WATTS: Final = 700.0
OUTSIDE_VLLM_BYTES: Final = 1_320_000_000  # device memory beside what vLLM plans with, as seen in that telemetry

_PREFILL_MFU: Final = 0.45  # share of peak FLOPs that prompt processing reaches on an H100
_HIDDEN_PREFILL_TOKENS: Final = 256  # up to here an H100 hides prompt tokens behind reading the weights


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """One model on one GPU.

    ``step_base_ms + step_running_ms * running + step_kv_ms * kv_tokens`` is the decode step in milliseconds;
    ``gap_base_ms + gap_running_ms * running`` is the part of it in which no kernel runs. ``kv_pool_tokens`` is what the
    GPU holds beside the weights at ``gpu_memory_utilization`` 0.9.
    """

    name: str
    parameters: float
    step_base_ms: float
    step_running_ms: float
    step_kv_ms: float
    gap_base_ms: float
    gap_running_ms: float
    kv_pool_tokens: int
    kv_bytes_per_token: int

    @property
    def weight_bytes(self) -> float:
        """Size of the weights in 16 bits."""
        return 2 * self.parameters

    @property
    def prefill_ms_per_token(self) -> float:
        """Compute time of a prompt token beyond those that hide behind the weights."""
        return 2 * self.parameters / (_PREFILL_MFU * GPU_FLOPS) * 1000

    def decode_ms(self, running: int, kv_tokens: float) -> float:
        """Duration of a step that only decodes."""
        return self.step_base_ms + self.step_running_ms * running + self.step_kv_ms * kv_tokens

    def prefill_ms(self, running: int, prompt_tokens: int) -> float:
        """What ``prompt_tokens`` add to a step that also decodes ``running`` requests."""
        hidden = max(0, _HIDDEN_PREFILL_TOKENS - running)
        return self.prefill_ms_per_token * max(0, prompt_tokens - hidden)

    def gap_ms(self, running: int) -> float:
        """Host time between two steps with a CPU that keeps up."""
        return self.gap_base_ms + self.gap_running_ms * running


LLAMA_2_13B: Final = ModelProfile(
    name="meta-llama/Llama-2-13b-chat-hf",
    parameters=13.0e9,
    step_base_ms=19.53,
    step_running_ms=0.0633,
    step_kv_ms=4.879e-4,
    gap_base_ms=0.44,
    gap_running_ms=0.0304,
    kv_pool_tokens=42_416,
    kv_bytes_per_token=819_200,
)
LLAMA_2_7B: Final = ModelProfile(
    name="codellama/CodeLlama-7b-hf",
    parameters=6.74e9,
    step_base_ms=10.88,
    step_running_ms=0.0420,
    step_kv_ms=3.291e-4,
    gap_base_ms=0.50,
    gap_running_ms=0.0303,
    kv_pool_tokens=90_500,
    kv_bytes_per_token=524_288,
)
OPT_2_7B: Final = ModelProfile(
    name="facebook/opt-2.7b",
    parameters=2.65e9,
    step_base_ms=6.09,
    step_running_ms=0.0457,
    step_kv_ms=1.979e-4,
    gap_base_ms=0.31,
    gap_running_ms=0.0363,
    kv_pool_tokens=169_600,
    kv_bytes_per_token=327_680,
)
OPT_1_3B: Final = ModelProfile(
    name="facebook/opt-1.3b",
    parameters=1.32e9,
    step_base_ms=3.56,
    step_running_ms=0.0302,
    step_kv_ms=1.372e-4,
    gap_base_ms=0.03,
    gap_running_ms=0.0426,
    kv_pool_tokens=296_000,
    kv_bytes_per_token=196_608,
)
