"""A flag that signal handlers set, whatever the main thread does just then."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from kvpressure.runtime.signal_flag import SignalFlag


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
