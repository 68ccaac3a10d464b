"""Which engines' KV events are followed: those with an endpoint. Without one, nothing is imported."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from time import time
from typing import TYPE_CHECKING, Final

from kvpressure.engines.registry import dialect
from kvpressure.kvevents.contents import NOT_INSTALLED, SHARED
from kvpressure.model.readings import (
    FINISHED_PREFIX,
    GENERATION_TOKENS,
    PREFIX_HITS,
    PREFIX_QUERIES,
    CacheReading,
    Scrape,
)
from kvpressure.sources.kvevents.addresses import Address
from kvpressure.sources.scrape.targets import Target

if TYPE_CHECKING:
    from kvpressure.sources.kvevents.subscription import Subscription

MAX_FOLLOWED: Final = 64
"""Engines whose KV events are followed. Beyond: those of further engines are not. Shown as: no
`kvpressure_kv_events_complete`.
"""


class EventFollower:
    """A subscription for each engine of targets with an endpoint of KV events."""

    def __init__(self) -> None:
        self._followed: dict[tuple[str, str], Subscription | str] = {}  # or why it is not followed

    def follow(self, target: Target, page: Scrape) -> None:
        """Follow the engines of a page. The name of an engine is its data-parallel rank, which gives its ports."""
        if target.kv_events is None or not page.engines:
            return
        named = {engine.engine for engine in page.engines}
        for key in [key for key in self._followed if key[0] == target.name and key[1] not in named]:
            self._drop(key)
        for engine in page.engines:
            addresses = target.kv_events.of_rank(int(engine.engine), target.host) if engine.engine.isdecimal() else None
            key = target.name, engine.engine
            if addresses is None or (key not in self._followed and len(self._followed) >= MAX_FOLLOWED):
                continue
            known = self._followed.get(key)
            if known is None or isinstance(known, str) or known.addresses != addresses:
                self._drop(key)
                others = {one.addresses[0] for one in self._followed.values() if not isinstance(one, str)}
                self._followed[key] = known = SHARED if addresses[0] in others else _subscribed(key, addresses)
            if not isinstance(known, str):
                known.capacity_tokens = dialect(engine.dialect).capacity_tokens(engine, page.engines_of_server(engine))
                known.done = _done(engine.counters)

    def keep(self, targets: Collection[str]) -> None:
        """Follow no other targets any more."""
        for key in [key for key in self._followed if key[0] not in targets]:
            self._drop(key)

    def readings(self) -> tuple[CacheReading, ...]:
        """What is known of each engine's cache now."""
        return tuple(
            CacheReading(*key, time(), one) if isinstance(one, str) else one.reading()
            for key, one in self._followed.items()
        )

    def _drop(self, key: tuple[str, str]) -> None:
        known = self._followed.pop(key, None)
        if known is not None and not isinstance(known, str):
            known.close()


def _done(counters: Mapping[str, float]) -> tuple[float, float]:
    """Tokens computed, which take blocks, and requests finished since the start of the engine."""
    queries, hits, generated = (counters.get(name, 0.0) for name in (PREFIX_QUERIES, PREFIX_HITS, GENERATION_TOKENS))
    finished = (value for name, value in counters.items() if name.startswith(FINISHED_PREFIX))
    return queries - hits + generated, sum(finished)


def _subscribed(key: tuple[str, str], addresses: tuple[Address, Address | None]) -> Subscription | str:
    try:
        from kvpressure.sources.kvevents.subscription import Subscription
    except ImportError:
        return NOT_INSTALLED
    return Subscription(key, addresses)
