"""Time of the simulation: starts at the real time and may run faster."""

from __future__ import annotations

import time


class DemoClock:
    """Unix seconds that pass ``speed`` times as fast as real ones."""

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed
        self.start = time.time()
        self._zero = time.monotonic()

    def __call__(self) -> float:
        """Simulated Unix time now."""
        return self.start + self.elapsed()

    def elapsed(self) -> float:
        """Simulated seconds since the start."""
        return (time.monotonic() - self._zero) * self.speed

    def at(self, wall: float) -> float:
        """Simulated Unix time at the real Unix time ``wall``."""
        return self.start + (wall - self.start) * self.speed
