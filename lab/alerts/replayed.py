"""Recordings through the pipeline, scraped as Prometheus would."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from kvpressure.model.state import State
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.recording.reader import Reader
from lab.accuracy.data import RECORDINGS
from lab.alerts.engine import EVALUATION_SECONDS, Active, evaluate_each
from lab.alerts.series import SCRAPE_SECONDS, Series

LEAD_SECONDS: Final = 900.0  # so long the exporter has been running before; it sees nothing but itself


def alerts(
    names: Iterable[str], scrape_seconds: float = SCRAPE_SECONDS, evaluation_seconds: float = EVALUATION_SECONDS
) -> dict[str, list[Active]]:
    """Active alerts at every evaluation of each recording (path below the recordings), in seconds from its
    first tick.
    """
    found = evaluate_each(
        {name: scrapes(name, scrape_seconds) for name in names},
        scrape_seconds=scrape_seconds,
        evaluation_seconds=evaluation_seconds,
    )
    return {
        name: [replace(item, at=item.at - LEAD_SECONDS) for item in active if item.at >= LEAD_SECONDS]
        for name, active in found.items()
    }


def scrapes(name: str, scrape_seconds: float) -> Series:
    """What is scraped of one recording, after ``LEAD_SECONDS`` of an exporter without engines."""
    pipeline, series = Pipeline(), Series()
    lead = int(LEAD_SECONDS / scrape_seconds)
    for number in range(lead):
        series.add(State(0.0, ticks=number + 1))
    with Reader(RECORDINGS / name) as reader:
        _sample(
            (
                (snapshot.time, replace(pipeline.observe(snapshot), ticks=lead + number))
                for number, snapshot in enumerate(reader, 1)
            ),
            series,
            scrape_seconds,
        )
    return series


def _sample(states: Iterable[tuple[float, State]], series: Series, scrape_seconds: float) -> None:
    """Scrapes on a grid from the first state on: each gets the state that is published then."""
    due: float | None = None
    last: State | None = None
    for t, state in states:
        due = t if due is None else due
        while last is not None and due < t:
            series.add(last)
            due += scrape_seconds
        last = state
    series.add(last)
