"""Numbers from outside are read by ``model.ceilings`` alone.

``math.isfinite`` raises for ``10**400`` and ``float`` reads ``1_0``, ``nan`` and ``1e999``: each place that judged by
itself forgot one of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "exporter" / "kvpressure"
READER = "model/ceilings.py"
JUDGES = {"isfinite", "isnan", "isinf"}
ALLOWED = {"sources/scrape/scanner.py": "the loop that dominates a scan: as number_in, without its call"}
CAUGHT = {"ValueError", "TypeError", "OverflowError", "Exception"}


def judged(tree: ast.AST) -> Iterator[int]:
    """Lines that judge a number, or try to make one of something that may be none."""
    for node in ast.walk(tree):
        if (isinstance(node, ast.Attribute) and node.attr in JUDGES) or (
            isinstance(node, ast.ImportFrom) and node.module == "math" and JUDGES & {name.name for name in node.names}
        ):
            yield node.lineno
        elif isinstance(node, ast.Try) and any(map(in_doubt, node.handlers)):
            yield from (
                call.lineno
                for statement in node.body
                for call in ast.walk(statement)
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "float"
            )


def in_doubt(handler: ast.ExceptHandler) -> bool:
    names = ast.walk(handler.type) if handler.type is not None else ()
    return handler.type is None or any(isinstance(name, ast.Name) and name.id in CAUGHT for name in names)


def test_only_ceilings_judges_numbers_from_outside() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    lines = {name: list(judged(ast.parse(path.read_text(encoding="utf-8")))) for name, path in files.items()}
    judging = {name: found for name, found in lines.items() if found and name != READER}
    assert judging.keys() == ALLOWED.keys(), f"use kvpressure.model.ceilings: {judging}"
