"""The real process, scraping recorded pages over HTTP."""

from __future__ import annotations

import re
import subprocess
import urllib.request
from contextlib import AbstractContextManager

import pytest

from tests.e2e.replay_server import ReplayServer, recorded_pages
from tests.e2e.test_golden_pages import GOLDEN, samples, scenario
from tests.helpers.serve_process import QUIET, serving
from tests.helpers.vllm_pages import CAPTURES, text_of
from tests.helpers.waiting import until

pytestmark = pytest.mark.live

STEP_SECONDS = 0.25
#: What the last scrape alone decides, so that it is the same at any pace.
LAST_SCRAPE = re.compile(
    r"kvpressure_(engine_up|requests_running|requests_waiting|kv_cache_used_ratio|kv_cache_capacity_tokens|"
    r"kv_cache_used_tokens|preemptions_total|prompt_tokens_total|generation_tokens_total|requests_finished_total|"
    r"limit|limit_explicit)\{"
)


def exporter(*targets: str) -> AbstractContextManager[str]:
    """The real process, reading at a faster pace than in production; yields its address."""
    pace = ("--interval", str(STEP_SECONDS / 2), "--collector.engines.interval", str(STEP_SECONDS))
    named = [word for target in targets for word in ("--engine.target", target)]
    return serving(*QUIET, *pace, "--engine.pace", "fixed", *named)


def scrape(address: str, accept: str = "text/plain") -> str:
    request = urllib.request.Request(address + "/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return str(answer.read().decode())


def test_the_process_publishes_what_the_replay_says() -> None:
    """The real process over HTTP: what the last scrape decides has the golden's values."""
    golden = (GOLDEN / "kv_pressure.metrics").read_text().splitlines()
    wanted = {without_target(line) for line in golden if LAST_SCRAPE.match(line)}
    assert len(wanted) > 10
    server = ReplayServer(scenario("kv_pressure")[-4:])
    try:
        with exporter(f"inference/vllm-0={server.url};container=vllm;args=--max-num-seqs 64") as address:
            until(lambda: wanted <= {without_target(line) for line in samples(scrape(address))}, 30)
    finally:
        server.close()


def without_target(line: str) -> str:
    """``line`` less the address, which is another one for each server."""
    return re.sub(r'target="[^"]*"', "", line)


def test_every_capture_is_served_by_one_exporter():
    """All captured pages at once, each its own target: every engine comes up with vLLM's own numbers."""
    servers = {capture: ReplayServer([text_of(capture)]) for capture in CAPTURES}
    try:
        with exporter(*(f"inference/{i}={server.url}" for i, server in enumerate(servers.values()))) as address:
            until(lambda: scrape(address).count("kvpressure_engine_up{") >= len(servers))
            until(lambda: all(server.served >= 3 for server in servers.values()))
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


def test_the_page_is_clean_for_promtool():
    server = ReplayServer(recorded_pages("vllm-cpu/d_kv_pressure")[20:24])
    try:
        with exporter(f"inference/vllm-0={server.url}") as address:
            until(lambda: server.served >= 4)
            page = scrape(address)
    finally:
        server.close()
    checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert not checked.stderr.strip()
