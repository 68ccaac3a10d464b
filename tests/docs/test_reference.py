"""What pages say of the code is written from its declarations, all of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from docs.generate import reference

from kvpressure.recording.format import tick_to_json
from tests.recording.strategies import full_snapshot

ROOT = Path(__file__).parents[2]


def copy(root: Path) -> None:
    for page in reference.pages():
        (root / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / page, root / page)


def test_pages_are_current_and_an_old_one_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy(tmp_path)
    assert reference.main(tmp_path, check=True) == 0
    page = tmp_path / "docs/reference/guarantees.md"
    page.write_text(page.read_text(encoding="utf-8").replace("| 4 MiB |", "| 5 MiB |"), encoding="utf-8")
    assert reference.main(tmp_path, check=True) == 1
    said = capsys.readouterr().out
    assert "docs/reference/guarantees.md: out of date" in said
    assert reference.main(tmp_path) == 0
    assert reference.main(tmp_path, check=True) == 0


def test_every_key_of_a_tick_is_on_the_page() -> None:
    text = (ROOT / "docs/recordings.md").read_text(encoding="utf-8").partition("## Format")[2]
    written = json.loads(tick_to_json(full_snapshot()))
    assert len(written) > 10
    assert [key for key in written if f"`{key}`" not in text] == []
