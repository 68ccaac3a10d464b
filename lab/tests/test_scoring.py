"""The harness itself: it must count what is wrong as wrong."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.diagnosis.conditions import NAMES
from kvpressure.model.state import VERDICTS
from lab.accuracy import ablation, data, report, show
from lab.accuracy.__main__ import main
from lab.accuracy.data import Capture, Incident, Telemetry
from lab.accuracy.episodes import episodes, said_by
from lab.accuracy.incidents import judge, judge_capture
from lab.accuracy.run import _COUNTER_LINES, Run, Sample, Tick, read_truth, replay
from lab.accuracy.score import Result, rates, score
from lab.accuracy.telemetry import (
    EPISODE,
    NEUTRAL,
    NO_CLAIM,
    OTHER,
    POSITIVE,
    changes,
    detection,
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


def test_windows_are_thirty_seconds_with_work_in_most_samples() -> None:
    idle = [Sample(float(t), running=0.0, waiting=0.0) for t in range(30)]
    work = [busy(float(t)) for t in range(30, 76)]
    found = windows(PRESSURE, run(idle + work))
    assert [window.start for window in found] == [30.0, 60.0]  # the last one spans 15 s
    assert [window.start for window in windows(PRESSURE, run(idle + work[:-1]))] == [30.0]
    mixed = [busy(float(t)) if t % 5 else Sample(float(t)) for t in range(30)]  # 24 of 30 = 80 %
    assert len(windows(PRESSURE, run(mixed))) == 1
    assert windows(PRESSURE, run([Sample(0.0), *mixed[0:1], *mixed[2:]])) == []


def test_a_window_is_positive_when_the_counter_rose_in_it_even_across_its_edge() -> None:
    samples = [busy(float(t), preemptions=0.0 if t < 30 else 4.0) for t in range(90)]
    assert [window.kind for window in windows(PRESSURE, run(samples))] == [OTHER, POSITIVE, OTHER]
    first = [busy(float(t), preemptions=7.0 + (t > 3)) for t in range(30)]
    assert [window.kind for window in windows(PRESSURE, run(first))] == [POSITIVE]
    before = [busy(float(t), preemptions=7.0) for t in range(30)]  # preempted before the recording began
    assert [window.kind for window in windows(PRESSURE, run(before))] == [OTHER]


@pytest.mark.parametrize(
    ("label", "counter", "full", "kind"),
    [
        ("kv_pressure", True, True, OTHER),  # a full cache without preemption is no preemption where they are counted
        ("kv_pressure", False, True, EPISODE),
        ("kv_pressure", False, False, OTHER),
        ("cap_or_compute_bound_no_kv_pressure", False, True, OTHER),
        ("kv_near_full_no_preemption", True, True, NEUTRAL),
        ("kv_usage_not_recorded", False, True, NO_CLAIM),
    ],
)
def test_what_a_window_was(label: str, counter: bool, full: bool, kind: str) -> None:
    values = {"kv": 0.98 if full else 0.6, **({"preemptions": 0.0} if counter else {})}
    (window,) = windows(Telemetry("x/y", label, False), run([busy(float(t), **values) for t in range(30)]))
    assert window.kind == kind


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


def test_claims_about_what_was_not_recorded_count_by_any_tick() -> None:
    samples = [busy(float(t)) for t in range(30)]
    said = ["unknown"] * 29 + ["kv_pressure"]
    found = rates(windows(Telemetry("v1/x", "kv_usage_not_recorded", False), run(samples, said)))
    assert (found.not_recorded, found.claimed_unrecorded) == (1, 1)


def test_time_to_detect_counts_from_the_first_sample_that_qualifies() -> None:
    samples = [busy(float(t), kv=0.98 if t >= 20 else 0.5, preemptions=float(t >= 25)) for t in range(60)]
    late = detection(PRESSURE, run(samples, ["healthy"] * 33 + ["kv_pressure"] * 27))
    assert late is not None
    assert (late.onset, late.first_preemption, late.delay, late.changes) == (20.0, 25.0, 13.0, 1)
    never = detection(PRESSURE, run(samples))
    assert never is not None
    assert never.delay is None
    assert detection(replace(PRESSURE, label="kv_near_full_no_preemption"), run(samples)) is None
    without_queue = [replace(sample, waiting=0.0, preemptions=0.0) for sample in samples]
    assert detection(PRESSURE, run(without_queue)) is None


@given(st.lists(st.sampled_from(["idle", "healthy", "kv_pressure"]), max_size=30))
def test_changes_are_counted_between_neighbours(said: list[str]) -> None:
    ticks = [Tick(float(t), verdict, 1.0) for t, verdict in enumerate(said)]
    assert changes(ticks) == sum(said[i] != said[i + 1] for i in range(len(said) - 1))


INCIDENT = Incident(
    "incidents/x",
    "X",
    "CPU",
    frozenset({"host_bound"}),
    frozenset(),
    frozenset({"kv_pressure"}),
    frozenset(),
    "no",
    "A",
    10.0,
    20.0,
    False,
)
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


def test_only_the_judged_stretch_counts_and_its_most_frequent_verdict() -> None:
    said = ["kv_pressure", "kv_pressure", "host_bound", "host_bound", "kv_pressure", "kv_pressure", "kv_pressure"]
    answer = judge(INCIDENT, run(SAMPLES, said))
    assert (answer.verdict, answer.outcome, answer.forbidden_ticks) == ("host_bound", "right", 1)


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


def test_taking_an_input_away_takes_it_away() -> None:
    name = "incidents-fresh/FGPU4.jsonl.gz"
    plain = replay(name)
    third = replay(name, taken=ablation.ABLATIONS["every third sample"])
    assert len(third.said["0"]) == -(-len(plain.said["0"]) // 3)
    blind = replay(name, taken=ablation.ABLATIONS["no GPU"])
    assert {tick.evidence["gpu_utilization_low"] for tick in plain.said["0"]} != {None}
    assert {tick.evidence["gpu_utilization_low"] for tick in blind.said["0"]} == {None}


QUICK = ("incidents-fresh/FPRE3.jsonl.gz", "incidents-fresh/FCAP4.jsonl.gz", "incidents-fresh/FHNG07.jsonl.gz")


def test_less_input_is_never_wrong_and_confident() -> None:
    recordings = [name for name in ablation.names() if name in QUICK]
    assert recordings
    found = ablation.ablate(recordings, workers=1)
    assert {answer.taken for answer in found} == set(ablation.ABLATIONS)
    assert ablation.wrong(found) == []


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_an_ablation_keeps_its_date_and_the_commit_with_a_plus_where_files_were_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*command: str) -> None:
        who = ("-c", "user.name=x", "-c", "user.email=x@localhost")
        subprocess.run(["git", *who, *command], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(data, "ROOT", tmp_path)
    (tmp_path / "rules").write_text("one")
    git("init")
    git("add", "rules")
    git("commit", "-m", "x")
    clean = ablation.made()
    assert clean.keys() == {"date", "commit"}
    assert re.fullmatch(r"[0-9a-f]{7,}", clean["commit"])
    (tmp_path / "rules").write_text("two")
    assert ablation.made()["commit"] == clean["commit"] + "+"


def test_the_page_states_when_the_ablation_was_made_and_with_which_rules() -> None:
    kept = json.loads(report.ABLATION_FILE.read_text(encoding="utf-8"))
    assert [row[0] for row in kept["rows"]] == list(ablation.ABLATIONS)
    page = report.PAGE.read_text(encoding="utf-8")
    assert f"without one of its inputs on {kept['date']} (commit {kept['commit']})" in page


def test_a_rule_on_single_samples_enters_at_the_sign_and_pays_in_gaps() -> None:
    full = {*range(20, 30), *range(40, 50)}  # one episode: the second stretch begins 11 s after the first
    told = run([busy(float(t), kv=0.98 if t in full else 0.5) for t in range(120)], "healthy")
    (judged,) = episodes(said_by(lambda sample: sample.full_with_queue, told))
    assert (judged.begin, judged.last, judged.entered, judged.left, judged.gaps) == (20.0, 49.0, 0.0, 1.0, 1)
    (held,) = episodes(said_by(lambda sample: 20 <= sample.t < 90, told))
    assert (held.entered, held.left, held.gaps) == (0.0, 11.0, 0)
    (never,) = episodes(said_by(lambda sample: sample.t < 0, told))
    assert (never.entered, never.gaps) == (None, 0)


def test_the_strongest_one_line_rules_claim_by_any_sample() -> None:
    samples = [busy(float(t), kv=0.98 if t == 7 else 0.5, preemptions=0.0) for t in range(30)]
    (window,) = windows(PRESSURE, run(samples))
    claimed = dict(window.one_line)
    assert claimed["any sample with KV usage at or above 0.97 and a queue"] is True
    (calm,) = windows(PRESSURE, run([busy(float(t), preemptions=0.0) for t in range(30)]))
    assert not any(claim for _, claim in calm.one_line)


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


def test_two_servers_of_one_recording_are_told_apart() -> None:
    told = replay("vllm-cpu-fresh/two-servers.jsonl.gz")
    assert set(told.said) == set(told.truth) == {"vllm-0/0", "vllm-1/0"}
    for pod, start in (("vllm-0/0", 39), ("vllm-1/0", 83)):
        assert all((s.waiting or 0) > 0 for s in told.truth[pod] if start + 2 < s.t < start + 20 and s.kv is not None)
        assert {tick.verdict for tick in told.said[pod] if start + 2 < tick.t < start + 20} == {"kv_pressure"}


def test_the_untouched_incidents_were_scored_once_each_and_never_again() -> None:
    kept = json.loads(report.UNTOUCHED_FILE.read_text(encoding="utf-8"))
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


def test_without_counter_no_line_of_it_is_left() -> None:
    text = (
        "# HELP vllm:num_preemptions_total x\n# TYPE vllm:num_preemptions_total counter\n"
        'vllm:num_preemptions_total{engine="0"} 4.0\nvllm:num_requests_running 1\n'
    )
    assert _COUNTER_LINES.sub("", text) == "vllm:num_requests_running 1\n"
    told = replay("v1/rtx4090-llama-3.1-8b.jsonl.gz", without_counter=True)
    assert len(told.said["0"]) == len(told.truth["0"]) == 184


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


def test_a_third_of_everything_that_matters_is_scored_only() -> None:
    telemetry, incidents = data.telemetry(), data.incidents()
    pressure = [item for item in telemetry if item.label == "kv_pressure" and item.part == "h100"]
    assert sum(item.scored_only for item in pressure) == len(pressure) // 3
    old = [item for item in incidents if item.part == data.INCIDENTS]
    assert sum(item.scored_only for item in old) == len(old) // 3
    assert {item.group for item in old} == {data.TUNED, data.SCORED_ONLY}
    assert {item.group for item in data.incidents((data.FRESH, data.ONCE))} == {data.MENDED}
    assert {item.group for item in data.incidents((data.UNTOUCHED,))} == {data.SCORED_ONLY}
    assert all(item.scored_only for item in telemetry if "opt-1.3b" in item.name)


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


def test_a_wrong_item_is_shown_with_its_evidence() -> None:
    result = score(only="/KV03", workers=1)
    (answer,) = result.answers
    wrong: Result = replace(result, answers=(replace(answer, outcome="wrong"),))
    shown = "\n".join(show.wrong_items(wrong))
    assert "KV03" in shown
    assert "evidence true: " in shown
    assert "evidence not known: " in shown
    assert list(show.wrong_items(wrong, scored_only=True)) == []


def test_only_runs_a_part_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "PAGE", tmp_path / "accuracy.md")
    assert main(["--only", "CAP1", "--verbose", "--jobs", "1"]) == 0
    assert "incidents (A, B): right" in capsys.readouterr().out
    assert not report.PAGE.exists()
    with pytest.raises(SystemExit) as caught:
        main(["--only", "nothing like it"])
    assert caught.value.code == 2
