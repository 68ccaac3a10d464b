"""Values of command-line options, for ``type=`` of argparse. All of them refuse in the same form."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable

from kvpressure.model.arguments import human_int

_BELOW = 1e9


def refused(text: str, allowed: str) -> argparse.ArgumentTypeError:
    """The error for a value that is not allowed."""
    return argparse.ArgumentTypeError(f"{text!r:.80} is not allowed; allowed: {allowed}")


def whole_number(least: int = 1, most: int | None = None) -> Callable[[str], int]:
    """A parser of whole numbers, also in the forms of vLLM (``8k``). Without ``most``, up to a thousand million."""
    allowed = f"a whole number of {least} or more" if most is None else f"a whole number from {least} to {most}"

    def parse(text: str) -> int:
        value = human_int(text)
        if value is None or not least <= value <= (_BELOW if most is None else most):
            raise refused(text, allowed)
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
    """A number above 0."""
    value = _number(text)
    if not 0 < value < _BELOW:
        raise refused(text, "a number above 0")
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
