"""Fourteen days of a production service's request rates on a simulated server with a default installation.

The rates of every ten minutes are the published ones, scaled so that the busiest window of the fortnight is
``PEAK_SHARE`` of what the server can do; in between requests arrive as a Poisson process. The exporter's pipeline takes
one snapshot per scrape. Two weeks run side by side, the second on a server of its own that starts ``WARM_SECONDS``
before its first day.
"""

from __future__ import annotations

import csv
import gzip
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Final

from kvpressure.model.readings import Scrape, Snapshot, SourceHealth
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.sources.scrape.scanner import Scanner, parse_scrape
from lab.alerts.engine import Active, evaluate
from lab.alerts.series import SCRAPE_SECONDS, Series
from lab.demo.gpus import SimulatedGpu
from lab.demo.model import GPU_MEMORY_BYTES, LLAMA_2_13B
from lab.demo.node import CONTAINER, NAMESPACE, PodChange, PodSpec, SimulatedNode
from lab.demo.requests import EngineConfig
from lab.demo.simulator import SimulatedEngine
from lab.demo.traffic import Traffic, TrafficLoad

RATES: Final = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "traffic" / "servegen_rates_10min.csv.gz"
PEAK_SHARE: Final = 0.8
DAYS: Final = 14
DAY_SECONDS: Final = 86_400
WINDOW_SECONDS: Final = 600
WARM_SECONDS: Final = 7200  # longer than any range, ``for`` and keep_firing_for together
START: Final = 1_700_000_000.0
POD: Final = "chat-13b-0"

# What vLLM takes when nothing but the model is given: 0.92 of the GPU, 256 sequences. 2 % more of the GPU than the
# profile's 0.9 is 1 670 more tokens of cache.
_POOL_TOKENS: Final = LLAMA_2_13B.kv_pool_tokens + int(0.02 * GPU_MEMORY_BYTES / LLAMA_2_13B.kv_bytes_per_token)
ENGINE: Final = EngineConfig(
    LLAMA_2_13B, "chat-13b", max_model_len=4096, gpu_memory_utilization=0.92, kv_pool_tokens=_POOL_TOKENS
)
ARGS: Final = ("vllm", "serve", LLAMA_2_13B.name, "--served-model-name", ENGINE.served_name)
LOAD: Final = TrafficLoad(requests_per_second=0.0, prompt_tokens=500, output_tokens=350, max_tokens=2048)
_OVERLOAD_PER_SECOND: Final = 6.0
_OVERLOAD_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Day:
    """What happened on one day; ``active`` are the alerts at every evaluation, in seconds from its midnight."""

    number: int
    requests: int
    preemptions: int
    peak_per_second: float
    kv_max: float
    active: tuple[Active, ...]


@lru_cache(maxsize=1)
def capacity() -> float:
    """Requests per second that the server finishes when far more arrive."""
    engine = SimulatedEngine(ENGINE, 0.0)
    for request in Traffic(replace(LOAD, requests_per_second=_OVERLOAD_PER_SECOND), 0.0, seed=1).until(
        _OVERLOAD_SECONDS
    ):
        engine.submit(request)
    engine.advance(_OVERLOAD_SECONDS)
    return sum(engine.books.finished.values()) / _OVERLOAD_SECONDS


@lru_cache(maxsize=4)
def rates(service: str) -> tuple[float, ...]:
    """Requests per second of every window of the fortnight, scaled to this server."""
    with gzip.open(RATES, "rt", encoding="utf-8", newline="") as lines:
        published = [float(row["requests_per_s"]) for row in csv.DictReader(lines) if row["model"] == service]
    scale = PEAK_SHARE * capacity() / max(published)
    return tuple(rate * scale for rate in published)


