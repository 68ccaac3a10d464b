"""Golden ``/metrics`` of the real process, scraping real pages over HTTP.

Names, labels and every value that does not depend on the moment are compared line by line with ``tests/golden``; values
that depend on time stand there as ``*``. ``UPDATE_GOLDEN=1 pytest tests/e2e/test_golden_pages.py`` rewrites them: read the
difference before you commit it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from e2e.replay_server import ReplayServer, recorded_pages
from kvpressure.publish.metrics import METRICS
from vllm_pages import CAPTURES, text_of, to_openmetrics

GOLDEN = Path(__file__).parents[1] / "golden"
STEP_SECONDS = 0.25
PAGES = 32

EXACT = re.compile(
    r"kvpressure_(engine_up|engine_info|requests_running|requests_waiting|kv_cache_used_ratio(_max)?|"
    r"kv_cache_capacity_tokens|kv_cache_used_tokens|preemptions_total|prompt_tokens_total|"
    r"generation_tokens_total|requests_finished_total|requests_rejected_total|requests_in_flight|limit|"
    r"limit_explicit|max_concurrent_requests\{.*source=\"args\"|verdict\{|score_evidence_level|"
    r"documented_signature\{.*(batch_collapsed|gpu)|condition|source_up)"
)

SCENARIOS = {
    "idle": ("vllm-cpu/a_idle", 0),
    "healthy": ("vllm-cpu/c_steady", 4),
    "kv_pressure": ("vllm-cpu/d_kv_pressure", 20),
    "two_api_servers": ("vllm-cpu/k_api_server_count2", 0),
    "two_engines_one_page": ("vllm-cpu/l_dp2", 0),
    "v0_names": ("h100/llama-2-7b-046", 20),
    "openmetrics": ("vllm-cpu/d_kv_pressure", 20),
}


@contextmanager
def exporter(*targets: str) -> Iterator[str]:
    """The real process on a free port, reading at a faster pace than in production; yields its address."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVPRESSURE_")}
    command = [
        sys.executable,
        "-m",
        "kvpressure.cli",
        "serve",
        "--web.listen-address",
        "127.0.0.1:0",
        "--node-name",
        "n",
        "--no-collector.nvidia",
        "--no-collector.amd",
        "--interval",
        str(STEP_SECONDS / 2),
        "--collector.vllm.interval",
        str(STEP_SECONDS),
        "--vllm.pace",
        "fixed",
    ]
    for target in targets:
        command += ["--vllm.target", target]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert child.stderr is not None
        for line in child.stderr:
            if found := re.search(r"listening address=(\S+)", line):
                break
        else:
            raise AssertionError("the exporter did not start")
        yield f"http://{found[1]}"
    finally:
        child.terminate()
        child.wait(10)
        assert child.stderr is not None
        child.stderr.close()


def scrape(address: str, accept: str = "text/plain") -> str:
    request = urllib.request.Request(address + "/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return str(answer.read().decode())


def wait(condition, seconds: float = 25.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def masked(page: str, port: int) -> list[str]:
    """The page's samples without what depends on the moment, ordered."""
    lines = []
    for line in page.splitlines():
        if line.startswith("#") or not line.startswith("kvpressure_"):
            continue
        line = line.replace(f":{port}", ":PORT")
        series, value = line.rsplit(" ", 1)
        series = re.sub(r'version="[\d.]+",?|python="[\d.]+"', "", series) if "build_info" in series else series
        lines.append(f"{series} {value if EXACT.match(series) else '*'}")
    return sorted(lines)


def played(pages: Sequence[str]) -> list[str]:
    """Scrape the exporter right after it has read the last page once."""
    server = ReplayServer(pages)
    try:
        with exporter(f"inference/vllm-0={server.url};container=vllm;args=--max-num-seqs 64") as address:
            wait(lambda: server.served >= len(pages))
            time.sleep(STEP_SECONDS * 0.8)
            return masked(scrape(address), server.port)
    finally:
        server.close()


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_golden_page(name):
    recording, first = SCENARIOS[name]
    pages = recorded_pages(recording)[first : first + PAGES]
    if name == "openmetrics":
        pages = [to_openmetrics(page) for page in pages]
    found = played(pages)
    path = GOLDEN / f"{name}.metrics"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text("\n".join(found) + "\n")
    assert found == path.read_text().splitlines()


def test_both_dialects_give_the_same_page():
    """Same server, classic text or OpenMetrics: the same series and the same exact values."""
    assert (GOLDEN / "openmetrics.metrics").read_text() == (GOLDEN / "kv_pressure.metrics").read_text()


def test_two_engines_on_one_page_are_judged_apart():
    lines = (GOLDEN / "two_engines_one_page.metrics").read_text().splitlines()
    for engine in ("0", "1"):
        assert any(
            f'engine="{engine}"' in line and line.startswith("kvpressure_verdict{") and line.endswith(" 1.0")
            for line in lines
        )


def test_every_capture_is_served_by_one_exporter():
    """All captured pages at once, each its own target: every engine comes up with vLLM's own numbers."""
    servers = {capture: ReplayServer([text_of(capture)]) for capture in CAPTURES}
    try:
        with exporter(*(f"inference/{i}={server.url}" for i, server in enumerate(servers.values()))) as address:
            wait(lambda: scrape(address).count("kvpressure_engine_up{") >= len(servers))
            wait(lambda: all(server.served >= 3 for server in servers.values()))
            page = scrape(address)
    finally:
        for server in servers.values():
            server.close()
    for i, capture in enumerate(CAPTURES):
        ups = re.findall(rf'kvpressure_engine_up{{[^}}]*pod="{i}"[^}}]*}} (\S+)', page)
        assert ups, capture
        assert set(ups) == {"1.0"}, capture
        running = sorted(
            float(v) for v in re.findall(rf'kvpressure_requests_running{{[^}}]*pod="{i}"[^}}]*}} (\S+)', page)
        )
        served = sorted(
            float(line.rsplit(" ", 1)[1])
            for line in text_of(capture).splitlines()
            if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_running "))
        )
        assert running == served, capture


def test_metric_names_are_frozen():
    """A rename or a removal is a change of the contract: it keeps the old name for a release and edits this file."""
    path = GOLDEN / "metric_names.txt"
    names = sorted(f"{metric.full_name} {metric.kind} {','.join(metric.labels)}" for metric in METRICS)
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text("\n".join(names) + "\n")
    assert names == path.read_text().splitlines()


def test_the_page_is_clean_for_promtool():
    server = ReplayServer(recorded_pages("vllm-cpu/d_kv_pressure")[20:24])
    try:
        with exporter(f"inference/vllm-0={server.url}") as address:
            wait(lambda: server.served >= 4)
            page = scrape(address)
    finally:
        server.close()
    checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert not checked.stderr.strip()
