"""Size of the KV pool where no log line reports it: from the arguments, or from the model's shape."""

from __future__ import annotations

from typing import Final

from kvpressure.capacity.errors import CapacityError
from kvpressure.capacity.kvbytes import Parallel, pool_bytes
from kvpressure.capacity.own_models import ModelShapes
from kvpressure.capacity.shapes import ModelShape
from kvpressure.engines.base import Pool
from kvpressure.model import ceilings
from kvpressure.model.arguments import EngineArgs

MAX_SIZES: Final = 256  # cached results


class PoolSizes:
    """KV pool sizes in bytes by model shape, cached."""

    def __init__(self, shapes: ModelShapes | None = None) -> None:
        self._shapes = shapes or ModelShapes()
        self._sizes: dict[tuple[object, ...], float | None] = {}

    def of(
        self, args: EngineArgs, pool: Pool, target: str = "", served: str = "", several_gpus: bool = False
    ) -> float | None:
        """Bytes of the KV pool on each GPU: as set in the arguments, else blocks times the block size of the model's
        shape; ``None`` if unknown. ``target`` and ``served`` (its name in the metrics) identify the model;
        ``several_gpus``: the server has, or may have, more than one.
        """
        if pool.bytes is not None:
            return pool.bytes
        parallel = _parallel(args, several_gpus)
        if parallel is None or not pool.blocks or not pool.block_size:
            return None
        names = tuple(name for name in (args.model, args.served_model_name, served) if name)
        key = (target, names, parallel, pool)
        if key not in self._sizes:
            if len(self._sizes) >= MAX_SIZES:
                self._sizes.clear()
            shape = self._shapes.find(names, target)
            self._sizes[key] = (
                None if shape is None else _size(shape, pool.blocks, pool.block_size, pool.dtype, parallel)
            )
        return self._sizes[key]


def _parallel(args: EngineArgs, several_gpus: bool) -> Parallel | None:
    """How the model is split over GPUs; ``None`` where several GPUs are there and arguments that are not visible may
    split it.
    """
    sizes = (args.tensor_parallel_size, args.pipeline_parallel_size, args.decode_context_parallel_size)
    if not args.complete and not any(sizes) and several_gpus:
        return None
    return Parallel(*(size or 1 for size in sizes))


def _size(shape: ModelShape, blocks: int, block_size: int, dtype: str, parallel: Parallel) -> float | None:
    if shape.recurrent_layers and len(shape.layers) > shape.recurrent_layers:
        return None  # the pool's blocks are as large as those layers need
    try:
        size = pool_bytes(shape, blocks, parallel, dtype, block_size)
    except (CapacityError, ValueError):
        return None
    return ceilings.number(size, ceilings.BYTES)
