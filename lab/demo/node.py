"""A machine with several vLLM pods, each on its own GPU, in simulated time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvpressure.engines.registry import log_line
from kvpressure.model.readings import ContainerReading, GpuOwner, GpuReading, LogLine
from lab.demo.enginelog import EngineLog
from lab.demo.gpus import SimulatedGpu
from lab.demo.page import Page
from lab.demo.requests import EngineConfig
from lab.demo.simulator import API_CPU_SECONDS_PER_PAGE, SimulatedEngine
from lab.demo.traffic import Traffic, TrafficLoad

NAMESPACE: Final = "inference"
CONTAINER: Final = "vllm"
START_SECONDS: Final = 6.0  # how long a pod is away when it is rolled out; a real start takes minutes
_CFS_PERIODS_PER_SECOND: Final = 10
_ENGINE_CORES: Final = 1.05  # cores of the engine process while it steps
_IDLE_CORES: Final = 0.06
_MEMORY_LIMIT: Final = 48 * 1024**3
_WORKING_SET: Final = 11 * 1024**3


@dataclass(frozen=True, slots=True)
class PodSpec:
    """A pod at its start: name, engine and load; the limits on its command line are the engine's."""

    name: str
    engine: EngineConfig
    load: TrafficLoad
    cpu_limit_cores: float = 8.0


@dataclass(frozen=True, slots=True)
class PodChange:
    """Change of a pod at one moment; ``None`` = unchanged. ``limits``: new engine limits (fields of
    ``EngineConfig``), rolled out while the pod is away for ``START_SECONDS``. ``throttled``: share of throttled CFS
    periods; ``host_factor``: how much that stretches the CPU's work.
    """

    load: TrafficLoad | None = None
    limits: Mapping[str, Any] | None = None
    restart: bool = False
    cpu_limit_cores: float | None = None
    throttled: float | None = None
    host_factor: float | None = None
    stalled: bool | None = None


class SimulatedPod:
    """A pod on the node. Methods require the node's lock."""

    def __init__(self, spec: PodSpec, gpu: SimulatedGpu, start: float, seed: int) -> None:
        self.name = spec.name
        self.gpu = gpu
        self.config = spec.engine
        self.traffic = Traffic(spec.load, start, seed)
        self.cpu_limit_cores = spec.cpu_limit_cores
        self.throttled = 0.0
        self.log = EngineLog()
        self._host_factor = 1.0
        self._ready_at = start
        self._now = start
        self._cpu = 0.0
        self._periods = 0.0
        self._throttled_periods = 0.0
        self._busy = 0.0
        self.engine: SimulatedEngine | None = None
        self.page: Page | None = None
        self._boot(start)

    @property
    def args(self) -> tuple[str, ...]:
        """The container's command line."""
        config = self.config
        queue = config.max_num_queued_reqs
        return (
            "vllm",
            "serve",
            config.model.name,
            "--served-model-name",
            config.served_name,
            "--max-model-len",
            str(config.max_model_len),
            "--max-num-seqs",
            str(config.max_num_seqs),
            "--max-num-batched-tokens",
            str(config.max_num_batched_tokens),
            "--gpu-memory-utilization",
            str(config.gpu_memory_utilization),
            *(() if queue is None else ("--max-num-queued-reqs", str(queue))),
        )

    def apply(self, change: PodChange, at: float) -> None:
        """Apply ``change`` at ``at``."""
        if change.load is not None:
            self.traffic.change(change.load, at)
        self.cpu_limit_cores = change.cpu_limit_cores or self.cpu_limit_cores
        self.throttled = self.throttled if change.throttled is None else change.throttled
        self._host_factor = change.host_factor or self._host_factor
        if change.limits is not None or change.restart:
            self.config = replace(self.config, **(change.limits or {}))
            self.engine = self.page = None
            self._ready_at = at + START_SECONDS
        if self.engine is not None:
            self.engine.host_factor = self._host_factor
            if change.stalled is True:
                self.engine.stall()
            elif change.stalled is False:
                self.engine.resume(at)

    def advance(self, to: float) -> None:
        """Advance time to ``to``. While the pod is away its requests are lost."""
        if self.engine is None and to >= self._ready_at:
            for _ in self.traffic.until(self._ready_at):
                pass
            self._boot(self._ready_at)
        requests = self.traffic.until(to)
        if self.engine is None:
            for _ in requests:
                pass
        else:
            for request in requests:
                self.engine.submit(request)
            self.engine.advance(to)
            self.log.advance(self.engine, to)
        self._account_cpu(to)

    def container(self) -> ContainerReading:
        """The container as in pod status and cgroup."""
        return ContainerReading(
            namespace=NAMESPACE,
            pod=self.name,
            container=CONTAINER,
            restarts=0,
            ready=self.engine is not None,
            cpu_usage_seconds=self._cpu,
            cpu_limit_cores=self.cpu_limit_cores,
            cpu_periods=int(self._periods),
            cpu_throttled_periods=int(self._throttled_periods),
            memory_working_set_bytes=_WORKING_SET,
            memory_limit_bytes=_MEMORY_LIMIT,
        )

    def _boot(self, at: float) -> None:
        self.engine = SimulatedEngine(self.config, at)
        self.engine.host_factor = self._host_factor
        self.page = Page(self.engine, at)
        self.log.started(self.engine)
        self._busy = self._cpu = self._periods = self._throttled_periods = (
            0.0  # a new container has a cgroup of its own
        )

    def _account_cpu(self, to: float) -> None:
        """Cores used: the engine's step loop and the API server, or the whole quota where that is too small."""
        elapsed = to - self._now
        if elapsed <= 0:
            return
        busy = self.engine.work_until(to).step_seconds if self.engine is not None else 0.0
        busy_share = min(1.0, max(0.0, busy - self._busy) / elapsed)
        wanted = _IDLE_CORES + busy_share * (self.cpu_limit_cores if self.throttled else _ENGINE_CORES)
        self._cpu += elapsed * min(wanted, self.cpu_limit_cores)
        self._periods += elapsed * _CFS_PERIODS_PER_SECOND
        self._throttled_periods += elapsed * _CFS_PERIODS_PER_SECOND * self.throttled * busy_share
        self._now, self._busy = to, busy


