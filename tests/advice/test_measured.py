"""What the plan says was measured stands in the page of the measurements."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpressure.advice.plan import MEASURED

PAGE = (Path(__file__).parents[2] / "docs/reports/mitigations.md").read_text()


def told(start: str) -> dict[str, int]:
    """Figures of the paragraph that begins so: preemptions, those before, and per cent of engine time."""
    line = next(line for line in PAGE.splitlines() if start in line and "preemptions " in line and "→" in line)
    before, left = map(int, re.findall(r"preemptions (\d+) → (\d+)", line)[0])
    change = re.search(r"[Ee]ngine time (?:([+-]\d+)%|as before)", line)
    assert change is not None
    return {"left": left, "before": before, "time": int(change[1] or 0)}


def row(start: str) -> list[str]:
    """Cells of the first table's row that begins so."""
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {start}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


CAPS, LIMIT, QUARTER, HALF = (
    "Caps at the edge",
    "a cut of the limit that was set",
    "**25 % below what ran",
    "**50 % below what ran",
)
POOL, WATERMARK = "`gpu_memory_utilization` down", "* **`--watermark 0.1`**"


def caps() -> list[str]:
    found, cells = told(CAPS), row("prompts above the plan")
    finished, refused = map(int, cells[-2:])
    return [
        f"preemptions fell from {found['before']} to {found['left']}",
        f"all engine steps together took {-found['time']} % less time",
        f"{finished} of {finished + refused} requests",
    ]


def limit() -> list[str]:
    assert told(LIMIT)["left"] == told(LIMIT)["before"]
    return [f"prevented none of {told(LIMIT)['before']} preemptions"]


def cut() -> list[str]:
    assert abs(told(QUARTER)["time"]) <= 3  # so the plan claims no effect on engine time
    assert abs(told(HALF)["time"]) <= 3
    assert told(HALF)["before"] == told(QUARTER)["before"]
    return [
        f"fell from {told(QUARTER)['before']} to {told(QUARTER)['left']} with max_num_seqs 25 % below the number",
        f", and to {told(HALF)['left']} with max_num_seqs 50 % below",
    ]


def pool() -> list[str]:
    return [
        f"all engine steps together took {told(POOL)['time']} % more time",
        f"preemptions rose from {told(POOL)['before']} to {told(POOL)['left']}",
    ]


def watermark() -> list[str]:
    return [
        f"preemptions fell from {told(WATERMARK)['before']} to {told(WATERMARK)['left']}",
        f"all engine steps together took {-told(WATERMARK)['time']} % less time",
    ]


@pytest.mark.parametrize("figures", [caps, limit, cut, pool, watermark])
def test_figures_of_the_plan_are_those_of_the_page(figures: Callable[[], list[str]]) -> None:
    for figure in figures():
        assert figure in MEASURED[figures.__name__]


def test_every_measured_sentence_is_held() -> None:
    assert set(MEASURED) == {"caps", "limit", "cut", "pool", "watermark"}
