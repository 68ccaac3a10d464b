"""Numbers from outside are read by ``model.ceilings`` alone.

``math.isfinite`` raises for ``10**400`` and ``float`` reads ``1_0``, ``nan`` and ``1e999``: each place that judged by
itself forgot one of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "exporter" / "kvpressure"
READER = "model/ceilings.py"
JUDGES = {"isfinite", "isnan", "isinf"}
ALLOWED = {
    "sources/scrape/scanner.py": "the loop that dominates a scan: as number_in, without its call",
}
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


FILES = sorted({*ALLOWED, *(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))})


@pytest.mark.parametrize("file", [file for file in FILES if file != READER])
def test_only_ceilings_judges_numbers_from_outside(file: str) -> None:
    found = list(judged(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))))
    if file in ALLOWED:
        assert found, f"{file} needs no exception any more"
    else:
        assert not found, f"{file}: lines {found}: use kvpressure.model.ceilings"
