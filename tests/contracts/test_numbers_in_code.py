"""No number that decides hides in the code of signals, diagnosis and pipeline: it stands in the files of thresholds, or
as a constant of its module, which ``test_size.py`` counts.

Every literal in a function is looked at, not comparisons alone, because ``x >= 2 * y`` decides as well. 0 and 1 are no
thresholds (nothing, all, the whole). What else stands there is in the lists below, each with its reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from kvpressure.settings.thresholds import builtin
from tests.contracts.test_size import plain_numbers

PACKAGE = Path(__file__).parents[2] / "exporter" / "kvpressure"
FILES = sorted(
    [
        *(PACKAGE / "signals").glob("*.py"),
        *(PACKAGE / "diagnosis").glob("*.py"),
        *(PACKAGE / "pipeline").glob("*.py"),
    ]
)

NOT_JUDGED = {
    "rules.py": "by how many grades, in a table that is read as a whole",
}

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


@pytest.mark.parametrize(
    "file", [file for file in FILES if file.name not in NOT_JUDGED], ids=lambda file: f"{file.parent.name}/{file.name}"
)
def test_numbers_that_decide_stand_in_the_file_of_thresholds(file):
    assert unexplained(file.read_text()) == [], "a number that decides belongs into thresholds.yaml"


@pytest.mark.parametrize(
    "source",
    [
        "LEVEL = 0.95\n",
        "def f(x):\n    return x >= 0.95\n",
        "def f(x, y):\n    return x >= 2 * y\n",
        "def f(x):\n    return len(x) < 4\n",
        "def f():\n    return Answer('idle', 0.9)\n",
        "def f(x):\n    MINUTE = 60.0\n    return x > MINUTE\n",
        "def f(x):\n    return min(x, -3)\n",
    ],
)
def test_the_test_sees_them(source):
    assert len(unexplained(source)) == 1


@lru_cache(maxsize=1)
def words() -> frozenset[str]:
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.j2")]
    return frozenset(word for file in files for word in re.findall(r"\w+", file.read_text()))


@pytest.mark.parametrize("name", sorted(builtin()))
def test_no_threshold_is_a_leftover(name):
    objective = re.fullmatch(r"(objective)_\w+_(?:ratio|seconds)", name)  # signals/requests.py reads all of them
    read = objective[1] if objective else name
    assert read in words(), f"nothing reads {name}"
