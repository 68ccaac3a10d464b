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
_TAG: Final = 2**32 - 2**20  # bits of a block's hash that are kept beside its salt


class Salts:
    """The salt of every block (a number of 20 bits, 0 = none), because events give it for the first block of a request
    only.

    A table of fixed size: a block whose slot another one took since has no known salt. Nothing is kept before the first
    salt.
    """

    def __init__(self) -> None:
        self._table: array[int] | None = None

    def put(self, blocks: Iterable[int], salt: int) -> None:
        """Note the salt of blocks."""
        if self._table is None and salt:
            self._table = array("I", bytes(4 << _SLOT_BITS))
        if self._table is not None:
            table, shift = self._table, 64 - _SLOT_BITS
            for block in blocks:
                table[block >> shift] = block & _TAG | salt

    def of(self, block: int) -> int | None:
        """The salt of a block, ``None`` if it is not known any more."""
        if self._table is None:
            return 0
        entry = self._table[block >> 64 - _SLOT_BITS]
        return entry & ~_TAG if not (entry ^ block) & _TAG else None


class Holders:
    """Blocks in the cache of one engine on one medium and cache group, by who had them stored first. An owner is an
    adapter and a salt, as published.
    """

    def __init__(self) -> None:
        self.divisor = 1
        self._mean_at = 0.0
        self.reset()

    def reset(self) -> None:
        """Forget all blocks."""
        self._owners: dict[int, tuple[str, str]] = {}
        self._means: dict[tuple[str, str], float] = {}

    @property
    def resident(self) -> int:
        """Blocks in the cache, as far as events were seen."""
        return len(self._owners) * self.divisor

    def stored(self, blocks: Iterable[int], owner: tuple[str, str]) -> None:
        """Blocks were stored, multiples of ``divisor``. One that is resident keeps its owner: it is a copy, or a report
        of its reuse.
        """
        for block in blocks:
            self._owners.setdefault(block, owner)
        while len(self._owners) > _TRACKED:
            self.divisor *= 2
            self._owners = {block: owner for block, owner in self._owners.items() if not block % self.divisor}

    def removed(self, blocks: Iterable[int]) -> int:
        """Blocks were evicted; how many of them were seen being stored."""
        return sum(self._owners.pop(block, None) is not None for block in blocks)

    def shares(self, now: float) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Shares (0-1) of the blocks by adapter and by salt: the largest, ``NONE``, ``UNKNOWN`` and ``OTHER``; means of
        the last minute, over the calls. Empty where no request had an adapter, or a salt.
        """
        counts = Counter(self._owners.values())
        kept = exp(min(0.0, self._mean_at - now) / _SECONDS) if self._means else 0.0
        means = {
            owner: kept * self._means.get(owner, 0.0) + (1 - kept) * counts[owner] * self.divisor
            for owner in {*self._means, *counts}
        }
        self._means, self._mean_at = {owner: mean for owner, mean in means.items() if mean >= 0.5}, now
        return self._largest(0), self._largest(1)

    def _largest(self, part: int) -> Mapping[str, float]:
        sums, total = Counter[str](), sum(self._means.values())
        for owner, mean in self._means.items():
            sums[owner[part]] += mean / total  # type: ignore[assignment]  # a counter of shares
        if sums.keys() <= {NONE}:
            return {}
        named = sorted(sums.keys() - {NONE, UNKNOWN}, key=lambda name: (-sums[name], name))[:TOP]
        kept = {name: float(sums[name]) for name in (*named, NONE, UNKNOWN) if name in sums}
        return {**kept, OTHER: 1.0 - sum(kept.values())} if len(kept) < len(sums) else kept
