"""Values of command-line options, for ``type=`` of argparse. All of them refuse in the same form."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import Final

from kvpressure.model.arguments import human_int

_MOST: Final = 10**9


def refused(text: str, allowed: str) -> argparse.ArgumentTypeError:
    """The error for a value that is not allowed."""
    return argparse.ArgumentTypeError(f"{text!r:.80} is not allowed; allowed: {allowed}")


def whole_number(least: int = 1, most: int = _MOST) -> Callable[[str], int]:
    """A parser of whole numbers from ``least`` to ``most``, also in the forms of vLLM (``8k``)."""

    def parse(text: str) -> int:
        value = human_int(text)
        if value is None or not least <= value <= most:
            raise refused(text, f"a whole number from {least} to {most}")
        return value

    return parse


def number(least: float, most: float | None = None) -> Callable[[str], float]:
    """A parser of finite numbers from ``least`` to ``most``."""
    allowed = f"a number of {least:g} or more" if most is None else f"a number from {least:g} to {most:g}"

    def parse(text: str) -> float:
        value = _number(text)
        if not least <= value <= (sys.float_info.max if most is None else most):
            raise refused(text, allowed)
        return value

    return parse


def positive(text: str) -> float:
    """A number above 0 and up to a thousand million."""
    value = _number(text)
    if not 0 < value <= _MOST:
        raise refused(text, f"above 0 and up to {_MOST}")
    return value


def share(text: str) -> float:
    """A part of a whole, above 0 and at most 1."""
    value = _number(text)
    if not 0 < value <= 1:
        raise refused(text, "above 0 and up to 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
