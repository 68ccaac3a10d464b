"""A flag that signal handlers set, whatever the main thread does just then."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from kvpressure.runtime.signal_flag import SignalFlag
from tests.helpers.waiting import until


@pytest.mark.parametrize(
    "use",
    [SignalFlag.set, SignalFlag.clear, SignalFlag.is_set],
    ids=["set", "clear", "is_set"],
)
def test_a_signal_may_come_between_any_two_lines(use: Callable[[SignalFlag], object]) -> None:
    """Where a handler waits for a lock that its own thread holds, neither goes on."""
    flag = SignalFlag()

    def interrupt(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and frame.f_code.co_name != "set":
            flag.set()
        return interrupt

    def run() -> None:
        sys.settrace(interrupt)
        use(flag)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_signals_set_the_flag() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    flag = SignalFlag()
    try:
        flag.follow((signal.SIGUSR1,))
        os.kill(os.getpid(), signal.SIGUSR1)
        until(flag.is_set)
        flag.clear()
        assert not flag.is_set()
    finally:
        signal.signal(signal.SIGUSR1, before)
