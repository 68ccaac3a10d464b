"""Short, stable names for replicas whose identifiers change at every start.

A new name is a new series in every Prometheus, so a replica is named by its place among those of its model; a new one
takes the place of one that is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvpressure.model.readings import EngineReading


class Replicas:
    """Places of one target's replicas by server, model and identifier; as many as there were at once."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], dict[str, int]] = {}

    def name(self, engines: Sequence[EngineReading]) -> tuple[EngineReading, ...]:
        """The engines with their replicas' places in their names: ``0/r1`` is rank 0 of the second replica."""
        present: dict[tuple[str, str], set[str]] = {}
        for engine in engines:
            if engine.replica:
                present.setdefault((engine.dialect, engine.model_name), set()).add(engine.replica)
        if not present:
            self._places.clear()
            return tuple(engines)
        self._places = {whose: self._placed(whose, replicas) for whose, replicas in present.items()}
        return tuple(
            replace(
                engine,
                engine=f"{engine.engine}/r{self._places[engine.dialect, engine.model_name][engine.replica]}",
            )
            if engine.replica
            else engine
            for engine in engines
        )

    def _placed(self, whose: tuple[str, str], replicas: set[str]) -> dict[str, int]:
        places = dict(self._places.get(whose, {}))
        gone = sorted((place, each) for each, place in places.items() if each not in replicas)
        for replica in sorted(replicas - places.keys()):
            place = len(places)
            if gone:
                place, predecessor = gone.pop(0)
                del places[predecessor]
            places[replica] = place
        return places
