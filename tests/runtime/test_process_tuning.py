"""How the serving process is tuned, seen from inside a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from threading import Thread

import pytest
from prometheus_client.metrics_core import Metric as Family

from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish import routes
from kvpressure.publish.web.http import HttpRequest
from kvpressure.sources.kubernetes.discovery_state import SharedDiscovery
from kvpressure.sources.scrape.source import EngineSource
from kvpressure.sources.scrape.targets import parse_target
from tests.helpers.three_engines import Shown, snapshot
from tests.sources.scrape.test_source import PAGE, USUAL, Settings, answering


def run(code: str) -> list[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()


@pytest.mark.live
def test_threads_leave_no_large_blocks_behind() -> None:
    """Twelve threads that each hold and free blocks of many sizes: without it each keeps an arena."""
    code = """
import threading
from pathlib import Path
from kvpressure.runtime import process_tuning as runtime
assert runtime.limit_malloc_arenas()
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
meet = threading.Barrier(13)
def work():
    meet.wait()
    for size in range(100_000, 2_000_000, 100_000):
        block = bytearray(b"x" * size)
        small = bytearray(1000)  # lies above the block, so that an arena cannot shrink
    del block
    meet.wait(); meet.wait()
before = resident()
threads = [threading.Thread(target=work, daemon=True) for _ in range(12)]
for thread in threads: thread.start()
meet.wait(); meet.wait()
print(resident() - before)
meet.wait()
"""
    assert int(run(code)[0]) < 2**20


@pytest.mark.live
def test_what_is_there_at_the_start_is_not_collected_again_and_garbage_still_is() -> None:
    code = """
import gc, sys, weakref
from kvpressure.runtime import process_tuning as runtime
runtime.tune_gc()
print(gc.get_freeze_count() > 5000, gc.isenabled(), sys.getswitchinterval())
class Knot: pass
knots = []
for _ in range(20_000):
    knot = Knot(); knot.self = knot; knots.append(weakref.ref(knot))
print(sum(ref() is not None for ref in knots) < 15_000)
"""
    assert run(code) == ["True", "True", "0.001", "True"]


@pytest.mark.live
def test_sources_and_tick_wait_while_a_page_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, shown, done = SharedDiscovery(), Shown(ticks=1), list[object]()
    pipeline = Pipeline(give_way=shared.give_way)
    site = routes.Site(
        lambda: shown.state, why_unhealthy=lambda: None, why_not_ready=lambda: None, rendering=shared.rendering
    )
    with answering(PAGE) as server:
        source = EngineSource(Settings(engine_targets=(parse_target(server.address),), shared=shared, **USUAL))
        others = [
            Thread(target=lambda: done.append(pipeline.observe(snapshot(1)))),
            Thread(target=lambda: done.append(source.read())),
        ]

        def rendered(*_: object) -> Iterator[Family]:
            for thread in others:
                thread.start()
                thread.join(0.08)
            assert (done, server.requests) == ([], [])
            yield from ()

        monkeypatch.setattr(routes, "collect", rendered)
        assert site.answer(HttpRequest("GET", "/metrics", {}, keep_alive=True)).status == 200
        for thread in others:
            thread.join(10)
        source.close()
    assert len(done) == 2
