"""What would more KV memory keep? Blocks in the cache and evicted ones ("ghosts"), fed with the hashes of KV events.

An LRU cache of f times the capacity C holds what the one of size C holds, and the (f - 1) x C most recently evicted
blocks that were not stored again. So a block that is stored again would have been a hit if fewer ghosts than that were
evicted after it. Only hashes divisible by ``divisor`` are tracked and stand for all; both engines' hashes are uniform.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from math import ceil, nan
from typing import Final

FACTORS: Final = (1.5, 2.0, 4.0, 8.0)
_TRACKED: Final = 8192  # hashes, resident and evicted: 2 MiB. Above it half of them are dropped
_HASH_BITS: Final = 2**64 - 1

Owner = tuple[str, str]
"""Adapter and salt of who had a block stored first, as published."""
_Times = tuple[float, float]  # of a ghost: when it was stored and when it was evicted


class ReuseEstimator:
    """Blocks on one medium and cache group of one engine, and counts of what was evicted and stored again.

    ``capacity``: blocks that the cache holds, ``None`` until it is known: no factor is counted before. ``clock``: time
    of the events that follow, in seconds. ``divisor``: one hash in so many is tracked; it doubles where memory would
    not do. ``counting``: whether what is stored again counts. All counts are of blocks since the start, over
    :meth:`reset` too, and never fall.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.divisor, self.clock, self.counting = 1, nan, True
        self.again = 0  # stored again after an eviction
        self.evicted_age_seconds = 0.0  # sum from the first store to the eviction, of `again`'s blocks
        self.again_gap_seconds = 0.0  # sum from the eviction to the next store, of `again`'s blocks
        self._evictions = 0
        self._gain = dict.fromkeys(FACTORS, 0)
        self._capacity = capacity
        self.reset()

    def reset(self) -> None:
        """Forget all blocks: the cache was cleared, the engine restarted, or events were lost."""
        self._resident: dict[int, tuple[float, Owner]] = {}  # when it was stored, and by whom
        self._before = self._evictions
        self._parts: list[OrderedDict[int, _Times]] = []
        self._order()

    def set_capacity(self, blocks: int) -> None:
        """Take how many blocks the cache holds."""
        if blocks != self._capacity:
            self._capacity = blocks
            self._order()

    @property
    def resident(self) -> int:
        """Blocks in the cache, as far as events were seen."""
        return len(self._resident) * self.divisor

    @property
    def gain(self) -> Mapping[float, int]:
        """Blocks that were computed again and would have been hits, by factor of the capacity.

        A factor is absent until as many blocks were evicted as it adds, and its count starts there: the list of
        ghosts is too short before.
        """
        return {factor: blocks for factor, blocks in self._gain.items() if self._long_enough(factor)}

    def owners(self, part: int) -> Counter[str]:
        """Tracked blocks in the cache by adapter (part 0) or salt (1)."""
        return Counter(owner[part] for _, owner in self._resident.values())

    def stored(self, blocks: Iterable[int], owner: Owner) -> None:
        """Blocks were stored. One that is resident is a copy, or a report of its reuse."""
        first_store = self.clock, owner
        for block in self._tracked(blocks):
            if block in self._resident:
                continue
            ghost = self._taken_out(block)
            if ghost is not None and self.counting:
                self._count(*ghost)
            self._resident[block] = first_store

    def removed(self, blocks: Iterable[int]) -> tuple[int, int]:
        """Blocks were evicted: how many are tracked, and how many of these were seen being stored."""
        tracked, seen = self._tracked(blocks), 0
        evicted: dict[int, _Times] = {}
        for block in tracked:
            stored = self._resident.pop(block, None)
            copy = None if stored else self._taken_out(block)  # the last of several
            self._evictions += self.divisor if copy is None else 0
            since = stored[0] if stored else copy[1][0] if copy else nan
            seen += since == since  # not nan
            evicted[block] = since, self.clock
        self._add(evicted.items())
        return len(tracked), seen

    def _tracked(self, blocks: Iterable[int]) -> Collection[int]:
        """Those of the blocks that are tracked, each once, after memory was made for them."""
        while True:
            rest = self.divisor - 1
            tracked = {block & _HASH_BITS: None for block in blocks if not block & rest}
            if len(self._resident) + sum(map(len, self._parts)) + len(tracked) <= _TRACKED:
                return tracked
            self.divisor *= 2
            self._resident = {block: of for block, of in self._resident.items() if not block % self.divisor}
            self._order()

    def _long_enough(self, factor: float) -> bool:
        return self._capacity is not None and self._evictions - self._before >= (factor - 1) * self._capacity

    def _count(self, evicted_later: int, times: _Times) -> None:
        self.again += self.divisor
        stored, evicted = times
        if evicted == evicted and stored == stored:  # known times
            self.again_gap_seconds += (self.clock - evicted) * self.divisor
            self.evicted_age_seconds += (evicted - stored) * self.divisor
        for factor in FACTORS:
            if self._long_enough(factor) and evicted_later * self.divisor < (factor - 1) * (self._capacity or 0):
                self._gain[factor] += self.divisor

    # --- ghosts, in parts that begin and end at the ranks up to which a factor counts: no rank has to be counted ------

    def _order(self) -> None:
        """Make the parts for the capacity and the divisor."""
        ghosts = [ghost for part in reversed(self._parts) for ghost in part.items() if not ghost[0] % self.divisor]
        blocks = [] if self._capacity is None else [(factor - 1) * self._capacity for factor in FACTORS]
        self._ranks = [0, *sorted({ceil(most / self.divisor) for most in blocks} or {_TRACKED})]
        self._sizes = [last - first for first, last in pairwise(self._ranks)]
        self._parts = [OrderedDict() for _ in self._sizes]
        self._add(ghosts)

    def _add(self, ghosts: Iterable[tuple[int, _Times]]) -> None:
        """Add ghosts as those that were evicted last; each part gives those that are too many to the next one."""
        for part, size in zip(self._parts, self._sizes, strict=True):
            part.update(ghosts)
            ghosts = [part.popitem(last=False) for _ in range(len(part) - size)]

    def _taken_out(self, block: int) -> tuple[int, _Times] | None:
        """Take a ghost out: the first rank of its part, and its times; each part after it gives its last to the one
        before.
        """
        for index, part in enumerate(self._parts):
            if block in part:
                times = part.pop(block)
                for newer, older in pairwise(self._parts[index:]):
                    if not older:
                        break
                    moved, of_moved = older.popitem()
                    newer[moved] = of_moved
                    newer.move_to_end(moved, last=False)
                return self._ranks[index], times
        return None
