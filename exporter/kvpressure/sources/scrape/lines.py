"""Takes one line of an exposition apart, for lines that the scanner does not know yet.

Reads the classic text format and OpenMetrics: timestamps, exemplars, quoted names (``{"vllm:x",a="b"} 1``).
"""

from __future__ import annotations

import re
from typing import Final

MAX_LINE_CHARS: Final = 16_384  # cache_config_info, the longest wanted line, has about 1 300
MAX_LABELS: Final = 128  # cache_config_info has 38
MAX_LABEL_CHARS: Final = 1_024  # served model names may be paths

_TEXT: Final = r'[^"\\]*+(?:\\.[^"\\]*+)*+'
_NAME: Final = re.compile(rf'[ \t]*+(?:([a-zA-Z_:][a-zA-Z0-9_:]*+)|\{{[ \t]*+"({_TEXT})"[ \t]*+(?:,|(?=\}})))')
_LABEL: Final = re.compile(
    rf'[ \t]*+(?:([a-zA-Z_][a-zA-Z0-9_]*+)|"({_TEXT})")[ \t]*+=[ \t]*+"({_TEXT})"[ \t]*+(?:,|(?=\}}))'
)
_LABELS: Final = re.compile(rf"(?:{_LABEL.pattern})*+[ \t]*+\}}")
_SAMPLE: Final = re.compile(
    rf'[ \t]*+((?:[a-zA-Z_:][a-zA-Z0-9_:]*+)?+(?:[ \t]*+\{{(?:[^"}}]++|"{_TEXT}")*+\}})?+)'  # name and labels
    r"(?:(?<=\})[ \t]*+|[ \t]++)([^ \t]++)"  # value
    r"(?:[ \t]++(-?[0-9]++(?:\.[0-9]*+)?+(?:[eE][+-]?+[0-9]++)?+))?+"  # timestamp
    r"[ \t\r]*+(?:# \{.*)?+\Z"  # exemplar
)
_MILLISECONDS: Final = 1e11
_ESCAPE: Final = re.compile(r"\\(.)")
_ESCAPED: Final = {"n": "\n", "\\": "\\", '"': '"'}


class BadLine(ValueError):
    """A line that cannot be parsed; only that line is lost."""


def name_of(line: str) -> str:
    """The metric name of a line; "" without one. A dot, which only quoted names may have, is read as an underscore."""
    match = _NAME.match(line[:MAX_LINE_CHARS])
    return "" if match is None else match[1] or _unescape(match[2]).replace(".", "_")


def sample_of(line: str) -> tuple[str, str, float | None]:
    """(name and labels as written, text of the value, Unix time of the line or ``None``); an exemplar may follow.

    Raises ``BadLine``. The classic format has milliseconds, OpenMetrics seconds; in seconds, ``_MILLISECONDS`` is the
    year 5138.
    """
    match = _SAMPLE.match(line) if len(line) <= MAX_LINE_CHARS else None
    if match is None:
        raise BadLine("too long, labels that do not end, no value, or something after it")
    head, number, stamp = match.groups()
    time = None if stamp is None else float(stamp)
    return head, number, time / 1000 if time is not None and abs(time) >= _MILLISECONDS else time


def labels_of(head: str) -> dict[str, str]:
    """Labels of a series, from its name and labels as written.

    Raises ``BadLine`` for broken syntax, a repeated label, too many labels or too long a value.
    """
    name = _NAME.match(head)
    start = name.end() if name is not None and name[2] is not None else head.find("{") + 1  # its brace is open already
    if not start:
        return {}
    pairs = _LABEL.findall(head, start)
    labels = {name or _unescape(quoted).replace(".", "_"): _unescape(value) for name, quoted, value in pairs}
    if _LABELS.fullmatch(head, start) is None or len(labels) < len(pairs) or len(pairs) > MAX_LABELS:
        raise BadLine("broken labels, one twice, or too many")
    if len(head) > MAX_LABEL_CHARS and any(len(value) > MAX_LABEL_CHARS for *_, value in pairs):
        raise BadLine("label too long")
    return labels


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[0]), text) if "\\" in text else text
