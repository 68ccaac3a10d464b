"""Faults that end the process still say where they happened."""

from __future__ import annotations

import signal

import pytest

from tests.helpers.serve_process import LISTEN, QUIET, Process
from tests.helpers.waiting import until

pytestmark = pytest.mark.live

CRASH = (
    "import ctypes, signal, sys, kvpressure.cli as cli;"
    "signal.signal(signal.SIGUSR1, lambda *_: ctypes.string_at(0));"
    "sys.exit(cli.main(sys.argv[1:]))"
)


@pytest.mark.attack("a driver that crashes the process", "the stack of every thread")
@pytest.mark.fault(
    "sources",
    "driver library crashes (segmentation fault)",
    "the container restarts",
    "stack of every thread on standard error",
    "new process",
)
def test_a_crash_of_a_library_says_where() -> None:
    """A segmentation fault in NVML ended the process (-11) without a word."""
    process = Process(*QUIET, *LISTEN, code=CRASH)
    try:
        assert process.port
        process.child.send_signal(signal.SIGUSR1)
        assert process.child.wait(20) == -11
        until(lambda: "Segmentation fault" in "".join(process.lines))
        assert "string_at" in "".join(process.lines)
    finally:
        process.child.kill()
        process.child.wait(10)
