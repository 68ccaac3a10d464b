"""The fresh and the untouched incidents: built from their facts, readable, consistently labelled. Nothing here scores
them.

That they are read without a problem is checked for every recording in ``test_reader.py``.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab.incidents.build import FOLDERS, build, load, recording_bytes, split

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
LARGEST_BYTES = 60_000


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
def test_another_number_gives_another_recording() -> None:
    facts, specs = load()
    fact = next(fact for fact in facts if fact["id"] == "FKV01")
    changed: dict[str, Any] = {**specs["FKV01"], "engine": {**specs["FKV01"]["engine"], "waiting": 44}}
    assert recording_bytes("FKV01", fact, changed) != recording_bytes("FKV01", fact, specs["FKV01"])


@pytest.mark.slow
def test_every_third_incident_is_untouched_and_no_spec_is_left_over() -> None:
    facts, specs = load()
    folders = [folder for folder, fact in split(facts) if fact.get("set") != "later"]
    assert [fact["id"] for fact in facts] == sorted(fact["id"] for fact in facts)
    assert folders == [FOLDERS[number % 3 == 0] for number in range(1, len(folders) + 1)]
    assert len(list(split(facts))) == len(facts) == len(folders) + 15
    assert {row["recording"] for _, row in ROWS} == {f"{name}.jsonl.gz" for name in specs}


def test_every_recording_is_small_names_what_is_assumed_and_covers_its_window() -> None:
    for folder, row in ROWS:
        path = RECORDINGS / folder / row["recording"]
        header, first, *_, last = gzip.decompress(path.read_bytes()).splitlines()
        length = json.loads(last)["t"] - json.loads(first)["t"]
        assert "; assumed: " in json.loads(header)["source"], path.name
        assert 0 <= int(row["from_seconds"]) < int(row["to_seconds"]) <= length, path.name
        assert path.stat().st_size < LARGEST_BYTES, path.name


@pytest.mark.parametrize("row", [row for _, row in ROWS], ids=lambda row: row["recording"])
def test_an_answer_uses_known_words_and_does_not_contradict_itself(row: dict[str, str]) -> None:
    right, wrong = words(row["expected_verdict"]), words(row["forbidden_verdicts"])
    expected, excluded = words(row["expected_conditions"]), words(row["forbidden_conditions"])
    verdict, *conditions = row["strict_verdict"].split("+")
    assert right
    assert right | wrong <= VERDICTS
    assert expected | excluded <= CONDITIONS
    assert not right & wrong
    assert not expected & excluded
    assert "unknown" not in wrong
    assert verdict in right or (verdict == "*" and conditions)
    assert set(conditions) <= expected
    assert row["page"] in {"yes", "ticket", "no"}
    assert row["grade"] in {"A", "B", "C"}


@pytest.mark.slow
def test_no_source_is_one_of_the_incidents_that_were_known_before() -> None:
    known = yaml.safe_load((RECORDINGS / "incidents.yaml").read_text("utf-8"))
    places = {place for item in known for place in sources(item["src"])}
    assert "vllm-project/vllm#37307" in places
    assert [fact["id"] for fact in load()[0] if places & sources(fact["src"])] == []


def sources(text: str) -> set[str]:
    """Every ``owner/name#number`` that a source names; a bare ``#number`` belongs to the repository before it."""
    found, repository = set(), ""
    for owner, number in re.findall(r"([\w.-]+/[\w.-]+|vllm)?#(\d+)", text):
        repository = {"": repository, "vllm": "vllm-project/vllm"}.get(owner, owner)
        found.add(f"{repository}#{number}")
    return found
