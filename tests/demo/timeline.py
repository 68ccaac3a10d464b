"""Runs a scenario through the real pipeline in simulated time, tick by tick, without a socket or a wait."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from lab.demo.scenario import SCENARIOS, Scenario
from lab.demo.source import DemoSource

from kvpressure.model.readings import Snapshot
from kvpressure.model.state import EngineState, State
from kvpressure.pipeline.pipeline import Pipeline

START = 1_700_000_000.0


class Clock:
    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def play(scenario: Scenario, seconds: int = 180) -> Iterator[tuple[int, State]]:
    """One tick a second: ``(seconds since the start, state)``."""
    clock = Clock()
    source = DemoSource(None, clock=clock, scenario=scenario, cycle_seconds=seconds + 1)
    pipeline = Pipeline()
    for tick in range(seconds):
        clock.now = START + tick
        reading = source.read()
        kinds = {kind: getattr(reading, kind) or () for kind in ("gpus", "pages", "containers", "owners", "logs")}
        yield tick, pipeline.observe(Snapshot(clock.now, targets=reading.targets, **kinds))


def engine(state: State, pod: str) -> EngineState:
    return next(engine for engine in state.engines if engine.key.pod == pod)


@cache
def played(name: str) -> tuple[tuple[int, State], ...]:
    """The scenario of that name in three minutes, once for all tests that look at it."""
    return tuple(play(SCENARIOS[name]))
