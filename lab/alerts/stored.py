"""The result of the last fortnight, kept beside the code: it takes minutes, the recordings take seconds."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from lab.alerts import fortnight
from lab.alerts.engine import episodes

PATH: Final = Path(__file__).with_name("fortnight.json")


@dataclass(frozen=True, slots=True)
class DaySummary:
    """One day: its load, and how often each alert began to fire; pages and tickets apart, information left out."""

    number: int
    requests: int
    peak_share: float  # of the server's capacity, busiest window
    kv_max: float
    preemptions: int
    pages: dict[str, int]
    tickets: dict[str, int]


@dataclass(frozen=True, slots=True)
class Fortnight:
    """All days of one service."""

    service: str
    commit: str  # of the code and the rules that were measured
    capacity_per_second: float
    wall_seconds: float
    days: tuple[DaySummary, ...]


def summary(service: str, days: Sequence[fortnight.Day], wall_seconds: float) -> Fortnight:
    """What is kept of a run."""
    return Fortnight(
        service, _commit(), round(fortnight.capacity(), 3), round(wall_seconds), tuple(_day(day) for day in days)
    )


def _commit() -> str:
    """The commit that is checked out; empty outside a checkout."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=PATH.parent
    )
    return done.stdout.strip()


def _day(day: fortnight.Day) -> DaySummary:
    found = episodes(day.active)
    return DaySummary(
        day.number,
        day.requests,
        round(day.peak_per_second / fortnight.capacity(), 3),
        round(day.kv_max, 3),
        day.preemptions,
        dict(Counter(one.name for one in found if one.pages)),
        dict(Counter(one.name for one in found if not one.pages and one.severity != "info")),
    )


def save(result: Fortnight) -> None:
    """Keep it."""
    PATH.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")


def load() -> Fortnight:
    """The last result. Raises ``OSError`` when there is none."""
    body = json.loads(PATH.read_text(encoding="utf-8"))
    return Fortnight(
        body["service"],
        body["commit"],
        body["capacity_per_second"],
        body["wall_seconds"],
        tuple(DaySummary(**day) for day in body["days"]),
    )
