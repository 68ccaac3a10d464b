"""Waiting for something to become true. The limit is generous: one that is never reached costs nothing. The longer it
takes, the seldomer it is asked for: asking costs time of the core that the awaited work needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
SHORTEST_PAUSE = 0.01
LONGEST_PAUSE = 0.2


def until(condition: Callable[[], T | None], seconds: float = 30.0) -> T:
    """The first true result of ``condition``. An ``AssertionError`` in it means "not yet"."""
    began = time.monotonic()
    while True:
        problem: AssertionError | None = None
        result: T | None = None
        try:
            result = condition()
        except AssertionError as error:
            problem = error
        if result:
            return result
        waited = time.monotonic() - began
        if waited > seconds:
            raise problem or AssertionError(f"did not become true within {seconds} s")
        time.sleep(min(LONGEST_PAUSE, max(SHORTEST_PAUSE, waited / 10)))
