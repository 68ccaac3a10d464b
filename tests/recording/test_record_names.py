"""What ``kvpressure record --out`` may be called."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpressure.cli import main


@pytest.mark.parametrize("name", ["", "incident.json", "incident.gz", "incident.jsonl.zst"])
def test_a_name_that_is_meant_for_a_file_makes_no_directory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["record", "--out", name, "--for", "1", "--engine.target", "http://127.0.0.1:1"]) == 2
    assert "allowed: a file NAME.jsonl or NAME.jsonl.gz, or a directory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
