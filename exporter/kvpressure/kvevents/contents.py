"""What the KV events of one engine add up to: who holds its prefix cache, and what was evicted and stored again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kvpressure.kvevents.holders import NONE, UNKNOWN, Holders, Salts
from kvpressure.kvevents.reuse import ReuseEstimator

GPU: Final = "GPU"
_FULL: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of cache groups that keep a block until it is evicted; the others drop blocks by design. None = not told."""
_KNOWN_SHARE: Final = 0.8  # of the last evictions, from which on those seen are nearly all: the oldest go first
_LAST: Final = 64  # evictions, about

HYBRID: Final = "hybrid_groups"
LATE: Final = "late"
"""Not everything in the cache was seen being stored."""


class Stored(NamedTuple):
    """Consecutive blocks that were stored. ``salt``: of the chain that begins here, 0 = none; ``None`` = the one of
    ``parent``. ``kind``: of the cache group.
    """

    blocks: Sequence[int]
    parent: int | None
    adapter: str
    salt: int | None
    block_size: int
    medium: str = GPU
    group: int | None = None
    kind: str | None = None


class Removed(NamedTuple):
    """Blocks that were evicted."""

    blocks: Sequence[int]
    medium: str = GPU
    group: int | None = None


class Cleared(NamedTuple):
    """The whole cache was dropped."""


Event = Stored | Removed | Cleared


class Contents:
    """The prefix cache on the GPU of one engine; of a hybrid model, one group with full attention.

    ``reason``: why its contents are not known, "" = they are. ``tiers``: blocks were stored on another medium too, so
    one that is stored again on the GPU may have been loaded.
    """

    def __init__(self) -> None:
        self.holders, self.reuse, self._salts = Holders(), ReuseEstimator(divisor=1), Salts()
        self.block_size: int | None = None
        self.tiers = False
        self._hybrid = False
        self._group: int | None = None
        self._clock = 0.0
        self._known_share = 0.0

    @property
    def reason(self) -> str:
        """``HYBRID``, ``LATE`` or ""."""
        return HYBRID if self._hybrid else "" if self._known_share >= _KNOWN_SHARE else LATE

    def begin(self, complete: bool) -> None:
        """Forget all blocks. ``complete``: the cache is empty now, so that all it will contain is seen."""
        self.holders.reset()
        self.reuse.reset()
        self._known_share = float(complete)

    def set_capacity(self, tokens: float | None) -> None:
        """The size of the cache, ``None`` = unknown."""
        if tokens is not None and self.block_size:
            self.reuse.capacity = int(tokens // self.block_size)

    def take(self, time: float, events: Iterable[Event]) -> None:
        """Take the events of one step. ``time``: in Unix seconds; one before the last counts as the last."""
        self._clock = self.reuse.clock = max(self._clock, time)
        for event in events:
            if isinstance(event, Cleared):
                self.begin(complete=True)
            elif event.medium != GPU:
                self.tiers = self.tiers or isinstance(event, Stored)
            elif isinstance(event, Stored):
                self._store(event)
            elif event.group == self._group:
                self._remove(event)

    def _store(self, event: Stored) -> None:
        self._hybrid = self._hybrid or (event.kind is None and bool(event.group))
        if event.kind not in _FULL:
            return
        if self.block_size is None:
            self._group = event.group
        if event.group != self._group:
            return  # the same tokens once more
        self.block_size = max(self.block_size or 0, event.block_size)
        salt = event.salt if event.salt is not None or event.parent is None else self._salts.of(event.parent)
        if salt is not None:
            self._salts.put(event.blocks, salt)
        owner = event.adapter, UNKNOWN if salt is None else f"{salt:05x}" if salt else NONE
        for block in self._sampled(event.blocks):
            self.holders.stored(block, owner, self._clock)
            self.reuse.stored(block)

    def _remove(self, event: Removed) -> None:
        for block in self._sampled(event.blocks):
            self._known_share += ((block in self.holders) - self._known_share) / _LAST
            self.holders.removed(block, self._clock)
            self.reuse.removed(block)

    def _sampled(self, blocks: Sequence[int]) -> Sequence[int]:
        divisor = min(self.holders.divisor, self.reuse.divisor)
        return blocks if divisor == 1 else [block for block in blocks if not block % divisor]
