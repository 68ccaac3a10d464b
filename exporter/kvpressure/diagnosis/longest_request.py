"""The longest request of the last hour, held during an incident.

Under pressure short requests still finish while long ones wait, are preempted or are abandoned: the longest of the
last minutes shrinks, and a limit derived from it would reject requests that were normal before.
"""

from __future__ import annotations

from collections import deque

from kvpressure.model.state import CALM
from kvpressure.signals.window import HOUR, MINUTE


class LongestRequest:
    """Longest request of one engine in tokens: the maximum over an hour, held while the verdict
    is neither healthy nor idle.
    """

    __slots__ = ("_held", "_minutes")

    def __init__(self) -> None:
        self._minutes: deque[tuple[float, float]] = deque()  # (begin of the minute, longest of it)
        self._held: float | None = None

    def observe(self, t: float, longest: float | None, verdict: str) -> float | None:
        """Take the longest of the last minutes; return the one that counts now, ``None`` before the first."""
        minutes = self._minutes
        while minutes and minutes[-1][0] > t:  # the clock stepped back
            minutes.pop()
        while minutes and minutes[0][0] < t - HOUR:
            minutes.popleft()
        if longest is not None:
            if minutes and t - minutes[-1][0] < MINUTE:
                longest = max(longest, minutes[-1][1])
                minutes[-1] = (minutes[-1][0], longest)
            else:
                minutes.append((t, longest))
        known = [tokens for _, tokens in minutes]
        if self._held is not None and verdict not in CALM:
            known.append(self._held)
        self._held = max(known, default=None)
        return self._held
