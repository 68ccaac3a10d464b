"""Judges a period: runs all snapshots through the pipeline, and picks the moment to report for each engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvpressure.model.readings import EngineKey, Snapshot
from kvpressure.model.state import CALM, EngineState, State
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.page.view import ViewContext
from kvpressure.settings.thresholds import Thresholds
from kvpressure.toolbox.engine_view import EngineView, engine_view
from kvpressure.toolbox.triage import PodFacts

MAX_CHANGES: Final = 200  # of one engine that are kept for the report


@dataclass(frozen=True, slots=True)
class VerdictChange:
    """The verdict changed at ``t`` (Unix seconds)."""

    t: float
    verdict: str
    stage: str | None
    confidence: float


@dataclass(frozen=True, slots=True)
class Case:
    """One engine to report at the moment ``at``. ``seconds``: duration of each verdict; ``final``: the last verdict;
    both empty for a single moment.
    """

    view: EngineView
    at: float | None = None
    changes: tuple[VerdictChange, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    final: str = ""

    def without(self, unseen: Sequence[str]) -> Case:
        """The same case, with ``unseen`` added to its missing inputs."""
        return replace(self, view=self.view.without(unseen))


class _Track:
    """One engine over time."""

    def __init__(self, key: EngineKey, first: State) -> None:
        self.key = key
        self.last = first
        self.changes: list[VerdictChange] = []
        self.seconds: dict[str, float] = {}
        # verdict -> its most confident moment, one at which its row held before others
        self.moments: dict[str, tuple[tuple[bool, float], State]] = {}
        self.last_t: float | None = None
        self.final = ""

    def observe(self, state: State, engine: EngineState) -> None:
        found = engine.diagnosis
        if self.last_t is not None and self.final:
            self.seconds[self.final] = self.seconds.get(self.final, 0.0) + max(0.0, state.time - self.last_t)
        before = self.changes[-1] if self.changes else None
        if (before is None or (before.verdict, before.stage) != (found.verdict, found.stage)) and len(
            self.changes
        ) < MAX_CHANGES:
            self.changes.append(VerdictChange(state.time, found.verdict, found.stage, found.confidence))
        known, now = self.moments.get(found.verdict), (not found.held, found.confidence)
        if known is None or now >= known[0]:
            self.moments[found.verdict] = (now, state)
        self.last, self.last_t, self.final = state, state.time, found.verdict

    def worst(self) -> State:
        """The most confident moment of the trouble that lasted longest; the end without trouble."""
        trouble = [verdict for verdict in self.moments if verdict not in (*CALM, "unknown")]
        if not trouble:
            return self.last
        return self.moments[max(trouble, key=lambda verdict: self.seconds.get(verdict, 0.0))][1]

    def case(self, state: State, around: ViewContext) -> Case:
        """The engine at the moment of ``state``, which has it."""
        engine = next(engine for engine in state.engines if engine.key == self.key)
        view = engine_view(engine, state, around)
        return Case(view, state.time, tuple(self.changes), dict(self.seconds), self.final)


class JudgedPeriod:
    """Each engine over a period, snapshot by snapshot."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._pipeline = Pipeline(thresholds)
        self._around = ViewContext(thresholds=thresholds)
        self._tracks: dict[EngineKey, _Track] = {}
        self._last: State | None = None

    def observe(self, snapshot: Snapshot) -> None:
        """Take the next snapshot."""
        self._last = state = self._pipeline.observe(snapshot)
        for engine in state.engines:
            self._tracks.setdefault(engine.key, _Track(engine.key, state)).observe(state, engine)

    def now(self) -> list[Case]:
        """The engines of the last snapshot."""
        last = self._last
        return [self._tracks[engine.key].case(last, self._around) for engine in last.engines] if last else []

    def worst(self) -> list[Case]:
        """Each engine at its worst moment."""
        return [track.case(track.worst(), self._around) for track in self._tracks.values()]


def judge(snapshots: Iterable[Snapshot], thresholds: Thresholds, *, at_the_end: bool = False) -> list[Case]:
    """Run a past period through a pipeline, and report each engine at its worst moment, or ``at_the_end``."""
    period = JudgedPeriod(thresholds)
    for snapshot in snapshots:
        period.observe(snapshot)
    return period.now() if at_the_end else period.worst()


@dataclass(frozen=True, slots=True)
class FoundEngines:
    """Engines to report. ``again``: the input as typed, for a shell; ``facts``: from kubectl, by (namespace, pod);
    ``warnings``: such as a damaged recording. ``interrupted``: by the user, before the answer was certain.
    """

    cases: tuple[Case, ...]
    again: str
    facts: dict[tuple[str, str], PodFacts]
    warnings: tuple[str, ...] = ()
    interrupted: bool = False
