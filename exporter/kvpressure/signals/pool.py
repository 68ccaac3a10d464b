"""Size of the KV pool where no log line tells it: from the configuration, or from the model's shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from kvpressure.args import EngineArgs
from kvpressure.capacity import CapacityError
from kvpressure.capacity.kvbytes import Parallel, pool_bytes
from kvpressure.capacity.models import CONFIGS, named

# Variants of a model that keep the shape of its KV cache: chat tuning and quantized weights.
_VARIANT: Final = re.compile(
    r"(-(hf|chat|instruct|it|base|v\d+(\.\d+)?|fp8|awq|gptq|int[48]|w\d+a\d+|bf16|fp16|\d{4}))+$"
)


@lru_cache(maxsize=256)
def known_model(name: str) -> str | None:
    """The key of a model whose shape is known: the last part of the name, without variants that keep the shape."""
    base = name.rsplit("/", 1)[-1].lower()
    for candidate in (base, _VARIANT.sub("", base)):
        if candidate in CONFIGS:
            return candidate
    return None


def from_configuration(args: EngineArgs, config: Mapping[str, str], engines_on_page: int) -> float | None:
    """Bytes of the KV pool on each GPU, or ``None``.

    ``--kv-cache-memory-bytes`` is the pool itself, unless the number of blocks is overridden besides. Else the model's
    published shape times the number of blocks, which ``cache_config_info`` sums over the engines of a page.
    """
    if (
        args.kv_cache_memory_bytes
        and "num_gpu_blocks_override" not in args.explicit
        and "num_gpu_blocks_override" not in config
    ):
        return float(args.kv_cache_memory_bytes)
    names = [name for name in (args.model, args.served_model_name) if name]
    model = next((key for name in names if (key := known_model(name))), None)
    blocks, block_size = config.get("num_gpu_blocks"), config.get("block_size")
    if model is None or blocks is None or block_size is None:
        return None
    return _from_shape(
        model,
        blocks,
        block_size,
        config.get("cache_dtype", "auto"),
        engines_on_page,
        args.tensor_parallel_size or 1,
        args.pipeline_parallel_size or 1,
        args.decode_context_parallel_size or 1,
    )


@lru_cache(maxsize=256)
def _from_shape(
    model: str, blocks: str, block_size: str, dtype: str, engines: int, tensor: int, pipeline: int, context: int
) -> float | None:
    try:
        number, size = int(float(blocks)) // max(1, engines), int(float(block_size))
        if number < 1 or size < 1:
            return None
        return float(pool_bytes(named(model), number, Parallel(tensor, pipeline, context), dtype, size))
    except (CapacityError, ValueError, OverflowError):
        return None
