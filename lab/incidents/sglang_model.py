"""What an incident of SGLang is made of: metrics over time, and its label."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

Points = list[tuple[float, float]]


def line(points: Points) -> Callable[[float], float]:
    """Return straight lines between the points, constant before the first and after the last."""

    def value(at: float) -> float:
        if at <= points[0][0]:
            return points[0][1]
        for (left, low), (right, high) in pairwise(points):
            if at <= right:
                return low + (high - low) * (at - left) / (right - left)
        return points[-1][1]

    return value


def steps(points: Points) -> Callable[[float], float]:
    """Return the value of the latest point at or before the time."""

    def value(at: float) -> float:
        current = points[0][1]
        for when, number in points:
            if at >= when:
                current = number
        return current

    return value


@dataclass(frozen=True)
class Series:
    """One metric of an incident: a level for a gauge, a rate per second for a counter."""

    name: str
    value: Callable[[float], float]
    labels: dict[str, str] = field(default_factory=dict)
    noise: float = 0.0
    until: float = float("inf")
    """From this time on the value stands still: a scheduler that hangs no longer updates its metrics."""


@dataclass(frozen=True)
class Incident:
    """One public incident: where it is described, its label and the quoted values."""

    id: str
    source: str
    kind: str
    version: str
    gpu: str
    configuration: str
    signals: str
    log: str
    cause: str
    trap: str
    verdicts: str
    strict: str
    forbidden: str
    page: str
    grade: str
    window: tuple[int, int]
    seconds: int
    series: list[Series]
    args: list[str]
    assumed: str = ""
    conditions: str = ""
    forbidden_conditions: str = ""
    model: str = "model"
    labels: dict[str, str] = field(default_factory=dict)
    lines: list[tuple[float, str]] = field(default_factory=list)
    dead_from: float = float("inf")
    """From this time on the server does not answer."""
    restarts: list[tuple[float, int]] = field(default_factory=list)
    utilization: Callable[[float], float] | None = None
    memory_total: int | None = None


def gauge(name: str, *points: tuple[float, float], noise: float = 0.0, until: float = float("inf")) -> Series:
    """Return a gauge with straight lines between the points."""
    return Series(name, line(list(points)), {}, noise, until)


def rate(name: str, *points: tuple[float, float], noise: float = 0.02, **labels: str) -> Series:
    """Return a counter that grows by the rate of the latest point."""
    return Series(name, steps(list(points)), labels, noise)


OLD = {"engine_type": "unified"}
RANKS = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
NEW = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}


def frozen(at: float, *names: tuple[str, float]) -> list[Series]:
    """Return gauges that keep their last value from ``at`` on, after a quiet start."""
    return [Series(name, steps([(0, 0.0), (at, value)])) for name, value in names]
