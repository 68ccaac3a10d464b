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
from tests.toolbox.conftest import FIXTURES

pytestmark = pytest.mark.live

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")


Series = dict[str, dict[str, list[tuple[float, str]]]]
UUID = "GPU-11111111-2222-3333-4444-555555555555"


def beside(end: float) -> Series:
    """What other exporters say: kube-state-metrics, cAdvisor and DCGM of vllm-0, kvpressure's exporter of vllm-2."""
    times = [end - 150 + 15 * i for i in range(11)]
    zero = 'namespace="inference",pod="vllm-0"'
    two = 'namespace="inference",pod="vllm-2",container="vllm"'
    renamed = 'namespace="monitoring",pod="dcgm-1",exported_namespace="inference",exported_pod="vllm-0",exported_container="vllm",UUID="GPU-a",gpu="0"'  # noqa: E501
    texts = {
        "kube_pod_container_status_restarts_total": {
            f'{zero},container="vllm"': "3",
            f'{zero},container="proxy"': "40",
        },
        "kube_pod_container_status_last_terminated_reason": {f'{zero},container="vllm",reason="OOMKilled"': "1"},
        "kube_pod_container_status_last_terminated_exitcode": {f'{zero},container="vllm"': "137"},
        "container_cpu_cfs_periods_total": {f'{zero},container="vllm"': "100"},
        "DCGM_FI_DEV_GPU_UTIL": {renamed: "91"},
        "DCGM_FI_DEV_FB_USED": {renamed: "70000"},
        "DCGM_FI_DEV_FB_FREE": {renamed: "10000"},
        "kvpressure_gpu_pod_info": {f'{two},uuid="{UUID}"': "1"},
        "kvpressure_gpu_memory_used_bytes": {f'uuid="{UUID}"': "90", 'uuid="GPU-of-another"': "1"},
        "kvpressure_gpu_memory_total_bytes": {f'uuid="{UUID}"': "100", 'uuid="GPU-of-another"': "100"},
        "kvpressure_container_restarts_total": {two: "2"},
        "kvpressure_container_last_termination_info": {f'{two},reason="Error",exit_code="1"': "1"},
    }
    return {
        name: {f"{{{labels}}}": [(t, value) for t in times] for labels, value in rows.items()}
        for name, rows in texts.items()
    }


