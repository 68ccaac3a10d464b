r"""Escapes control characters in text from outside, quotes it in commands that a person may paste, and writes numbers.

A model's name, a label or a log line may contain terminal escape sequences, bidirectional controls that reorder a
line, or line ends that forge one. Each such character is shown as its escape (``\x1b``, ``\u202e``). Pure.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TextIO, cast

_OBEYED: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_OF_LINES: Final = frozenset("\n\t")
MARKUP: Final = r"[][<>|`]|\B@|@(here|everyone)"
"""Markup of Slack, Discord, Teams, Mattermost and Google Chat, as anybody names a model or a pod. The ``@`` of
``model@revision`` or ``vllm@0.service`` is kept: Discord alone mentions within a word. In its place is ``_`` and the
group.
"""


class Asked(dict[str, str]):
    """Values for ``str.format_map``, each computed by ``write`` when asked for."""

    def __init__(self, write: Callable[[str], str]) -> None:
        super().__init__()
        self._write = write

    def __missing__(self, name: str) -> str:
        return self._write(name)


def grouped(value: float) -> str:
    """A whole number with its thousands apart: ``1 107 712``."""
    return f"{value:,.0f}".replace(",", " ")


def visible(text: str) -> str:
    """``text`` on one line, with control characters as escapes."""
    return text if text.isascii() and text.isprintable() else "".join(map(_shown, text))


def visible_lines(text: str) -> str:
    """As ``visible``, but lines and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if char in _OF_LINES else _shown(char) for char in text)


def visible_all(value: Any) -> Any:
    """A JSON document with every text and key as ``visible``. Raises ``RecursionError`` if it is nested too deeply."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, list):
        return [visible_all(item) for item in value]
    if isinstance(value, dict):
        return {visible(str(key)): visible_all(item) for key, item in value.items()}
    return value


def _shown(char: str) -> str:
    return char.encode("unicode_escape").decode() if unicodedata.category(char) in _OBEYED else char


class Operator(str):
    """A word of ``command`` that the shell obeys."""

    __slots__ = ()


PIPE: Final = Operator("|")
OR: Final = Operator("||")
BESIDE: Final = Operator("&")
INTO: Final = Operator(">")


def command(*words: str) -> str:
    """A shell command on one line: every word but an ``Operator`` is one argument of it, whatever it contains."""
    return " ".join(word if isinstance(word, Operator) else shlex.quote(visible(word)) for word in words)


class _Visible:
    """A text stream that escapes control characters."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text`` as ``visible_lines``; returns its length, as streams do."""
        self._stream.write(visible_lines(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def visible_streams() -> Iterator[None]:
    """Make standard output and error escape control characters in the meantime."""
    with (
        contextlib.redirect_stdout(cast(TextIO, _Visible(sys.stdout))),
        contextlib.redirect_stderr(cast(TextIO, _Visible(sys.stderr))),
    ):
        yield


UNKNOWN: Final = "unknown"
PERCENT: Final = 100
_GB: Final = 10**9
_BYTE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_TIME_UNITS: Final = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
_LONG: Final = 600  # seconds from which on minutes, hours and days are easier to read


def say(value: float | None, unit: str = "") -> str:
    """A number with its unit, with two or three significant digits: ``97 %``, ``250 ms``, ``1.9 GiB``, ``1 368``."""
    if value is None or not abs(value) <= sys.float_info.max:
        return UNKNOWN
    return _FORMS.get(unit, _plain)(value)


def named(name: str, text: str) -> str:
    """A number with its name: ``peak 97 %``, ``peak: unknown``."""
    return f"{name}: unknown" if text == UNKNOWN else f"{name} {text}"


def capital(text: str) -> str:
    """``text`` with a capital at its beginning."""
    return f"{text[:1].upper()}{text[1:]}"


def _plain(value: float) -> str:
    if value == int(value) or abs(value) >= 100:
        return grouped(value)
    return f"{value:.{1 if abs(value) >= 10 else 2}f}".rstrip("0").rstrip(".")


def _percent(value: float) -> str:
    return f"{value * PERCENT:.0f} %"


def _bytes(value: float) -> str:
    """Bytes in binary units; whole gigabytes, as the guides write them, in GB."""
    if value and value % _GB == 0:
        return f"{value / _GB:.0f} GB"
    unit = 0
    while abs(value) >= 1024 and unit < len(_BYTE_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.{0 if unit == 0 or abs(value) >= 100 else 1}f} {_BYTE_UNITS[unit]}"


def _seconds(value: float) -> str:
    """Seconds; milliseconds below one, from ten minutes on the two largest units."""
    if abs(value) >= _LONG:
        return duration(value)
    return f"{1000 * value:.0f} ms" if 0 < abs(value) < 1 else f"{_plain(round(value, 1))} s"


def duration(total: float) -> str:
    """Seconds in the two largest units: ``1 h 30 min``."""
    left = max(0, int(total))
    parts = []
    for name, length in _TIME_UNITS:
        if left >= length:
            parts.append(f"{left // length} {name}")
            left %= length
    return " ".join(parts[:2]) or "0 s"


_FORMS: Final[Mapping[str, Callable[[float], str]]] = {
    "ratio": _percent,
    "score": _percent,
    "bytes": _bytes,
    "seconds": _seconds,
    "multiple": lambda value: f"{_plain(value)} ×",
}
