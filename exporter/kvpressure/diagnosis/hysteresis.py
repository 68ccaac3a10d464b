"""Hysteresis: a verdict stands until another has held for a moment, so that it does not flap tick by tick."""

from __future__ import annotations

from typing import Final

from kvpressure.diagnosis.verdicts import Finding
from kvpressure.thresholds import Thresholds

_SPANS: Final = "no_progress"  # evidence that already spans many samples


def _wait(current: str, candidate: str) -> str:
    """The threshold that says how long the published verdict has to be gone before the candidate takes its place."""
    if candidate in ("kv_pressure", "idle"):
        return "pressure_enter_seconds" if candidate == "kv_pressure" else "idle_enter_seconds"
    queue_remains = candidate not in ("idle", "healthy")
    return "pressure_leave_seconds" if current == "kv_pressure" and queue_remains else "verdict_enter_seconds"


class Settled:
    """The published verdict of one engine.

    Another verdict is published once it was found in ``verdict_enter_samples`` in a row and the published one has
    not been found for ``verdict_enter_seconds`` (``pressure_enter_seconds`` for KV pressure;
    ``pressure_leave_seconds`` to end it while a queue remains, because a full cache empties and fills in waves).
    ``unknown`` gives way at the first sample, and so does a verdict that was last found more than
    ``verdict_unconfirmed_seconds`` ago, again except for KV pressure while a queue remains and for ``unknown``:
    where samples are far apart, waiting for a second one would keep what is over. That pages are missing or nothing
    moves (a stall, gauges that froze) is said at once.
    """

    __slots__ = ("_away_since", "_candidate", "_candidate_ticks", "_found", "current", "since")

    def __init__(self) -> None:
        self.current: Finding | None = None
        self.since = 0.0
        self._found = 0.0  # when the published verdict was last found
        self._away_since: float | None = None  # since when something else than the published verdict is found
        self._candidate: str | None = None
        self._candidate_ticks = 0

    def observe(self, t: float, finding: Finding, thresholds: Thresholds, page_missing: bool) -> Finding:
        """Take what was found now; what is published now."""
        current, self.since = self.current, min(self.since, t)  # a clock that steps back
        if current is None or current.verdict == finding.verdict:
            return self._publish(t, finding, changed=current is None)
        if self._away_since is None or t < self._away_since:
            self._away_since = t
        self._candidate_ticks = self._candidate_ticks + 1 if self._candidate == finding.verdict else 1
        self._candidate = finding.verdict
        wait = _wait(current.verdict, finding.verdict)
        held = self._candidate_ticks >= thresholds["verdict_enter_samples"] and t - self._away_since >= thresholds[wait]
        held |= (
            finding.verdict != "unknown"
            and wait != "pressure_leave_seconds"
            and t - self._found > thresholds["verdict_unconfirmed_seconds"]
        )
        if held or page_missing or current.verdict == "unknown" or _SPANS in finding.supporting:
            return self._publish(t, finding, changed=True)
        return current

    def _publish(self, t: float, finding: Finding, changed: bool) -> Finding:
        if changed:
            self.since = t
        self.current, self._found = finding, t
        self._away_since = self._candidate = None
        self._candidate_ticks = 0
        return finding
