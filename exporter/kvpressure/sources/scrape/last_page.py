"""The last scrape's lines of one target, so that of the next scrape only changed lines are parsed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress, count
from operator import ne
from sys import getsizeof
from typing import Final

from kvpressure.model.ceilings import number_in
from kvpressure.sources.scrape.layout import UNWANTED

LINE_BYTES: Final = 80  # of a kept line beside its text: the object and two list entries

SlotOf = Callable[[str], int | None]


class LastPage:
    """Lines, the slot of each, and values by slot. Kept only if every line has a known form, a valid number and its
    own slot.
    """

    __slots__ = ("_lines", "_slots", "_values", "bytes")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Keep nothing."""
        self._lines: list[str] = []
        self._slots: list[int] = []
        self._values: list[float | None] = []
        self.bytes = 0  # of memory

    def keep(self, text: str, lines: list[str], slot_of: SlotOf, values: Sequence[float | None]) -> None:
        """Keep a page whose numbers are all valid, if its lines allow it."""
        slots = []
        for line in lines:
            slot = slot_of(line.rpartition(" ")[0]) if line else UNWANTED
            if slot is None:
                return
            slots.append(slot)
        wanted = [slot for slot in slots if slot >= 0]
        if len(set(wanted)) == len(wanted):
            self._lines, self._slots, self._values = lines, slots, list(values)
            self.bytes = getsizeof(text) + LINE_BYTES * len(lines)

    def replace(
        self, text: str, lines: list[str], slot_of: SlotOf, ceilings: Sequence[float]
    ) -> list[float | None] | None:
        """Keep this page instead; returns its values, or ``None`` (and keeps nothing) if it must be parsed as a
        whole.

        Values of removed lines are cleared first, then those of new lines are set.
        """
        kept, values, slots = len(self._lines), self._values, self._slots
        if not kept:
            return None
        places = [*compress(count(), map(ne, lines, self._lines)), *range(kept, len(lines))]
        gone = [*(slots[place] for place in places if place < kept), *slots[len(lines) :]]
        for slot in gone:
            if slot >= 0:
                values[slot] = None
        slots[len(lines) :] = [UNWANTED] * (len(lines) - kept)
        for place in places:
            key, _, number = lines[place].rpartition(" ")
            slot = slot_of(key) if lines[place] else UNWANTED
            if slot is None:
                break
            slots[place] = slot
            if slot >= 0:
                value = number_in(number, ceilings[slot])
                if value is None or values[slot] is not None:
                    break
                values[slot] = value
        else:
            self._lines, self.bytes = lines, getsizeof(text) + LINE_BYTES * len(lines)
            return values.copy()
        self.forget()
        return None
