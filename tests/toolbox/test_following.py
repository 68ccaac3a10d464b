"""Live inputs over time: an answer comes as soon as more seconds would hardly change it, and not before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import dropwhile
from typing import Any

import pytest
from lab.demo.node import PodChange
from lab.demo.scenario import PODS

from kvpressure.cli import main
from kvpressure.model.readings import Snapshot
from kvpressure.recording.reader import Reader
from kvpressure.settings.thresholds import builtin
from kvpressure.toolbox import following
from kvpressure.toolbox.history import FoundEngines
from tests.helpers.command import Capsys, answer, run
from tests.toolbox.conftest import FIXTURES, FakeClock, ServeJson, ServePod
from tests.toolbox.test_diagnose import dead_address, document_of, heavy

pytestmark = pytest.mark.live

CHAT = PODS[0]
SECONDS = 30.0


def metrics_only(name: str, begin: float, clock: FakeClock) -> Iterator[Snapshot]:
    """What a look at the server alone would have read from ``begin`` seconds of a recording on."""
    with Reader(FIXTURES / f"recordings/{name}.jsonl.gz") as reader:
        snapshots = iter(reader)
        start = next(snapshots).time + begin
        for snapshot in dropwhile(lambda one: one.time < start, snapshots):
            clock.t = snapshot.time
            yield Snapshot(snapshot.time, pages=tuple(replace(page, gpus=()) for page in snapshot.pages))


def watched(name: str, begin: float, clock: FakeClock) -> tuple[FoundEngines, float]:
    """What a watch of a recording says, and after how many seconds."""
    snapshots = metrics_only(name, begin, clock)
    clock.t = first = next(snapshots).time
    found = following.answered(following.engines_of(snapshots, builtin(), name), SECONDS, builtin())
    return found, clock.t - first


@pytest.mark.parametrize(
    ("name", "begin", "verdict", "seconds"),
    [
        ("vllm-cpu-edges/44-slow-ramp", 68, "kv_pressure", 5),
        ("vllm-cpu-fresh/parallel-sampling", 97, "kv_pressure", 6),
        ("h100/llama-2-7b-044", 60, "concurrency_limited", 6),
        ("vllm-cpu-edges/advice-budget", 51, "concurrency_limited", 7),
    ],
)
def test_a_full_server_is_said_after_seconds(
    clock: FakeClock, name: str, begin: float, verdict: str, seconds: float
) -> None:
    found, took = watched(name, begin, clock)
    (case,) = found.cases
    assert (case.view.diagnosis.verdict, case.view.diagnosis.confidence >= 0.85) == (verdict, True)
    assert took <= seconds
    assert any(limit.recommended for limit in case.view.engine.limits.values()), "the value to set"


@pytest.mark.parametrize(
    ("name", "begin", "never"),
    [
        ("h100/llama-2-7b-121", 97, "concurrency_limited"),  # at 5 s; the cache fills once in 20 s: a raise would harm
        ("vllm-cpu-edges/35-bursts", 0, "idle"),  # a burst comes every quarter of a minute
        ("vllm-cpu-fresh/api-stopped", 51, "unknown"),  # late answers at first: it is not dead
    ],
)
def test_what_may_still_change_is_waited_for(clock: FakeClock, name: str, begin: float, never: str) -> None:
    found, took = watched(name, begin, clock)
    assert took > 10
    assert {case.view.diagnosis.verdict for case in found.cases} != {never}


def test_a_healthy_server_is_watched_to_the_end_for_peaks(
    capsys: Capsys, clock: FakeClock, serve_pod: ServePod
) -> None:
    _, url = serve_pod(CHAT, 60)
    begin = clock.t
    (engine,) = answer(capsys, "diagnose --gpu H100:80", url)[1]["engines"]
    assert engine["verdict"] == "healthy"
    assert clock.t - begin >= SECONDS
    limit = {"value": 1024, "explicit": None, "source": "default", "recommended": None}
    assert engine["engine"]["limits"]["max_num_seqs"] == limit, "of an H100"


def test_a_plan_has_the_values_of_the_whole_watch(capsys: Capsys, clock: FakeClock, serve_pod: ServePod) -> None:
    _, url = serve_pod(heavy(CHAT), 90)
    begin = clock.t
    status, document = answer(capsys, "diagnose", f"inference/chat-0={url}", "--args=--max-num-seqs 128")
    (engine,) = document["engines"]
    assert (status, engine["verdict"], engine["pod"]) == (1, "kv_pressure", "chat-0")
    assert engine["engine"]["limits"]["max_num_seqs"]["source"] == "args"
    assert clock.t - begin < 10
    begin = clock.t
    assert main(["mitigate", url, "--args=--max-num-seqs 128"]) == 0
    assert clock.t - begin >= SECONDS


def interrupt_after(monkeypatch: pytest.MonkeyPatch, clock: FakeClock, seconds: float) -> None:
    """Ctrl-C while the watch sleeps."""
    end, sleep = clock.t + seconds, clock.sleep

    def slept(pause: float) -> None:
        sleep(pause)
        if clock.t >= end:
            raise KeyboardInterrupt

    monkeypatch.setattr(clock, "sleep", slept)


def test_what_was_known_when_interrupted_is_printed(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, clock: FakeClock, serve_pod: ServePod
) -> None:
    _, url = serve_pod(CHAT, 60)
    interrupt_after(monkeypatch, clock, 6)
    status, out, _ = run(capsys, f"diagnose {url}")
    assert status == 130
    assert "VERDICT  HEALTHY" in out
    assert "note: interrupted after 6 of 30 s" in out


def test_a_watch_prints_each_other_verdict_until_interrupted(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, clock: FakeClock, serve_pod: ServePod
) -> None:
    node, url = serve_pod(CHAT, 60)
    looks = following.answered

    def then_stops(*args: Any) -> FoundEngines:
        found = looks(*args)
        node.apply({CHAT.name: PodChange(restart=True)}, clock.t)
        interrupt_after(monkeypatch, clock, 60)
        return found

    monkeypatch.setattr(following, "answered", then_stops)
    status, out, _ = run(capsys, f"diagnose {url} --watch")
    assert status == 130
    verdicts = [line for line in out.splitlines() if line.startswith("VERDICT")]
    assert [line.split()[1].strip(",") for line in verdicts[:2]] == ["HEALTHY", "UNKNOWN"]
    assert "down since" in verdicts[1]


def test_a_watch_waits_for_a_server_that_is_not_up_yet(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    interrupt_after(monkeypatch, clock, 20)
    status, out, _ = run(capsys, f"diagnose http://{dead_address()} --watch")
    assert (status, out.count("down since")) == (130, 1)


@pytest.mark.usefixtures("clock")
def test_an_exporter_that_stops_is_said_with_its_time(serve_json: ServeJson) -> None:
    answers: dict[str, Any] = {"/api/v1/diagnosis": document_of("incidents/KV01")}
    stops, stays = serve_json(answers), serve_json(dict(answers))
    looks = following.exporters([stops, stays])
    assert [len(found.cases) for found in next(looks)] == [1, 1]
    answers.clear()
    gone, alive = next(looks)
    said = gone.warnings
    assert (gone.cases, len(alive.cases), len(said)) == ((), 1, 1)
    assert stops in said[0]
    assert next(looks)[0].warnings == said, "since then, not since now"