def write_history(path: Path, servers: dict[str, tuple[str, float]], end: float) -> None:
    """An OpenMetrics file with the pages of recordings as if scraped at an interval, ending at ``end``."""
    series = beside(end)
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
    programs = [shutil.which(name) for name in ("prometheus", "promtool")]
    assert all(programs), "apt install prometheus: this test needs prometheus and promtool"
    folder = tmp_path_factory.mktemp("prometheus")
    write_history(
        folder / "history.om",
        {
            "vllm-0": ("d_kv_pressure", 5.0),
            "vllm-1": ("b_light", 5.0),
            "vllm-2": ("d_kv_pressure", 15.0),
            "vllm-3": ("d_kv_pressure", 30.0),
        },
        time.time() - 20,
    )
    subprocess.run(
        [
            str(programs[1]),
            "tsdb",
            "create-blocks-from",
            "openmetrics",
            str(folder / "history.om"),
            str(folder / "data"),
        ],
        check=True,
        capture_output=True,
    )
    (folder / "prometheus.yml").write_text("scrape_configs: []\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [
            str(programs[0]),
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            "--storage.tsdb.retention.time=10y",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
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
    _, document = diagnose(
        capsys, "--prometheus", f"{prometheus}/", "--since", "30m", "--model", "tiny", "-n", "inference"
    )
    assert len(document["engines"]) == 4


def test_sparse_samples_are_judged_with_a_warning(capsys: pytest.CaptureFixture[str], prometheus: str) -> None:
    _, document = diagnose(
        capsys, "--prometheus", prometheus, "--since", "30m", "--pod", "vllm-2", "--args=--max-num-seqs 64"
    )
    engine = document["engines"][0]
    assert engine["verdict"] == "kv_pressure"
    assert engine["engine"]["limits"]["max_num_seqs"]["source"] == "args"
    assert "vllm-2: samples are 15 s apart: weak evidence" in document["warnings"][0]
    assert any("between samples, which are 15 s apart" in text for text in engine["engine"]["missing"])
    _, document = diagnose(capsys, "--prometheus", prometheus, "--since", "30m", "--pod", "vllm-1")
    assert document["warnings"] == []
    assert not any("between samples" in text for text in document["engines"][0]["engine"]["missing"])


def test_half_a_minute_between_scrapes(capsys: pytest.CaptureFixture[str], prometheus: str) -> None:
    """Three or four samples of a hundred seconds of pressure are enough, and that it is little is said."""
    status, document = diagnose(
        capsys, "--prometheus", prometheus, "--since", "30m", "--pod", "vllm-3", "--args=--max-num-seqs 64"
    )
    engine = document["engines"][0]
    assert (status, engine["verdict"], engine["final_verdict"]) == (1, "kv_pressure", "kv_pressure")
    assert engine["verdict_seconds"]["kv_pressure"] >= 25
    assert "samples are 30 s apart: weak evidence" in document["warnings"][0]


def test_what_is_not_in_this_prometheus_is_said(capsys: pytest.CaptureFixture[str], prometheus: str) -> None:
    _, document = diagnose(capsys, "--prometheus", prometheus, "--since", "30m", "--pod", "vllm-1")
    assert (
        "GPU, restarts, CPU of the container, log: not in this Prometheus"
        in document["engines"][0]["engine"]["missing"]
    )
    _, document = diagnose(capsys, "--prometheus", prometheus, "--since", "30m", "--pod", "vllm-0")
    assert "log: not in this Prometheus" in document["engines"][0]["engine"]["missing"]


def test_restarts_and_gpu_from_other_exporters(capsys: pytest.CaptureFixture[str], prometheus: str) -> None:
    _, document = diagnose(capsys, "--prometheus", prometheus, "--since", "30m", "--pod", "vllm-0")
    engine = document["engines"][0]
    steps = {one["number"]: " ".join(one["answers"]) for one in engine["triage"]}
    assert "3 restarts" in steps[2]
    assert "OOMKilled, exit code 137" in steps[2]
    assert "GPU utilization 91" in steps[3]
    assert engine["engine"]["signals"]["device_used_ratio"] == pytest.approx(70000 / 80000)
    assert document["warnings"] == [
        "vllm-0: beside it: CPU (cAdvisor), GPU (DCGM's exporter), restarts (kube-state-metrics)"
    ]


def test_restarts_and_gpu_from_our_own_exporter(capsys: pytest.CaptureFixture[str], prometheus: str) -> None:
    _, document = diagnose(capsys, "--prometheus", prometheus, "--since", "30m", "--pod", "vllm-2")
    engine = document["engines"][0]
    assert "2 restarts" in " ".join(engine["triage"][1]["answers"])
    assert "Error, exit code 1" in " ".join(engine["triage"][1]["answers"])
    assert engine["engine"]["signals"]["device_used_ratio"] == pytest.approx(0.9)
    assert engine["engine"]["gpus"] == [UUID]


def test_nothing_matches(capsys: pytest.CaptureFixture[str], prometheus: str) -> None:
    for arguments in (["--pod", "nobody"], ["--model", 'a"b\\'], ["-n", "elsewhere"]):
        assert main(["diagnose", "--prometheus", prometheus, "--since", "30m", *arguments]) == 2
        assert "no series like" in capsys.readouterr().err


@pytest.mark.parametrize(
    "answer", [{}, {"status": "error", "error": "out of order"}, "text", [], {"status": "success"}]
)
def test_something_else_than_prometheus(
    capsys: pytest.CaptureFixture[str], serve_json: Callable[..., str], answer: object
) -> None:
    assert main(["diagnose", "--prometheus", serve_json({"/api/v1/query": answer})]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("kvpressure diagnose: --prometheus: ")
    assert len(captured.err.splitlines()) == 1
