"""The condition `kv_exhaustion_ahead` on recordings of real servers: how long before the cache is full it warns, and
how often for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from lab.accuracy.run import Run, Sample

CONDITION: Final = "kv_exhaustion_ahead"
WITHIN_SECONDS: Final = 120.0  # a warning that nothing follows for so long was for nothing
FULL: Final = 0.97
APART_SECONDS: Final = 15.0  # warnings less far apart are one


@dataclass(frozen=True, slots=True)
class Warned:
    """One warning. ``lead`` = seconds from it to a full cache or a preemption; None = neither followed. ``peak`` = the
    highest usage that followed.
    """

    recording: str
    begin: float
    lead: float | None
    peak: float


def warnings(run: Run) -> Iterator[Warned]:
    """The warnings of every engine of a recording; those within a minute of a sign do not count."""
    for engine, samples in sorted(run.truth.items()):
        signs = list(_signs(samples))
        true = [tick.t for tick in run.said[engine] if tick.conditions.get(CONDITION)]
        for place, t in enumerate(true):
            if (place and t - true[place - 1] <= APART_SECONDS) or any(0 < t - sign <= 60 for sign in signs):
                continue
            lead = next((sign - t for sign in signs if 0 <= sign - t <= WITHIN_SECONDS), None)
            followed = [sample.kv or 0.0 for sample in samples if 0 <= sample.t - t <= WITHIN_SECONDS]
            yield Warned(run.name, t, lead, max(followed, default=0.0))


def _signs(samples: Sequence[Sample]) -> Iterator[float]:
    for before, after in pairwise([samples[0], *samples]):
        if (after.kv or 0) >= FULL or (after.preemptions or 0) > (before.preemptions or 0):
            yield after.t
