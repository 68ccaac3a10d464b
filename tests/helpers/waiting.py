"""Waiting for something to become true. The limit is generous: one that is never reached costs nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T | None], seconds: float = 30.0) -> T:
    """The first true result of ``condition``. An ``AssertionError`` in it means "not yet"."""
    end = time.monotonic() + seconds
    while True:
        problem: AssertionError | None = None
        result: T | None = None
        try:
            result = condition()
        except AssertionError as error:
            problem = error
        if result:
            return result
        if time.monotonic() > end:
            raise problem or AssertionError(f"did not become true within {seconds} s")
        time.sleep(0.01)
