"""The labels and the truth of the fresh stretches of a real vLLM agree with each other and with the recordings."""

import csv
import gzip
import json
from typing import Any

import pytest

from tests.recording.strategies import RECORDINGS

FRESH = RECORDINGS / "vllm-cpu-fresh"
VERDICTS = {
    "idle",
    "healthy",
    "kv_pressure",
    "concurrency_limited",
    "compute_bound",
    "host_bound",
    "stalled",
    "unknown",
}
with (FRESH / "labels.csv").open(newline="") as lines:
    LABELS = list(csv.DictReader(lines))
NAMES = sorted(path.name for path in FRESH.glob("*.jsonl.gz"))


def ticks(name: str) -> list[dict[str, Any]]:
    with gzip.open(FRESH / name, "rt") as lines:
        return [json.loads(line) for line in lines][1:]


def words(text: str) -> set[str]:
    return set(text.split("|")) - {""}


def test_every_recording_has_labels_and_a_truth() -> None:
    assert sorted({label["recording"] for label in LABELS}) == NAMES
    assert sorted(path.stem + ".jsonl.gz" for path in (FRESH / "truth").glob("*.json")) == NAMES


@pytest.mark.parametrize(
    "label", LABELS, ids=lambda label: "-".join([label["recording"][:-9], label["pod"], label["phase"]])
)
def test_a_label_does_not_contradict_itself(label: dict[str, str]) -> None:
    strict, lenient, forbidden = (
        words(label[name]) for name in ("strict_verdict", "lenient_verdicts", "forbidden_verdicts")
    )
    assert strict
    assert strict <= lenient
    assert lenient | forbidden <= VERDICTS
    assert not lenient & forbidden
    assert not words(label["expected_conditions"]) & words(label["forbidden_conditions"])


@pytest.mark.parametrize("name", NAMES)
def test_the_windows_lie_in_a_phase_of_the_truth_and_have_ticks_of_their_pod(name: str) -> None:
    truth = json.loads((FRESH / "truth" / name.replace(".jsonl.gz", ".json")).read_text())
    recorded = ticks(name)
    for label in LABELS:
        if label["recording"] != name:
            continue
        begin, end = float(label["from_seconds"]), float(label["to_seconds"])
        assert any(phase["from"] <= begin < end <= phase["to"] + 0.5 for phase in truth["phases"]), label
        inside = [tick for tick in recorded if begin <= tick["t"] - recorded[0]["t"] <= end]
        assert len(inside) >= 4
        assert any(engine["pod"] == label["pod"] for tick in inside for engine in tick.get("engines", ()))


@pytest.mark.parametrize("name", NAMES)
def test_running_and_waiting_in_the_servers_log_are_those_of_its_metrics(name: str) -> None:
    """Two independent ways to the same number: the most requests in the server agree within two."""
    truth = json.loads((FRESH / "truth" / name.replace(".jsonl.gz", ".json")).read_text())
    logged: dict[str, list[int]] = {}
    for _, pod, running, waiting, *_ in truth["server_log"]:
        logged.setdefault(pod, []).append(running + waiting)
    scraped: dict[str, list[float]] = {}
    for tick in ticks(name):
        for engine in tick.get("engines", ()):
            values = [
                float(line.rsplit(" ", 1)[1])
                for line in engine.get("exposition", "").splitlines()
                if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{"))
            ]
            if values:
                scraped.setdefault(engine["pod"], []).append(sum(values))
    assert set(logged) == set(scraped)
    for pod, values in logged.items():
        assert max(scraped[pod]) == pytest.approx(max(values), abs=2)
