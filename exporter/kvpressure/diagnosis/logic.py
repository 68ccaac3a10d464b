"""Three-valued conditions: ``yes``, ``no``, ``maybe`` (not no), ``unsure`` (not yes) and ``unknown`` of a fact.

A condition is tested against facts (name -> True, False or None for unknown).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

Facts = Mapping[str, bool | None]

_TESTS: Final[Mapping[str, str]] = {
    "yes": "is True",
    "no": "is False",
    "maybe": "is not False",
    "unsure": "is not True",
    "unknown": "is None",
}


class Condition:
    """A condition on facts. ``kind``: a leaf's form, or ``and``, ``or``, ``not``, ``always``; ``parts``: its
    operands. ``code``: the test as one Python expression, because calls per part in every tick would cost more than
    the tests.
    """

    __slots__ = ("code", "kind", "name", "parts", "test")

    def __init__(self, kind: str, parts: tuple[Condition, ...], code: str, name: str = "") -> None:
        self.kind, self.parts, self.code, self.name = kind, parts, code, name
        self.test: Callable[[Facts], bool] = self._first_test

    def _first_test(self, facts: Facts) -> bool:
        self.test = eval(f"lambda facts: {self.code}")
        return self.test(facts)

    def __and__(self, other: Condition) -> Condition:
        return Condition("and", (self, other), f"({self.code} and {other.code})")

    def __or__(self, other: Condition) -> Condition:
        return Condition("or", (self, other), f"({self.code} or {other.code})")

    def __invert__(self) -> Condition:
        return Condition("not", (self,), f"(not {self.code})")

    def names(self) -> frozenset[str]:
        """The facts it reads."""
        if not self.parts:
            return frozenset({self.name} if self.name else ())
        return frozenset().union(*(part.names() for part in self.parts))


def listed(clauses: Sequence[str]) -> str:
    """Clauses joined with commas and "and"."""
    *others, last = clauses
    more = "," if others[1:] else ""  # two clauses need no comma
    return f"{', '.join(others)}{more} and {last}" if others else last


def _leaf(kind: str, name: str) -> Condition:
    return Condition(kind, (), f"(facts[{name!r}] {_TESTS[kind]})", name)


def yes(name: str) -> Condition:
    """The fact is known and true."""
    return _leaf("yes", name)


def no(name: str) -> Condition:
    """The fact is known and false."""
    return _leaf("no", name)


def maybe(name: str) -> Condition:
    """The fact is true or unknown."""
    return _leaf("maybe", name)


def unsure(name: str) -> Condition:
    """The fact is false or unknown."""
    return _leaf("unsure", name)


def unknown(name: str) -> Condition:
    """The fact is unknown."""
    return _leaf("unknown", name)


ALWAYS: Final = Condition("always", (), "True")
