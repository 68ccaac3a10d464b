"""How the serving process is tuned, seen from inside a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import cast

import pytest

from kvpressure.cli import main, serve
from kvpressure.publish.web.server import ListenError, Server
from kvpressure.runtime import process_tuning as runtime
from kvpressure.runtime.monitor import Monitor
from kvpressure.runtime.signal_flag import SignalFlag
from kvpressure.settings.kinds import ListenAddress


def run(code: str) -> list[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()


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


def test_the_main_thread_tidies_up_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    tidied: list[int] = []
    stopping = SignalFlag()

    class Idle:
        """A monitor that is never done; gives up after a while."""

        rounds = 0

        def wait(self, _: float) -> bool:
            nonlocal now
            now += 0.02
            self.rounds += 1
            return self.rounds > 200

    def collect_garbage() -> None:
        tidied.append(1)
        if len(tidied) == 3:
            stopping.set()

    monkeypatch.setattr(runtime, "TIDY_SECONDS", 0.05)
    monkeypatch.setattr(runtime, "collect_garbage", collect_garbage)
    monkeypatch.setattr(serve, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(serve, "time", SimpleNamespace(monotonic=lambda: now))
    monitor = Idle()
    with serve._signals() as signals:
        serve._wait(cast(Monitor, monitor), stopping, SignalFlag(), signals)
    assert len(tidied) == 3
    assert monitor.rounds == 9, "not on every turn"


def test_a_signal_ends_the_wait_of_the_main_thread_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks only once a second by itself."""

    class Idle:
        def wait(self, _: float) -> bool:
            return False

    monkeypatch.setattr(serve, "WAIT_SECONDS", 60.0)
    stopping = SignalFlag()
    before = signal.getsignal(signal.SIGUSR1)
    stopping.follow((signal.SIGUSR1,))
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        began = time.monotonic()
        with serve._signals() as signals:
            serve._wait(cast(Monitor, Idle()), stopping, SignalFlag(), signals)
        assert time.monotonic() - began < 30
        assert signal.set_wakeup_fd(-1) == -1, "as it was"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_signals_need_is_open_before_anybody_can_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of clients right at the start takes all descriptors: the process ended then."""
    woken: list[int] = []

    def start(_: Server) -> list[ListenAddress]:
        woken.append(signal.set_wakeup_fd(-1))
        raise ListenError(ListenAddress("127.0.0.1", 1), "as the test wants it")

    monkeypatch.setattr(Server, "start", start)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        assert main(["serve", "--no-collector.nvidia", "--web.listen-address", "127.0.0.1:1"]) == 2
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert len(woken) == 1
    assert woken[0] >= 0
