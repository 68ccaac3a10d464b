"""What the plan says was measured stands in the page of the measurements."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvpressure.advice.plan import MEASURED

PAGE = (Path(__file__).parents[2] / "docs/reports/mitigations.md").read_text().splitlines()
LINES = {  # of the page, by sentence: what its lines have, and numbers that stand elsewhere on it
    "caps": (r"\*\*Caps at the edge\*\*", {"72"}),
    "limit": (r"a cut of the limit that was set\*\*", set()),
    "cut": (r"\*\*(25|50) % below what ran at once\*\*", set()),
    "pool": (r"\*\*`gpu_memory_utilization` down\*\*", {"30"}),
    "watermark": (r"\*\*`--watermark 0.1`\*\*", set()),
}


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+", text))


@pytest.mark.parametrize("name", MEASURED)
def test_figures_of_the_plan_are_those_of_the_page(name: str) -> None:
    wanted, elsewhere = LINES[name]
    told = [line for line in PAGE if re.search(wanted, line) and "preemptions" in line]
    assert numbers(MEASURED[name]) - elsewhere <= numbers(" ".join(told))
    for before, left in re.findall(r"from (\d+) to (\d+)", MEASURED[name]):
        assert f"preemptions {before} → {left}" in " ".join(told)
    assert elsewhere <= numbers(" ".join(PAGE))
