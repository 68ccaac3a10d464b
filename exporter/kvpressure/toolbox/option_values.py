"""Values of command-line options, for ``type=`` of argparse. All of them refuse in the same form."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Final, TypeVar

from kvpressure import parsed
from kvpressure.errors import shown
from kvpressure.model import ceilings
from kvpressure.model.arguments import human_int
from kvpressure.settings.kinds import Kind

T = TypeVar("T")
_MOST: Final = 10**9


def refused(text: str, allowed: str) -> argparse.ArgumentTypeError:
    """The error for a value that is not allowed."""
    return argparse.ArgumentTypeError(f"{shown(text)} is not allowed; allowed: {allowed}")


def _parser(read: Callable[[str], T | None], allowed: str) -> Callable[[str], T]:
    def parse(text: str) -> T:
        value = read(text)
        if value is None:
            raise refused(text, allowed)
        return value

    return parse


def whole_number(least: int = 1, most: int = _MOST) -> Callable[[str], int]:
    """A parser of whole numbers from ``least`` to ``most``, also in the forms of vLLM (``8k``)."""
    return _parser(lambda text: ceilings.whole(human_int(text), most, least), f"a whole number from {least} to {most}")


def number(least: float, most: float | None = None) -> Callable[[str], float]:
    """A parser of finite numbers from ``least`` to ``most``."""
    allowed = f"a number of {least:g} or more" if most is None else f"a number from {least:g} to {most:g}"
    return _parser(lambda text: ceilings.number_in(text, ceilings.FINITE if most is None else most, least), allowed)


def above_zero(most: int = _MOST) -> Callable[[str], float]:
    """A parser of numbers above 0 and up to ``most``."""
    return _parser(lambda text: ceilings.number_in(text, most) or None, f"above 0 and up to {most}")


moment: Final = _parser(
    lambda text: ceilings.number_in(text, 10 * _MOST, _MOST) or ceilings.number(parsed.moment(text), 10 * _MOST, _MOST),
    "a time like 2026-11-27T03:12:00Z, or Unix seconds",
)
"""A parser of a time in the past, in Unix seconds; without a zone it is UTC."""


def of_kind(kind: Kind) -> Callable[[str], Any]:
    """A parser of the values of a setting's kind."""

    def parse(text: str) -> Any:
        try:
            return kind.parse(text)
        except ValueError:
            raise refused(text, kind.allowed) from None

    return parse
