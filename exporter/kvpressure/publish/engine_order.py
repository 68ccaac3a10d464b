"""The order of engines on page, dashboards and in every command: by verdict, then by requests waiting."""

from __future__ import annotations

from typing import Final

from kvpressure.diagnosis import conditions
from kvpressure.model.readings import EngineKey
from kvpressure.model.state import CALM, EngineState

ORDER: Final = (
    "stalled",
    "kv_pressure",
    "concurrency_limited",
    "host_bound",
    "compute_bound",
    "unknown",
    "healthy",
    "idle",
)
"""Verdicts, worst first."""
RANKS: Final = {verdict: rank for rank, verdict in enumerate(reversed(ORDER), 1)}
"""The larger, the worse."""


def rank(engine: EngineState) -> int:
    """Rank of the engine's verdict, the larger the worse; 0 for a verdict that is not in ``ORDER``."""
    return RANKS.get(engine.diagnosis.verdict, 0)


def trouble(engine: EngineState) -> float:
    """Order of an engine, the larger the worse: rank of the verdict plus a fraction below 1 that grows with the
    queue.
    """
    waiting = max(0.0, engine.signals.load.waiting or 0.0) if engine.up else 0.0
    return rank(engine) + waiting / (waiting + 1)


def fine(engine: EngineState) -> bool:
    """Whether the verdict is calm and no condition holds that is bad news by itself."""
    found = engine.diagnosis
    return found.verdict in CALM and not any(
        found.conditions.get(declared.name) for declared in conditions.CONDITIONS if declared.serious
    )


def worst_first(engine: EngineState) -> tuple[bool, float, EngineKey]:
    """Sort key of engines: those in trouble before those that are fine, then by ``trouble``."""
    return fine(engine), -trouble(engine), engine.key
