"""The fresh and the untouched incidents: built from their facts, readable, consistently labelled. Nothing here scores
them.

That they are read without a problem is checked for every recording in ``test_reader.py``.
"""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest
from lab.incidents.build import FOLDERS, build, load, split

RECORDINGS = Path(__file__).resolve().parents[1] / "fixtures" / "recordings"
VERDICTS = {
    *("idle", "healthy", "kv_pressure", "concurrency_limited"),
    *("compute_bound", "host_bound", "stalled", "unknown"),
}
CONDITIONS = {
    *("memory_leak_idle", "kv_held_without_load", "allocator_fragmentation", "baseline_too_high"),
    *("host_memory_near_limit", "host_oom_killed", "gpu_out_of_memory", "crash_loop", "gpu_fault"),
    *("metrics_frozen", "documented_signature"),
}


def labels(folder: str) -> list[dict[str, str]]:
    with (RECORDINGS / folder / "labels.csv").open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


ROWS = [(folder, row) for folder in FOLDERS for row in labels(folder)]


def words(text: str) -> set[str]:
    return set(filter(None, text.split("|")))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by name, recordings decompressed: compressed bytes depend on the version of zlib."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}
    return {name: gzip.decompress(data) if name.endswith(".gz") else data for name, data in files.items()}


@pytest.mark.slow
def test_the_checked_in_files_are_what_the_facts_and_specs_give(tmp_path: Path) -> None:
    build(tmp_path)
    for folder in FOLDERS:
        built, kept = contents(tmp_path / folder), contents(RECORDINGS / folder)
        assert built.keys() == kept.keys()
        assert [name for name in built if built[name] != kept[name]] == []


@pytest.mark.slow
def test_every_third_incident_is_untouched_and_no_spec_is_left_over() -> None:
    facts, specs = load()
    folders = [folder for folder, fact in split(facts) if fact.get("set") != "later"]
    assert [fact["id"] for fact in facts] == sorted(fact["id"] for fact in facts)
    assert folders == [FOLDERS[number % 3 == 0] for number in range(1, len(folders) + 1)]
    assert len(list(split(facts))) == len(facts) == len(folders) + 15
    assert {row["recording"] for _, row in ROWS} == {f"{name}.jsonl.gz" for name in specs}
