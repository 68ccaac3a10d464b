"""Snapshot in, published state out: the one path that live, demo and replay share."""

from __future__ import annotations

from kvpressure.readings import Snapshot
from kvpressure.state import State
from kvpressure.thresholds import Thresholds, builtin


class Pipeline:
    """Keeps the windows of every engine and turns each snapshot into a state."""

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self._thresholds = thresholds or builtin()

    def observe(self, snapshot: Snapshot) -> State:
        """Take one snapshot. Snapshots come in any order of time; older ones than the newest are ignored."""
        return State(time=snapshot.time, health=snapshot.health)
