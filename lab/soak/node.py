"""The node on which faults happen, and how much the machine under it can be trusted with time."""

from __future__ import annotations

import mmap
import resource
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from pathlib import Path
from typing import Any, Final

from tests.sources.gpu.nvml_stub import build
from tests.sources.kubernetes.node import Node, PodServer, uuid

from lab.soak.engines import Stoppable, Victim

INNOCENT: Final = ("good-0", "good-1", "good-2")
VICTIM, STOPPABLE = "victim-0", "victim-1"
LAG_BEFORE_SECONDS: Final = 3.0
WOKEN_SECONDS: Final = 0.02


class Lag:
    """How late a thread is woken on this machine: where that is long, an engine that is not up says nothing
    about the exporter.
    """

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque(maxlen=20_000)
        threading.Thread(target=self._measure, daemon=True).start()

    def _measure(self) -> None:
        while True:
            began = time.monotonic()
            time.sleep(WOKEN_SECONDS)
            self._late.append((began, time.monotonic() - began - WOKEN_SECONDS))

    def worst(self, since: float) -> float:
        """The most in seconds, from some seconds before ``since`` on."""
        return max((late for began, late in tuple(self._late) if began >= since - LAG_BEFORE_SECONDS), default=0.0)

    def lost(self, since: float) -> float:
        """Seconds since then in which a thread that wanted to run did not."""
        return sum(late for began, late in tuple(self._late) if began >= since)


class WallClock:
    """The wall clock of a process, which can be stepped: a library that the process preloads."""

    def __init__(self, where: Path) -> None:
        library = where / "clock.so"
        source = Path(__file__).with_name("clock.c")
        subprocess.run(
            ["cc", "-std=gnu11", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True
        )
        file = where / "clock"
        file.write_bytes(struct.pack("d", 0.0))
        with file.open("r+b") as opened:
            self._offset = mmap.mmap(opened.fileno(), 8)
        self.environment = {"LD_PRELOAD": str(library), "SOAK_CLOCK": str(file)}

    def step(self, seconds: float) -> None:
        """Set the clock off by so much from the machine's."""
        self._offset[:] = struct.pack("d", seconds)


class SoakNode(Node):
    """A node with two engines that fail on demand, a flight recorder and a clock of its own."""

    def __init__(self, where: Path) -> None:
        recorder = ("--record.directory", str(where / "recordings"), "--record.max-size", "1MiB", "--record.keep", "2")
        super().__init__(where, build(where / "driver"), *recorder)
        self.patience_seconds = 300.0  # on a busy machine; what is judged is the time until everything is back
        self.clock = WallClock(where)
        self.extra_environment = self.clock.environment
        self.victim, self.stoppable = Victim(), Stoppable()
        self.servers += [self.victim, self.stoppable]

    def populate(self) -> None:
        """Three engines that no fault is meant for, the first with a GPU, and the two that fail; the first of these
        has the other GPU.
        """
        devices = {INNOCENT[0]: [uuid(0)], VICTIM: [uuid(1)]}
        for name in (*INNOCENT, VICTIM, STOPPABLE):
            self.add(name, devices.get(name))

    def server(self, name: str) -> PodServer:
        """The failing ones for their pods; the others share what does not fail."""
        own: dict[str, PodServer] = {VICTIM: self.victim, STOPPABLE: self.stoppable}
        return own.get(name) or self.servers[sum(name.encode()) % (len(self.servers) - 2)]

    @property
    def process(self) -> Any:
        """The exporter."""
        assert self._exporter is not None
        return self._exporter

    def refuse_writes(self, refused: bool) -> None:
        """Let every write to a file fail, as on a disk that is full."""
        _, most = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (0 if refused else most, most))

    def status_of(self, path: str) -> int:
        """The status with which a path is answered."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def resources(self) -> tuple[float, int, int]:
        """Resident MiB, descriptors and threads."""
        pid = self.process.pid
        return (
            self.memory_bytes() / 2**20,
            sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
            sum(1 for _ in Path(f"/proc/{pid}/task").iterdir()),
        )
