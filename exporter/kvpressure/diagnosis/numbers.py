"""Numbers in the sentences of facts."""

from __future__ import annotations

from typing import Final

from kvpressure.printable import grouped

NOT_KNOWN: Final = "unknown"
PERCENT: Final = 100
MINUTE: Final = 60


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
