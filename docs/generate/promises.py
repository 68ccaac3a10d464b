"""Write the tables of faults and outside writers, and the number of attacks, from the tests that prove them:
``python -m docs.generate [--check]``.

A test carries its promise as a mark: ``attack(attack, result)``, ``fault(part, fault, what users see, metric and
reason, recovery)`` or ``writer(who, can write, can reach with it, what bounds them)``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from docs.generate import parts

ROOT: Final = Path(__file__).resolve().parents[2]
PARTS: Final = ("engines", "sources", "process", "web")
"""Parts of the faults, each with a table."""

_HEADS: Final = {
    "attack": "",
    "fault": "| fault | what users see | metric and reason | recovery | test |",
    "writer": "| who | can write | can reach with it | what bounds them | test |",
}
_PAGES: Final = {  # page -> tables on it: name of the place, kind of mark, part
    "docs/reference/guarantees.md": (
        ("writers", "writer", ""),
        ("attacks", "attack", ""),
        *((part, "fault", part) for part in PARTS),
    ),
}


class Promise(NamedTuple):
    """A mark: ``test`` is the path with the function's name."""

    kind: str
    cells: tuple[str, ...]
    test: str


def promises(root: Path = ROOT) -> list[Promise]:
    """All marks of all tests, by path and line."""
    return [found for path in sorted((root / "tests").rglob("test_*.py")) for found in _of(path, root)]


def _of(path: Path, root: Path) -> Iterator[Promise]:
    text = path.read_text(encoding="utf-8")
    if not any(f"mark.{kind}(" in text for kind in _HEADS):
        return
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    for function in sorted(functions, key=lambda node: node.lineno):
        for mark in function.decorator_list:
            if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Attribute) and mark.func.attr in _HEADS:
                cells = tuple(str(ast.literal_eval(cell)) for cell in mark.args)
                yield Promise(mark.func.attr, cells, f"{path.relative_to(root)}::{function.name}")


def table(kind: str, part: str, found: list[Promise]) -> str:
    """The promises of a kind (and of a part, for faults) as Markdown."""
    head = _HEADS[kind]
    if not head:
        return f"{sum(one.kind == kind for one in found)} attacks are tests, each named after what came of it.\n"
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    for one in sorted(found, key=lambda one: one.cells[0]) if kind == "writer" else found:
        cells = one.cells[1:] if part else one.cells
        if one.kind == kind and (not part or one.cells[0] == part):
            lines.append(f"| {' | '.join(cells)} | `{one.test}` |")
    return "\n".join(lines) + "\n"


def page(path: str, text: str, found: list[Promise]) -> str:
    """The page's text with today's tables in their places. Raises ``ValueError`` where a place is missing."""
    for name, kind, part in _PAGES[path]:
        text = parts.put(text, name, table(kind, part, found))
    return text


def main(root: Path = ROOT, check: bool = False) -> int:
    """Write the pages, or with ``check`` name each that would change; 1 = one would."""
    found, wrong = promises(root), 0
    for path in _PAGES:
        text = (root / path).read_text(encoding="utf-8")
        new = page(path, text, found)
        if new != text and check:
            print(f"{path}: out of date; run python -m docs.generate")
            wrong = 1
        elif new != text:
            (root / path).write_text(new, encoding="utf-8")
    return wrong
