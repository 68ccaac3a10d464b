"""``diagnose --prometheus`` against a real Prometheus that holds the pages of recordings."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpressure.cli import main
from kvpressure.recording.reader import Reader
from toolbox.conftest import FIXTURES

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
                labels = f'{{instance="10.0.0.5:8000",job="vllm",namespace="inference",pod="{pod}",{found[2] or ""}}}'
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
    programs = [shutil.which(name) for name in ("prometheus", "promtool")]
    assert all(programs), "apt install prometheus: this test needs prometheus and promtool"
    folder = tmp_path_factory.mktemp("prometheus")
    write_history(folder / "history.om", {
        "vllm-0": ("d_kv_pressure", 5.0), "vllm-1": ("b_light", 5.0), "vllm-2": ("d_kv_pressure", 15.0)}, time.time() - 20)
    subprocess.run([str(programs[1]), "tsdb", "create-blocks-from", "openmetrics", str(folder / "history.om"),
                    str(folder / "data")], check=True, capture_output=True)
    (folder / "prometheus.yml").write_text("scrape_configs: []\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([str(programs[0]), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                                f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.retention.time=10y"],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(200):
            try:
                with urllib.request.urlopen(f"{url}/-/ready", timeout=1):
                    break
            except OSError:
                time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def diagnose(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["diagnose", *arguments, "--format", "json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, document


def test_the_past_of_every_server(capsys: pytest.CaptureFixture[str], prometheus: str) -> None:
    status, document = diagnose(capsys, "--prometheus", prometheus, "--since", "30m")
    engines = {engine["pod"]: engine for engine in document["engines"]}
    assert status == 1
    assert engines["vllm-0"]["verdict"] == "kv_pressure"
    assert engines["vllm-0"]["verdict_seconds"]["kv_pressure"] >= 60
    assert engines["vllm-0"]["engine"]["signals"]["kv_capacity_tokens"] == 8192
    assert engines["vllm-1"]["verdict"] in ("healthy", "idle")


def test_by_pod_and_by_model(capsys: pytest.CaptureFixture[str], prometheus: str) -> None:
    _, document = diagnose(capsys, "--prometheus", prometheus, "--since", "30m", "--pod", "vllm-1")
    assert [engine["pod"] for engine in document["engines"]] == ["vllm-1"]
    _, document = diagnose(capsys, "--prometheus", f"{prometheus}/", "--since", "30m", "--model", "tiny", "-n", "inference")
    assert len(document["engines"]) == 3


def test_sparse_samples_are_judged_with_a_warning(capsys: pytest.CaptureFixture[str], prometheus: str) -> None:
    _, document = diagnose(capsys, "--prometheus", prometheus, "--since", "30m", "--pod", "vllm-2", "--args=--max-num-seqs 64")
    engine = document["engines"][0]
    assert engine["verdict"] == "kv_pressure"
    assert engine["engine"]["limits"]["max_num_seqs"]["source"] == "args"
    assert "samples are 15 s apart" in document["warnings"][0]
    _, document = diagnose(capsys, "--prometheus", prometheus, "--since", "30m", "--pod", "vllm-0")
    assert document["warnings"] == []


def test_nothing_matches(capsys: pytest.CaptureFixture[str], prometheus: str) -> None:
    for arguments in (["--pod", "nobody"], ["--model", 'a"b\\'], ["-n", "elsewhere"]):
        assert main(["diagnose", "--prometheus", prometheus, "--since", "30m", *arguments]) == 2
        assert "no series like" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [{}, {"status": "error", "error": "out of order"}, "text", [], {"status": "success"}])
def test_something_else_than_prometheus(capsys: pytest.CaptureFixture[str], serve_json: Callable[..., str],
                                        answer: object) -> None:
    assert main(["diagnose", "--prometheus", serve_json({"/api/v1/query": answer})]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("kvpressure diagnose: --prometheus: ")
    assert len(captured.err.splitlines()) == 1
