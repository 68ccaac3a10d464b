"""Tests that play hours in a minute: a run in which the servers missed their beats shows nothing about kvpressure,
and is repeated slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

Shown = TypeVar("Shown")
SLOWER = (1, 2, 4)  # than as fast as a quiet machine of two cores can
TOO_SLOW = "too slow for --speed"  # how the demo says that it missed its beats


def in_time(play: Callable[[int], tuple[Shown, Sequence[str]]], slower: Sequence[int] = SLOWER) -> Shown:
    """What the first run shows that kept time. ``play(times)`` plays that many times slower, and returns what it showed
    and the beats it missed. When every run missed some, the test fails.
    """
    missed = []
    for times in slower:
        shown, late = play(times)
        if not late:
            return shown
        missed.append(f"{times} x slower: {', '.join(late)}")
    pytest.fail("this machine was too slow for a trial:\n" + "\n".join(missed))


def missed_by(output: str) -> list[str]:
    """What a demo that printed this says about beats it missed."""
    return [line for line in output.splitlines() if TOO_SLOW in line]
