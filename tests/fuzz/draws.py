"""Drawing of cases: pieces of real input, words that mean something to the parser, and changes to both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, TypeVar

T = TypeVar("T")
SECRET: Final = "Zq7hunterXw2"

NUMBERS = (
    *("0", "1", "-1", "0.5", "1e3", "1.7e308", "-1.7e308", "1e400", "NaN", "+Inf", "-Inf", "nan", "inf", "1_0", "0x1f"),
    *("9" * 30, "9" * 400, "-0", "0.0001", "4294967296", "9223372036854775808", "1e-400", "00", "１", "", "True"),
)
SIGNS = "{}[]()\"'\\,;:=#&|<>$`!?*@%^~-+._/ \t\n\r\x00\x1b\x7f\x85\u2028\u202e\ufeffé😀\ud800"


@dataclass(frozen=True)
class Subject:
    """What is fuzzed. ``make`` draws a case (JSON or bytes), ``check`` raises where not all holds that it says."""

    name: str
    make: Callable[[Random], Any]
    check: Callable[[Any], None]


def number(rng: Random) -> str:
    """The text of a number, now and then of none."""
    kind = rng.random()
    if kind < 0.35:
        return str(rng.randrange(0, 10 ** rng.randrange(1, 7)))
    if kind < 0.6:
        return repr(rng.uniform(-1, 1000))
    return rng.choice(NUMBERS)


def text(rng: Random, words: Sequence[str], most: int = 8) -> str:
    """A few words and signs in a row."""
    parts = []
    for _ in range(rng.randrange(most + 1)):
        kind = rng.random()
        if kind < 0.6:
            parts.append(rng.choice(words))
        elif kind < 0.85:
            parts.append(rng.choice(SIGNS))
        else:
            parts.append(number(rng))
    return "".join(parts)


def mutated(rng: Random, given: str, words: Sequence[str], others: Sequence[str] = ()) -> str:
    """``given`` after some changes: parts cut out, doubled, moved, put in from ``words`` and ``others``,
    numbers replaced.
    """
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        at = rng.randrange(len(given) + 1)
        end = min(len(given), at + rng.choice((1, 1, 2, 5, 20, 100)))
        kind = rng.randrange(7)
        if kind == 0:
            given = given[:at] + given[end:]
        elif kind == 1:
            given = given[:end] + given[at:end] * rng.choice((1, 2, 20)) + given[end:]
        elif kind == 2:
            given = given[:at] + rng.choice(words) + given[at:]
        elif kind == 3:
            given = given[:at] + rng.choice(SIGNS) + given[at + 1 :]
        elif kind == 4:
            given = given[:at] + number(rng) + given[end:]
        elif kind == 5 and others:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            given = given[:at] + other[start : start + 200] + given[end:]
        else:
            given = given[:at] if rng.random() < 0.2 else given[:at] + given[at:end][::-1] + given[end:]
    return given


def value(rng: Random, words: Sequence[str], depth: int = 2) -> Any:
    """Anything that JSON can say."""
    kind = rng.randrange(9 if depth else 7)
    if kind == 7:
        return [value(rng, words, depth - 1) for _ in range(rng.randrange(3))]
    if kind == 8:
        return {text(rng, words, 2): value(rng, words, depth - 1) for _ in range(rng.randrange(3))}
    return (
        None,
        rng.random() < 0.5,
        rng.choice((0, 1, -1, 5, 2**31, 2**63, 10**30, 10**400)),
        rng.choice((0.0, 0.5, -1.5, 1e308, float("inf"), float("nan"))),
        text(rng, words, 3),
        rng.choice(words),
        "",
    )[kind]


def with_another_field(rng: Random, document: Any, words: Sequence[str]) -> Any:
    """A copy of a JSON document in which one value, anywhere, is another one, is gone or stands twice."""
    path: list[Any] = []
    here = document
    while isinstance(here, dict | list) and here and (not path or rng.random() < 0.85):
        path.append(rng.choice(list(here)) if isinstance(here, dict) else rng.randrange(len(here)))
        here = here[path[-1]]
    return _changed(document, path, lambda old: _other(rng, old, words)) if path else value(rng, words)


_GONE = object()


def _other(rng: Random, old: Any, words: Sequence[str]) -> Any:
    kind = rng.random()
    if kind < 0.1:
        return _GONE
    if kind < 0.4 and isinstance(old, str):
        return mutated(rng, old, words)
    if kind < 0.5 and isinstance(old, list):
        return old * rng.choice((0, 2, 3))
    return value(rng, words)


def _changed(node: Any, path: Sequence[Any], change: Callable[[Any], Any]) -> Any:
    if not path:
        return change(node)
    new = _changed(node[path[0]], path[1:], change)
    if isinstance(node, dict):
        return {
            key: new if key == path[0] else item for key, item in node.items() if key != path[0] or new is not _GONE
        }
    return [new if at == path[0] else item for at, item in enumerate(node) if at != path[0] or new is not _GONE]


def some(rng: Random, given: Sequence[T], most: int) -> list[T]:
    """Up to ``most`` of ``given``, in any order, also more than once."""
    return [rng.choice(given) for _ in range(rng.randrange(most + 1))]
