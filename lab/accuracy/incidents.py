"""Reconstructed incidents and captures of live servers: is the answer in the judged stretch the right one?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lab.accuracy.data import Capture, Incident
from lab.accuracy.run import Run, Tick
from lab.accuracy.telemetry import changes, most_frequent

CONFIDENT: Final = 0.7

RIGHT: Final = "right"
ABSTAINED: Final = "abstained"
WRONG: Final = "wrong"


@dataclass(frozen=True, slots=True)
class Answer:
    """How one incident was answered.

    ``outcome`` is about the verdict. ``confident`` = some tick carries the window's verdict with confidence of 0.7
    or more. ``forbidden_ticks`` counts ticks in the window that say a forbidden verdict with that confidence.
    """

    incident: Incident
    verdict: str
    outcome: str
    confident: bool
    confidence: float
    forbidden_ticks: int
    conditions_right: bool
    conditions_true: tuple[str, ...]
    changes: int
    ticks: tuple[Tick, ...]

    @property
    def right(self) -> bool:
        """Verdict and conditions."""
        return self.outcome == RIGHT and self.conditions_right

    @property
    def strictly_right(self) -> bool:
        """The one best answer: its verdict, and every condition that it asks for."""
        best, *conditions = self.incident.strict.split("+")
        verdict = self.verdict in self.incident.expected if best == "*" else self.verdict == best
        return verdict and set(conditions) <= set(self.conditions_true)

    @property
    def wrong_and_confident(self) -> bool:
        """The worst answer."""
        return self.outcome == WRONG and self.confident


def judge(incident: Incident, run: Run) -> Answer:
    """Score one incident by the rules of ``incidents/README``: grade C is wrong only when it says what is forbidden."""
    ticks = [tick for tick in run.said["0"] if incident.start <= tick.t <= incident.end]
    verdict = most_frequent(tick.verdict for tick in ticks)
    carrying = [tick.confidence for tick in ticks if tick.verdict == verdict]
    true = {name for tick in ticks for name, value in tick.conditions.items() if value is True}
    wanted = incident.expected_conditions
    return Answer(
        incident,
        verdict,
        _outcome(incident, verdict),
        max(carrying) >= CONFIDENT,
        sum(carrying) / len(carrying),
        sum(tick.verdict in incident.forbidden and tick.confidence >= CONFIDENT for tick in ticks),
        (not wanted or bool(true & wanted)) and not true & incident.forbidden_conditions,
        tuple(sorted(true)),
        changes(run.said["0"]),
        tuple(ticks),
    )


def _outcome(incident: Incident, verdict: str) -> str:
    if verdict in incident.expected:
        return RIGHT
    if incident.grade == "C":
        return WRONG if verdict in incident.forbidden else RIGHT
    return ABSTAINED if verdict == "unknown" else WRONG


@dataclass(frozen=True, slots=True)
class CaptureAnswer:
    """How one stretch of a live capture was answered; ``never_ticks`` = ticks that said what must never be said.

    ``confident`` = some tick carries the stretch's verdict with confidence of 0.7 or more.
    """

    capture: Capture
    verdict: str
    never_ticks: int
    histogram: tuple[tuple[str, int], ...]
    ticks: tuple[Tick, ...]
    confident: bool
    conditions_true: frozenset[str]

    @property
    def outcome(self) -> str:
        """Right, abstained or wrong, by the most frequent verdict alone."""
        if self.verdict in self.capture.most:
            return RIGHT
        return ABSTAINED if self.verdict == "unknown" else WRONG

    @property
    def conditions_right(self) -> bool:
        """One of the expected conditions was true, and none of the forbidden ones."""
        wanted = self.capture.expected_conditions
        return (not wanted or bool(self.conditions_true & wanted)) and not (
            self.conditions_true & self.capture.forbidden_conditions
        )

    @property
    def right(self) -> bool:
        """The most frequent verdict is an expected one, nothing forbidden was said, and the conditions are right."""
        return self.outcome == RIGHT and self.never_ticks == 0 and self.conditions_right

    @property
    def strictly_right(self) -> bool:
        """Right with one of the best verdicts."""
        return self.right and self.verdict in self.capture.strict

    @property
    def wrong_and_confident(self) -> bool:
        """The worst answer."""
        return self.outcome == WRONG and self.confident


def judge_capture(capture: Capture, run: Run) -> CaptureAnswer:
    """Score one stretch of a capture."""
    ticks = [tick for tick in run.said[capture.engine] if capture.start <= tick.t <= capture.end + 0.5]
    histogram = Counter(tick.verdict for tick in ticks)
    verdict = most_frequent(tick.verdict for tick in ticks)
    return CaptureAnswer(
        capture,
        verdict,
        sum(
            tick.verdict in capture.never and (tick.confidence >= CONFIDENT or not capture.confidently)
            for tick in ticks
        ),
        tuple(histogram.most_common()),
        tuple(ticks),
        any(tick.verdict == verdict and tick.confidence >= CONFIDENT for tick in ticks),
        frozenset(name for tick in ticks for name, value in tick.conditions.items() if value is True),
    )


def histogram(ticks: Sequence[Tick]) -> str:
    """Verdicts of some ticks as ``healthy 12, unknown 3``."""
    return ", ".join(f"{verdict} {count}" for verdict, count in Counter(t.verdict for t in ticks).most_common())
