"""The same incidents with inputs taken away: less input may give `unknown` or a lower grade, never a wrong
answer with confidence.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.accuracy import data
from benchmarks.accuracy.incidents import CONFIDENT, RIGHT, judge, judge_capture
from benchmarks.accuracy.run import Taken, replay
from kvpressure.model import readings as r
from kvpressure.model.readings import EngineReading, Scrape, Snapshot

THIRD: Final = 3
TEN: Final = 10
MISSING_OF_TEN: Final = frozenset({2, 5, 8})


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
    taken: str
    verdict: str
    right: bool
    wrong_and_confident: bool


def answers(name: str, taken: str) -> list[Answered]:
    """Every judged stretch of a recording by its name below the recordings folder."""
    run = replay(name, taken=ABLATIONS[taken])
    found = []
    for incident in data.incidents():
        if incident.name == name:
            answer = judge(incident, run)
            found.append(
                Answered(incident.id, taken, answer.verdict, answer.outcome == RIGHT, answer.wrong_and_confident)
            )
    for capture in data.captures():
        if capture.name == name:
            said = judge_capture(capture, run)
            confident = any(tick.confidence >= CONFIDENT for tick in said.ticks if tick.verdict == said.verdict)
            wrong = said.verdict not in capture.most and said.verdict != "unknown"
            title = f"{name.removesuffix('.jsonl.gz')} {capture.start:g} s"
            found.append(Answered(title, taken, said.verdict, said.verdict in capture.most, wrong and confident))
    return found


def names() -> list[str]:
    """Every recording with a judged stretch that nothing was tuned on: fresh incidents, and load shapes on
    a real vLLM.
    """
    fresh = {item.name for item in data.incidents() if item.part == data.FRESH}
    return sorted(fresh | {item.name for item in data.captures() if item.name.startswith(f"{data.LOADS}/")})


def ablate(recordings: Sequence[str], workers: int | None = None) -> list[Answered]:
    """Every ablation of the recordings."""
    jobs = [(name, taken) for name in recordings for taken in ABLATIONS]
    if workers == 1:
        return [answer for job in jobs for answer in answers(*job)]
    with ProcessPoolExecutor(workers or os.cpu_count()) as pool:
        return [answer for found in pool.map(answers, *zip(*jobs, strict=True), chunksize=4) for answer in found]


def newly_wrong(found: Iterable[Answered]) -> list[Answered]:
    """Answers that are wrong and confident with less input, and were not with all of it."""
    found = list(found)
    before = {answer.name for answer in found if answer.taken == "nothing" and answer.wrong_and_confident}
    return [answer for answer in found if answer.wrong_and_confident and answer.name not in before]


def rows(found: Iterable[Answered]) -> list[tuple[str, str, int, int, str]]:
    """One line an ablation: what was taken, right, unknown, wrong and confident, and where."""
    table = []
    found = list(found)
    for taken in ABLATIONS:
        of_it = [answer for answer in found if answer.taken == taken]
        wrong = sorted(answer.name for answer in of_it if answer.wrong_and_confident)
        right = sum(answer.right for answer in of_it)
        unknown = sum(answer.verdict == "unknown" for answer in of_it)
        table.append((taken, f"{right} of {len(of_it)}", unknown, len(wrong), ", ".join(wrong) or "-"))
    return table
