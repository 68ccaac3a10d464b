"""A signal of another package: how evenly the prompt tokens of the last minute arrived, with its metric beside it."""

from __future__ import annotations

from dataclasses import dataclass

from kvpressure.model import readings as r
from kvpressure.model.metrics import gauge, published
from kvpressure.model.signals import Signals
from kvpressure.signals.registry import ExtraSignal
from kvpressure.signals.window import MINUTE, EngineWindow


@dataclass(frozen=True, slots=True)
class ToySignals:
    """Share of the running requests' highest number that ran on average."""

    running_evenness_ratio: float | None = published(
        gauge(
            "toy_running_evenness_ratio",
            "Mean of requests_running over the last minute, divided by its maximum.",
            absent="nothing ran in the last minute",
        )
    )


def compute(window: EngineWindow, _signals: Signals) -> ToySignals:
    """Evenness now."""
    running = window.gauge_values(r.RUNNING, MINUTE)
    most = max(running, default=0.0)
    return ToySignals(sum(running) / len(running) / most if most else None)


SIGNAL = ExtraSignal("toy_evenness", ToySignals, compute)
