"""Every engine step as the plugin counts it: exact batch sizes and the true KV maximum."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Mapping
from typing import Final

from kvpressure.model.frozen import frozen
from kvpressure.model.readings import StepStats
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.window import MINUTE

MAX_REPORTS: Final = 256
# (size, count) pairs of all reports together; an engine makes at most 200 steps a second
MAX_ENTRIES: Final = 8_192
"""Batch sizes and counts kept in one engine's step window. Beyond: the oldest reports go; none is older than a minute.
Shown as: shorter window.
"""


@frozen
class _Increase:
    t: float
    steps: int
    decoded: int
    sizes: array[int]  # size and steps in turn: a hundred bytes less an entry than in a mapping
    kv_max: float | None


class StepWindow:
    """The plugin's counts over the last minute; keeps increases, which are smaller than the counts."""

    __slots__ = ("_entries", "_increases", "_last", "_thresholds")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._last: StepStats | None = None
        self._increases: deque[_Increase] = deque()
        self._entries = 0

    def observe(self, stats: StepStats) -> None:
        """Take a report. A known one is skipped; a new process, or a count that fell, starts the window anew."""
        before, self._last = self._last, stats
        if before is None or (stats.started, stats.exact) != (before.started, before.exact) or _shrunk(before, stats):
            self._increases.clear()
            self._entries = 0
            return
        if stats.written <= before.written:
            self._last = before
            return
        sizes = array("Q")
        for size, count in stats.sizes.items():
            if more := count - before.sizes.get(size, 0):
                sizes.extend((size, more))
        self._keep(
            _Increase(stats.written, stats.steps - before.steps, stats.decoded - before.decoded, sizes, stats.kv_max)
        )

    def _keep(self, newest: _Increase) -> None:
        """Add an increase; drop those older than a minute, and the oldest beyond the limits."""
        self._increases.append(newest)
        self._entries += len(newest.sizes)
        while len(self._increases) > 1 and (
            self._increases[0].t <= newest.t - MINUTE
            or len(self._increases) > MAX_REPORTS
            or self._entries > MAX_ENTRIES
        ):
            self._entries -= len(self._increases.popleft().sizes)

    def quantiles(self, now: float, *ranks: float) -> list[float] | None:
        """Batch sizes at these ranks (nearest rank) over the steps of the last minute; ``None`` without steps."""
        sizes: Counter[int] = Counter()
        for increase in self._since(now, MINUTE):
            for size, steps in zip(increase.sizes[::2], increase.sizes[1::2], strict=True):
                sizes[size] += steps
        total = sum(sizes.values())
        return [_at_rank(sizes, max(1, -int(-rank * total // 1))) for rank in ranks] if total else None

    def mean(self, now: float, seconds: float) -> float | None:
        """Mean batch of the steps of the last ``seconds``; ``None`` without steps."""
        increases = self._since(now, seconds)
        steps = sum(increase.steps for increase in increases)
        return sum(increase.decoded for increase in increases) / steps if steps else None

    def kv_max(self, now: float, seconds: float) -> float | None:
        """Largest KV usage (0-1) of any step of the last ``seconds``; ``None`` without steps."""
        return max((i.kv_max for i in self._since(now, seconds) if i.kv_max is not None), default=None)

    def _since(self, now: float, seconds: float) -> list[_Increase]:
        if self._last is None or now - self._last.written > self._thresholds["stale_page_seconds"]:
            return []
        return [increase for increase in self._increases if increase.t > now - seconds]


def _shrunk(before: StepStats, after: StepStats) -> bool:
    """Whether a count fell: an API server was replaced, or its report is missing."""
    return (
        after.steps < before.steps
        or after.decoded < before.decoded
        or any(after.sizes.get(size, 0) < count for size, count in before.sizes.items())
    )


def _at_rank(sizes: Mapping[int, int], rank: int) -> float:
    seen = 0
    for size in sorted(sizes):
        seen += sizes[size]
        if seen >= rank:
            break
    return float(size)
