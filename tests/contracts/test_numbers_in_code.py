"""No number that decides hides in the code of signals, diagnosis and pipeline: it stands in the files of thresholds, or
as a constant of its module, which ``test_size.py`` counts.

Every literal in a function is looked at, not comparisons alone, because ``x >= 2 * y`` decides as well. 0 and 1 are no
thresholds (nothing, all, the whole). What else stands there is in the lists below, each with its reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from kvpressure.settings.thresholds import builtin
from tests.contracts.test_size import plain_numbers

PACKAGE = Path(__file__).parents[2] / "exporter" / "kvpressure"
FILES = [path for name in ("signals", "diagnosis", "pipeline") for path in (PACKAGE / name).glob("*.py")]

NOT_JUDGED = {"rules.py": "by how many grades, in a table that is read as a whole"}

EXPRESSIONS = {
    "running * (block_size - 1) / 2 * pool / kv.kv_capacity_tokens": (
        "the last block of a request is half empty on average"
    ),
    "(len(values) - 1) // 2": "the middle: a median",
    "increase.sizes[::2]": "sizes and counts in turns",
    "increase.sizes[1::2]": "sizes and counts in turns",
}


def numbers(tree: ast.AST) -> Iterator[tuple[ast.Constant, list[ast.AST]]]:
    """Every number but 0 and 1, with the nodes around it, outermost first."""

    def walk(node: ast.AST, around: list[ast.AST]) -> Iterator[tuple[ast.Constant, list[ast.AST]]]:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value not in (0, 1):
            yield node, around
        for child in ast.iter_child_nodes(node):
            yield from walk(child, [*around, node])

    yield from walk(tree, [])


def explained(around: list[ast.AST]) -> bool:
    return bool(plain_numbers(around[1])) or any(
        isinstance(node, ast.expr) and ast.unparse(node) in EXPRESSIONS for node in around
    )


def unexplained(source: str) -> list[str]:
    return [
        f"line {number.lineno}: {number.value}"
        for number, around in numbers(ast.parse(source))
        if not explained(around)
    ]


def test_numbers_that_decide_stand_in_the_file_of_thresholds():
    found = {file.name: unexplained(file.read_text()) for file in FILES if file.name not in NOT_JUDGED}
    assert {name: lines for name, lines in found.items() if lines} == {}, "these belong into thresholds.yaml"


def test_no_threshold_is_a_leftover():
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.j2")]
    words = {word for file in files for word in re.findall(r"\w+", file.read_text())}
    # signals/requests.py reads all objectives
    assert {name for name in builtin() if not re.match(r"objective_", name)} - words == set(), "nothing reads these"
