"""Parses one line of an exposition carefully and slowly, for lines that the scanner does not know yet.

Reads the classic text format and OpenMetrics: timestamps, exemplars, quoted names (``{"vllm:x",a="b"} 1``).
"""

from __future__ import annotations

import re
from typing import Final

from kvpressure.model import ceilings

MAX_LINE_CHARS: Final = 16_384  # cache_config_info, the longest wanted line, has about 1 300
MAX_LABELS: Final = 128  # cache_config_info has 38
MAX_LABEL_CHARS: Final = 1_024  # served model names may be paths

_NAME: Final = re.compile(r"[ \t]*+([a-zA-Z_:][a-zA-Z0-9_:]*+)[ \t]*+")
_QUOTED_NAME: Final = re.compile(r'[ \t]*+\{[ \t]*+"([^"\\]*+(?:\\.[^"\\]*+)*+)"[ \t]*+(?=[,}])')
_LABEL: Final = re.compile(
    r'[ \t]*+([a-zA-Z_][a-zA-Z0-9_]*+|"[^"\\]*+(?:\\.[^"\\]*+)*+")[ \t]*+=[ \t]*+'  # name
    r'"([^"\\]*+(?:\\.[^"\\]*+)*+)"[ \t]*+'
)  # value
_CLOSE: Final = re.compile(r"[ \t]*+\}[ \t]*+")
_REST: Final = re.compile(  # value, timestamp, exemplar
    r"(?<=[ \t}])([^ \t]++)(?:[ \t]++(-?[0-9][0-9.eE+-]*+))?+[ \t\r]*+(?:# \{.*)?+\Z"
)
_MILLISECONDS: Final = 1e11
_ESCAPE: Final = re.compile(r"\\(.)")
_ESCAPED: Final = {"n": "\n", "\\": "\\", '"': '"'}


class BadLine(ValueError):
    """A line that cannot be parsed; only that line is lost."""


class TooMany(BadLine):
    """A valid line beyond the limits."""


def name_of(line: str) -> tuple[str, int]:
    """(metric name, where it ends) of a line; ``("", 0)`` without a name.

    A dot, which only quoted names may have, is read as an underscore.
    """
    match = _NAME.match(line)
    if match is not None:
        return match[1], match.end()
    match = _QUOTED_NAME.match(line)
    if match is None:
        return "", 0
    return _unescape(match[1]).replace(".", "_"), match.end()


def labels_from(line: str, start: int) -> tuple[dict[str, str], int]:
    """(labels of a line whose name ends at ``start``, where they end).

    Raises ``BadLine`` for broken syntax, a repeated label, too many labels or too long a value.
    """
    labels: dict[str, str] = {}
    position = start
    if line[:start].lstrip(" \t").startswith("{"):  # quoted name: the brace is already open
        if line.startswith(",", position):
            position += 1
    elif line.startswith("{", position):
        position += 1
    else:
        return labels, start
    while (match := _LABEL.match(line, position)) is not None:
        _add_label(labels, match[1], match[2])
        position = match.end()
        if not line.startswith(",", position):
            break
        position += 1
    close = _CLOSE.match(line, position)
    if close is None:
        raise BadLine("labels do not end")
    return labels, close.end()


def _add_label(labels: dict[str, str], name: str, value: str) -> None:
    name = _unescape(name[1:-1]).replace(".", "_") if name.startswith('"') else name
    if name in labels or len(labels) >= MAX_LABELS or len(value) > MAX_LABEL_CHARS:
        raise BadLine("label twice, too many or too long")
    labels[name] = _unescape(value)


def number_from(line: str, start: int) -> tuple[str, float | None]:
    """(text of the value, Unix time of the line or ``None``); an exemplar may follow. Raises ``BadLine``.

    The classic format has milliseconds, OpenMetrics seconds; in seconds, ``_MILLISECONDS`` is the year 5138.
    """
    match = _REST.match(line, start)
    if match is None:
        raise BadLine("no value, or something after it")
    if match[2] is None:
        return match[1], None
    time = ceilings.number_in(match[2], ceilings.FINITE, -ceilings.FINITE)
    if time is None:
        raise BadLine("timestamp is no number")
    return match[1], time / 1000 if abs(time) >= _MILLISECONDS else time


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    return _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[0]), text)
