"""Numbers in the sentences of facts."""

from __future__ import annotations

from typing import Final

NOT_KNOWN: Final = "unknown"
PERCENT: Final = 100


def number(value: float | None, digits: int = 0) -> str:
    """A number with so many decimals."""
    return NOT_KNOWN if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A ratio as a percentage."""
    return NOT_KNOWN if value is None else f"{value * PERCENT:.0f} %"