class Server:
    """The node with its one pod, driven by a clock of its own, and the exporter's pipeline on it."""

    def __init__(self, start: float, seed: int, engine: EngineConfig = ENGINE, load: TrafficLoad = LOAD) -> None:
        self.now = start
        self._load = load
        self.node = SimulatedNode([PodSpec(POD, engine, load)], lambda: self.now, seed)
        self.pipeline = Pipeline()
        self.ticks = 0
        self._scanner = Scanner()

    @property
    def engine(self) -> SimulatedEngine:
        """The engine; this server never restarts."""
        engine = self.node.pods[POD].engine
        assert engine is not None
        return engine

    @property
    def _gpu(self) -> SimulatedGpu:
        return self.node.pods[POD].gpu

    def scrape(self, series: Series, rate: float | None) -> None:
        """Let ``SCRAPE_SECONDS`` pass, at a new request rate unless None, and publish one snapshot."""
        if rate is not None:
            self.node.apply({POD: PodChange(load=replace(self._load, requests_per_second=rate))}, self.now)
        self.now += SCRAPE_SECONDS
        self.ticks += 1
        node, page = self.node, self._page()
        health = {
            name: SourceHealth(name, up=True, last_success=self.now) for name in ("engines", "nvidia", "podresources")
        }
        snapshot = Snapshot(
            time=self.now,
            gpus=node.gpus(),
            pages=(page,),
            containers=node.containers(),
            owners=node.owners(),
            logs=node.logs(),
            targets=(page.target,),
            health=health,
        )
        series.add(replace(self.pipeline.observe(snapshot), ticks=self.ticks))

    def _page(self) -> Scrape:
        return parse_scrape(
            self.node.metrics(POD),
            target=f"http://{POD}:8000/metrics",
            time=self.now,
            namespace=NAMESPACE,
            pod=POD,
            container=CONTAINER,
            gpus=(self._gpu.uuid,),
            args=ARGS,
            duration_seconds=0.01,
            scanner=self._scanner,
        )


def play(service: str, first_day: int, end_day: int, seed: int = 1) -> Iterator[Day]:
    """The days ``first_day`` (included) to ``end_day`` (excluded), counted from 0, evaluated one by one."""
    begin = first_day * DAY_SECONDS - (WARM_SECONDS if first_day else 0)
    server, series = Server(START + begin, seed), Series()
    window, rate = -1, rates(service)
    for number in range(first_day, end_day):
        before = (server.engine.books.preemptions, _finished(server))
        peak = kv_max = 0.0
        while server.now < START + (number + 1) * DAY_SECONDS:
            at = int((server.now - START) // WINDOW_SECONDS)
            server.scrape(series, rate[at] if at != window else None)
            window, peak, kv_max = at, max(peak, rate[at]), max(kv_max, server.engine.books.kv_usage)
        yield Day(
            number,
            _finished(server) - before[1],
            server.engine.books.preemptions - before[0],
            peak,
            kv_max,
            tuple(_evaluated(series, begin, number)),
        )
        series.forget(series.scrapes - int(WARM_SECONDS / SCRAPE_SECONDS))


def _finished(server: Server) -> int:
    return sum(server.engine.books.finished.values())


def _evaluated(series: Series, begin: float, number: int) -> Iterator[Active]:
    """Alerts of one day, the hours before it evaluated along so that every range and wait is filled."""
    midnight = int((number * DAY_SECONDS - begin) / SCRAPE_SECONDS)
    warm = min(midnight, int(WARM_SECONDS / SCRAPE_SECONDS))
    for item in evaluate(series, midnight - warm):
        at = item.at - midnight * SCRAPE_SECONDS
        if at >= 0:
            yield replace(item, at=at)


def _week(job: tuple[str, int, int]) -> list[Day]:
    return list(play(*job))


def fortnight(service: str, days: int = DAYS, workers: int = 2) -> list[Day]:
    """All days in order, in ``workers`` processes, one stretch each."""
    edges: Sequence[int] = [round(days * part / workers) for part in range(workers + 1)]
    jobs = [(service, first, end) for first, end in itertools.pairwise(edges) if end > first]
    with ProcessPoolExecutor(workers) as pool:
        return [day for week in pool.map(_week, jobs) for day in week]
