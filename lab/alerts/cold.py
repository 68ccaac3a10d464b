"""Overload that no baseline was learned before: does it page, and does a batch of some minutes stay a ticket?

The server is that of the fortnight. The exporter sees it busy from its first scrape on, or is restarted in the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from kvpressure.pipeline.pipeline import Pipeline
from lab.alerts.engine import Episode, episodes, evaluate
from lab.alerts.fortnight import ENGINE, LOAD, START, Server, capacity
from lab.alerts.series import SCRAPE_SECONDS, Series
from lab.demo.requests import EngineConfig
from lab.demo.traffic import TrafficLoad

OVERLOAD: Final = 2.0  # times what the server finishes
CALM: Final = 0.5
LASTS_SECONDS: Final = 1200.0  # an overload
BATCH_SECONDS: Final = 90.0  # of work, sent within one scrape
AFTER_SECONDS: Final = 900.0  # without new requests


@dataclass(frozen=True, slots=True)
class Case:
    """One course of events. ``course``: seconds and requests per second, one after the other, for a server that
    finishes so many requests per second; ``begins``, ``restarts``, ``ends``: when the overload begins, the exporter is
    restarted, and the overload ends, in seconds.
    """

    name: str
    pages: bool
    course: Callable[[float], tuple[tuple[float, float], ...]]
    ends: float = LASTS_SECONDS
    begins: float = 0.0
    restarts: float | None = None
    engine: EngineConfig = field(default=ENGINE)
    load: TrafficLoad = field(default=LOAD)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What fired in a case."""

    case: Case
    found: tuple[Episode, ...]

    @property
    def pages(self) -> tuple[Episode, ...]:
        """What woke somebody."""
        return tuple(one for one in self.found if one.pages)

    @property
    def good(self) -> bool:
        """A page that still stands when the overload ends, or no page at all where there must be none."""
        return any(one.start <= self.case.ends <= one.end for one in self.pages) if self.case.pages else not self.pages


def cases() -> tuple[Case, ...]:
    """All of them. A few long answers on four sequences finish too seldom for quantiles; the wait is
    estimated there.
    """
    rest = (AFTER_SECONDS, 0.0)
    long_answers = replace(LOAD, output_tokens=3500, max_tokens=3500)
    return (
        Case("overload since the first scrape", True, lambda full: ((LASTS_SECONDS, OVERLOAD * full), rest)),
        Case(
            "exporter restarted in the middle of an overload",
            True,
            lambda full: ((LASTS_SECONDS, CALM * full), (LASTS_SECONDS, OVERLOAD * full), rest),
            ends=2 * LASTS_SECONDS,
            begins=LASTS_SECONDS,
            restarts=1.5 * LASTS_SECONDS,
        ),
        Case(
            "overload since the first scrape, the cache not full (16 sequences)",
            True,
            lambda full: ((LASTS_SECONDS, OVERLOAD * full), rest),
            engine=replace(ENGINE, max_num_seqs=16),
        ),
        Case(
            "few long answers, hardly one finishes",
            True,
            lambda _: ((LASTS_SECONDS, 0.2), rest),
            engine=replace(ENGINE, max_num_seqs=4),
            load=long_answers,
        ),
        Case(
            "a batch of a minute and a half, sent at once",
            False,
            lambda full: ((SCRAPE_SECONDS, full * BATCH_SECONDS / SCRAPE_SECONDS), (LASTS_SECONDS, 0.0)),
        ),
        Case("a quiet start", False, lambda full: ((LASTS_SECONDS, CALM * full), rest)),
    )


def play(case: Case) -> Outcome:
    """Simulate and evaluate one case."""
    server, series = Server(START, 7, case.engine, case.load), Series()
    for seconds, rate in case.course(capacity()):
        for scrape in range(round(seconds / SCRAPE_SECONDS)):
            if case.restarts is not None and series.scrapes == round(case.restarts / SCRAPE_SECONDS):
                server.pipeline = Pipeline()
            server.scrape(series, rate if scrape == 0 else None)
    return Outcome(case, tuple(episodes(evaluate(series))))


def outcomes() -> list[Outcome]:
    """Every case, played."""
    return [play(case) for case in cases()]
