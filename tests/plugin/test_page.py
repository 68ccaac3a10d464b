"""The way without a directory: from the plugin through prometheus_client's files and vLLM's page to the exporter."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tests.helpers.vllm_pages as pages
from kvpressure.settings.settings import Settings
from kvpressure.sources.catalog import CollectorSettings
from kvpressure.sources.plugin_metrics import read_plugin_metrics
from kvpressure.sources.scrape.source import EngineSource
from kvpressure.sources.scrape.targets import parse_target
from tests.helpers.plugin import with_plugin
from tests.helpers.vllm_server import answering, response

pytestmark = pytest.mark.live

WORKER = """
from kvpressure_vllm.registry_gauges import show_allocator
show_allocator({"rank": %d, "allocated_bytes": 10, "reserved_bytes": 30, "inactive_split_bytes": 5})
"""
FRONTEND = """
from kvpressure_vllm.registry_gauges import show_steps
for n in (1, 2):
    show_steps({"0": {"steps": 50 * n, "decoded": 280 * n, "tokens": 300 * n, "preemptions": n, "kv_max": 0.4 * n,
                      "batch": {4: 10 * n, 8: 30 * n}, "running": {9: 50 * n}}})
"""
PEAK = """from kvpressure_vllm.registry_gauges import show_steps as show; show({"0": {
    "steps": 1, "decoded": 1, "tokens": 1, "preemptions": 0, "kv_max": %s, "batch": {1: 1}, "running": {1: 1}}})"""
SERVE = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode(), end="")
"""


def python(code: str, directory: Path | None) -> str:
    env = with_plugin(os.environ, without=("KVPRESSURE", "PROMETHEUS"))
    if directory is not None:
        env["PROMETHEUS_MULTIPROC_DIR"] = str(directory)
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=30
    ).stdout


def shown(directory: Path) -> bytes:
    """The page of a server with two workers and one API server, with figures of this moment."""
    for code in (WORKER % 0, WORKER % 1, FRONTEND):
        python(code, directory)
    return python(SERVE, directory).encode()


@pytest.fixture(scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return shown(tmp_path_factory.mktemp("multiproc"))


class TestPage:
    def test_what_workers_and_an_api_server_show_is_read(self, one_server: bytes) -> None:
        inside = read_plugin_metrics(one_server, "ns", "p", time.time())
        assert inside is not None
        assert sorted(
            (a.pod, a.rank, a.allocated_bytes, a.reserved_bytes, a.inactive_split_bytes) for a in inside.allocator
        ) == [("p", rank, 10, 30, 5) for rank in (0, 1)]
        [stats] = inside.steps
        assert (stats.exact, stats.sizes, stats.kv_max) == (True, {4: 20, 8: 60}, 0.8)
        assert (stats.steps, stats.decoded) == (80, 560)

    def test_two_api_servers_add_up(self, tmp_path: Path) -> None:
        for _ in range(2):
            python(FRONTEND, tmp_path)
        inside = read_plugin_metrics(python(SERVE, tmp_path).encode(), "ns", "p", time.time())
        [stats] = inside.steps if inside else ()
        assert (stats.exact, stats.sizes, stats.steps, stats.decoded) == (False, {9: 200}, 200, 1120)

    def test_workers_of_two_replicas_that_have_the_same_rank_are_two(self, tmp_path: Path) -> None:
        for _ in range(2):
            python(WORKER % 0, tmp_path)
        inside = read_plugin_metrics(python(SERVE, tmp_path).encode(), "ns", "p", time.time())
        assert inside is not None
        assert [(a.rank, a.allocated_bytes, a.reserved_bytes) for a in inside.allocator] == [(0, 10, 30)] * 2

    @pytest.mark.parametrize("order", [("0.9", "0.4", "0.9"), ("0.4", "0.9", "0.9"), ("0.9", "None", None)])
    def test_the_kv_peak_is_the_largest_of_all_api_servers_and_expires(
        self, tmp_path: Path, order: tuple[str, str, float | None]
    ) -> None:
        """The scheduler's part of a step goes to one API server. The third: one server that has been idle since."""
        *told, peak = order
        if peak is None:
            python("; ".join(PEAK % value for value in told), tmp_path)
        else:
            for value in told:
                python(PEAK % value, tmp_path)
        inside = read_plugin_metrics(python(SERVE, tmp_path).encode(), "ns", "p", time.time())
        assert inside is not None
        assert [stats.kv_max for stats in inside.steps] == [peak and float(peak)]

    def test_figures_of_a_worker_that_has_ended_are_not_used(self, one_server: bytes) -> None:
        inside = read_plugin_metrics(one_server, "ns", "p", time.time() + 20)
        assert inside is not None
        assert inside.allocator == ()

    def test_the_source_gives_it_with_every_read_while_it_is_fresh(self, tmp_path: Path) -> None:
        page = response(pages.text_of("c_steady").encode() + b"\n" + shown(tmp_path))
        with answering(page) as server:
            target = parse_target(f"ns/p={server.address}")
            source = EngineSource(
                Settings(engine_targets=(target,), collectors={"engines": CollectorSettings(True, 5.0, 5.0)})
            )
            try:
                first, second = source.read(), source.read()
            finally:
                source.close()
        assert (len(first.pages or ()), len(second.pages or ())) == (1, 0)  # the second page is not due yet
        for reading in (first, second):
            assert sorted((a.pod, a.rank) for a in reading.allocator or ()) == [("p", 0), ("p", 1)]
            assert [s.exact for s in reading.steps or ()] == [True]


@pytest.mark.attack("step counts that rise to 1.7e308 on one scrape", "the values are absent and counted")
@pytest.mark.parametrize(
    "line",
    [
        'engine_steps_total{engine="0",count="batch",size="-5"} 3',
        'engine_steps_total{engine="0",count="batch",size="9000000"} 3',
        'engine_steps_total{engine="0",count="batch",size="5"} -3',
        'engine_steps_total{engine="0",count="batch",size="5"} 1.7e308',
        'engine_kv_max{engine="0"} 77.0',
        'engine_sums_total{engine="0",sum="decoded"} 1e300',
        'allocator{rank="0",figure="reserved_bytes"} 1e300',
        'allocator{rank="-1",figure="reserved_bytes"} 10',
        'written_seconds{rank="0"} 1e300',
    ],
)
def test_figures_that_cannot_be_are_absent_and_counted(line: str) -> None:
    page = f"vllm:x 1\nkvpressure:frontends 1.0\nkvpressure:{line}\n"
    inside = read_plugin_metrics(page.encode(), "n", "p", 1_700_000_000.0)
    assert inside is not None
    assert inside.bad_lines == 1
    assert inside.allocator == ()
    assert all((stats.sizes, stats.decoded, stats.kv_max) == ({}, 0, None) for stats in inside.steps)
