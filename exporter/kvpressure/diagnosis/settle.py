"""Hysteresis: a verdict stands until another has held for a moment, so that it does not flap tick by tick."""

from __future__ import annotations

from typing import Final

from kvpressure.diagnosis.verdicts import Finding
from kvpressure.thresholds import Thresholds

_AT_ONCE: Final = frozenset({"stalled"})  # its own evidence already spans many samples
_SLOW_LEAVE: Final = frozenset({"kv_pressure"})


class Settled:
    """The published verdict of one engine.

    A new verdict is published once it was found in two samples in a row and for ``verdict_enter_seconds``
    (``verdict_leave_seconds`` when it would end KV pressure); ``unknown`` gives way at the first sample, and missing
    pages are said at once.
    """

    __slots__ = ("_candidate", "_candidate_since", "_candidate_ticks", "current", "since")

    def __init__(self) -> None:
        self.current: Finding | None = None
        self.since = 0.0
        self._candidate: str | None = None
        self._candidate_since = 0.0
        self._candidate_ticks = 0

    def observe(self, t: float, finding: Finding, thresholds: Thresholds, page_missing: bool) -> Finding:
        """Take what was found now; what is published now."""
        current = self.current
        if current is None or current.verdict == finding.verdict:
            self._candidate = None
            return self._publish(t, finding, changed=current is None)
        if self._candidate != finding.verdict:
            self._candidate, self._candidate_since, self._candidate_ticks = finding.verdict, t, 0
        self._candidate_ticks += 1
        wait = thresholds["verdict_leave_seconds" if current.verdict in _SLOW_LEAVE else "verdict_enter_seconds"]
        held = self._candidate_ticks >= 2 and t - self._candidate_since >= wait
        if held or page_missing or current.verdict == "unknown" or finding.verdict in _AT_ONCE:
            self._candidate = None
            return self._publish(t, finding, changed=True)
        return current

    def _publish(self, t: float, finding: Finding, changed: bool) -> Finding:
        if changed:
            self.since = t
        self.current = finding
        return finding


