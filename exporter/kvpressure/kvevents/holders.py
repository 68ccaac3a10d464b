"""Who holds the prefix cache: blocks by adapter and by cache salt, from the hashes of KV events.

Only hashes that are multiples of ``divisor`` are tracked and stand for all, so that memory is bounded.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from math import exp
from typing import Final

TOP: Final = 5
"""Holders that are named; the rest is ``OTHER``."""
OTHER: Final = "(other)"
NONE: Final = "(none)"
UNKNOWN: Final = "(unknown)"
_TRACKED: Final = 4096  # hashes: 1 MiB, and shares within 2 points. Above it half of them are dropped
_SECONDS: Final = 60.0  # over which the blocks of a holder are averaged
_SLOT_BITS: Final = 19  # of the salts of blocks: 2 MiB
_SALT_BITS: Final = 20
_TAG: Final = 2**32 - 2**_SALT_BITS  # bits of a block's hash that are kept beside its salt

_Owner = tuple[str, str]
"""Adapter and salt, as published."""


class Salts:
    """The salt of every block, because events give it for the first block of a request only.

    A table of fixed size: a block whose slot another one took since has no known salt. Nothing is kept before the first
    salt.
    """

    def __init__(self) -> None:
        self._table: array[int] | None = None

    def __bool__(self) -> bool:
        """Whether any request had a salt."""
        return self._table is not None

    def put(self, blocks: Iterable[int], salt: int) -> None:
        """Note the salt of blocks: a number of 20 bits, 0 = none."""
        if self._table is None:
            if not salt:
                return
            self._table = array("I", bytes(4 << _SLOT_BITS))
        table, shift = self._table, 64 - _SLOT_BITS
        for block in blocks:
            table[block >> shift] = block & _TAG | salt

    def of(self, block: int) -> int | None:
        """The salt of a block, ``None`` if it is not known any more."""
        if self._table is None:
            return 0
        entry = self._table[block >> 64 - _SLOT_BITS]
        return entry & ~_TAG if not (entry ^ block) & _TAG else None


class _Tally:
    """Tracked blocks of one holder: now, and their mean over the last minute."""

    __slots__ = ("_mean", "_since", "blocks")

    def __init__(self, now: float) -> None:
        self.blocks, self._mean, self._since = 0, 0.0, now

    def mean(self, now: float) -> float:
        """The mean; its weight falls by half in 42 s."""
        now = max(now, self._since)
        self._mean = self.blocks + (self._mean - self.blocks) * exp((self._since - now) / _SECONDS)
        self._since = now
        return self._mean

    def add(self, blocks: int, now: float) -> None:
        """Change the number of blocks."""
        self.mean(now)
        self.blocks += blocks


class Holders:
    """Blocks in the cache of one engine on one medium and cache group, by who had them stored first."""

    def __init__(self) -> None:
        self.divisor = 1
        self.reset()

    def reset(self) -> None:
        """Forget all blocks."""
        self._owners: dict[int, _Owner] = {}
        self._tallies: tuple[dict[str, _Tally], dict[str, _Tally]] = ({}, {})

    @property
    def resident(self) -> int:
        """Blocks in the cache, as far as events were seen."""
        return len(self._owners) * self.divisor

    def stored(self, blocks: Iterable[int], owner: _Owner, now: float) -> None:
        """Blocks were stored, multiples of ``divisor``. One that is resident keeps its owner: it is a copy, or a report
        of its reuse.
        """
        before = len(self._owners)
        for block in blocks:
            self._owners.setdefault(block, owner)
        self._count(owner, len(self._owners) - before, now)
        while len(self._owners) > _TRACKED:
            self.divisor *= 2
            self.removed([block for block in self._owners if block % self.divisor], now)

    def removed(self, blocks: Iterable[int], now: float) -> int:
        """Blocks were evicted; how many of them were seen being stored."""
        owners = [owner for block in blocks if (owner := self._owners.pop(block, None)) is not None]
        for owner, count in Counter(owners).items():
            self._count(owner, -count, now)
        return len(owners)

    def shares(self, now: float) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Shares (0-1) of the blocks by adapter and by salt, means of the last minute: the largest, ``NONE``,
        ``UNKNOWN`` and ``OTHER``. Empty where no request had an adapter, or a salt.
        """
        adapters, salts = (self._shares(tallies, now) for tallies in self._tallies)
        return adapters, salts

    def _count(self, owner: _Owner, blocks: int, now: float) -> None:
        for tallies, name in zip(self._tallies, owner, strict=True):
            if name not in tallies:
                tallies[name] = _Tally(now)
            tallies[name].add(blocks, now)

    def _shares(self, tallies: dict[str, _Tally], now: float) -> Mapping[str, float]:
        means = {name: tally.mean(now) for name, tally in tallies.items()}
        for name in [name for name, tally in tallies.items() if not tally.blocks and means[name] < 1]:
            del tallies[name]
        total = sum(means.values())
        if total <= 0 or means.keys() <= {NONE}:
            return {}
        named = sorted(means.keys() - {NONE, UNKNOWN}, key=lambda name: (-means[name], name))[:TOP]
        kept = {name: means[name] / total for name in (*named, NONE, UNKNOWN) if name in means}
        rest = 1.0 - sum(kept.values())
        return {**kept, OTHER: rest} if len(kept) < len(means) else kept
