"""Build the recordings of public SGLang incidents from the numbers quoted in their threads.

Usage: ``python -m lab.incidents.build_sglang [DIRECTORY]`` (default: tests/fixtures/recordings/sglang-incidents).
Writes one recording per incident, ``labels.csv`` and ``incidents.yaml``. The output is the same byte for byte on each
run: the noise is seeded with the incident's name and the gzip header carries no time.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from lab.incidents.build import COLUMNS
from lab.incidents.sglang_incidents import INCIDENTS
from lab.incidents.sglang_model import Incident

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = ROOT / "tests/fixtures/recordings/sglang-incidents"
START = 1_700_000_000.0
STEP = 5.0
COUNTERS = {
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_requests_total",
    "num_aborted_requests_total",
    "num_retracted_requests_total",
    "realtime_tokens_total",
}
#: Gauges of the scheduler carry its labels; the tokenizer process knows the model name only.
TOKENIZER = {
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_requests_total",
    "num_aborted_requests_total",
    "inter_token_latency_seconds_sum",
    "inter_token_latency_seconds_count",
    "time_to_first_token_seconds_sum",
    "time_to_first_token_seconds_count",
}


def scheduler_labels(incident: Incident) -> dict[str, str]:
    """Return the labels that the incident's release gives its scheduler's metrics."""
    return {"model_name": incident.model, **incident.labels}


def samples(incident: Incident) -> Iterator[tuple[float, str | None]]:
    """Yield the exposition text of each tick, or None where the server does not answer."""
    chance = random.Random(incident.id)
    totals: dict[int, float] = {}
    for tick in range(int(incident.seconds / STEP)):
        at = tick * STEP
        rows: dict[str, list[str]] = {}
        for index, series in enumerate(incident.series):
            value = series.value(min(at, series.until))
            if series.noise and value:
                value *= 1 + chance.uniform(-series.noise, series.noise)
            base = series.name.removesuffix("_sum").removesuffix("_count")
            counting = series.name in COUNTERS or base != series.name
            if counting:
                totals[index] = totals.get(index, 0.0) + value * STEP
                value = totals[index] if series.name.endswith("_sum") else float(int(totals[index]))
            elif series.name.startswith(("num_", "max_")):
                value = float(round(value))
            labels = {"model_name": incident.model} if series.name in TOKENIZER else scheduler_labels(incident)
            text = ",".join(f'{key}="{text}"' for key, text in sorted({**labels, **series.labels}.items()))
            kind = "histogram" if base != series.name else "counter" if counting else "gauge"
            head = f"# TYPE sglang:{base} {kind}"
            rows.setdefault(head, []).append(f"sglang:{series.name}{{{text}}} {round(value, 6)}")
        body = "".join("\n".join([head, *found]) + "\n" for head, found in rows.items())
        yield at, None if at >= incident.dead_from else body


def gpus(incident: Incident, at: float) -> list[dict[str, object]]:
    """Return the GPU of the incident, or nothing where the thread quotes none of its values."""
    if incident.utilization is None:
        return []
    return [
        {
            "uuid": f"GPU-{incident.id.lower()}",
            "index": 0,
            "vendor": "nvidia",
            "name": incident.gpu,
            "memory_total_bytes": incident.memory_total,
            "memory_used_bytes": None,
            "utilization_ratio": incident.utilization(at),
        }
    ]


def recording(incident: Incident) -> Iterator[dict[str, object]]:
    """Yield the lines of the recording, its header first."""
    source = f"reconstructed from the numbers quoted in {incident.source}"
    if incident.assumed:
        source += f"; assumed: {incident.assumed}"
    yield {
        "format": "kvpressure-recording",
        "version": 1,
        "interval_seconds": STEP,
        "node": "node-1",
        "source": source,
    }
    name = {"namespace": "inference", "pod": f"sglang-{incident.id.lower()}", "container": "sglang"}
    restarts = 0
    for at, body in samples(incident):
        devices = gpus(incident, at)
        tick: dict[str, object] = {
            "t": START + at,
            "gpus": devices,
            "engines": [
                {
                    "target": "http://10.0.0.5:30000/metrics",
                    **name,
                    "gpus": [device["uuid"] for device in devices],
                    "args": incident.args,
                    "exposition": body,
                    "error": None if body is not None else "connection refused",
                    "duration_seconds": 0.004,
                }
            ],
        }
        found = [text for when, text in incident.lines if at - STEP < when <= at]
        if found:
            tick["logs"] = [{**name, "line": text} for text in found]
        restarts = max([restarts, *(count for when, count in incident.restarts if when <= at)])
        if incident.restarts:
            tick["containers"] = [{**name, "restarts": restarts, "ready": body is not None}]
        yield tick


def write(path: Path, rows: Iterator[dict[str, object]]) -> None:
    """Write a gzip-compressed recording without a time in its header."""
    raw = io.BytesIO()
    with gzip.GzipFile("", mode="wb", fileobj=raw, mtime=0) as packed:
        for row in rows:
            packed.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
    path.write_bytes(raw.getvalue())


def label(incident: Incident) -> dict[str, str | int]:
    """Return the incident's row of labels.csv."""
    return {
        "recording": f"{incident.id}.jsonl.gz",
        "id": incident.id,
        "class": incident.kind,
        "expected_verdict": incident.verdicts,
        "expected_conditions": incident.conditions,
        "forbidden_verdicts": incident.forbidden,
        "page": incident.page,
        "grade": incident.grade,
        "from_seconds": incident.window[0],
        "to_seconds": incident.window[1],
        "forbidden_conditions": incident.forbidden_conditions,
        "strict_verdict": incident.strict,
    }


def entry(incident: Incident) -> str:
    """Return the incident's item of incidents.yaml."""
    keys = {
        "src": incident.source,
        "class": incident.kind,
        "label": incident.strict,
        "page": incident.page,
        "grade": incident.grade,
        "ver": incident.version,
        "gpu": incident.gpu,
        "cfg": incident.configuration,
        "signals": incident.signals,
        "log": incident.log,
        "cause": incident.cause,
        "trap": incident.trap,
    }
    return f"- id: {incident.id}\n" + "".join(
        f"  {key}: {json.dumps(text, ensure_ascii=False)}\n" for key, text in keys.items()
    )


def build(directory: Path) -> None:
    """Write the recordings, the labels and the list of incidents."""
    directory.mkdir(parents=True, exist_ok=True)
    for incident in INCIDENTS:
        write(directory / f"{incident.id}.jsonl.gz", recording(incident))
    with (directory / "labels.csv").open("w", newline="", encoding="utf-8") as out:
        table = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(label(incident) for incident in INCIDENTS)
    head = "# Public SGLang incidents; keys as in ../incidents.yaml. Written by lab/incidents/build_sglang.py.\n\n"
    (directory / "incidents.yaml").write_text(head + "\n".join(map(entry, INCIDENTS)), encoding="utf-8")


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT)
