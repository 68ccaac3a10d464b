"""What the plan says was measured stands in the page of the measurements."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvpressure.publish.pressure import MEASURED

PAGE = Path(__file__).parents[2] / "docs/mitigations.md"


def rows() -> dict[str, list[str]]:
    """Cells by the setting that begins the row, of the first table."""
    found: dict[str, list[str]] = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) > 8:
            found.setdefault(cells[0], cells[1:])
    return found


def row(start: str) -> tuple[int, int]:
    """Preemptions and steps of the setting that begins so."""
    cells = next(cells for title, cells in rows().items() if title.startswith(start))
    return int(cells[0]), int(cells[2].replace(" ", ""))


BASE = "as it was"
SEQS = "`max_num_seqs` {} % below "


def more(start: str) -> str:
    """Steps beyond the baseline's."""
    return f"{100 * (row(start)[1] / row(BASE)[1] - 1):.0f} %"


@pytest.mark.parametrize(("name", "figures"), [
    ("caps", lambda: [f"{row('prompts above')[1]} steps", f"{row(BASE)[1]} before"]),
    ("limit", lambda: [f"{row(SEQS.format(50) + 'the limit')[0]} of {row(BASE)[0]} preemptions"]),
    ("cut", lambda: [f"{row(SEQS.format(25) + 'what')[0]} of {row(BASE)[0]}", f"left {row(SEQS.format(50) + 'what')[0]} ",
                     more(SEQS.format(50) + "what")]),
    ("pool", lambda: [more("KV pool 30 %"), f"{row('KV pool 30 %')[0]} preemptions instead of {row(BASE)[0]}"]),
    ("watermark", lambda: [f"{row('`--watermark')[0]} of {row(BASE)[0]}", more("`--watermark"), more(SEQS.format(50) + "what")]),
])
def test_figures_of_the_plan_are_those_of_the_page(name: str, figures: object) -> None:
    assert callable(figures)
    for figure in figures():
        assert figure in MEASURED[name]


def test_every_measured_sentence_is_held() -> None:
    held = set(re.findall(r'^    \("(\w+)", lambda', Path(__file__).read_text(), re.MULTILINE))
    assert held == set(MEASURED)
