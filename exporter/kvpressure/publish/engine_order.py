"""Which engines come first, on the page and on dashboards: by verdict, then by how many requests wait."""

from __future__ import annotations

from typing import Final

from kvpressure.model.state import EngineState

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
"""Verdicts: harm first; what is fine comes last."""
RANKS: Final = {verdict: rank for rank, verdict in enumerate(reversed(ORDER), 1)}
"""The larger, the worse."""


def rank(engine: EngineState) -> int:
    """Of the engine's verdict; 0 for one that is unknown here."""
    return RANKS.get(engine.diagnosis.verdict, 0)


def trouble(engine: EngineState) -> float:
    """The larger, the worse: the rank of the verdict, and a fraction below one that grows with the queue."""
    waiting = (engine.signals.load.waiting or 0.0) if engine.up else 0.0
    return rank(engine) + waiting / (waiting + 1)
