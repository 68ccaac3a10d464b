"""Drops branches of a shell script whose tests are known to be false. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvpressure.engines.shell import UNKNOWN

_EQUAL: Final = frozenset({"=", "==", "-eq"})
_UNEQUAL: Final = frozenset({"!=", "-ne"})


def taken(commands: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """The commands without branches of ``if`` that cannot run; both branches of an undecided test stay."""
    kept: list[Sequence[str]] = []
    stack: list[tuple[bool, bool]] = []  # of each open ``if``: this branch may run, a later branch may run
    for command in commands:
        word = command[0] if command else ""
        if word == "if":
            stack.append((True, True))
        if word in ("if", "elif", "else") and stack:
            result = None if word == "else" else _decided(command[1:])
            open_still = stack[-1][1]
            stack[-1] = (open_still and result is not False, open_still and result is not True and word != "else")
        elif word == "fi" and stack:
            stack.pop()
            continue
        if all(may_run for may_run, _ in stack):
            kept.append(command)
    return kept


def _decided(test: Sequence[str]) -> bool | None:
    """Result of comparing two known texts; None for any other test."""
    match test:
        case ["test", left, operator, right] | ["[", left, operator, right, "]"] | ["[[", left, operator, right, "]]"]:
            if UNKNOWN in left + right:
                return None
            equal = left == right
            return equal if operator in _EQUAL else not equal if operator in _UNEQUAL else None
    return None
