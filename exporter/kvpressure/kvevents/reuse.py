"""What would more KV memory keep? A list of evicted blocks ("ghosts"), fed with the hashes of KV events.

An LRU cache of f times the capacity C holds what the one of size C holds, and the (f - 1) x C most recently evicted
blocks that were not stored again. So a block that is stored again would have been a hit if fewer ghosts than that were
evicted after it. Only hashes divisible by ``divisor`` are tracked and stand for all; both engines' hashes are uniform.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from math import nan
from typing import Final

FACTORS: Final = (1.5, 2.0, 4.0, 8.0)
_TRACKED: Final = 16_384  # hashes, resident and evicted: 4 MiB. Above it half of them are dropped
_HASH_BITS: Final = 2**64 - 1


class _Ghosts:
    """Evicted hashes in the order of their eviction, with a Fenwick tree that counts those evicted later."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._fill([])

    def _fill(self, rows: list[tuple[int, float, float]]) -> None:
        size = 2 * _TRACKED
        self._hashes, self._evicted, self._age = array("Q", bytes(8 * size)), array("d"), array("d")
        self._count, self._oldest = array("i", bytes(4 * (size + 1))), 0
        self._slots.clear()
        for ghost, evicted, age in rows:
            self.append(ghost, evicted, age)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, ghost: int) -> bool:
        return ghost in self._slots

    def _add(self, slot: int, change: int) -> None:
        slot += 1
        while slot < len(self._count):
            self._count[slot] += change
            slot += slot & -slot

    def append(self, ghost: int, evicted: float, age: float) -> None:
        """Add a hash as the one that was evicted last."""
        if len(self._evicted) == len(self._hashes):
            self.keep(1)
        slot = len(self._evicted)
        self._evicted.append(evicted)
        self._age.append(age)
        self._hashes[slot], self._slots[ghost] = ghost, slot
        self._add(slot, 1)

    def pop(self, ghost: int) -> tuple[int, float, float]:
        """Take a hash out: how many were evicted later, and the times that :meth:`append` got."""
        slot = self._slots.pop(ghost)
        self._add(slot, -1)
        earlier, below = 0, slot
        while below:
            earlier += self._count[below]
            below &= below - 1
        return len(self._slots) - earlier, self._evicted[slot], self._age[slot]

    def drop_oldest(self) -> None:
        """Forget the hash that was evicted first."""
        while self._slots.get(self._hashes[self._oldest]) != self._oldest:
            self._oldest += 1
        self.pop(self._hashes[self._oldest])

    def keep(self, divisor: int) -> None:
        """Forget hashes that ``divisor`` does not divide, and close the gaps."""
        rows = ((ghost, slot) for ghost, slot in self._slots.items() if ghost % divisor == 0)
        self._fill([(ghost, self._evicted[slot], self._age[slot]) for ghost, slot in rows])


class ReuseEstimator:
    """Counters of what was evicted and stored again on one medium and cache group of one engine.

    ``capacity``: blocks that the cache holds, ``None`` until it is known: no factor is counted before. ``clock``: time
    of the events that follow, in seconds. ``divisor``: one hash in so many is tracked; it doubles where memory would
    not do. All counts are of blocks since the start, over :meth:`reset` too, and never fall.
    """

    def __init__(self, capacity: int | None = None, divisor: int = 16) -> None:
        self.capacity, self.divisor, self.clock = capacity, divisor, nan
        self.again = 0  # stored again after an eviction
        self.evictions = 0
        self.evicted_age_seconds = 0.0  # sum from the first store to the eviction, of `again`'s blocks
        self.again_gap_seconds = 0.0  # sum from the eviction to the next store, of `again`'s blocks
        self._gain = dict.fromkeys(FACTORS, 0)
        self.reset()

    def reset(self) -> None:
        """Forget all blocks: the cache was cleared, the engine restarted, or events were lost."""
        self._resident: dict[int, float] = {}  # hash -> when it was stored
        self._ghosts = _Ghosts()
        self._before = self.evictions

    @property
    def gain(self) -> Mapping[float, int]:
        """Blocks that were computed again and would have been hits, by factor of the capacity.

        A factor is absent until as many blocks were evicted as it adds, and its count starts there: the list of
        ghosts is too short before.
        """
        return {factor: blocks for factor, blocks in self._gain.items() if self._long_enough(factor)}

    def _long_enough(self, factor: float) -> bool:
        return self.capacity is not None and self.evictions - self._before >= (factor - 1) * self.capacity

    def stored(self, block: int) -> None:
        """A block was stored. One that is resident already is a copy or a report of its reuse."""
        if block % self.divisor:
            return
        block &= _HASH_BITS
        if block in self._resident:
            return
        if block in self._ghosts:
            later, evicted, age = self._ghosts.pop(block)
            self.again += self.divisor
            if evicted == evicted and age == age:  # known times
                self.again_gap_seconds += (self.clock - evicted) * self.divisor
                self.evicted_age_seconds += age * self.divisor
            for factor in FACTORS:
                if self._long_enough(factor) and later * self.divisor < (factor - 1) * (self.capacity or 0):
                    self._gain[factor] += self.divisor
        self._resident[block] = self.clock
        self._bound()

    def removed(self, block: int) -> None:
        """A block was evicted. One that was not seen before was stored before the events began."""
        if block % self.divisor:
            return
        block &= _HASH_BITS
        age = self.clock - self._resident.pop(block, nan)
        if block in self._ghosts:  # the last of several copies
            age = self._ghosts.pop(block)[2]
        else:
            self.evictions += self.divisor
        self._ghosts.append(block, self.clock, age)
        if self.capacity is not None and len(self._ghosts) * self.divisor > (FACTORS[-1] - 1) * self.capacity:
            self._ghosts.drop_oldest()
        self._bound()

    def _bound(self) -> None:
        while len(self._resident) + len(self._ghosts) > _TRACKED:
            self.divisor *= 2
            self._resident = {block: at for block, at in self._resident.items() if block % self.divisor == 0}
            self._ghosts.keep(self.divisor)
