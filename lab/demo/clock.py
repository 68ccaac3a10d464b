"""Simulated time: starts at the real time and may run faster."""

from __future__ import annotations

import time


class DemoClock:
    """Unix seconds, fixed until ``begin`` and then ``speed`` times as fast as real ones."""

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed
        self.start = time.time()
        self._began: tuple[float, float] | None = None  # wall and monotonic time of ``begin``

    def begin(self) -> None:
        """Start the clock."""
        self._began = (time.time(), time.monotonic())

    def __call__(self) -> float:
        """Simulated Unix time now."""
        return self.start + self.elapsed()

    def elapsed(self) -> float:
        """Simulated seconds since ``begin``."""
        return 0.0 if self._began is None else (time.monotonic() - self._began[1]) * self.speed

    def at(self, wall: float) -> float:
        """Simulated Unix time at the real Unix time ``wall``."""
        return self.start + (0.0 if self._began is None else (wall - self._began[0]) * self.speed)
