"""Build the recordings of published incidents from ``facts.yaml`` (what is quoted, the answer) and ``specs/`` (the
curves).

Usage: python -m lab.incidents.build [FOLDER]    default: tests/fixtures/recordings

Writes ``incidents-fresh/``, ``incidents-untouched/`` and ``incidents-later/``: recordings, labels.csv, incidents.yaml.
The same input gives the same bytes. Every third incident in the order of its id goes to ``incidents-untouched/``; those
whose ``set`` is ``later`` were collected when the others had been scored.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from lab.incidents.record import Recording

HERE: Final = Path(__file__).resolve().parent
FOLDERS: Final = ("incidents-fresh", "incidents-untouched", "incidents-later")
FIELDS: Final = (
    "id",
    "src",
    "class",
    "label",
    "page",
    "grade",
    "ver",
    "gpu",
    "cfg",
    "signals",
    "log",
    "cause",
    "trap",
)
COLUMNS: Final = (
    "recording",
    "id",
    "class",
    "expected_verdict",
    "expected_conditions",
    "forbidden_verdicts",
    "page",
    "grade",
    "from_seconds",
    "to_seconds",
    "forbidden_conditions",
    "strict_verdict",
)


def load() -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The facts in the order of their ids, and the spec of each recording."""
    facts = sorted(yaml.safe_load((HERE / "facts.yaml").read_text("utf-8")), key=lambda fact: str(fact["id"]))
    specs: dict[str, dict[str, Any]] = {}
    for path in sorted((HERE / "specs").glob("*.yaml")):
        found = yaml.safe_load(path.read_text("utf-8"))
        if twice := specs.keys() & found.keys():
            raise SystemExit(f"{path}: specified twice: {', '.join(sorted(twice))}")
        specs |= found
    return facts, specs


def split(facts: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Folder and fact: those collected later, and of the others every third in the order of ids is kept untouched."""
    first = [fact for fact in facts if fact.get("set") != "later"]
    for number, fact in enumerate(first, start=1):
        yield FOLDERS[1] if number % 3 == 0 else FOLDERS[0], fact
    for fact in facts:
        if fact.get("set") == "later":
            yield FOLDERS[2], fact


def windows(fact: Mapping[str, Any]) -> dict[str, str]:
    """The window of each recording of an incident."""
    window = fact["answer"]["window"]
    return dict(window) if isinstance(window, Mapping) else {str(fact["id"]): str(window)}


def rows(fact: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """The lines of labels.csv for one incident."""
    answer = fact["answer"]
    for name, window in windows(fact).items():
        start, end = window.split("-")
        yield {
            "recording": f"{name}.jsonl.gz",
            "id": fact["id"],
            "class": fact["class"],
            "expected_verdict": answer["right"],
            "expected_conditions": answer.get("conditions", ""),
            "forbidden_verdicts": answer["wrong"],
            "page": fact["page"],
            "grade": fact["grade"],
            "from_seconds": start,
            "to_seconds": end,
            "forbidden_conditions": answer.get("not", ""),
            "strict_verdict": answer["strict"],
        }


def recording_bytes(name: str, fact: Mapping[str, Any], spec: Mapping[str, Any]) -> bytes:
    """The gzip-compressed recording."""
    source = f"reconstructed from the numbers quoted in {fact['src']}; assumed: {spec['assumed']}"
    header = {
        "format": "kvpressure-recording",
        "version": 1,
        "interval_seconds": 5,
        "node": "node-1",
        "source": source,
    }
    lines = [header, *Recording(name, spec).ticks()]
    text = "".join(json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n" for line in lines)
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0, compresslevel=9) as stream:
        stream.write(text.encode())
    return packed.getvalue()


def labels_text(facts: list[dict[str, Any]]) -> str:
    """labels.csv of one folder."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for fact in facts:
        writer.writerows(rows(fact))
    return text.getvalue()


def incidents_text(facts: list[dict[str, Any]]) -> str:
    """incidents.yaml of one folder: one item a line, all values text."""
    head = (
        "# Incidents and healthy controls: what their sources say. Fields: the head of ../incidents.yaml.\n# Written by"
        " lab/incidents/build.py.\n\n"
    )
    items = [json.dumps({field: fact[field] for field in FIELDS}, ensure_ascii=False) for fact in facts]
    return head + "".join(f"- {item}\n" for item in items)


def build(target: Path) -> dict[str, int]:
    """Write the folders; sizes by recording."""
    facts, specs = load()
    by_folder: dict[str, list[dict[str, Any]]] = {folder: [] for folder in FOLDERS}
    for folder, fact in split(facts):
        by_folder[folder].append(fact)
    sizes: dict[str, int] = {}
    for folder, chosen in by_folder.items():
        path = target / folder
        path.mkdir(parents=True, exist_ok=True)
        for old in path.glob("*.jsonl.gz"):
            old.unlink()
        for fact in chosen:
            for name in windows(fact):
                if name not in specs:
                    raise SystemExit(f"{HERE / 'specs'}: no spec for {name}")
                content = recording_bytes(name, fact, specs[name])
                (path / f"{name}.jsonl.gz").write_bytes(content)
                sizes[name] = len(content)
        (path / "labels.csv").write_text(labels_text(chosen), "utf-8")
        (path / "incidents.yaml").write_text(incidents_text(chosen), "utf-8")
    return sizes


if __name__ == "__main__":
    default = HERE.parents[1] / "tests" / "fixtures" / "recordings"
    written = build(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
    print(
        f"{len(written)} recordings, {sum(written.values()) // 1024} KiB, the largest"
        f" {max(written.values()) // 1024} KiB"
    )
