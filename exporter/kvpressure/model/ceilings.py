"""The largest values accepted from outside, by kind of quantity.

A value that is negative, not finite or above its ceiling is absent and counted where it enters. Ceilings allow for
far more than any existing node, and products of several stay finite.
"""

from __future__ import annotations

import sys
from typing import Final

REQUESTS: Final = 1e9  # running or waiting at one moment in one engine
BATCH: Final = 2**20  # requests of one step
COUNT: Final = 2**60  # tokens, requests, steps or events since a process began
BYTES: Final = 2**60  # of memory
WORK: Final = 1e27  # FLOPs, and bytes moved, since a process began: an exaFLOP/s for thirty years
RATE: Final = 1e12  # of anything a second
SECONDS: Final = 1e15  # durations, and sums of those of all requests
MOMENT: Final = 253_402_300_800.0  # Unix seconds: the end of the year 9999, which no date passes
RATIO: Final = 1.0001  # shares, with room for rounding
ACTIVITY: Final = 1.5  # shares of time that a driver measured, which may count a little more than there was
LEVEL: Final = 1e9  # watts, cores
IDENTIFIER: Final = 2**32  # indexes, ranks, process ids, codes
LABEL: Final = 1e15  # numbers in the labels and arguments of an engine: tokens, blocks, requests, bytes
FINITE: Final = sys.float_info.max  # of what has no ceiling of its own


def number(value: object, most: float, least: float = 0.0) -> float | None:
    """``value`` if it is a number from ``least`` to ``most``, else ``None``; integers of any length are accepted as
    input.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if least <= value <= most else None


def number_in(text: str | None, most: float, least: float = 0.0) -> float | None:
    """The number that is all of ``text``, if it is one from ``least`` to ``most``, else ``None``."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    # NaN fails here too; "1_0" is a number to Python, to nobody else
    return value if least <= value <= most and "_" not in text else None


def is_finite(value: float) -> bool:
    """Whether ``value`` can be published; also for whole numbers for which ``math.isfinite`` raises."""
    return -FINITE <= value <= FINITE


def whole(value: object, most: float, least: float = 0.0) -> int | None:
    """``value`` if it is a whole number from ``least`` to ``most``, else ``None``."""
    known = number(value, most, least)
    if known is None or not known.is_integer():
        return None
    return value if isinstance(value, int) else int(known)
