"""The last fifteen minutes of each engine for the page's sparklines; bounded in memory."""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Mapping
from functools import partial
from typing import Final

from kvpressure.model.isolation import ENGINE, RENDER, Guard, engine_name
from kvpressure.model.readings import EngineKey, Snapshot
from kvpressure.model.state import EngineState, State

SLOT_SECONDS: Final = 10.0
SLOTS: Final = 90
SERIES: Final = ("kv_used_ratio_max", "running", "waiting", "batch_p95", "preemption_rate")

Points = tuple[float | None, ...]


class _Ring:
    """One engine: the largest value of each slot by series; NaN = none."""

    __slots__ = ("last", "values")

    def __init__(self, slot: int) -> None:
        self.last = slot
        self.values = {name: array("f", [math.nan] * SLOTS) for name in SERIES}

    def advance(self, slot: int) -> None:
        """Empty the slots between the last one and ``slot``; all of them if the clock stepped back."""
        if slot < self.last:
            self.last = slot - SLOTS
        for passed in range(max(self.last + 1, slot - SLOTS + 1), slot + 1):
            for series in self.values.values():
                series[passed % SLOTS] = math.nan
        self.last = slot

    def take(self, slot: int, name: str, value: float | None) -> None:
        """Keep ``value`` if it is the largest of its slot."""
        if value is not None:
            series = self.values[name]
            if not series[slot % SLOTS] >= value:  # also when there is none yet
                series[slot % SLOTS] = value


class PageHistory:
    """Largest value of every ten seconds over fifteen minutes. ``observe`` is a listener of the
    monitor. Thread-safe.
    """

    def __init__(self) -> None:
        self.guard = Guard(RENDER)
        self._rings: dict[EngineKey, _Ring] = {}
        self._lock = threading.Lock()

    def observe(self, snapshot: Snapshot, state: State) -> None:
        """Take the newest values; drop engines that are gone."""
        del snapshot
        slot = int(state.time // SLOT_SECONDS)
        with self._lock:
            present = {engine.key for engine in state.engines}
            for key in [key for key in self._rings if key not in present]:
                del self._rings[key]
            self.guard.each(ENGINE, state.engines, lambda one: engine_name(one.key), partial(self._take, slot))

    def _take(self, slot: int, engine: EngineState) -> None:
        ring = self._rings.get(engine.key)
        if ring is None:
            ring = self._rings[engine.key] = _Ring(slot)
        ring.advance(slot)
        if engine.up:
            signals = engine.signals
            ring.take(slot, "kv_used_ratio_max", signals.kv.kv_used_ratio_max)
            ring.take(slot, "running", signals.load.running)
            ring.take(slot, "waiting", signals.load.waiting)
            ring.take(slot, "batch_p95", signals.batch.batch_p95)
            ring.take(slot, "preemption_rate", signals.kv.preemption_rate)

    def of(self, key: EngineKey) -> Mapping[str, Points]:
        """Series of one engine, oldest first; empty for an unknown engine."""
        with self._lock:
            ring = self._rings.get(key)
            if ring is None:
                return {}
            first = (ring.last + 1) % SLOTS
            rows = {name: (*series[first:], *series[:first]) for name, series in ring.values.items()}
        return {
            name: tuple(None if math.isnan(value) else round(value, 4) for value in row) for name, row in rows.items()
        }
