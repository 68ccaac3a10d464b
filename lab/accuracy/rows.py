"""Which recordings show which row of the rules: a row that no real recording shows is at most doubtful."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from lab.accuracy.score import Result
from lab.accuracy.telemetry import OTHER

SHOWN_FILE = Path(__file__).with_name("rows_shown.json")
REAL = "real"
INCIDENTS = "incidents"


def shown(result: Result) -> dict[str, dict[str, list[str]]]:
    """Recordings by row and kind in which a judged tick gave the right verdict by that row."""
    found: dict[str, dict[str, set[str]]] = {}
    for row, kind, name in _ticks(result):
        found.setdefault(row, {}).setdefault(kind, set()).add(name.removesuffix(".jsonl.gz"))
    return {row: {kind: sorted(names) for kind, names in sorted(kinds.items())} for row, kinds in sorted(found.items())}


def _ticks(result: Result) -> Iterator[tuple[str, str, str]]:
    for answer in result.answers:
        for tick in answer.ticks:
            if tick.verdict in answer.incident.expected:
                yield tick.row, INCIDENTS, answer.incident.id
    for capture in result.captures:
        for tick in capture.ticks:
            if tick.verdict in capture.capture.most:
                yield tick.row, REAL, capture.capture.name
    for window in result.windows:
        for tick in window.ticks:
            if (tick.verdict == "kv_pressure") == (window.kind != OTHER) and tick.verdict != "stalled":
                yield tick.row, REAL, window.recording


def write(result: Result) -> None:
    """Keep what is shown of each row."""
    found = shown(result)
    found.pop("", None)
    SHOWN_FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
