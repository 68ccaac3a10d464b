"""Replay one recording: what the product said at every tick, and beside it what the raw pages say.

The truth is read with regular expressions straight from the recorded text, so that a fault in the product's own
reading cannot hide itself.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvpressure.model.readings import Snapshot
from kvpressure.model.state import EngineState, State
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.recording.reader import Reader
from kvpressure.runtime.process_tuning import tune_gc
from lab.accuracy.data import RECORDINGS, captures
from lab.accuracy.digests import Digests

_COUNTER_LINES: Final = re.compile(r"^(?:# (?:TYPE|HELP) )?vllm[:_]num_preemptions.*\n?", re.M)
_SERIES: Final = {
    name: re.compile(rf"^vllm:{pattern}(?:\{{(?P<labels>[^\n]*)\}})? (?P<value>\S+)$", re.M)
    for name, pattern in (
        ("running", "num_requests_running"),
        ("waiting", "num_requests_waiting"),
        ("kv", "(?:kv|gpu)_cache_usage_perc"),
        ("preemptions", "num_preemptions_total"),
    )
}
_ENGINE_LABEL: Final = re.compile(r'(?:^|,)engine="([^"]*)"')


Taken = Callable[[int, Snapshot], Snapshot | None]


@dataclass(frozen=True, slots=True)
class Sample:
    """What one recorded page says about one engine; ``t`` in seconds from the first tick, None = not on the page."""

    t: float
    running: float | None = None
    waiting: float | None = None
    kv: float | None = None
    preemptions: float | None = None
    memory_ratio: float | None = None

    @property
    def working(self) -> bool:
        """Requests run or wait."""
        return (self.running or 0) + (self.waiting or 0) > 0

    @property
    def full_with_queue(self) -> bool:
        """The simple rule of the evidence: usage at or above 0.97 while requests wait."""
        return (self.kv or 0) >= 0.97 and (self.waiting or 0) > 0


@dataclass(frozen=True, slots=True)
class Tick:
    """What the product said about one engine at ``t`` seconds from the first tick."""

    t: float
    verdict: str
    confidence: float
    stage: str | None = None
    evidence: Mapping[str, bool | None] = field(default_factory=dict)
    conditions: Mapping[str, bool | None] = field(default_factory=dict)
    signature_met: bool | None = None
    row: str = ""
    grade: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """One replayed recording by engine label ("0" where pages carry none), behind ``POD/`` where it has
    several servers.
    """

    name: str
    truth: Mapping[str, list[Sample]]
    said: Mapping[str, list[Tick]]
    problems: tuple[str, ...] = ()
    digests: str = ""


def replay(name: str, without_counter: bool = False, taken: Taken | None = None) -> Run:
    """Replay a recording by its name below the recordings folder, with or without the preemption counter, or with some
    input ``taken`` away; a tick that is taken away whole has no answer.
    """
    path = RECORDINGS / name
    truth = read_truth(path)
    problems: list[str] = []
    digests = Digests()
    said: dict[str, list[Tick]] = {engine: [] for engine in truth}
    rewrite = (lambda text: _COUNTER_LINES.sub("", text)) if without_counter else None
    with Reader(path, on_problem=lambda p: problems.append(f"{name}:{p.line}: {p.text}"), rewrite=rewrite) as reader:
        pipeline = Pipeline()
        start: float | None = None
        for place, snapshot in enumerate(reader):
            start = snapshot.time if start is None else start
            if taken is not None:
                left = taken(place, snapshot)
                if left is None:
                    continue
                snapshot = left
            state = pipeline.observe(snapshot)
            if not without_counter and taken is None:
                digests.add(snapshot.time, state)
            for engine, ticks in said.items():
                ticks.append(_tick(round(snapshot.time - start, 3), _engine(state, engine, len(said) == 1)))
    return Run(name + (" without counter" if without_counter else ""), truth, said, tuple(problems), str(digests))


def replay_all(jobs: Iterable[tuple[str, bool]], workers: int = 2) -> dict[tuple[str, bool], Run]:
    """Replay many (name, without counter), in parallel, largest first so that no worker idles at the end."""
    todo = sorted(set(jobs), key=lambda job: (-(RECORDINGS / job[0]).stat().st_size, job))
    if workers <= 1:
        return {job: replay(*job) for job in todo}
    with ProcessPoolExecutor(workers, initializer=tune_gc) as pool:
        return dict(zip(todo, pool.map(replay, *zip(*todo, strict=True)), strict=True))


def _engine(state: State, engine: str, only: bool) -> EngineState | None:
    """The engine of that label; the only one of a recording whatever its label, a placeholder last."""
    found = [item for item in state.engines if only or engine in (item.key.engine, f"{item.key.pod}/{item.key.engine}")]
    return max(found, key=lambda item: (item.key.model_name != "", item.up), default=None)


def _tick(t: float, state: EngineState | None) -> Tick:
    if state is None:
        return Tick(t, "unknown", 0.0)
    answer = state.diagnosis
    return Tick(
        t,
        answer.verdict,
        answer.confidence,
        answer.stage,
        {name: item.value for name, item in answer.evidence.items()},
        dict(answer.conditions),
        answer.documented_signature_met,
        answer.row,
        answer.grade,
    )


def read_truth(path: Path) -> dict[str, list[Sample]]:
    """Samples by engine label, behind ``POD/`` where the labels tell servers apart, straight from the file."""
    name = str(path.relative_to(RECORDINGS))
    apart = any(item.name == name and "/" in item.engine for item in captures())
    ticks: list[tuple[float, dict[str, dict[str, float]], float | None]] = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        next(lines)
        for line in lines:
            body = json.loads(line)
            ticks.append((body["t"], _series(body, apart), _memory_ratio(body)))
    engines = sorted({key for _, series, _ in ticks for key in series}) or ["0"]
    start = ticks[0][0]
    return {
        engine: [
            Sample(round(t - start, 3), **series.get(engine, {}), memory_ratio=memory) for t, series, memory in ticks
        ]
        for engine in engines
    }


def _series(body: Mapping[str, object], apart: bool) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for entry in body.get("engines") or ():  # type: ignore[attr-defined]  # a list by the format
        for name, pattern in _SERIES.items():
            for match in pattern.finditer(entry.get("exposition") or ""):
                label = _ENGINE_LABEL.search(match["labels"] or "")
                engine = label[1] if label else "0"
                key = f"{entry.get('pod')}/{engine}" if apart else engine
                found.setdefault(key, {})[name] = float(match["value"])
    return found


def _memory_ratio(body: Mapping[str, object]) -> float | None:
    ratios = [
        gpu["memory_used_bytes"] / gpu["memory_total_bytes"]
        for gpu in body.get("gpus") or ()  # type: ignore[attr-defined]  # a list by the format
        if gpu.get("memory_used_bytes") and gpu.get("memory_total_bytes")
    ]
    return max(ratios, default=None)
