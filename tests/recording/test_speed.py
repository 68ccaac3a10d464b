"""A replay's memory does not grow with the recording, and its time no faster. ``make -C lab bench-replay`` judges
the speed itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.replay import COMMANDS, GROWTH, measure, write_recording

pytestmark = pytest.mark.live


@pytest.mark.parametrize(("name", "template"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_a_recording_twice_as_long(name: str, template: tuple[str, ...], tmp_path: Path) -> None:
    arguments = [item.replace("{out}", str(tmp_path / name)) for item in template]
    found = []
    for ticks in (500, 1000):
        path = tmp_path / f"{ticks}.gz"
        write_recording(path, ticks)
        found.append(measure(path, arguments))
    (short, before), (long, after) = found
    assert after < before * GROWTH
    assert long < 3 * short
