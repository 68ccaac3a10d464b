"""Judging a stretch of time: every snapshot through the pipeline, and for each engine the moment worth reporting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvpressure.pipeline import Pipeline
from kvpressure.publish.diagnosis_json import diagnosis_document
from kvpressure.publish.view import Surroundings
from kvpressure.readings import EngineKey, Snapshot
from kvpressure.state import EngineState, State
from kvpressure.thresholds import Thresholds
from kvpressure.toolbox.lifetime import since_start
from kvpressure.toolbox.view import FINE, EngineView, engines

MAX_CHANGES: Final = 200  # of one engine that are kept for the report
_QUIET: Final = (*FINE, "unknown")


@dataclass(frozen=True, slots=True)
class Change:
    """The verdict became another one at ``t`` (Unix seconds)."""

    t: float
    verdict: str
    stage: str | None
    confidence: float


@dataclass(frozen=True, slots=True)
class Case:
    """One engine to report on, at the moment ``at``. ``seconds`` says how long each verdict stood, ``final`` is the
    verdict at the end; both are empty when only one moment is known.
    """

    view: EngineView
    at: float | None = None
    changes: tuple[Change, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    final: str = ""

    def without(self, unseen: Sequence[str]) -> Case:
        """The same, saying also that these were not seen."""
        return replace(
            self,
            view=EngineView(
                {**self.view.data, "missing": [*self.view.sentences("missing"), *unseen]}, self.view.document
            ),
        )


class _Track:
    """One engine over time."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.seconds: dict[str, float] = {}
        self.moments: dict[str, tuple[float, State]] = {}  # verdict -> its most confident moment
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
            self.changes.append(Change(state.time, found.verdict, found.stage, found.confidence))
        known = self.moments.get(found.verdict)
        if known is None or found.confidence >= known[0]:
            self.moments[found.verdict] = (found.confidence, state)
        self.last_t, self.final = state.time, found.verdict

    def worst(self, last: State) -> State:
        """The most confident moment of the trouble that lasted longest; the end when there was none."""
        trouble = [verdict for verdict in self.moments if verdict not in _QUIET]
        if not trouble:
            return last
        return self.moments[max(trouble, key=lambda verdict: self.seconds.get(verdict, 0.0))][1]


def judge(
    snapshots: Iterable[Snapshot],
    thresholds: Thresholds,
    node: str,
    *,
    worst: bool,
    on_state: Callable[[State], None] | None = None,
) -> list[Case]:
    """Run ``snapshots`` through a pipeline. ``worst`` = report each engine at its worst moment, not at the end."""
    pipeline = Pipeline(thresholds)
    tracks: dict[EngineKey, _Track] = {}
    last: State | None = None
    for snapshot in snapshots:
        last = pipeline.observe(snapshot)
        for engine in last.engines:
            tracks.setdefault(engine.key, _Track()).observe(last, engine)
        if on_state is not None:
            on_state(last)
    if last is None:
        return []
    around = Surroundings(thresholds=thresholds)
    return [
        _case(key, track, track.worst(last) if worst else last, node, around)
        for key, track in tracks.items()
        if worst or any(engine.key == key for engine in last.engines)
    ]


def _case(key: EngineKey, track: _Track, state: State, node: str, around: Surroundings) -> Case:
    """Documents are built only for what is reported."""
    document = diagnosis_document(state, node, around)
    view = next((view for view in engines(document) if _key(view.data) == key), EngineView({}, document))
    reading = next((engine.reading for engine in state.engines if engine.key == key), None)
    view = EngineView({**view.data, "since_start": since_start(reading)}, document)
    return Case(view, state.time, tuple(track.changes), track.seconds, track.final)


def _key(data: Mapping[str, Any]) -> EngineKey:
    return EngineKey(str(data["namespace"]), str(data["pod"]), str(data["model_name"]), str(data["engine"]))
