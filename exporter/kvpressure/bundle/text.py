"""Deterministic text of numbers, durations and YAML."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final

import yaml

from kvpressure.model.arguments import GIB
from kvpressure.settings.thresholds import Threshold

# A pattern; the brackets stand in no text, and YAML takes them for letters
TOKEN: Final = "\u27ea[a-z]:[A-Za-z0-9_]+\u27eb"
_SPANS: Final = ((86400, "d", "day"), (3600, "h", "hour"), (60, "m", "minute"), (1, "s", "second"))


def token(form: str, name: str) -> str:
    """Placeholder for a value filled in later: ``t`` a number, ``w`` in words, ``d`` a duration, ``n`` in JSON, ``o``
    its origin, ``u`` a link.
    """
    return f"\u27ea{form}:{name}\u27eb"


class Named(float):
    """A threshold's value that is written as a placeholder, in any form."""

    __slots__ = ("name",)
    name: str

    def __new__(cls, value: float, name: str) -> Named:
        """The number and its name."""
        self = super().__new__(cls, value)
        self.name = name
        return self

    def __str__(self) -> str:
        return token("t", self.name)

    def __format__(self, form: str) -> str:
        return format(str(self), form)


def read_number(text: object) -> float:
    """A number of a rendered template: the number itself, or that of a placeholder."""
    if isinstance(text, str) and re.fullmatch(TOKEN, text):
        return Named(float("nan"), text[3:-1])
    return float(text)  # type: ignore[arg-type]  # float itself rejects other types


def number(value: float) -> str:
    """Shortest decimal of ``value``, without exponent and rounding noise."""
    if isinstance(value, Named):
        return str(value)
    return format(Decimal(repr(float(value))).normalize(), "f")


def duration(seconds: float) -> str:
    """Seconds as a Prometheus duration in the largest unit that is exact: 300 -> ``5m``, 90 -> ``90s``."""
    if isinstance(seconds, Named):
        return token("d", seconds.name)
    if seconds != int(seconds):
        return f"{round(seconds * 1000)}ms"
    for size, short, _ in _SPANS:
        if seconds and seconds % size == 0:
            return f"{int(seconds) // size}{short}"
    return "0s"


def span(seconds: float) -> str:
    """Seconds in words: 300 -> ``5 minutes``."""
    for size, _, word in _SPANS:
        if seconds and seconds % size == 0:
            count = int(seconds) // size
            return f"{count} {word}" + ("" if count == 1 else "s")
    return f"{number(seconds)} seconds"


def words(entry: Threshold) -> str:
    """A threshold for people: ``80 %``, ``2 GB``, ``5 minutes``, ``2 requests``."""
    if isinstance(entry.value, Named):
        return token("w", entry.name)
    value = Decimal(repr(entry.value))
    if entry.unit in ("ratio", "multiple", "score"):
        return f"{number(float(value * 100))} %" if value <= 1 else f"{entry.text} times"
    if entry.unit == "bytes" and value % GIB == 0:
        return f"{number(float(value / GIB))} GiB"
    if entry.unit == "bytes":
        return f"{number(float(value / 10**9))} GB"
    if entry.unit == "seconds":
        return span(entry.value)
    if entry.unit == "count":
        return entry.text
    return f"{entry.text} {entry.unit.replace('_', ' ')}"


def origin(entry: Threshold) -> str:
    """Whether the number is the guides' own: "documented", or "configured" after an override."""
    return token("o", entry.name) if isinstance(entry.value, Named) else entry.origin


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper with block style for texts of several lines and lists indented below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def to_yaml(document: Any, header: str = "") -> str:
    """``document`` as YAML in its own order; ``header`` lines become comments on top."""
    comment = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
    try:
        body = "\n".join(_Writer().block(document, "")) + "\n"
    except _UnusualError:
        body = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=_WIDTH)
    return comment + body


# --- the same bytes as PyYAML's dumper, in a fifth of the time: the unit tests of the rules are 50 000 scalars
# -----------------

_WIDTH: Final = 4096  # lines are folded there
_KEY_LENGTH: Final = 100  # longer ones may become complex keys
_BREAKS: Final = re.compile("[\x85\u2028\u2029]")  # line breaks to YAML alone
_JUDGE: Final[Any] = _Dumper(io.StringIO(), allow_unicode=True, width=_WIDTH)


class _UnusualError(Exception):
    """Something that only PyYAML itself can write."""


@lru_cache(maxsize=1 << 16)
def _line(text: str) -> str:
    """A one-line text as a scalar: plain where that still reads as text, else in single quotes."""
    judged = _JUDGE.analyze_scalar(text)
    if judged.multiline or _BREAKS.search(text) or len(text) > _WIDTH - _KEY_LENGTH - 60:
        raise _UnusualError
    plain = bool(text) and judged.allow_block_plain
    if plain and _JUDGE.resolve(yaml.ScalarNode, text, (True, False)) == "tag:yaml.org,2002:str":
        return text
    if not judged.allow_single_quoted:
        raise _UnusualError
    return "'" + text.replace("'", "''") + "'"


class _Writer:
    """Writes one document; raises ``_UnusualError`` for a container that occurs twice, which PyYAML makes an alias."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def block(self, value: Any, pad: str) -> Iterator[str]:
        """Lines of a non-empty mapping or list."""
        if not isinstance(value, dict | list) or not value or id(value) in self._seen:
            raise _UnusualError
        self._seen.add(id(value))
        if isinstance(value, list):
            for item in value:
                yield from self._entry(f"{pad}-", item, f"{pad}  ")
            return
        for key, item in value.items():
            if not isinstance(key, str) or len(key) > _KEY_LENGTH:
                raise _UnusualError
            yield from self._entry(f"{pad}{_line(key)}:", item, f"{pad}  ")

    def _entry(self, head: str, value: Any, pad: str) -> Iterator[str]:
        if isinstance(value, dict | list) and value:
            lines = self.block(value, pad)
            if head.endswith("-"):  # of a list: its first line stands beside the dash
                yield f"{head} {next(lines)[len(pad) :]}"
            else:
                yield head
            yield from lines
        elif isinstance(value, str) and "\n" in value:
            yield from _literal(head, value, pad)
        else:
            yield f"{head} {_scalar(value)}"


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return _line(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if value is None:
        return "null"
    if isinstance(value, float):
        return str(_JUDGE.represent_float(value).value)
    if value in ({}, []):
        return "{}" if isinstance(value, dict) else "[]"
    raise _UnusualError


def _literal(head: str, text: str, pad: str) -> Iterator[str]:
    """A text of several lines as a literal block."""
    if not _JUDGE.analyze_scalar(text).allow_block or _BREAKS.search(text) or text[0] in " \n" or text.endswith("\n\n"):
        raise _UnusualError
    yield f"{head} |" if text.endswith("\n") else f"{head} |-"
    yield from (f"{pad}{line}" if line else "" for line in text.removesuffix("\n").split("\n"))
