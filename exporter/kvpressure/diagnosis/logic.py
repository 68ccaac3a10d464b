"""Three-valued conditions: ``yes``, ``no``, ``maybe`` (not no), ``unsure`` (not yes) and ``unknown`` of a fact.

A condition is tested against facts (name -> True, False or None for unknown) and written in words for
``docs/reference/verdict-rows.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

Facts = Mapping[str, bool | None]

OR_UNKNOWN: Final = " (or unknown)"
NEXT: Final = "\nor "  # between alternatives, so that a table may show one a line
_OPPOSITE: Final[Mapping[str, str]] = {"yes": "unsure", "no": "maybe", "maybe": "no", "unsure": "yes"}
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

    __slots__ = ("code", "denied", "kind", "name", "parts", "test")

    def __init__(self, kind: str, parts: tuple[Condition, ...], code: str, name: str = "", denied: str = "") -> None:
        self.kind, self.parts, self.code, self.name, self.denied = kind, parts, code, name, denied
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

    def called(self, name: str, denied: str = "") -> Condition:
        """The same condition under a name, and one for its opposite, which stand for it in other conditions' words."""
        return Condition(self.kind, self.parts, self.code, name, denied)

    def names(self) -> frozenset[str]:
        """The facts it reads."""
        if not self.parts:
            return frozenset({self.name} if self.name else ())
        return frozenset().union(*(part.names() for part in self.parts))

    def clauses(self, say: Callable[[str, bool], str], *, negated: bool = False, opened: bool = False) -> list[str]:
        """Clauses that all have to hold; alternatives have a line each. ``say`` gives the clause of a fact or of its
        opposite; ``opened`` writes out a condition that has a name.
        """
        if self.kind in _TESTS:
            return [_clause(_OPPOSITE.get(self.kind, "known") if negated else self.kind, self.name, say)]
        name = self.denied if negated else self.name
        if name and not opened:
            return [f"*{name}*"]
        if self.kind == "not":
            return self.parts[0].clauses(say, negated=not negated)
        if (self.kind == "and") is not negated:
            return [clause for part in self.parts for clause in part.clauses(say, negated=negated)]
        return [_one_of(self._options(say, negated))]

    def _options(self, say: Callable[[str, bool], str], negated: bool) -> list[str]:
        """The alternatives in words."""
        found: list[str] = []
        for part in self.parts:
            if part.kind == self.kind and not part.name:
                found += part._options(say, negated)
                continue
            clauses = part.clauses(say, negated=negated)
            found.append(f"({listed(clauses)})" if len(clauses) > 1 else clauses[0])
        return found


def listed(clauses: Sequence[str]) -> str:
    """Clauses joined with commas and "and"."""
    *others, last = clauses
    more = "," if others[1:] else ""  # two clauses need no comma
    return f"{', '.join(others)}{more} and {last}" if others else last


def _one_of(options: Sequence[str]) -> str:
    return f"either {NEXT.join(options)}"


def _clause(kind: str, name: str, say: Callable[[str, bool], str]) -> str:
    if kind in ("unknown", "known"):
        return f"it is {kind} whether {say(name, True)}"
    return say(name, kind in ("yes", "maybe")) + (OR_UNKNOWN if kind in ("maybe", "unsure") else "")


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
