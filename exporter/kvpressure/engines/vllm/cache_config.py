"""The KV pool by the labels of vLLM's ``cache_config_info`` and by its arguments."""

from __future__ import annotations

from kvpressure.engines.base import Pool
from kvpressure.model import ceilings
from kvpressure.model.arguments import EngineArgs
from kvpressure.model.readings import SWAPPED, EngineReading


def positive(text: str | None) -> float | None:
    """The number in a label if it is above 0 and plausible; ``None`` for anything else ("None", "nan", "x")."""
    return ceilings.number_in(text, ceilings.LABEL) or None


def capacity_tokens(reading: EngineReading, engines_on_page: int) -> float | None:
    """Tokens that the KV cache of one engine holds; ``None`` if unknown.

    ``kv_cache_size_tokens`` where published (right for hybrid models). Else usable blocks times block size, which
    holds for models with one KV group; ``num_gpu_blocks`` is the sum over a server's data-parallel engines, and block
    0 is never used, except by V0.
    """
    config = reading.cache_config
    size = positive(config.get("kv_cache_size_tokens"))
    if size:
        return size
    blocks = positive(config.get("num_gpu_blocks"))
    tokens = positive(config.get("effective_attention_block_size")) or block_size(reading)
    if not blocks or not tokens:
        return None
    per_engine = blocks / max(1, engines_on_page)
    unused = 0 if SWAPPED in reading.gauges else 1
    return (per_engine - unused) * tokens if per_engine > 1 else None


def block_size(reading: EngineReading) -> float | None:
    """Tokens in a KV block."""
    return positive(reading.cache_config.get("block_size"))


def pool(args: EngineArgs, reading: EngineReading | None, engines_on_page: int) -> Pool:
    """``--kv-cache-memory-bytes`` is the pool itself, unless the number of blocks is overridden; else
    ``num_gpu_blocks``, which is the sum over a server's engines.
    """
    config = reading.cache_config if reading else {}
    overridden = "num_gpu_blocks_override" in args.explicit or "num_gpu_blocks_override" in config
    if args.kv_cache_memory_bytes and not overridden:
        return Pool(bytes=float(args.kv_cache_memory_bytes))
    blocks, size = positive(config.get("num_gpu_blocks")), positive(config.get("block_size"))
    if blocks is None or size is None:
        return Pool()
    return Pool(
        blocks=int(blocks) // max(1, engines_on_page), block_size=int(size), dtype=config.get("cache_dtype", "auto")
    )
