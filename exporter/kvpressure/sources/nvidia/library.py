"""The NVML library: opened, closed, and tried again with back-off."""

from __future__ import annotations

import pynvml

from kvpressure.sources.nvidia import codes
from kvpressure.sources.nvidia.query import LibraryDown

FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 60.0


class Backoff:
    """When to try again: ``first`` seconds after a failure, twice as long after each further one, up to ``longest``."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._delay = 0.0
        self._due = 0.0

    def wait(self, now: float) -> float:
        """Seconds until the next attempt; 0 = now."""
        return max(0.0, self._due - now)

    def failed(self, now: float) -> None:
        """An attempt failed: wait longer."""
        self._delay = min(self._longest, 2 * self._delay or self._first)
        self._due = now + self._delay

    def reset(self) -> None:
        """All is well: the next attempt need not wait."""
        self._delay = self._due = 0.0


class Library:
    """NVML's state in this process. The binding loads the shared object once; it stays loaded when closed, which is
    why a driver upgrade needs a new process.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.driver: str | None = None

    def open(self) -> None:
        """Initialise. A node without GPUs is no failure.

        Raises:
            LibraryDown: with the reason.
        """
        try:
            pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
        except pynvml.NVMLError as error:
            raise LibraryDown(codes.reason_of(error.value)) from error
        self.is_open = True
        try:
            self.driver = str(pynvml.nvmlSystemGetDriverVersion())
        except (pynvml.NVMLError, UnicodeDecodeError):
            self.driver = None

    def close(self) -> None:
        """Release the driver. Calls in other threads must have ended."""
        if not self.is_open:
            return
        self.is_open = False
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            return  # the driver went first; there is nothing left to release
