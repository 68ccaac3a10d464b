"""The guides' own approximations, number for number: "Finding the KV Cache Problem", memory_audit and
kv_cache_calculator.

Kept for comparison. Their bytes per token count every attention head; models with grouped heads (Llama-2-70B,
Mixtral) need about an eighth, see ``kvbytes``. ``max_concurrent`` divides the memory of one GPU by the bytes of all
of them. Units: GB, as in the guide.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

KV_GB_PER_TOKEN: Final[Mapping[str, float]] = MappingProxyType(
    {"llama_7b": 0.0005, "llama_13b": 0.001, "llama_70b": 0.0025, "mixtral_8x7b": 0.002}
)
MODEL_GB: Final[Mapping[str, float]] = MappingProxyType(
    {"llama_7b": 14, "llama_13b": 26, "llama_70b": 140, "mixtral_8x7b": 90}
)
DEFAULT_KV_GB_PER_TOKEN: Final = 0.001
DEFAULT_MODEL_GB: Final = 50.0
OVERHEAD_GB: Final = 4.0
CUDA_CONTEXT_GB: Final = 1.5
ALLOCATOR_GB: Final = 2.0
_SIZES: Final = re.compile(
    r"(?:llama[-_]?(?:[23](?:\.\d)?[-_])?(?P<llama>7b|13b|70b)|(?P<mixtral>mixtral[-_]8x7b))(?![0-9a-z])"
)


@dataclass(frozen=True, slots=True)
class Worksheet:
    """kv_cache_calculator. GB per GPU."""

    kv_cache_needed_per_gpu: float
    available_per_gpu: float
    will_fit: bool
    headroom_gb: float
    max_concurrent: int


@dataclass(frozen=True, slots=True)
class WorksheetAudit:
    """memory_audit. GB per GPU."""

    model_weights_per_gpu: float
    cuda_context: float
    allocator_overhead: float
    available_for_kv_cache: float


def guide_name(model: str) -> str:
    """The guide's own name of a model (``llama_70b`` for ``meta-llama/Llama-2-70b-hf``), else the name as it is.

    Only names that say family and size as the guide does; an 8B is no 7B.
    """
    found = _SIZES.match(model.lower().rpartition("/")[2])
    if found is None:
        return model
    return f"llama_{found['llama']}" if found["llama"] else "mixtral_8x7b"


def worksheet(
    model: str, context_length: int, concurrent_requests: int, gpu_memory_gb: float, tensor_parallel: int
) -> Worksheet:
    """Whether the load fits, as the guide computes it. Unknown models get the guide's defaults."""
    per_token = KV_GB_PER_TOKEN.get(model, DEFAULT_KV_GB_PER_TOKEN)
    needed = per_token * context_length * concurrent_requests / tensor_parallel
    available = gpu_memory_gb - MODEL_GB.get(model, DEFAULT_MODEL_GB) / tensor_parallel - OVERHEAD_GB
    return Worksheet(
        needed, available, needed < available, available - needed, int(available / (per_token * context_length))
    )


def memory_audit(model: str, gpu_memory_gb: float, tensor_parallel: int) -> WorksheetAudit:
    """Where the memory of one GPU goes, as the guide computes it."""
    weights = MODEL_GB.get(model, DEFAULT_MODEL_GB) / tensor_parallel
    return WorksheetAudit(
        weights, CUDA_CONTEXT_GB, ALLOCATOR_GB, gpu_memory_gb - weights - CUDA_CONTEXT_GB - ALLOCATOR_GB
    )
