"""Run everything and add it up."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from kvpressure.runtime.process_tuning import tune_gc
from lab.accuracy import data
from lab.accuracy.ahead import Warned, warnings
from lab.accuracy.data import PRESSURE
from lab.accuracy.episodes import Episode, at_default_pace, episodes, said_by
from lab.accuracy.incidents import Answer, CaptureAnswer, judge, judge_capture
from lab.accuracy.run import Run, Sample, replay, replay_all
from lab.accuracy.telemetry import (
    EPISODE,
    NEUTRAL,
    NO_CLAIM,
    ONE_LINE_RULES,
    OTHER,
    POSITIVE,
    Detection,
    Window,
    changes,
    detection,
    windows,
)

PARTS = (
    *("h100", "burstgpt", "v1"),
    *(data.INCIDENTS, data.FRESH, data.ONCE),
    *("vllm-cpu", *data.LOADS, data.STRETCHES),
)


@dataclass(frozen=True, slots=True)
class Rates:
    """Windows of one selection, counted.

    A window is claimed when any of its ticks says ``kv_pressure``: pressure may begin with a window's last
    seconds, and a false word counts however short. ``*_most`` count by the most frequent verdict instead.
    """

    positive: int
    found: int
    found_most: int
    episode: int
    episode_found: int
    other: int
    false: int
    false_most: int
    false_full: int
    informative: int
    neutral: int
    neutral_claimed: int
    not_recorded: int
    claimed_unrecorded: int

    @property
    def recall(self) -> float | None:
        """Share of windows with preemptions that were called pressure."""
        return self.found / self.positive if self.positive else None

    @property
    def false_per_1000(self) -> float | None:
        """Windows without pressure that were called pressure, of 1 000."""
        return 1000 * self.false / self.other if self.other else None

    @property
    def informative_share(self) -> float | None:
        """Share of windows without pressure whose verdict is not ``unknown``."""
        return self.informative / self.other if self.other else None


def rates(found: Sequence[Window]) -> Rates:
    """Count windows by what they were and what was said."""
    by_kind = {kind: [w for w in found if w.kind == kind] for kind in (POSITIVE, EPISODE, OTHER, NEUTRAL, NO_CLAIM)}
    positive, episode, other = by_kind[POSITIVE], by_kind[EPISODE], by_kind[OTHER]
    false = [w for w in other if w.claimed]
    return Rates(
        len(positive),
        sum(w.claimed for w in positive),
        sum(w.verdict == "kv_pressure" for w in positive),
        len(episode),
        sum(w.claimed for w in episode),
        len(other),
        len(false),
        sum(w.verdict == "kv_pressure" for w in other),
        sum(w.full_with_queue for w in false),
        sum(w.verdict != "unknown" for w in other),
        len(by_kind[NEUTRAL]),
        sum(w.claimed for w in by_kind[NEUTRAL]),
        len(by_kind[NO_CLAIM]),
        sum(w.claimed for w in by_kind[NO_CLAIM]),
    )


@dataclass(frozen=True, slots=True)
class Result:
    """Everything scored: with the preemption counter in the input and with its lines removed."""

    windows: tuple[Window, ...]
    windows_without_counter: tuple[Window, ...]
    detections: tuple[Detection, ...]
    detections_without_counter: tuple[Detection, ...]
    flaps: tuple[tuple[str, int, int], ...]  # recording, changes of verdict, ticks
    answers: tuple[Answer, ...]
    captures: tuple[CaptureAnswer, ...]
    episodes: tuple[Episode, ...]
    episodes_paced: tuple[Episode, ...]  # at the default pace
    episodes_one_line: tuple[tuple[str, tuple[Episode, ...]], ...]  # of each one-line rule on the same samples
    warned: tuple[Warned, ...]
    problems: tuple[str, ...]
    ticks: int
    digests: dict[str, str]  # by recording

    def rates(self, *, without_counter: bool = False, scored_only: bool | None = None, part: str = "") -> Rates:
        """Rates over all windows, or over those of one set or one part."""
        found = self.windows_without_counter if without_counter else self.windows
        return rates([w for w in found if scored_only in (None, w.scored_only) and part in ("", w.part)])

    def graded(self) -> list[Answer]:
        """Incidents whose cause is confirmed or plausibly stated (grades A and B)."""
        return [a for a in self.answers if a.incident.grade != "C"]


def score(parts: Sequence[str] = PARTS, workers: int | None = None, only: str = "") -> Result:
    """Replay and score some parts; ``only`` restricts to recordings whose name contains it."""
    telemetry = [item for item in data.telemetry() if item.part in parts and only in item.name]
    scored = (data.INCIDENTS, data.FRESH, data.ONCE, *((data.UNTOUCHED,) if data.UNTOUCHED in parts else ()))
    incidents = [item for item in data.incidents(scored) if item.part in parts and only in item.name]
    captures = [item for item in data.captures() if item.name.split("/")[0] in parts and only in item.name]
    jobs = [(item.name, without) for item in telemetry for without in (False, True)]
    jobs += [(name, False) for name in (*(i.name for i in incidents), *(c.name for c in captures))]
    workers = workers or os.cpu_count() or 1
    runs = replay_all(jobs, workers)
    plain = {name: run for (name, without), run in sorted(runs.items()) if not without}
    stripped = {name: run for (name, without), run in sorted(runs.items()) if without}
    live = {item.name for item in telemetry if item.label == PRESSURE} | {item.name for item in captures}
    real = {item.name for item in telemetry} | {item.name for item in captures}
    sick = [name for name in sorted(live) if episodes(plain[name])]
    return Result(
        _windows(telemetry, plain),
        _windows(telemetry, stripped),
        _detections(telemetry, plain),
        _detections(telemetry, stripped),
        tuple((item.name, *_flaps(plain[item.name])) for item in telemetry),
        tuple(judge(item, plain[item.name]) for item in incidents),
        tuple(judge_capture(item, plain[item.name]) for item in captures),
        tuple(found for name in sick for found in episodes(plain[name])),
        tuple(found for run in paced_runs(sick, workers) for found in episodes(run)),
        tuple((title, _by_rule([plain[name] for name in sick], rule)) for title, rule in ONE_LINE_RULES),
        tuple(one for name in sorted(real) for one in warnings(plain[name])),
        tuple(problem for run in runs.values() for problem in run.problems),
        sum(len(ticks) for run in runs.values() for ticks in run.said.values()),
        {name: run.digests for name, run in plain.items()},
    )


def _by_rule(runs: Sequence[Run], rule: Callable[[Sample], bool]) -> tuple[Episode, ...]:
    return tuple(found for run in runs for found in episodes(said_by(rule, run)))


def paced_runs(names: Sequence[str], workers: int) -> list[Run]:
    """Recordings replayed at the default pace."""
    if workers <= 1:
        return [_paced(name) for name in names]
    with ProcessPoolExecutor(workers, initializer=tune_gc) as pool:
        return list(pool.map(_paced, names))


def _paced(name: str) -> Run:
    return replay(name, taken=at_default_pace())


def _windows(items: Sequence[data.Telemetry], runs: dict[str, Run]) -> tuple[Window, ...]:
    return tuple(window for item in items for window in windows(item, runs[item.name]))


def _detections(items: Sequence[data.Telemetry], runs: dict[str, Run]) -> tuple[Detection, ...]:
    found = (detection(item, runs[item.name]) for item in items)
    return tuple(item for item in found if item is not None)


def _flaps(run: Run) -> tuple[int, int]:
    return sum(changes(ticks) for ticks in run.said.values()), sum(len(ticks) for ticks in run.said.values())
