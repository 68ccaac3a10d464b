"""Three-valued conditions in the open: ``yes``, ``no``, ``maybe`` (not no), ``unsure`` (not yes) and ``unknown`` of a
fact.

A condition is tested against facts (name -> true, false or None for unknown) and written in words for
``docs/verdicts.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

Facts = Mapping[str, bool | None]

_FORMS: Final[Mapping[str, str]] = {
    "yes": "{}",
    "no": "not {}",
    "maybe": "{} (or unknown)",
    "unsure": "not {} (or unknown)",
    "unknown": "{} unknown",
}
_TESTS: Final[Mapping[str, Callable[[str], Callable[[Facts], bool]]]] = {
    "yes": lambda name: lambda facts: facts[name] is True,
    "no": lambda name: lambda facts: facts[name] is False,
    "maybe": lambda name: lambda facts: facts[name] is not False,
    "unsure": lambda name: lambda facts: facts[name] is not True,
    "unknown": lambda name: lambda facts: facts[name] is None,
}


class Condition:
    """A condition on facts. ``kind`` is a leaf's form, or ``and``, ``or``, ``not``, ``always``; ``parts``
    what it is made of.
    """

    __slots__ = ("kind", "name", "parts", "test")

    def __init__(self, kind: str, parts: tuple[Condition, ...], test: Callable[[Facts], bool], name: str = "") -> None:
        self.kind, self.parts, self.test, self.name = kind, parts, test, name

    def __and__(self, other: Condition) -> Condition:
        a, b = self.test, other.test
        return Condition("and", (self, other), lambda facts: a(facts) and b(facts))

    def __or__(self, other: Condition) -> Condition:
        a, b = self.test, other.test
        return Condition("or", (self, other), lambda facts: a(facts) or b(facts))

    def __invert__(self) -> Condition:
        a = self.test
        return Condition("not", (self,), lambda facts: not a(facts))

    def called(self, name: str) -> Condition:
        """The same condition under a name of its own, which stands for it in other conditions' words."""
        return Condition(self.kind, self.parts, self.test, name)

    def names(self) -> frozenset[str]:
        """The facts it reads."""
        if not self.parts:
            return frozenset({self.name} if self.name else ())
        return frozenset().union(*(part.names() for part in self.parts))

    def words(self, title: Callable[[str], str], inside: str = "", open_: bool = False) -> str:
        """The condition in words. ``title`` names a fact; ``open_`` writes out what ``called`` named."""
        if self.kind in _FORMS:
            return _FORMS[self.kind].format(title(self.name))
        if self.kind == "always":
            return "else"
        if self.name and not open_:
            return f"*{self.name}*"
        if self.kind == "not":
            inner = self.parts[0]
            text = inner.words(title)
            return f"not {text}" if inner.parts and inner.name else f"not ({text})"
        text = f" {self.kind} ".join(part.words(title, self.kind) for part in self.parts)
        return f"({text})" if inside not in ("", self.kind) else text


def _leaf(kind: str, name: str) -> Condition:
    return Condition(kind, (), _TESTS[kind](name), name)


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


ALWAYS: Final = Condition("always", (), lambda _facts: True)
