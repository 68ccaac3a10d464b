"""The navigation of the site: the table "Find your way" of the README, and the runbooks below theirs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
START: Final = "README.md"
RUNBOOKS: Final = "docs/runbooks/README.md"
_LINK: Final = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)\)")


class Section(NamedTuple):
    """A task with its pages: label and path from the root, in order."""

    task: str
    pages: tuple[tuple[str, str], ...]


def sections(root: Path = ROOT) -> list[Section]:
    """The tasks of the README, in order."""
    table = (root / START).read_text(encoding="utf-8").partition("## Find your way")[2]
    rows = re.findall(r"^\| ([^|]+?) \| (.*) \|$", table, re.MULTILINE)
    return [Section(task, tuple(_LINK.findall(cell))) for task, cell in rows if _LINK.search(cell)]


def runbooks(root: Path = ROOT) -> list[tuple[str, str]]:
    """The runbooks in the order of their list."""
    listed = _LINK.findall((root / RUNBOOKS).read_text(encoding="utf-8"))
    folder = Path(RUNBOOKS).parent
    return [(name, (folder / path).as_posix()) for name, path in listed if path == f"{name}.md"]


def pages(root: Path = ROOT) -> list[str]:
    """Every page of the navigation, as often as it is in it."""
    named = [path for section in sections(root) for _, path in section.pages]
    return [START, *named, *(path for _, path in runbooks(root))]
