"""Size of the KV pool where no log line tells it: from the configuration, or from the model's shape."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from kvpressure.capacity.errors import CapacityError
from kvpressure.capacity.kvbytes import Parallel, pool_bytes
from kvpressure.capacity.models import CONFIGS, named
from kvpressure.engines.base import Pool
from kvpressure.model.arguments import EngineArgs

MAX_NAME: Final = 128  # characters of the longest name of a model that is looked at

# Variants of a model that keep the shape of its KV cache: chat tuning and quantized weights.
_VARIANT: Final = re.compile(
    r"(-(hf|chat|instruct|it|base|v\d+(\.\d+)?|fp8|awq|gptq|int[48]|w\d+a\d+|bf16|fp16|\d{4}))+$"
)


@lru_cache(maxsize=256)
def known_model(name: str) -> str | None:
    """The key of a model whose shape is known: the last part of the name, without variants that keep the shape."""
    base = name.rsplit("/", 1)[-1].lower()
    if len(base) > MAX_NAME:
        return None
    for candidate in (base, _VARIANT.sub("", base)):
        if candidate in CONFIGS:
            return candidate
    return None


def from_configuration(args: EngineArgs, pool: Pool) -> float | None:
    """Bytes of the KV pool on each GPU, or ``None``: as set outright, else the model's published shape times the number of blocks."""
    if pool.bytes is not None:
        return pool.bytes
    names = [name for name in (args.model, args.served_model_name) if name]
    model = next((key for name in names if (key := known_model(name))), None)
    if model is None or pool.blocks is None or pool.block_size is None:
        return None
    return _from_shape(
        model,
        pool.blocks,
        pool.block_size,
        pool.dtype,
        args.tensor_parallel_size or 1,
        args.pipeline_parallel_size or 1,
        args.decode_context_parallel_size or 1,
    )


@lru_cache(maxsize=256)
def _from_shape(
    model: str, blocks: int, block_size: int, dtype: str, tensor: int, pipeline: int, context: int
) -> float | None:
    if blocks < 1 or block_size < 1:
        return None
    try:
        return float(pool_bytes(named(model), blocks, Parallel(tensor, pipeline, context), dtype, block_size))
    except (CapacityError, ValueError, OverflowError):
        return None
