"""Episodes of KV pressure on recordings of real servers: how long `kv_pressure` takes to be entered and to be left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from kvpressure.model.readings import Snapshot
from kvpressure.sources.scrape.scrape_interval import ScrapeInterval
from lab.accuracy.run import Run, Sample, Taken, Tick

OVER_SECONDS: Final = 30.0  # without a sign
AGAIN_SECONDS: Final = 60.0
ENTER_SECONDS: Final = 3.0
LEAVE_SECONDS: Final = 20.0
FAST: Final = 1.0  # seconds between two scrapes under load, the default


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode of one engine: first sign, last sign, and when it was over.

    A sign is a sample with usage at or above 0.97 and a queue, or a counted preemption; signs less than 30 s apart are
    one episode. It is over 30 s after the last sign, or when the queue is gone before that. ``entered`` and ``left``
    are seconds from the first sign and from its end; ``entered`` None = never; ``left`` None = the recording ended
    first. ``again`` = said again within a minute without a new sign. ``gaps`` = times it was not said for a while
    within the episode.
    """

    recording: str
    begin: float
    last: float
    over: float
    entered: float | None
    left: float | None
    again: bool
    gaps: int = 0


def episodes(run: Run) -> list[Episode]:
    """The episodes of every engine of a recording."""
    return [
        _judge(run.name, *found, run.said[engine], _signs(samples))
        for engine, samples in sorted(run.truth.items())
        for found in _spans(samples)
        if run.said[engine]
    ]


def said_by(rule: Callable[[Sample], bool], run: Run) -> Run:
    """The run as a rule on single samples would have judged it: `kv_pressure` where it holds, `healthy` elsewhere."""
    said = {
        engine: [Tick(s.t, "kv_pressure" if rule(s) else "healthy", 1.0) for s in samples]
        for engine, samples in run.truth.items()
        if run.said[engine]
    }
    return replace(run, said={engine: said.get(engine, []) for engine in run.truth})


def _signs(samples: Sequence[Sample]) -> list[float]:
    counted = {
        after.t
        for before, after in pairwise(s for s in samples if s.preemptions is not None)
        if (after.preemptions or 0) > (before.preemptions or 0)
    }
    return [sample.t for sample in samples if sample.full_with_queue or sample.t in counted]


def _spans(samples: Sequence[Sample]) -> Iterator[tuple[float, float, float]]:
    signs = _signs(samples)
    begins = [t for place, t in enumerate(signs) if place == 0 or t - signs[place - 1] > OVER_SECONDS]
    for begin in begins:
        last = begin
        for t in signs:
            if begin <= t <= last + OVER_SECONDS:
                last = t
        empty = (s.t for s in samples if s.t > last and s.waiting == 0)
        yield begin, last, min(last + OVER_SECONDS, next(empty, last + OVER_SECONDS))


def _judge(name: str, begin: float, last: float, over: float, ticks: Sequence[Tick], signs: Sequence[float]) -> Episode:
    inside = [tick for tick in ticks if begin <= tick.t <= over]
    entered = next((tick.t - begin for tick in inside if tick.verdict == "kv_pressure"), None)
    after = [tick for tick in ticks if tick.t > over]
    left = next((tick.t for tick in after if tick.verdict != "kv_pressure"), None)
    fresh = next((t for t in signs if t > last), float("inf"))
    again = left is not None and any(
        tick.verdict == "kv_pressure" and left < tick.t <= min(left + AGAIN_SECONDS, fresh) for tick in after
    )
    if left is not None and left > fresh:
        left = None  # the next episode began before
    gaps = sum(
        before.verdict != "kv_pressure" and now.verdict == "kv_pressure" and before.t > begin + (entered or 0.0)
        for before, now in pairwise(inside)
    )
    return Episode(name, begin, last, over, entered, None if left is None else max(0.0, left - over), again, gaps)


def at_default_pace() -> Taken:
    """Takes away the scrapes that the exporter would not have made at its default pace."""
    pace = ScrapeInterval(FAST)

    def taken(_place: int, snapshot: Snapshot) -> Snapshot | None:
        if not pace.due(snapshot.time):
            return None
        pace.started(snapshot.time)
        for page in snapshot.pages:
            pace.observe(page, snapshot.time)
        return snapshot

    return taken


def rank(values: Iterable[float], share: float) -> float:
    """Nearest-rank quantile."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
