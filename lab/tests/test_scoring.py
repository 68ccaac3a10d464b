"""The harness itself: it must count what is wrong as wrong."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvpressure.diagnosis.conditions import NAMES
from kvpressure.model.state import VERDICTS
from lab.accuracy import ablation, data, report, tables
from lab.accuracy.__main__ import main
from lab.accuracy.data import Capture, Incident, Telemetry
from lab.accuracy.incidents import judge, judge_capture
from lab.accuracy.run import Run, Sample, Tick, read_truth
from lab.accuracy.score import rates, score
from lab.accuracy.telemetry import (
    windows,
)

pytestmark = pytest.mark.slow

PRESSURE = Telemetry("h100/x", "kv_pressure", False)


def run(samples: list[Sample], said: list[str] | str = "healthy", confidence: float = 0.9) -> Run:
    verdicts = [said] * len(samples) if isinstance(said, str) else said
    ticks = [Tick(s.t, verdict, confidence) for s, verdict in zip(samples, verdicts, strict=True)]
    return Run("x", {"0": samples}, {"0": ticks})


def busy(t: float, **values: float) -> Sample:
    return Sample(t, **{"running": 5.0, "waiting": 3.0, "kv": 0.5, **values})


def test_one_tick_claims_a_window_for_and_against() -> None:
    samples = [busy(float(t), preemptions=float(t >= 30)) for t in range(60)]
    said = ["healthy"] * 60
    said[10] = said[50] = "kv_pressure"
    found = rates(windows(PRESSURE, run(samples, said)))
    assert (found.positive, found.found, found.found_most) == (1, 1, 0)
    assert (found.other, found.false, found.false_most) == (1, 1, 0)
    assert found.false_per_1000 == 1000.0
    unknown = rates(windows(PRESSURE, run(samples, "unknown")))
    assert (unknown.found, unknown.informative) == (0, 0)


WANTED, FORBIDDEN, NONE = frozenset({"host_bound"}), frozenset({"kv_pressure"}), frozenset[str]()
INCIDENT = Incident("incidents/x", "X", "CPU", WANTED, NONE, FORBIDDEN, NONE, "no", "A", 10.0, 20.0, False)
SAMPLES = [busy(float(t)) for t in range(0, 35, 5)]


@pytest.mark.parametrize(
    ("said", "confidence", "grade", "outcome", "confident"),
    [
        ("host_bound", 0.9, "A", "right", False),
        ("unknown", 0.9, "A", "abstained", False),
        ("healthy", 0.69, "A", "wrong", False),
        ("healthy", 0.7, "A", "wrong", True),
        ("kv_pressure", 0.9, "B", "wrong", True),
        ("healthy", 0.9, "C", "right", False),
        ("unknown", 0.9, "C", "right", False),
        ("kv_pressure", 0.9, "C", "wrong", True),
    ],
)
def test_an_incident_is_right_abstained_wrong_or_wrong_and_confident(
    said: str, confidence: float, grade: str, outcome: str, confident: bool
) -> None:
    answer = judge(replace(INCIDENT, grade=grade), run(SAMPLES, said, confidence))
    assert (answer.outcome, answer.wrong_and_confident) == (outcome, confident)


def test_conditions_need_one_of_the_expected_and_none_of_the_forbidden() -> None:
    item = replace(
        INCIDENT,
        expected_conditions=frozenset({"crash_loop", "gpu_fault"}),
        forbidden_conditions=frozenset({"host_oom_killed"}),
    )

    def right(**conditions: bool | None) -> bool:
        told = run(SAMPLES, "host_bound")
        told.said["0"][3] = replace(told.said["0"][3], conditions=conditions)
        return judge(item, told).right

    assert right(gpu_fault=True, host_oom_killed=None)
    assert not right(gpu_fault=False)
    assert not right(gpu_fault=None)
    assert not right(gpu_fault=True, host_oom_killed=True)


@pytest.mark.parametrize(
    ("strict", "said", "conditions", "right"),
    [
        ("host_bound", "host_bound", {}, True),
        ("host_bound", "healthy", {}, False),
        ("host_bound+gpu_fault", "host_bound", {"gpu_fault": True}, True),
        ("host_bound+gpu_fault", "host_bound", {"gpu_fault": None}, False),
        ("*", "host_bound", {}, True),
        ("*", "idle", {}, False),
        ("*+gpu_fault", "host_bound", {}, False),
    ],
)
def test_strictly_right_is_the_one_best_answer_with_its_conditions(
    strict: str, said: str, conditions: dict[str, bool | None], right: bool
) -> None:
    told = run(SAMPLES, said)
    told.said["0"][3] = replace(told.said["0"][3], conditions=conditions)
    assert judge(replace(INCIDENT, strict=strict), told).strictly_right is right


QUICK = ("incidents-fresh/FPRE3.jsonl.gz", "incidents-fresh/FCAP4.jsonl.gz", "incidents-fresh/FHNG07.jsonl.gz")


def test_less_input_is_never_wrong_and_confident() -> None:
    recordings = [name for name in ablation.names() if name in QUICK]
    assert recordings
    found = ablation.ablate(recordings, workers=1)
    assert {answer.taken for answer in found} == set(ablation.ABLATIONS)
    assert ablation.wrong(found) == []


def test_a_capture_is_wrong_when_one_tick_says_what_must_never_be_said() -> None:
    capture = Capture("x", "0", "w", 0.0, float("inf"), frozenset({"idle"}), frozenset({"kv_pressure"}))
    assert judge_capture(capture, run(SAMPLES, "idle")).right
    assert not judge_capture(capture, run(SAMPLES, ["idle"] * 6 + ["kv_pressure"])).right
    assert not judge_capture(capture, run(SAMPLES, "healthy")).right


def test_a_stretch_is_strictly_right_wrong_or_wrong_and_confident() -> None:
    capture = replace(
        Capture("x", "0", "w", 0.0, float("inf"), frozenset({"idle", "healthy"}), frozenset({"stalled"}), True),
        strict=frozenset({"idle"}),
        forbidden_conditions=frozenset({"gpu_fault"}),
    )
    assert judge_capture(capture, run(SAMPLES, "idle")).strictly_right
    lenient = judge_capture(capture, run(SAMPLES, "healthy"))
    assert (lenient.right, lenient.strictly_right) == (True, False)
    assert judge_capture(capture, run(SAMPLES, "host_bound")).wrong_and_confident
    assert not judge_capture(capture, run(SAMPLES, "host_bound", 0.6)).wrong_and_confident
    assert judge_capture(capture, run(SAMPLES, "unknown")).outcome == "abstained"
    told = run(SAMPLES, "idle")
    told.said["0"][3] = replace(told.said["0"][3], conditions={"gpu_fault": True})
    assert not judge_capture(capture, told).right
    assert not judge_capture(capture, run(SAMPLES, ["idle"] * 6 + ["stalled"])).right
    assert judge_capture(capture, run(SAMPLES, ["idle"] * 6 + ["stalled"], 0.6)).right


def test_the_untouched_incidents_were_scored_once_each_and_never_again() -> None:
    kept = json.loads(tables.UNTOUCHED_FILE.read_text(encoding="utf-8"))
    there = data.incidents((data.UNTOUCHED,))
    assert [row[0] for row in kept if len(row) != 2] == [item.id for item in there]
    assert not {item.name for item in data.incidents()} & {item.name for item in there}
    with pytest.raises(SystemExit) as caught:
        main(["--untouched"])
    assert caught.value.code == 2


def test_the_truth_is_read_from_the_raw_pages() -> None:
    truth = read_truth(data.RECORDINGS / "vllm-cpu" / "l_dp2.jsonl.gz")
    assert set(truth) == {"0", "1"}
    whole = read_truth(data.RECORDINGS / "h100" / "llama-2-7b-046.jsonl.gz")["0"]
    with (data.RECORDINGS / "labels.csv").open(newline="") as lines:
        label = next(row for row in csv.DictReader(lines) if row["recording"].endswith("046.jsonl.gz"))
    assert max(sample.kv or 0 for sample in whole) == pytest.approx(float(label["kv_usage_max"]), abs=0.001)
    assert whole[-1].preemptions == float(label["preemptions_total"])
    first = next(sample.t for sample in whole if sample.preemptions)
    assert first == pytest.approx(float(label["first_preemption_seconds"]), abs=0.2)


def test_labels_name_verdicts_and_conditions_that_exist_and_files_that_are_there() -> None:
    scored = data.incidents((data.INCIDENTS, data.FRESH, data.ONCE))
    for item in (*scored, *data.incidents((data.UNTOUCHED,))):
        assert item.expected | item.forbidden <= set(VERDICTS)
        assert item.expected_conditions | item.forbidden_conditions <= set(NAMES)
        assert not item.expected & item.forbidden
        assert "unknown" not in item.forbidden
    for item in data.captures():
        assert item.most | item.never <= set(VERDICTS)
    named = {item.name for item in (*data.telemetry(), *scored, *data.captures())}
    there = {str(path.relative_to(data.RECORDINGS)) for path in data.RECORDINGS.glob("*/*.jsonl.gz")}
    elsewhere = (f"{data.UNTOUCHED}/", "sglang-incidents/")  # kept apart; scored by tests/engines/sglang
    assert named == {name for name in there if not name.startswith(elsewhere)}
    assert any(name.startswith(f"{data.UNTOUCHED}/") for name in there), "kept apart, and there"
    for item in scored:
        best, *conditions = item.strict.split("+")
        assert best in {"", "*", *item.expected}
        assert set(conditions) <= set(NAMES)


def test_the_page_is_the_same_for_the_same_result_and_its_check_sees_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "PAGE", tmp_path / "docs" / "accuracy.md")
    monkeypatch.setattr(report, "TABLES", tmp_path / "build" / "accuracy.md")
    result = score(only="/KV03", workers=1)
    assert report.publish(result, check=True) == 1
    assert not report.PAGE.exists()
    assert report.publish(result, check=False) == 0
    assert report.publish(score(only="/KV03", workers=1), check=True) == 0
    assert "| KV03 | KV_PRESSURE |" in report.TABLES.read_text()
    report.PAGE.write_text(report.PAGE.read_text().replace("| 1 of 1 ", "| 0 of 1 "))
    assert report.publish(result, check=True) == 1
    assert "+| grades A and B | 1 of 1 | - | - |" in capsys.readouterr().err
