"""Reconstructed incidents and captures of live servers: is the answer in the judged stretch the right one?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.accuracy.data import Capture, Incident
from benchmarks.accuracy.run import Run, Tick
from benchmarks.accuracy.telemetry import changes, most_frequent

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
    """How one stretch of a live capture was answered; ``never_ticks`` = ticks that said what must never be said."""

    capture: Capture
    verdict: str
    never_ticks: int
    histogram: tuple[tuple[str, int], ...]
    ticks: tuple[Tick, ...]

    @property
    def right(self) -> bool:
        """The most frequent verdict is the expected one and nothing forbidden was said."""
        return self.verdict in self.capture.most and self.never_ticks == 0


def judge_capture(capture: Capture, run: Run) -> CaptureAnswer:
    """Score one stretch of a capture."""
    ticks = [tick for tick in run.said[capture.engine] if capture.start <= tick.t <= capture.end + 0.5]
    histogram = Counter(tick.verdict for tick in ticks)
    return CaptureAnswer(
        capture,
        most_frequent(tick.verdict for tick in ticks),
        sum(histogram[verdict] for verdict in capture.never),
        tuple(histogram.most_common()),
        tuple(ticks),
    )


def histogram(ticks: Sequence[Tick]) -> str:
    """Verdicts of some ticks as ``healthy 12, unknown 3``."""
    return ", ".join(f"{verdict} {count}" for verdict, count in Counter(t.verdict for t in ticks).most_common())
