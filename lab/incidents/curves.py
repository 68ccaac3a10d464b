"""A quoted quantity over time: straight lines between quoted points, a step at the start, a repeated cycle,
lumps, noise.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

TICK: Final = 5  # seconds

Curve = Callable[[float], float]
Quoted = Any  # a number, a list of values, a mapping of seconds to values, or lumps, as YAML gives them


def curve(quoted: Quoted, before: float | None, start: float, every: float, repeat: bool) -> Curve:
    """The value at each second.

    A number holds from ``start`` on. A list holds its values at ``start``, ``start + every`` and so on; the last one
    stays, or the list repeats. A mapping names the seconds itself. Before ``start`` a number or a list has the value
    ``before``, or its first value.
    """
    if isinstance(quoted, Mapping) and "lumps" in quoted:
        return _lumps(quoted["lumps"], float(quoted["of"]))
    if isinstance(quoted, Mapping):
        return _lines([(float(t), float(v)) for t, v in sorted(quoted.items())])
    values = [float(v) for v in quoted] if isinstance(quoted, Sequence) else [float(quoted)]
    first = values[0] if before is None else float(before)
    held = _cycle(values, start, every) if repeat else _lines([(start + i * every, v) for i, v in enumerate(values)])
    return lambda t: first if t < start else held(t)


def _lines(points: list[tuple[float, float]]) -> Curve:
    times = [t for t, _ in points]

    def at(t: float) -> float:
        i = bisect_right(times, t)
        if i == 0:
            return points[0][1]
        if i == len(points):
            return points[-1][1]
        (t0, v0), (t1, v1) = points[i - 1], points[i]
        return v0 + (v1 - v0) * (t - t0) / (t1 - t0)

    return at


def _cycle(values: list[float], start: float, every: float) -> Curve:
    return lambda t: values[int((t - start) // every) % len(values)]


def _lumps(times: Sequence[float], amount: float) -> Curve:
    """A rate per second that adds ``amount`` within one tick at each of ``times``."""
    ticks = {int(t) // TICK for t in times}
    return lambda t: amount / TICK if int(t) // TICK in ticks else 0.0


class Noise:
    """Seeded noise of one quantity of one recording: the same on every machine and in every run."""

    def __init__(self, recording: str, quantity: str) -> None:
        self._random = random.Random(f"{recording}/{quantity}")

    def scale(self, value: float, share: float = 0.02) -> float:
        """The value with noise of ``share`` of itself; an exact zero stays one."""
        return value * (1 + self._bounded() * share) if value else 0.0

    def usage(self, ratio: float) -> float:
        """A usage with noise of 1 % of what is used or 3 % of what is free, whichever is less; full stays full."""
        return min(1.0, max(0.0, ratio + self._bounded() * min(0.01 * ratio, 0.03 * (1 - ratio))))

    def count(self, value: float) -> int:
        """A number of requests: below ten as quoted, from ten on with noise of 2 %."""
        return round(value if value < 10 else self.scale(value))

    def _bounded(self) -> float:
        return max(-1.5, min(1.5, self._random.gauss(0, 0.6)))


def lognormal(quoted: Mapping[str, float]) -> tuple[float, float]:
    """Location and spread of the log-normal distribution with the quoted median and 95th or 99th percentile."""
    median = float(quoted["p50"])
    z, high = (2.326, quoted["p99"]) if "p99" in quoted else (1.645, quoted["p95"])
    return math.log(median), math.log(float(high) / median) / z


def share_below(bound: float, location: float, spread: float) -> float:
    """The share of a log-normal distribution at or below ``bound``."""
    return 0.5 * (1 + math.erf((math.log(bound) - location) / (spread * math.sqrt(2))))
