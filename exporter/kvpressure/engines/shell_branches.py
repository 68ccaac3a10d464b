"""Drops branches of a shell script whose tests are known to be false. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvpressure.engines.shell import UNKNOWN

_EQUAL: Final = frozenset({"=", "==", "-eq"})
_UNEQUAL: Final = frozenset({"!=", "-ne"})
_TESTS: Final = {"[": "]", "[[": "]]", "test": ""}


def taken(commands: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """The commands without branches of ``if`` that cannot run; both branches of an undecided test stay."""
    kept: list[Sequence[str]] = []
    stack: list[tuple[bool, bool]] = []  # of each open ``if``: this branch may run, a later branch may run
    for command in commands:
        word = command[0] if command else ""
        if word == "if":
            result = _decided(command[1:])
            stack.append((result is not False, result is not True))
        elif word == "elif" and stack:
            result = _decided(command[1:])
            open_still = stack[-1][1]
            stack[-1] = (open_still and result is not False, open_still and result is not True)
        elif word == "else" and stack:
            stack[-1] = (stack[-1][1], False)
        elif word == "fi" and stack:
            stack.pop()
            continue
        if all(may_run for may_run, _ in stack):
            kept.append(command)
    return kept


def _decided(test: Sequence[str]) -> bool | None:
    """Result of comparing two known texts; None for any other test."""
    if not test or test[0] not in _TESTS:
        return None
    closing = _TESTS[test[0]]
    words = list(test[1:])
    if closing:
        if not words or words[-1] != closing:
            return None
        words.pop()
    if len(words) != 3 or UNKNOWN in words[0] or UNKNOWN in words[2]:
        return None
    left, operator, right = words
    if operator in _EQUAL:
        return left == right
    return left != right if operator in _UNEQUAL else None
