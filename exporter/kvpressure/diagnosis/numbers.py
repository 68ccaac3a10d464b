"""Numbers in sentences."""

from __future__ import annotations

from typing import Final

from kvpressure.printable import grouped
from kvpressure.signals.window import MINUTE

NOT_KNOWN: Final = "unknown"
PERCENT: Final = 100
_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: float | None, digits: int = 0) -> str:
    """A number with at most ``digits`` decimals and three significant digits; thousands are separated."""
    if value is None:
        return NOT_KNOWN
    if abs(value) >= 1_000:
        return grouped(value)
    return f"{value:.{min(digits, 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2)}f}"


def percent(value: float | None) -> str:
    """A ratio as a whole percentage."""
    return NOT_KNOWN if value is None else f"{value * PERCENT:.0f} %"


def minutes(seconds: float) -> str:
    """A window in whole minutes: 600 -> ``10 minutes``."""
    return f"{seconds / MINUTE:.0f} minutes"


def size(value: float | None) -> str:
    """Bytes in binary units (KiB, MiB, ...)."""
    if value is None:
        return NOT_KNOWN
    left, unit = float(value), 0
    while abs(left) >= 1024 and unit < len(_BYTE_UNITS) - 1:
        left, unit = left / 1024, unit + 1
    return f"{left:.{0 if unit == 0 or abs(left) >= 100 else 1}f} {_BYTE_UNITS[unit]}"


def seconds(value: float | None) -> str:
    """Seconds; milliseconds below 1 s."""
    if value is None:
        return NOT_KNOWN
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.{0 if value >= 100 else 1}f} s"


def counted(count: float | None, noun: str) -> str:
    """``1 restart``, ``3 restarts``."""
    return f"{number(count)} {noun}{'' if count == 1 else 's'}"
