"""The real process with little memory: an address space as of ``ulimit -v``, a memory cgroup as of a container, and
memory that runs out while it works.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.test_hostile_scrapes import HONEST, KINDS
from tests.e2e.test_hostile_scrapes import hostile as hostile  # a fixture
from tests.helpers.serve_process import LISTEN, QUIET, Process
from tests.helpers.waiting import until
from tests.publish.clients import ask, connect

pytestmark = [pytest.mark.live, pytest.mark.slow]

Serve = Callable[[Callable[[int], bytes]], str]
MIB = 1024 * 1024
ADDRESSES_MIB = 147  # ulimit -v 150000
CONTAINER_MIB = 96  # half of what the chart allows; 64 was too little once in three runs
CGROUPS = Path("/sys/fs/cgroup")
SECONDS = 4.0


def _address_space() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES_MIB * MIB, ADDRESSES_MIB * MIB))


class Cgroup:
    """A memory cgroup below our own, of version 1 or 2. Raises ``OSError`` where none can be made."""

    def __init__(self, mib: int) -> None:
        lines = dict(reversed(line.split(":", 2)[1:]) for line in Path("/proc/self/cgroup").read_text().splitlines())
        self._version1 = (CGROUPS / "memory").is_dir()
        own = next((path for path, names in lines.items() if ("memory" in names.split(",")) == self._version1), "/")
        above = CGROUPS / "memory" if self._version1 else CGROUPS
        self.path = above / own.lstrip("/") / f"kvpressure-test-{os.getpid()}"
        self.path.mkdir()
        try:
            self._file("memory.limit_in_bytes", "memory.max").write_text(str(mib * MIB))
        except OSError:
            self.path.rmdir()
            raise

    def _file(self, version1: str, version2: str) -> Path:
        return self.path / (version1 if self._version1 else version2)

    def enter(self) -> None:
        """Move this process in; called in a child."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def kills(self) -> int:
        text = self._file("memory.oom_control", "memory.events").read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])

    def peak_mib(self) -> float:
        return int(self._file("memory.max_usage_in_bytes", "memory.peak").read_text()) / MIB

    def close(self) -> None:
        until(lambda: self._empty() or None, 10)

    def _empty(self) -> bool:
        try:
            self.path.rmdir()
        except OSError as error:
            if error.errno == errno.EBUSY:
                return False
            raise
        return True


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    try:
        made = Cgroup(CONTAINER_MIB)
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield made
    made.close()


def read_of(text: str, least: int = 0) -> set[str]:
    """The honest engine's series that are read and not concluded, if there are ``least``."""
    found = set(
        re.findall(r'^(kvpressure_(?:requests|kv|engine|limit_value)\w*\{.*pod="chat-0".*\}) ', text, re.MULTILINE)
    )
    return found if len(found) >= least else set()


def survives(process: Process, targets: int) -> None:
    """For a while, with silent clients: every scrape answers, and the honest engine keeps all that it has."""
    with ExitStack() as clients:
        for _ in range(100):
            clients.enter_context(connect(process.port))
        until(lambda: process.scrape().count("kvpressure_target_scrape_seconds{") == targets, 60)
        own = until(lambda: read_of(process.scrape(), least=5))
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            seen = process.scrape()
            assert own <= read_of(seen)
            assert re.search(r'^kvpressure_engine_up\{.*pod="chat-0".*\} 1\.0$', seen, re.MULTILINE)
            assert ask(process.port, "/-/healthy").status == 200
            assert ask(process.port, "/").status == 200
            time.sleep(0.2)
    assert "isolated_failures_total{" not in seen


def honest(hostile: Serve) -> str:
    return f"good/chat-0={hostile(lambda _version: HONEST)}/honest"


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def begin(targets: list[str], limit: Callable[[], object]) -> Process:
        arguments = [word for target in targets for word in ("--engine.target", target)]
        processes.append(Process(*QUIET, *LISTEN, "--engine.pace", "fixed", *arguments, limit=limit))
        return processes[-1]

    yield begin
    for process in processes:
        process.child.kill()
        process.child.wait(10)


@pytest.mark.attack("an address space of 147 MiB (`ulimit -v 150000`), with 100 silent clients", "it goes on as usual")
def test_a_small_address_space_is_enough(hostile: Serve, start: Callable[..., Process]) -> None:
    process = start([honest(hostile)], _address_space)
    survives(process, 1)
    assert process.stop() == 0
    assert "MemoryError" not in "".join(process.lines)


@pytest.mark.attack(
    "engines of eight hostile kinds and 100 silent clients, in a container of 96 MiB",
    "no process is ended for memory; the honest engine keeps its series",
)
def test_a_container_of_half_the_charts_limit_is_enough(
    hostile: Serve, start: Callable[..., Process], cgroup: Cgroup
) -> None:
    bad = [f"bad/p{n}={hostile(kind)}/{n}" for n, kind in enumerate(KINDS)]
    process = start([*bad, honest(hostile)], cgroup.enter)
    survives(process, len(KINDS) + 1)
    assert cgroup.peak_mib() > 0.5 * process.memory_mib()
    assert process.stop() == 0
    assert cgroup.kills() == 0
