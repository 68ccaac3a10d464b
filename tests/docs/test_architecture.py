"""The map in ``docs/architecture.md`` is the code's: every room is on it, and the walk of a sample passes
files that have what it names.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "exporter" / "kvpressure"
TEXT = (ROOT / "docs" / "architecture.md").read_text()
WALK = re.findall(r"^(\d+)\. `([^`]+)` `([^`]+)`: ", TEXT.partition("<!-- walk -->")[2], re.M)
ROOMS = TEXT.partition("## Packages")[2].partition("##")[0]


def test_every_room_is_on_the_map_and_no_other() -> None:
    rooms = {f"{face.parent.name}/" for face in PACKAGE.glob("*/__init__.py")}
    rooms |= {path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")}
    assert set(re.findall(r"`([a-z_]+(?:/|\.py))`(?=[ ,])", "".join(re.findall(r"^\|[^|]*\|", ROOMS, re.M)))) == rooms


def test_the_rooms_stand_in_the_order_of_the_layers() -> None:
    config = (ROOT / "pyproject.toml").read_text().partition('type = "layers"')[2].partition("]")[0]
    floors = [re.findall(r"kvpressure\.(\w+)", line) for line in config.splitlines()]
    place = {name: floor for floor, names in enumerate(floors) for name in names}
    order = [place[name] for name in re.findall(r"^\| `([a-z]+)/`", ROOMS, re.M)]
    assert order == sorted(order)


@pytest.mark.parametrize(("file", "name"), [step[1:] for step in WALK], ids=lambda value: value)
def test_a_step_of_the_walk_is_there(file: str, name: str) -> None:
    assert re.search(rf"\b{name}\b", (PACKAGE / file).read_text())