class SimulatedNode:
    """The pods and one clock. Thread-safe: every reader first advances time to its own now."""

    def __init__(self, pods: Iterable[PodSpec], clock: Callable[[], float], seed: int = 1) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        start = self._reached = clock()
        self.pods = {
            spec.name: SimulatedPod(spec, SimulatedGpu(index), start, seed * 1000 + index)
            for index, spec in enumerate(pods)
        }

    def apply(self, changes: Mapping[str, PodChange], at: float) -> None:
        """Apply changes to pods, by name, at time ``at``, or now if a reader has advanced time beyond it."""
        with self._lock:
            self._advance(at)
            for name, change in changes.items():
                self.pods[name].apply(change, self._reached)

    def metrics(self, name: str) -> str | None:
        """A pod's metrics now; ``None`` while it is away."""
        with self._lock:
            self._advance(self._clock())
            pod = self.pods[name]
            if pod.engine is None or pod.page is None:
                return None
            pod.engine.books.cpu_seconds += API_CPU_SECONDS_PER_PAGE
            return pod.page.render()

    def gpus(self) -> tuple[GpuReading, ...]:
        """All GPUs now."""
        with self._lock:
            now = self._clock()
            self._advance(now)
            return tuple(pod.gpu.read(pod.engine, now) for pod in self.pods.values())

    def owners(self) -> tuple[GpuOwner, ...]:
        """The owner of each GPU."""
        return tuple(GpuOwner(pod.gpu.uuid, NAMESPACE, pod.name, CONTAINER) for pod in self.pods.values())

    def containers(self) -> tuple[ContainerReading, ...]:
        """The containers now."""
        with self._lock:
            self._advance(self._clock())
            return tuple(pod.container() for pod in self.pods.values())

    def logs(self) -> tuple[LogLine, ...]:
        """Log lines since the last call."""
        with self._lock:
            self._advance(self._clock())
            return tuple(
                log_line(NAMESPACE, pod.name, CONTAINER, line) for pod in self.pods.values() for line in pod.log.take()
            )

    def _advance(self, to: float) -> None:
        self._reached = max(self._reached, to)
        for pod in self.pods.values():
            pod.advance(self._reached)
