"""Windows of real telemetry: recall of pressure, false claims, informative answers, baselines, time to detect."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from lab.accuracy.data import NEAR_FULL, NOT_RECORDED, Telemetry
from lab.accuracy.run import Run, Sample, Tick

WINDOW_SECONDS: Final = 30.0
WORK_SHARE: Final = 0.8

POSITIVE: Final = "preemption"  # the counter rose in the window
EPISODE: Final = "episode"  # no counter on the page; usage >= 0.97 with a queue
OTHER: Final = "no pressure"
NEUTRAL: Final = "near full"  # run labelled nearly full without preemption: either answer is defensible
NO_CLAIM: Final = "not recorded"  # run without a KV gauge: pressure must not be claimed


@dataclass(frozen=True, slots=True)
class Window:
    """One 30 s window of one run: what was true, what was said.

    ``claimed`` = some tick says ``kv_pressure``; ``verdict`` = the most frequent one.
    """

    recording: str
    part: str
    scored_only: bool
    start: float
    kind: str
    verdict: str
    claimed: bool
    full_with_queue: bool
    one_line: tuple[tuple[str, bool], ...]
    baselines: tuple[tuple[str, bool], ...]
    ticks: tuple[Tick, ...] = ()


@dataclass(frozen=True, slots=True)
class Detection:
    """How long one pressure run took to be recognised, in seconds; negative = early.

    ``onset`` is the first sample that alone makes a window qualify: usage at or above 0.97 with a queue, or the
    first counted preemption. ``delay`` None = never recognised.
    """

    recording: str
    scored_only: bool
    onset: float
    first_preemption: float | None
    delay: float | None
    changes: int


# vllm-doctor 0.6.0, KVCachePressureConfig.high_cache_usage; held to the package by ``doctor.py``
DOCTOR_USAGE: Final = 0.9

# Claim a window when any of its samples says so, as ours does.
ONE_LINE_RULES: Final[tuple[tuple[str, Callable[[Sample], bool]], ...]] = (
    ("any sample with KV usage at or above 0.97 and a queue", lambda sample: sample.full_with_queue),
    ("any sample with KV usage at or above 0.9 and a queue", lambda s: (s.kv or 0) >= 0.9 and (s.waiting or 0) > 0),
    ("any sample with KV usage at or above 0.97", lambda sample: (sample.kv or 0) >= 0.97),
    (
        "vllm-doctor 0.6.0, KV cache pressure with high confidence",
        lambda s: (s.kv or 0) >= DOCTOR_USAGE and (s.waiting or 0) > 0,
    ),
    ("vllm-doctor 0.6.0, KV cache pressure", lambda s: (s.kv or 0) >= DOCTOR_USAGE),
)

BASELINES: Final[tuple[tuple[str, Callable[[Sample, Tick], bool]], ...]] = (
    ("documented signature", lambda _sample, tick: tick.signature_met is True),
    ("device memory > 90 %", lambda sample, _tick: (sample.memory_ratio or 0) > 0.9),
    ("KV usage > 0.9", lambda sample, _tick: (sample.kv or 0) > 0.9),
)


def most_frequent(verdicts: Iterable[str]) -> str:
    """The verdict of most ticks; of equals the one that came first."""
    return Counter(verdicts).most_common(1)[0][0]


def windows(item: Telemetry, run: Run) -> list[Window]:
    """The windows of one run in which there was work in at least 80 % of the samples."""
    samples, ticks = run.truth["0"], run.said["0"]
    groups: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        groups.setdefault(int(sample.t // WINDOW_SECONDS), []).append(place)
    found: list[Window] = []
    before: float | None = None
    for number, places in groups.items():
        inside = [samples[place] for place in places]
        last = inside[-1].preemptions
        rose = last is not None and before is not None and last > before
        if before is None and last is not None:
            rose = last > (inside[0].preemptions or 0)
        before = last if last is not None else before
        spans = inside[-1].t - number * WINDOW_SECONDS >= WINDOW_SECONDS / 2
        if spans and sum(sample.working for sample in inside) >= WORK_SHARE * len(inside):
            found.append(_window(item, number * WINDOW_SECONDS, inside, [ticks[place] for place in places], rose))
    return found


def _window(item: Telemetry, start: float, inside: Sequence[Sample], ticks: Sequence[Tick], rose: bool) -> Window:
    full = any(sample.full_with_queue for sample in inside)
    counted = any(sample.preemptions is not None for sample in inside)
    verdicts = [tick.verdict for tick in ticks]
    pairs = list(zip(inside, ticks, strict=True))
    return Window(
        item.name,
        item.part,
        item.scored_only,
        start,
        _kind(item.label, rose, full and not counted),
        most_frequent(verdicts),
        "kv_pressure" in verdicts,
        full,
        tuple((name, any(rule(sample) for sample in inside)) for name, rule in ONE_LINE_RULES),
        tuple((name, sum(rule(*pair) for pair in pairs) * 2 > len(pairs)) for name, rule in BASELINES),
        tuple(ticks),
    )


def _kind(label: str, rose: bool, episode: bool) -> str:
    if label == NOT_RECORDED:
        return NO_CLAIM
    if label == NEAR_FULL:
        return NEUTRAL
    if rose:
        return POSITIVE
    return EPISODE if episode and label == "kv_pressure" else OTHER


def detection(item: Telemetry, run: Run) -> Detection | None:
    """Time to detect in a run labelled pressure; None where nothing in the run qualifies."""
    samples, ticks = run.truth["0"], run.said["0"]
    first = samples[0].preemptions or 0
    preempted = next((s.t for s in samples if s.preemptions is not None and s.preemptions > first), None)
    full = next((s.t for s in samples if s.full_with_queue), None)
    onsets = [t for t in (preempted, full) if t is not None]
    if item.label != "kv_pressure" or not onsets:
        return None
    said = next((tick.t for tick in ticks if tick.verdict == "kv_pressure"), None)
    return Detection(
        item.name,
        item.scored_only,
        min(onsets),
        preempted,
        None if said is None else round(said - min(onsets), 1),
        changes(ticks),
    )


def changes(ticks: Sequence[Tick]) -> int:
    """How often the verdict changed."""
    return sum(a.verdict != b.verdict for a, b in itertools.pairwise(ticks))
