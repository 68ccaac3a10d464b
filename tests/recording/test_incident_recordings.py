"""The fresh and the untouched incidents are built from their facts. Nothing here scores them; that they are read
without a problem is checked in ``tests/accuracy``.
"""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest
from lab.incidents.build import FOLDERS, build, load, split

pytestmark = pytest.mark.slow

RECORDINGS = Path(__file__).resolve().parents[1] / "fixtures" / "recordings"


def labels(folder: str) -> list[dict[str, str]]:
    with (RECORDINGS / folder / "labels.csv").open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by name, recordings decompressed: compressed bytes depend on the version of zlib."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}
    return {name: gzip.decompress(data) if name.endswith(".gz") else data for name, data in files.items()}


def test_the_checked_in_files_are_what_the_facts_and_specs_give(tmp_path: Path) -> None:
    build(tmp_path)
    for folder in FOLDERS:
        built, kept = contents(tmp_path / folder), contents(RECORDINGS / folder)
        assert built.keys() == kept.keys()
        assert [name for name in built if built[name] != kept[name]] == []


def test_every_third_incident_is_untouched_and_no_spec_is_left_over() -> None:
    facts, specs = load()
    folders = [folder for folder, fact in split(facts) if fact.get("set") != "later"]
    assert [fact["id"] for fact in facts] == sorted(fact["id"] for fact in facts)
    assert folders == [FOLDERS[number % 3 == 0] for number in range(1, len(folders) + 1)]
    assert len(list(split(facts))) == len(facts) == len(folders) + 15
    assert {row["recording"] for folder in FOLDERS for row in labels(folder)} == {f"{name}.jsonl.gz" for name in specs}
