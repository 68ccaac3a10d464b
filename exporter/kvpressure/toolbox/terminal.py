"""Text for people: wrapped to the terminal's width and coloured on a terminal. NO_COLOR is honoured."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from typing import Final

from kvpressure.printable import control

_RED, _YELLOW, _GREEN, _BOLD, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[32m", "\x1b[1m", "\x1b[0m"
_COLOURS: Final = (
    (re.compile(r"^VERDICT +(?:HEALTHY|IDLE)\b|^ +pass |^ +\d ok "), _GREEN),
    (re.compile(r"^VERDICT +UNKNOWN\b|^ +\d look "), _YELLOW),
    (re.compile(r"^VERDICT |: (?:THIS IS NOT KV PRESSURE|KV PRESSURE IS NOT CONFIRMED): "), _RED),
    (re.compile(r"^ +FAIL |^ +\d BAD |^ +YES |^does not fit"), _RED),
    (re.compile(r"^\d+\. |^(?:triage|common problems|next)$|^\d+ engines: "), _BOLD),
)
_COPIED: Final = re.compile(r"^ *(?:\$ |set: |by hand: |\d+\. kvpressure )")  # a line break would end up in the shell
_HANGING: Final = re.compile(r" *(?:[\w-]+: +|\d+ \S+ +|\S{1,4} {1,3}|\d+\. )?")


def answer(form: str, values: object, text: str) -> None:
    """Print the result of a command: ``values`` where ``form`` is json, else ``text``."""
    if form == "json":
        print(json.dumps(values, indent=2))
    else:
        show(text)


def show(text: str) -> None:
    """Print ``text``."""
    if not sys.stdout.isatty():
        print(text)
        return
    width = max(40, shutil.get_terminal_size().columns)
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    for line in text.split("\n"):
        colour = "" if plain else next((colour for pattern, colour in _COLOURS if pattern.search(line)), "")
        if colour:
            control(colour, sys.stdout)
        print("\n".join(wrapped(line, width)))
        if colour:
            control(_PLAIN, sys.stdout)


def wrapped(line: str, width: int) -> list[str]:
    """``line`` in parts of at most ``width`` characters, broken between words; commands are not broken."""
    if len(line) <= width or _COPIED.match(line):
        return [line]
    start = _HANGING.match(line)
    indent = " " * min(len(start[0]) if start else 0, width // 3)
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
