"""Hysteresis: a verdict stays until another has held for a while, so that it does not flap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kvpressure.diagnosis.evaluate import GOOD, Answer, Grade
from kvpressure.model.frozen import frozen
from kvpressure.settings.thresholds import Thresholds

Pair = Callable[[Answer, Answer], bool]


@frozen
class Transition:
    """How long another verdict must be found before it is published. ``samples``: times in a row. ``seconds``: the
    threshold of how long the published verdict has not been found. ``far_apart``: at once when that was last found
    more than ``kv_recent_seconds`` ago, because waiting for a second sample would keep an outdated verdict.
    """

    words: str
    applies: Pair
    samples: int
    seconds: str | None
    far_apart: bool = True


SAMPLES: Final = 2
CHANGES: Final = (
    Transition("to a missing scrape or a lack of progress", lambda _old, new: new.at_once, 0, None),
    Transition("from unknown to anything", lambda old, _new: old.verdict == "unknown", 0, None),
    Transition("to kv_pressure", lambda _old, new: new.verdict == "kv_pressure", SAMPLES, "pressure_enter_seconds"),
    Transition("to idle", lambda _old, new: new.verdict == "idle", SAMPLES, "idle_enter_seconds"),
    Transition(
        "from kv_pressure while a queue remains",
        lambda old, new: old.verdict == "kv_pressure" and new.verdict != "healthy",
        SAMPLES,
        "recent_window_seconds",
        False,
    ),
    Transition("to unknown", lambda _old, new: new.verdict == "unknown", SAMPLES, "verdict_enter_seconds", False),
    Transition("any other change", lambda _old, _new: True, SAMPLES, "verdict_enter_seconds"),
)


class VerdictHysteresis:
    """The published verdict of one engine; the first line of ``CHANGES`` that applies decides when it changes."""

    __slots__ = ("_away_since", "_candidate", "_candidate_ticks", "_found", "current", "since")

    def __init__(self) -> None:
        self.current: Answer | None = None
        self.since = 0.0
        self._found = 0.0  # when the published verdict was last found
        self._away_since: float | None = None  # since when something else than the published verdict is found
        self._candidate: str | None = None
        self._candidate_ticks = 0

    def observe(self, t: float, finding: Answer, thresholds: Thresholds) -> Answer:
        """Take what was found now; return what is published."""
        current, self.since = self.current, min(self.since, t)  # a clock that steps back
        if current is None or current.verdict == finding.verdict:
            return self._publish(t, finding, changed=current is None)
        if self._away_since is None or t < self._away_since:
            self._away_since = t
        self._candidate_ticks = self._candidate_ticks + 1 if self._candidate == finding.verdict else 1
        self._candidate = finding.verdict
        change = next(change for change in CHANGES if change.applies(current, finding))
        wait = 0.0 if change.seconds is None else thresholds[change.seconds]
        held = self._candidate_ticks >= change.samples and t - self._away_since >= wait
        if held or (change.far_apart and t - self._found > thresholds["kv_recent_seconds"]):
            return self._publish(t, finding, changed=True)
        return self._doubted(current)

    def _doubted(self, current: Answer) -> Answer:
        """``current``; if it is healthy or idle, without confidence and without a row, because none of its rows
        holds any more.
        """
        if current.verdict not in GOOD:
            return current
        return replace(current, grade=min(current.grade, Grade.DOUBTFUL), row="")

    def _publish(self, t: float, finding: Answer, changed: bool) -> Answer:
        if changed:
            self.since = t
        self.current, self._found = finding, t
        self._away_since = self._candidate = None
        self._candidate_ticks = 0
        return finding
