"""What rules are made of. Three-valued conditions: ``yes``, ``no``, ``maybe`` (not no), ``unsure`` (not yes) and
``unknown`` of a fact; and the tables of verdicts, with grades.

A condition is tested against facts (name -> True, False or None for unknown).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum, auto
from typing import Final

from kvpressure.model.frozen import frozen

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


class Grade(IntEnum):
    """How reliable an answer is. Confidence begins at ``LIKELY``."""

    NOTHING = 0  # no data
    GUESS = auto()
    DOUBTFUL = auto()
    LIKELY = auto()
    STRONG = auto()
    CERTAIN = auto()


GRADE_CONFIDENCE: Final = (0.0, 0.4, 0.6, 0.75, 0.85, 0.95)
"""The published confidence of each grade, 0 to 1."""
ONE_SCRAPE_AT_MOST: Final = Grade.DOUBTFUL  # whatever the table says


@frozen
class Row:
    """One line of a verdict: its condition, and the grade it gives. ``missing``: what would have to be known.
    ``verdict`` replaces the table's; "" = the table does not apply, ask the next one.
    """

    name: str
    when: Condition
    grade: Grade
    missing: str = ""
    verdict: str | None = None


@frozen
class Lower:
    """Lowers the grade by ``by`` grades, and to ``at_most``, where ``when`` holds."""

    when: Condition
    by: int = 0
    at_most: Grade = Grade.CERTAIN
    missing: str = ""
    against: tuple[str, ...] = ()


@frozen
class Verdict:
    """A verdict as a table. ``supports`` and ``against``: leaves whose fact's sentence is shown where they hold.
    ``missing``: (fact, text) shown where the fact is unknown. ``at_once``: published without a second sample.
    ``when`` and ``confident`` state in a sentence when the verdict is given, and when with confidence ("" = never);
    ``{threshold}`` is replaced by its value.
    """

    name: str
    title: str
    rows: Sequence[Row]
    requires: Condition = ALWAYS
    unless: Sequence[Condition] = ()
    lower: Sequence[Lower] = ()
    stages: Sequence[tuple[str, Condition]] = ()
    supports: Sequence[Condition] = ()
    against: Sequence[Condition] = ()
    missing: Sequence[tuple[str, str]] = ()
    at_once: bool = False
    when: str = ""
    confident: str = ""


@frozen
class Answer:
    """Result of the tables. ``supporting`` and ``opposing`` name facts; ``missing`` are texts, ``{fact}`` in them is
    replaced by that fact's sentence. ``inputs``: those of ``missing`` that a setting or a source can provide.
    """

    verdict: str
    grade: Grade
    row: str = ""
    stage: str | None = None
    supporting: tuple[str, ...] = ()
    opposing: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    at_once: bool = False
    runner_up: str | None = None
    inputs: tuple[str, ...] = ()
