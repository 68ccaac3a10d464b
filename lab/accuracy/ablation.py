"""All ground truth with inputs taken away: less input may give `unknown` or a lower grade, never a wrong
answer with confidence.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final

from kvpressure.model import readings as r
from kvpressure.model.readings import EngineReading, Scrape, Snapshot
from lab.accuracy import data
from lab.accuracy.incidents import CONFIDENT, RIGHT, judge, judge_capture
from lab.accuracy.run import Run, Taken, replay
from lab.accuracy.telemetry import EPISODE, NEUTRAL, POSITIVE, WINDOW_SECONDS, Window, most_frequent, windows

THIRD: Final = 3
TEN: Final = 10
MISSING_OF_TEN: Final = frozenset({2, 5, 8})
PRESSURE: Final = "kv_pressure"
LATE_SECONDS: Final = 10.0
LABELLED: Final = (data.INCIDENTS, data.FRESH, data.ONCE, data.UNTOUCHED)
KINDS: Final = {
    "incidents": frozenset(LABELLED),
    "live vLLM": frozenset({"vllm-cpu", *data.LOADS, data.STRETCHES}),
    "telemetry windows": frozenset({"h100", "burstgpt", "v1"}),
}


def _pages(change: Callable[[Scrape], Scrape]) -> Taken:
    return lambda _place, snapshot: replace(snapshot, pages=tuple(change(page) for page in snapshot.pages))


def _engines(change: Callable[[EngineReading], EngineReading]) -> Taken:
    return _pages(lambda page: replace(page, engines=tuple(change(engine) for engine in page.engines)))


def _no_counter(engine: EngineReading) -> EngineReading:
    return replace(engine, counters={name: value for name, value in engine.counters.items() if name != r.PREEMPTIONS})


def _only_page(_place: int, snapshot: Snapshot) -> Snapshot:
    pages = tuple(replace(page, args=(), env={}, gpus=()) for page in snapshot.pages)
    return Snapshot(snapshot.time, pages=pages, targets=snapshot.targets)


ABLATIONS: Final[dict[str, Taken | None]] = {
    "nothing": None,
    "no GPU": lambda _place, s: replace(s, gpus=(), owners=(), process_pods={}, expected_gpus={}),
    "no arguments": _pages(lambda page: replace(page, args=(), env={})),
    "no containers": lambda _place, s: replace(s, containers=()),
    "no logs": lambda _place, s: replace(s, logs=()),
    "no preemption counter": _engines(_no_counter),
    "no histograms": _engines(lambda engine: replace(engine, histograms={})),
    "no cache configuration": _engines(lambda engine: replace(engine, cache_config={})),
    "only the metrics endpoint": _only_page,
    "every third sample": lambda place, s: None if place % THIRD else s,
    "three of ten samples missing": lambda place, s: None if place % TEN in MISSING_OF_TEN else s,
}


@dataclass(frozen=True, slots=True)
class Answered:
    """One judged stretch with one input taken away."""

    name: str
    part: str
    taken: str
    verdict: str
    right: bool
    wrong_and_confident: bool


def answers(name: str) -> list[Answered]:
    """Every judged stretch of a recording, by its name below the recordings folder, under every ablation."""
    whole = replay(name)
    found: list[Answered] = []
    for taken, change in ABLATIONS.items():
        run = whole if change is None else replay(name, taken=change)
        found += _incidents(name, taken, run)
        found += _captures(name, taken, run)
        found += _windows(name, taken, whole, run)
    return found


def _incidents(name: str, taken: str, run: Run) -> Iterator[Answered]:
    for incident in data.incidents(LABELLED):
        if incident.name == name:
            said = judge(incident, run)
            yield Answered(
                incident.id, incident.part, taken, said.verdict, said.outcome == RIGHT, said.wrong_and_confident
            )


def _captures(name: str, taken: str, run: Run) -> Iterator[Answered]:
    for capture in data.captures():
        if capture.name == name:
            said = judge_capture(capture, run)
            title = f"{name.removesuffix('.jsonl.gz')} {capture.start:g} s"
            yield Answered(title, capture.part, taken, said.verdict, said.outcome == RIGHT, said.wrong_and_confident)


def _windows(name: str, taken: str, whole: Run, run: Run) -> Iterator[Answered]:
    """Windows of telemetry, as they were with all of the input. Pressure is claimed by any tick; pressure that begins
    with a window's last sample may be claimed a few samples later. What was said before its first sign is not wrong.
    """
    for item in data.telemetry():
        if item.name != name:
            continue
        for window in windows(item, whole):
            ticks = [tick for tick in run.said["0"] if 0 <= tick.t - window.start < WINDOW_SECONDS]
            if window.kind == NEUTRAL or not ticks:
                continue
            verdict = most_frequent(tick.verdict for tick in ticks)
            sick = window.kind in (POSITIVE, EPISODE)
            until = WINDOW_SECONDS + (LATE_SECONDS if sick else 0.0)
            near = [tick for tick in run.said["0"] if 0 <= tick.t - window.start < until]
            claims = [tick for tick in near if tick.verdict == PRESSURE]
            told = [tick for tick in ticks if tick.t >= _sign(whole, window)] if sick else claims
            wrong = sick != bool(claims)
            title = f"{name.removesuffix('.jsonl.gz')} {window.start:g} s"
            confident = any(tick.confidence >= CONFIDENT for tick in told)
            yield Answered(title, window.part, taken, verdict, not wrong, wrong and confident and verdict != "unknown")


def _sign(whole: Run, window: Window) -> float:
    """First sample of a window with a full cache and a queue, or with a preemption counted."""
    inside = [s for s in whole.truth["0"] if 0 <= s.t - window.start < WINDOW_SECONDS]
    counted = (after.t for before, after in pairwise(inside) if (after.preemptions or 0) > (before.preemptions or 0))
    full = (sample.t for sample in inside if sample.full_with_queue)
    return min((*counted, *full), default=window.start)


def names() -> list[str]:
    """Every labelled recording."""
    names = [item.name for item in data.incidents(LABELLED)]
    names += [item.name for item in data.captures()]
    return sorted({*names, *(item.name for item in data.telemetry())})


def ablate(recordings: Sequence[str], workers: int | None = None) -> list[Answered]:
    """Every ablation of the recordings."""
    largest = sorted(recordings, key=lambda name: (-(data.RECORDINGS / name).stat().st_size, name))
    if workers == 1:
        return [answer for name in largest for answer in answers(name)]
    with ProcessPoolExecutor(workers or os.cpu_count()) as pool:
        return [answer for found in pool.map(answers, largest) for answer in found]


def wrong(found: Iterable[Answered]) -> list[Answered]:
    """Answers that are wrong and confident."""
    return [answer for answer in found if answer.wrong_and_confident]


def made() -> dict[str, str]:
    """Today and the commit whose rules are replayed; ``+`` behind it = with changes that are not committed."""
    revision = subprocess.run(
        ["git", "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=+"],
        cwd=data.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {"date": datetime.now(UTC).date().isoformat(), "commit": revision.stdout.strip()}


def rows(found: Iterable[Answered]) -> list[tuple[str, ...]]:
    """One line an ablation: what was taken, right by kind of data, unknown, wrong and confident, and where."""
    table = []
    found = list(found)
    for taken in ABLATIONS:
        of_it = [answer for answer in found if answer.taken == taken]
        names = sorted(answer.name for answer in wrong(of_it))
        right = []
        for parts in KINDS.values():
            part = [answer for answer in of_it if answer.part in parts]
            right.append(f"{sum(answer.right for answer in part)} of {len(part)}")
        unknown = sum(answer.verdict == "unknown" for answer in of_it)
        table.append((taken, *right, str(unknown), str(len(names)), ", ".join(names) or "-"))
    return table
