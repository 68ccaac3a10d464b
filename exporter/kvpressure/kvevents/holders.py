"""Who holds the prefix cache: blocks by adapter and by cache salt."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import exp
from typing import Final

from kvpressure.kvevents.reuse import ReuseEstimator

TOP: Final = 5
"""Holders that are named; the rest is ``OTHER``."""
OTHER: Final = "(other)"
NONE: Final = "(none)"
UNKNOWN: Final = "(unknown)"
_SECONDS: Final = 60.0  # over which the blocks of a holder are averaged
_EVERY_SECONDS: Final = 5.0  # the count takes milliseconds
_AVERAGED: Final = 64  # holders whose mean is kept; one that grows has its true mean a minute later
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
    """Who has most of the blocks, by adapter and by salt: means of a minute."""

    def __init__(self, blocks: ReuseEstimator) -> None:
        self._blocks = blocks
        self._mean_at = 0.0
        self._means: tuple[Mapping[str, float], ...] = ()  # blocks by adapter, and by salt

    def shares(self, now: float) -> Sequence[Mapping[str, float]]:
        """Shares (0-1) of the blocks by adapter and by salt: the largest, ``NONE``, ``UNKNOWN`` and ``OTHER``; means of
        the last minute, every few seconds. Empty where no request had an adapter, or a salt.
        """
        if not self._means or abs(now - self._mean_at) >= _EVERY_SECONDS:
            kept = exp(min(0.0, self._mean_at - now) / _SECONDS) if self._means else 0.0
            before, self._mean_at = self._means or ({}, {}), now
            self._means = tuple(_averaged(self._blocks.owners(part), before[part], kept) for part in (0, 1))
        return tuple(map(_largest, self._means))


def _averaged(counts: Counter[str], before: Mapping[str, float], kept: float) -> Mapping[str, float]:
    """Mean blocks of the holders that have most; those of all others count for ``OTHER``."""
    means = {name: kept * before.get(name, 0.0) + (1 - kept) * counts[name] for name in {*before, *counts}}
    by_size = sorted(means.keys() - {NONE, UNKNOWN, OTHER}, key=lambda name: (-means[name], name))
    small = sum(means.pop(name) for name in by_size[_AVERAGED:])
    return {**means, OTHER: means.get(OTHER, 0.0) + small}


def _largest(means: Mapping[str, float]) -> Mapping[str, float]:
    blocks = {name: mean for name, mean in means.items() if mean >= 0.5}
    if blocks.keys() <= {NONE}:
        return {}
    total = sum(blocks.values())
    named = sorted(blocks.keys() - {NONE, UNKNOWN, OTHER}, key=lambda name: (-blocks[name], name))[:TOP]
    shares = {name: blocks[name] / total for name in (*named, NONE, UNKNOWN) if name in blocks}
    return {**shares, OTHER: 1.0 - sum(shares.values())} if len(shares) < len(blocks) else shares
