"""Arguments of a vLLM server as its start-up log has them. Pure; an unreadable value is None."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from kvpressure.model.arguments import EngineArgs

MAX_TEXT: Final = 65536  # characters read of a logged line
_SIGN: Final = re.compile(r"'(?:[^'\\]++|\\.)*+(?:'|\Z)|\"(?:[^\"\\]++|\\.)*+(?:\"|\Z)|[,()\[\]{}]", re.DOTALL)


def parse_logged(line: str) -> tuple[str | None, dict[str, str | None]]:
    """(form, arguments) of a start-up line: ``non-default args: {...}`` (0.9.1 and later) or ``args:
    Namespace(...)``.

    The form is "non_default", "all" or None for other lines. A list gives its first element, ``None`` gives None.
    """
    for marker, form, opening in (("non-default args: ", "non_default", "{"), ("args: Namespace", "all", "(")):
        at = line.find(marker + opening)
        if at >= 0:
            body = line[at + len(marker) + 1 : at + MAX_TEXT]
            items = _items(body, ":" if form == "non_default" else "=")
            return form, {key: _plain(value) for key, value in items}
    return None, {}


def printed(text: str, depth: int = 6) -> Any:
    """The value that Python printed: a mapping for a dict or an object with its fields, a list, else text. What is
    cut off at the end is left out; ``depth``: of brackets that are opened.
    """
    name, sign, body = text.partition("{" if text[:1] in "{[" else "(")
    if depth and text.startswith("["):
        return [printed(item.strip(), depth - 1) for item in _split(text[1:])]
    if depth and sign and (name == "" or name.isidentifier()):
        return {key: printed(value, depth - 1) for key, value in _items(body, ":" if sign == "{" else "=")}
    return _plain(text)


def from_log(line: str) -> EngineArgs | None:
    """``EngineArgs`` of a start-up line, None for other lines. The older form includes defaults, so it does not show
    which were set.
    """
    form, values = parse_logged(line)
    if form is None:
        return None
    given = {name: value for name, value in values.items() if value is not None}
    explicit = frozenset(values) if form == "non_default" else frozenset[str]()
    return EngineArgs(given, explicit, complete=form == "non_default")


def _items(body: str, separator: str) -> Iterator[tuple[str, str]]:
    """Top-level ``key: value`` items of a printed dict or Namespace."""
    for item in _split(body):
        key, found, value = item.partition(separator)
        key = key.strip().strip("'\"")
        if found and key.isidentifier():
            yield key, value.strip()


def _split(body: str) -> Iterator[str]:
    """Split at commas outside quotes and brackets, up to the end of the outermost bracket."""
    depth, start = 0, 0
    for found in _SIGN.finditer(body):
        sign = found[0]
        if sign in "([{":
            depth += 1
        elif sign in ")]}" or (sign == "," and depth == 0):
            depth -= sign != ","
            if depth < 0 or sign == ",":
                yield body[start : found.start()]
                start = found.end()
            if depth < 0:
                return


def _plain(text: str) -> str | None:
    if text == "None":
        return None
    if text.startswith("["):
        text = next(_split(text[1:]), "").strip()
    if len(text) >= 2 and text[0] in "'\"" and text[-1] == text[0]:
        return text[1:-1]
    return text
