"""The faults: each is a context in which the fault lasts, with what it may cost meanwhile."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from tests.sources.gpu.nvml_stub import Gpu, Mig
from tests.sources.kubernetes import objects

from kvpressure.sources.kubernetes.api import BACKOFF_SECONDS
from lab.soak.node import STOPPABLE, VICTIM, SoakNode

HOUR: Final = 3600.0
UNKNOWN, LOST = 999, 15  # NVML's codes
PASSING_AT_ONCE: Final = 500  # pods; one in forty is an engine
ENGINES_AMONG: Final = 40
JOB: Final = {"name": "job", "image": "busybox", "command": ["sleep", "5"]}
REPAIR_SECONDS: Final = 60.0  # after which a GPU that was lost is looked for anew; after that twice as long each time
SUSPEND_SECONDS: Final = 300.0
RETRY_SECONDS: Final = 5.0  # of a failing target, the list of GPUs and the flight recorder's disk

# What a fault shows
DOWN: Final = r'kvpressure_engine_up{{[^}}]*pod="{}"[^}}]*}} 0\.0'
SOURCE: Final = r'kvpressure_source_up{{source="{}"}} 0\.0'
GPU_DOWN: Final = r"kvpressure_gpu_up\{[^}]*\} 0\.0"

# What may be lost of an engine that has no fault, as long as the fault lasts
OF_GPU: Final = re.compile(r"kvpressure_(gpu_|engine_gpu|memory_|fragmentation|limit|score_|.*demand)")
OF_POD: Final = re.compile(r"kvpressure_container_(discovery|restarts|ready|last|alerts)")


@dataclass(frozen=True)
class Fault:
    """``happen``: makes it happen, and mends it. ``shows``: what has to appear in the metrics soon. ``costs``: names
    of series that an innocent engine may lose meanwhile. ``retry_seconds``: after which what failed is tried again at
    the latest, where that is not at the next interval.
    ``late_seconds``: after which the exporter looks, beside the usual time. ``blind``: nothing is known at first, and
    an innocent engine may be absent, but not down.
    ``hides_pods``: pods that went are not known to be gone. ``rare``: takes minutes, so it happens once in many rounds.
    """

    happen: Callable[[], AbstractContextManager[None]]
    shows: str = ""
    costs: re.Pattern[str] | None = None
    retry_seconds: float = 0.0
    late_seconds: float = 0.0
    blind: bool = False
    hides_pods: bool = False
    rare: bool = False


class Faults:
    """All of them, by name, on one node. ``gone``: pods that were deleted, and when; ``passed``: how many."""

    def __init__(self, node: SoakNode, rng: random.Random, in_order: Callable[[], None]) -> None:
        self.node = node
        self.random = rng
        self.in_order = in_order  # waits until everything is there
        self.gone: dict[str, float] = {}
        self.passed = 0
        self.problems: list[str] = []
        self._rotations = 0
        modes = ("hang", "drip", "reset", "error", "html", "endless")
        # One fault after the other teaches the watch to wait as long as it ever does before it connects again.
        api = partial(
            Fault, costs=OF_POD, hides_pods=True, late_seconds=BACKOFF_SECONDS[1], retry_seconds=BACKOFF_SECONDS[1]
        )
        self.all: dict[str, Fault] = {
            **{
                f"engine {mode}": Fault(partial(self._engine, mode), DOWN.format(VICTIM), retry_seconds=RETRY_SECONDS)
                for mode in modes
            },
            "engine slow": Fault(partial(self._engine, "slow")),
            "engine renamed": Fault(partial(self._engine, "renamed"), 'model_name="renamed-'),
            "engine stopped (SIGSTOP)": Fault(
                self._engine_stopped, DOWN.format(STOPPABLE), retry_seconds=RETRY_SECONDS
            ),
            "engine killed and restarted": Fault(
                self._engine_killed, DOWN.format(STOPPABLE), retry_seconds=RETRY_SECONDS
            ),
            "API server 410": api(partial(self._api, 410)),
            "API server 429": api(partial(self._api, 429), SOURCE.format("pods")),
            "API server 500": api(partial(self._api, 500), SOURCE.format("pods")),
            "API server hangs up": Fault(self._api_cut, hides_pods=True),
            "API server down": api(self._api_down, SOURCE.format("pods")),
            "API server HTML": api(self._api_html, SOURCE.format("pods")),
            "kubelet gone": Fault(self._kubelet, SOURCE.format("podresources"), costs=OF_GPU),
            "GPU fails": Fault(partial(self._gpu, UNKNOWN), GPU_DOWN),
            "GPU lost": Fault(partial(self._gpu, LOST), GPU_DOWN, retry_seconds=2 * REPAIR_SECONDS, rare=True),
            "GPU split by MIG": Fault(self._mig, 'uuid="MIG-1"', costs=OF_GPU, retry_seconds=RETRY_SECONDS),
            "log flood and rotation": Fault(self._logs),
            "disk full": Fault(self._disk, r"\nkvpressure_recorder_up 0\.0\n", retry_seconds=RETRY_SECONDS),
            "pods pass by": Fault(self._pods, 'pod="passing-', late_seconds=BACKOFF_SECONDS[1]),
            "clock an hour ahead": Fault(partial(self._clock, HOUR), blind=True, retry_seconds=RETRY_SECONDS),
            "clock an hour behind": Fault(partial(self._clock, -HOUR), blind=True, retry_seconds=RETRY_SECONDS),
            "suspended": Fault(self._suspend),
            "suspended for five minutes": Fault(partial(self._suspend, SUSPEND_SECONDS), blind=True, rare=True),
            "terminated": Fault(self._terminate),
        }

    @contextmanager
    def _engine(self, mode: str) -> Iterator[None]:
        self.node.victim.mode = mode
        yield
        self.node.victim.mode = "ok"

    @contextmanager
    def _engine_stopped(self) -> Iterator[None]:
        self.node.stoppable.freeze()
        yield
        self.node.stoppable.go_on()

    @contextmanager
    def _engine_killed(self) -> Iterator[None]:
        self.node.stoppable.kill()
        yield
        self.node.stoppable.start()

    @contextmanager
    def _api(self, status: int) -> Iterator[None]:
        api = self.node.api
        api.status = {"watch": status} if status == 410 else {"watch": status, "list": status}
        api.compact()
        api.cut()
        yield
        api.status = {}

    @contextmanager
    def _api_cut(self) -> Iterator[None]:
        self.node.api.cut()
        yield

    @contextmanager
    def _api_down(self) -> Iterator[None]:
        self.node.api.stop()
        yield
        self.node.api.start()

    @contextmanager
    def _api_html(self) -> Iterator[None]:
        self.node.api.html = True
        self.node.api.cut()
        yield
        self.node.api.html = False

    @contextmanager
    def _kubelet(self) -> Iterator[None]:
        self.node.kubelet.stop()
        yield
        self.node.kubelet.start()

    @contextmanager
    def _gpu(self, code: int) -> Iterator[None]:
        with self._second_gpu(Gpu(codes={"all": code})):
            yield

    @contextmanager
    def _mig(self) -> Iterator[None]:
        with self._second_gpu(Gpu(mig=1, max_mig=2, migs=[Mig(f"MIG-{number}", gi=number) for number in (1, 2)])):
            yield

    @contextmanager
    def _second_gpu(self, gpu: Gpu) -> Iterator[None]:
        sound = self.node.gpus[1]
        self.node.gpus[1] = gpu
        self.node.write_world()
        yield
        self.node.gpus[1] = sound
        self.node.write_world()

    @contextmanager
    def _logs(self) -> Iterator[None]:
        log = self.node.logs[VICTIM]
        for _ in range(3):
            log.write(
                *("x" * 200 for _ in range(2_000)),
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.",
            )
            self._rotations += 1
            log.rotate(f"20260101-{self._rotations:06}")
        yield
        for file in log.directory.glob("*.log.*"):
            file.unlink()

    @contextmanager
    def _disk(self) -> Iterator[None]:
        self.node.refuse_writes(True)
        yield
        self.node.refuse_writes(False)

    @contextmanager
    def _pods(self) -> Iterator[None]:
        node, api = self.node, self.node.api
        api.forget_delivered()
        jobs, engines = [], []
        for number in range(self.passed, self.passed + PASSING_AT_ONCE):
            name = f"passing-{number}"
            if number % ENGINES_AMONG == 0:
                node.add(name)
                engines.append(name)
            else:
                jobs.append(objects.pod(name, containers=[dict(JOB)]))
                api.apply(jobs[-1])
        self.passed += PASSING_AT_ONCE
        yield
        for name in engines:
            node.remove(name)
        for job in jobs:
            api.delete(job)
        now = time.monotonic()
        self.gone |= dict.fromkeys((*engines, *(job["metadata"]["name"] for job in jobs)), now)

    @contextmanager
    def _clock(self, seconds: float) -> Iterator[None]:
        self.node.clock.step(seconds)
        yield
        self.node.clock.step(0.0)

    @contextmanager
    def _suspend(self, seconds: float | None = None) -> Iterator[None]:
        self.node.process.send_signal(signal.SIGSTOP)
        time.sleep(self.random.uniform(0.5, 3.0) if seconds is None else seconds)
        self.node.process.send_signal(signal.SIGCONT)
        yield

    @contextmanager
    def _terminate(self) -> Iterator[None]:
        time.sleep(self.random.uniform(0, 1.0))  # anywhere in a tick
        process = self.node.process
        self.node.stop()
        if process.returncode != 0:
            self.problems.append(f"SIGTERM: exit status {process.returncode}")
        self.node.start()
        self.in_order()
        yield
