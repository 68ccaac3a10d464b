"""A progress line on standard error; only on a terminal, and erased at the end."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from types import TracebackType

from kvpressure.printable import control, visible


class ProgressLine(AbstractContextManager["ProgressLine"]):
    """``show`` replaces the line; leaving the block erases it."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._shown = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            control("\r\033[K", sys.stderr)

    def show(self, text: str) -> None:
        """Show this text."""
        if self._live:
            self._shown = True
            control("\r\033[K", sys.stderr)
            print(visible(text[:118]), end="", file=sys.stderr, flush=True)


def bar(done: float, whole: float, width: int = 20) -> str:
    """``[#####     ]``."""
    filled = round(width * min(1.0, max(0.0, done / whole))) if whole > 0 else width
    return f"[{'#' * filled}{' ' * (width - filled)}]"
