"""Small line charts as numbers for inline SVG: no library, no script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvpressure.publish.page.history import SLOT_SECONDS, SLOTS

WIDTH: Final = 180
HEIGHT: Final = 40
_INSET: Final = 2  # keeps the line's half width inside


@dataclass(frozen=True, slots=True)
class Sparkline:
    """``lines``: points of one polyline per stretch without a gap. ``mark``: height of the threshold, ``None``
    without one. ``now``, ``highest``: newest and largest value.
    """

    lines: tuple[str, ...]
    mark: float | None
    now: float | None
    highest: float | None


def sparkline(values: Sequence[float | None], top: float | None = None, mark: float | None = None) -> Sparkline:
    """A chart of ``values``, oldest first, scaled from 0 to ``top`` (default: the larger of largest value and
    ``mark``).
    """
    known = [value for value in values if value is not None]
    highest = max(known, default=None)
    scale = top or max(highest or 0.0, mark or 0.0) or 1.0

    def height(value: float) -> float:
        return round(HEIGHT - _INSET - min(1.0, max(0.0, value / scale)) * (HEIGHT - 2 * _INSET), 1)

    step = (WIDTH - 2 * _INSET) / max(1, len(values) - 1)
    lines: list[list[str]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            lines.append([])
        else:
            lines[-1].append(f"{_INSET + index * step:.1f},{height(value)}")
    # A single point is drawn as a dot.
    drawn = tuple(" ".join(line if len(line) > 1 else [line[0], line[0]]) for line in lines if line)
    return Sparkline(drawn, None if mark is None else height(mark), values[-1] if values else None, highest)


MINUTES: Final = int(SLOTS * SLOT_SECONDS // 60)
