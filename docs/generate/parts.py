"""Parts of a page that a command writes, between ``<!-- NAME: written by COMMAND -->`` and ``<!-- end of NAME -->``."""

from __future__ import annotations

import re
from pathlib import Path


def put(text: str, name: str, part: str) -> str:
    """``text`` with ``part`` in the place ``name``. Raises ``ValueError`` where the place is missing."""
    place = re.compile(rf"(<!-- {name}: written by [^\n]*-->\n).*?(<!-- end of {name} -->\n)", re.DOTALL)
    new, found = place.subn(lambda marks: f"{marks[1]}{part.rstrip()}\n{marks[2]}", text)
    if found != 1:
        raise ValueError(f"no place for {name}")
    return new


def write(page: Path, name: str, part: str) -> None:
    """Put ``part`` into the file ``page``."""
    page.write_text(put(page.read_text(encoding="utf-8"), name, part), encoding="utf-8")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(line)} |\n" for line in (head, *rows)]
    return "".join([lines[0], "|" + "---|" * len(head) + "\n", *lines[1:]])
