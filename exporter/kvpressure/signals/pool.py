"""Size of the KV pool where no log line tells it: from the configuration, or from the model's shape."""

from __future__ import annotations

from functools import lru_cache

from kvpressure.capacity.errors import CapacityError
from kvpressure.capacity.kvbytes import Parallel, pool_bytes
from kvpressure.capacity.models import known, named
from kvpressure.engines.base import Pool
from kvpressure.model.arguments import EngineArgs

known_model = lru_cache(maxsize=256)(known)


def from_configuration(args: EngineArgs, pool: Pool) -> float | None:
    """Bytes of the KV pool on each GPU, or ``None``: as set outright, else the model's published shape
    times the number of blocks.
    """
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
    shape = named(model)
    if shape.recurrent_layers and len(shape.layers) > shape.recurrent_layers:
        return None  # the pool's blocks are as large as those layers need
    try:
        return float(pool_bytes(shape, blocks, Parallel(tensor, pipeline, context), dtype, block_size))
    except (CapacityError, ValueError, OverflowError):
        return None
