"""A node of three engines, each with a pod, a GPU and a container, and what it shows of them: one can be
made to misbehave.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cached_property
from typing import Any

import pytest

from kvpressure.model import readings as r
from kvpressure.model.isolation import REASONS
from kvpressure.model.readings import (
    AllocatorReading,
    ContainerReading,
    Discovered,
    EngineReading,
    GpuOwner,
    GpuProcess,
    GpuReading,
    Histogram,
    Scrape,
    Snapshot,
    SourceHealth,
    StepStats,
)
from kvpressure.model.state import State
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.page.view import ViewContext
from kvpressure.publish.routes import Site
from kvpressure.publish.web.http import HttpRequest

T = 1_700_000_000.0
PODS = ("chat-0", "chat-1", "chat-2")
BAD = "chat-1"
TICKS = 4
GIB = 2**30


def engine_page(pod: str, i: int) -> Scrape:
    gauges = {r.RUNNING: 4.0, r.WAITING: 1.0, r.KV_USAGE: 0.5}
    counters = {
        r.PREEMPTIONS: float(i),
        r.PROMPT_TOKENS: 100.0 * i,
        r.GENERATION_TOKENS: 1000.0 * i,
        r.FINISHED_PREFIX + "stop": 2.0 * i,
    }
    histogram = Histogram((0.1, 1.0, float("inf")), (1.0 * i, 2.0 * i, 3.0 * i), 1.5 * i, 3.0 * i)
    histograms = dict.fromkeys((r.TTFT, r.E2E, r.INTER_TOKEN, r.REQUEST_PROMPT, r.REQUEST_OUTPUT), histogram)
    reading = EngineReading("m", "0", gauges, counters, histograms, {"block_size": "16", "num_gpu_blocks": "1000"})
    return Scrape(
        f"http://{pod}/metrics", T + i, "n", pod, "vllm", engines=(reading,), page={r.PROCESS_START: T - 900.0}
    )


def gpu(pod: str) -> GpuReading:
    return GpuReading(
        f"GPU-{pod}",
        PODS.index(pod),
        "nvidia",
        "H100",
        memory_total_bytes=80 * GIB,
        memory_used_bytes=70 * GIB,
        utilization_ratio=0.5,
        power_watts=400.0,
        power_limit_watts=700.0,
        processes=(GpuProcess(10, GIB),),
    )


def container(pod: str, i: int) -> ContainerReading:
    return ContainerReading(
        "n",
        pod,
        "vllm",
        restarts=0,
        ready=True,
        cpu_usage_seconds=1.0 * i,
        cpu_limit_cores=4.0,
        cpu_periods=10 * i,
        cpu_throttled_periods=i,
        memory_working_set_bytes=GIB,
        memory_limit_bytes=4 * GIB,
    )


def steps(pod: str, i: int) -> StepStats:
    return StepStats("n", pod, "0", T - 100, T + i, 10 * i, 40 * i, exact=True, kv_max=0.6, sizes={4: 10 * i})


def discovered(pod: str) -> Discovered:
    return Discovered("n", pod, "vllm", "engine", "command", "command", "its command", f"http://{pod}/metrics", True)


def snapshot(i: int) -> Snapshot:
    return Snapshot(
        T + i,
        gpus=tuple(map(gpu, PODS)),
        pages=tuple(engine_page(pod, i) for pod in PODS),
        containers=tuple(container(pod, i) for pod in PODS),
        owners=tuple(GpuOwner(f"GPU-{pod}", "n", pod, "vllm") for pod in PODS),
        allocator=tuple(AllocatorReading("n", pod, 0, 60 * GIB, 65 * GIB, GIB) for pod in PODS),
        steps=tuple(steps(pod, i) for pod in PODS),
        targets=tuple(f"http://{pod}/metrics" for pod in PODS),
        discovered=tuple(map(discovered, PODS)),
        health={name: SourceHealth(name, up=True, last_success=T + i) for name in PODS},
    )


class Shown:
    def __init__(self, change: Callable[[Snapshot], Snapshot] = lambda one: one, ticks: int = TICKS) -> None:
        pipeline, self.around = Pipeline(), ViewContext()
        for i in range(1, ticks + 1):
            given = change(snapshot(i))
            self.state: State = pipeline.observe(given)
        self.site = Site(lambda: self.state, why_unhealthy=lambda: None, why_not_ready=lambda: None, around=self.around)
        self.html = self.get("/").decode()
        self.json = self.get("/api/v1/diagnosis").decode()
        self.document: dict[str, Any] = json.loads(self.json, parse_constant=pytest.fail)
        self.metrics = self.get("/metrics").decode().splitlines()

    def get(self, path: str) -> bytes:
        response = self.site.answer(HttpRequest("GET", path, {}, keep_alive=True))
        assert response.status == 200
        return response.body

    def of(self, pod: str) -> tuple[list[str], list[str], list[Any]]:
        """Series, parts of the page and entries of the JSON about one pod, its GPU and its container."""
        series = [line for line in self.metrics if pod in line and "isolated" not in line and not line.startswith("#")]
        parts = [part for part in self.parts if pod in part]
        return series, parts, [entry for text, entry in self.entries if pod in text]

    @cached_property
    def parts(self) -> list[str]:
        return re.findall(r"<article.*?</article>|<tr>.*?</tr>", self.html, re.S)

    @cached_property
    def entries(self) -> list[tuple[str, Any]]:
        found = (
            entry
            for kind in ("engines", "gpus", "containers", "targets", "discovered")
            for entry in self.document[kind]
        )
        return [(str(entry), entry) for entry in found]

    @cached_property
    def innocent(self) -> dict[str, tuple[list[str], list[str], list[Any]]]:
        """What is shown of the pods that do not misbehave."""
        return {pod: self.of(pod) for pod in PODS if pod != BAD}

    def failures(self) -> dict[tuple[str, str, str], float]:
        found = {}
        for line in self.metrics:
            if line.startswith("kvpressure_isolated_failures_total{"):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
                assert labels["reason"] in REASONS
                found[labels["kind"], labels["name"], labels["stage"]] = float(line.rsplit(" ", 1)[1])
        return found


def assert_innocent(shown: Shown, undisturbed: Shown) -> None:
    for pod, (series, parts, entries) in shown.innocent.items():
        assert len(series) > 50
        assert len(parts) == 4
        assert len(entries) == 5
        assert (series, parts, entries) == undisturbed.innocent[pod]
