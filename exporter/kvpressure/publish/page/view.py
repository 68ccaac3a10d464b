"""One state for people: engines in trouble first, each with triage, plan and links; shared by page and JSON."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from kvpressure.advice.mitigation import MitigationPlan, cause, plan
from kvpressure.advice.triage import TriageStep, steps
from kvpressure.advice.wording import scrape_error, words
from kvpressure.model.isolation import ENGINE, RENDER, Guard, engine_name
from kvpressure.model.readings import EngineKey
from kvpressure.model.state import CALM, EngineState, Found, State
from kvpressure.printable import capital, say
from kvpressure.publish.collector import RANKS, rank, worst_first
from kvpressure.publish.links import DASHBOARDS, Link, Links
from kvpressure.settings.thresholds import Thresholds, builtin

UNKNOWN: Final = "unknown"
OWN_LINE: Final = "documented_signature"  # shown with its five parts elsewhere

T = TypeVar("T")
Said = tuple[int, str]  # rank of a verdict, the larger the worse, and its words


@dataclass(frozen=True, slots=True)
class ViewContext:
    """Inputs of page and JSON beside the state: thresholds, and the links to dashboards and runbooks. ``guard`` counts
    the subjects that cannot be rendered.
    """

    thresholds: Thresholds = field(default_factory=builtin)
    links: Links = field(default_factory=Links)
    guard: Guard = field(default_factory=lambda: Guard(RENDER))


@dataclass(frozen=True, slots=True)
class PageEngine:
    """An engine with everything derived for people. ``worst_first``: its place on the page; ``anchor``: its stable id
    there; ``verdict``: in words; ``said``: its part of the headline.
    """

    state: EngineState
    worst_first: tuple[bool, float, EngineKey]
    anchor: str
    verdict: str
    said: Said
    triage: tuple[TriageStep, ...]
    plan: MitigationPlan
    dashboard: Link
    runbooks: tuple[Link, ...]
    standings: tuple[Found, ...]
    cause: str

    @property
    def holding(self) -> tuple[Found, ...]:
        """The conditions that are true."""
        return tuple(one for one in self.standings if one.value)

    @property
    def others(self) -> tuple[Found, ...]:
        """The conditions that are false or unknown."""
        return tuple(one for one in self.standings if not one.value)

    @property
    def calm(self) -> bool:
        """Whether nobody has to look at it now: healthy or idle, and no condition holds."""
        return self.state.diagnosis.verdict in CALM and not self.holding


def engine_view(engine: EngineState, state: State, around: ViewContext) -> PageEngine:
    """The view of one engine."""
    diagnosis = engine.diagnosis
    beside = tuple(found for name, found in diagnosis.beside.items() if name != OWN_LINE)
    holding = [one.name for one in beside if one.value]
    return PageEngine(
        state=engine,
        worst_first=worst_first(engine),
        anchor=_anchor(engine.key),
        verdict=words(diagnosis.verdict),
        said=said(engine),
        triage=steps(engine, state, around.thresholds),
        plan=plan(engine, around.thresholds),
        dashboard=around.links.dashboard("kvpressure-incident", engine.key),
        runbooks=tuple(around.links.runbooks_for(_explained(engine), holding)),
        standings=beside,
        cause=capital(cause(engine)),
    )


def _explained(engine: EngineState) -> str:
    """The verdict whose runbook explains the engine: that of a stall where it may have begun, none where the verdict
    is unknown although the engine is scraped.
    """
    found = engine.diagnosis
    if found.verdict != UNKNOWN or not engine.up:
        return found.verdict
    return "stalled" if found.holds("no_progress") else ""


def rendered_engines(
    engines: Iterable[EngineState], state: State, around: ViewContext, render: Callable[[PageEngine], T]
) -> list[tuple[PageEngine, T]]:
    """Each engine's view, and what ``render`` makes of it: of the engine without values when that raises; an engine
    whose identity cannot be rendered either is left out.
    """

    def rendered(engine: EngineState) -> tuple[PageEngine, T]:
        view = engine_view(engine, state, around)
        return view, render(view)

    return around.guard.each(
        ENGINE, engines, lambda engine: engine_name(engine.key), rendered, EngineState.without_values
    )


def dashboards(around: ViewContext) -> list[Link]:
    """Every dashboard."""
    return [around.links.dashboard(uid) for uid in DASHBOARDS]


def headline(shown: Iterable[Said], total: int) -> str:
    """The node in one sentence. ``total``: number of engines, also of those that cannot be ``shown``."""
    if not total:
        return "No engine found on this node."
    parts = [*shown]
    parts += [(RANKS[UNKNOWN], UNKNOWN)] * (total - len(parts))
    counts = Counter(text for _, text in sorted(parts, key=lambda part: part[0], reverse=True))
    counted = ", ".join(f"{say(count)} {text}" for text, count in counts.items())
    return f"{total} engine{'s' if total > 1 else ''}: {counted}."


def said(engine: EngineState) -> Said:
    """What the headline says about an engine."""
    return rank(engine), verdict_in_words(engine)


def verdict_in_words(engine: EngineState) -> str:
    """The verdict, or why the engine is down."""
    return words(engine.diagnosis.verdict) if engine.up else f"down ({scrape_error(engine)})"


def _anchor(key: EngineKey) -> str:
    return f"engine-{zlib.crc32(repr(key).encode('utf-8', 'surrogatepass')):08x}"
