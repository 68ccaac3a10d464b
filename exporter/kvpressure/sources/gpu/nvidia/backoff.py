"""Back-off between attempts."""

from __future__ import annotations


class Backoff:
    """``first`` seconds after a failure, doubled after each further one, up to ``longest``."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._delay = 0.0
        self._due = 0.0

    @property
    def begun(self) -> bool:
        """Whether something has failed since the last success."""
        return self._delay > 0

    def wait(self, now: float) -> float:
        """Seconds until the next attempt; 0 = now."""
        return max(0.0, self._due - now)

    def failed(self, now: float) -> None:
        """Note a failed attempt; the next wait is longer."""
        self._delay = min(self._longest, 2 * self._delay or self._first)
        self._due = now + self._delay

    def reset(self) -> None:
        """Note a success; the next attempt need not wait."""
        self._delay = self._due = 0.0
