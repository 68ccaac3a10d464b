"""KV blocks in use, from the server's metrics: usage times number of blocks, never device memory, which is
preallocated.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvpressure.errors import InputError
from kvpressure.model import readings
from kvpressure.model.readings import EngineReading, Scrape
from kvpressure.sources.base import SourceError
from kvpressure.sources.scrape.fetch import Fetcher
from kvpressure.sources.scrape.scanner import Scanner, parse_scrape
from kvpressure.sources.scrape.targets import Target
from kvpressure.toolbox.fetch import why


@dataclass(frozen=True, slots=True)
class BlockReading:
    """One reading: blocks in use and requests, over all engines of the server."""

    blocks: float
    running: float
    waiting: float


@dataclass(frozen=True, slots=True)
class Cache:
    """The cache by the server's metrics. ``blocks``: usable ones of all engines (vLLM keeps one for itself)."""

    blocks: int
    block_size: int
    engines: int

    @property
    def tokens(self) -> int:
        """Capacity in token slots of one group of attention layers."""
        return self.blocks * self.block_size


class Meter:
    """Reads one server repeatedly. Raises ``InputError`` when it is unreadable or lacks a metric."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._fetcher = Fetcher(target, 5.0)
        self._scanner = Scanner()
        self.cache = _cache(self._page(), target.name)

    def close(self) -> None:
        """Close the connection."""
        self._fetcher.close()

    def read(self) -> BlockReading | None:
        """The reading now; None when it failed."""
        try:
            page = self._page()
        except InputError:
            return None
        each = self.cache.blocks / max(1, self.cache.engines)
        usage = [engine.gauges.get(readings.KV_USAGE) for engine in page.engines]
        if not usage or None in usage:
            return None
        return BlockReading(
            sum(each * value for value in usage if value is not None),
            _sum(page.engines, readings.RUNNING),
            _sum(page.engines, readings.WAITING),
        )

    def _page(self) -> Scrape:
        name = self._target.name
        try:
            text = self._fetcher.fetch()
        except SourceError as error:
            raise InputError(f"could not scrape {name}: {why(error)}; is a vLLM server running there?") from error
        page = parse_scrape(text, target=name, time=time.time(), scanner=self._scanner)
        if page.error is not None or not page.engines:
            raise InputError(
                f"{name}: {(page.error or 'no engine').replace('_', ' ')}; allowed: the address of a running vLLM"
                " server"
            )
        return page


def _sum(engines: tuple[EngineReading, ...], name: str) -> float:
    return sum(engine.gauges.get(name, 0.0) for engine in engines)


def _cache(page: Scrape, where: str) -> Cache:
    """Size of the cache; ``num_gpu_blocks`` is already the sum over a server's engines."""
    config = page.engines[0].cache_config
    count, size = _whole(config.get("num_gpu_blocks")), _whole(config.get("block_size"))
    if size is not None and count is None:
        tokens = _whole(config.get("kv_cache_size_tokens"))
        count = None if tokens is None else len(page.engines) * (tokens // size)
    if count is None or size is None or count <= len(page.engines):
        raise InputError(
            f"{where}: the metrics do not contain the size of the KV cache (cache_config_info); update to vLLM"
            " 0.5.5 or later"
        )
    return Cache(count - len(page.engines), size, len(page.engines))


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and 0 < int(text) < 2**40 else None
