"""Spellings of an inference server stand in its folder under ``engines`` and nowhere else in the package's code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvpressure.engines.registry import dialects

pytestmark = pytest.mark.slow

PACKAGE = Path(__file__).parents[2] / "exporter" / "kvpressure"
EXEMPT = {
    "engines/vllm": "is where they belong",
    "engines/other_software.py": "names pages of routers and other servers by their beginnings",
}
FLAGS_TOO = {"cli", "toolbox/inputs.py"}  # their own options and examples are called like the engine's flags

SERIES = re.compile(r"\bvllm(:[a-z(.\[]|\[:_\])|\bvllm_(?!version\b|config\b|router\b|limits\.js)[a-z]")
STARTS = re.compile(r"vllm serve|vllm\.entrypoints|VLLM_[A-Z]")
LOG = re.compile(r"Maximum concurrency|KV cache size|non-default args|EngineCore |EngineDeadError|LLM engine")
FLAGS = re.compile(
    r"--(max-num-seqs|max-num-batched-tokens|gpu-memory-utilization|max-model-len|kv-cache-dtype|watermark|"
    r"kv-cache-memory-bytes|max-num-active-seqs|enable-chunked-prefill|tensor-parallel-size)"
)


@cache
def texts_of(path: Path) -> list[tuple[int, str]]:
    return list(texts(path.read_text()))


def texts(source: str) -> Iterator[tuple[int, str]]:
    """String constants of the code, with their lines; docstrings and comments explain and may name anything."""
    tree = ast.parse(source)
    explained = {
        id(statement.value)
        for node in ast.walk(tree)
        if isinstance(body := getattr(node, "body", None), list)
        for statement in body
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in explained:
            yield node.lineno, node.value


def judged(exempt: set[str]) -> list[Path]:
    return [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if not any(str(path.relative_to(PACKAGE)).startswith(place) for place in exempt)
    ]


@pytest.mark.parametrize(
    ("words", "exempt"),
    [
        pytest.param(SERIES, set(EXEMPT), id="series"),
        pytest.param(STARTS, {*EXEMPT, *FLAGS_TOO}, id="start words and variables"),
        pytest.param(LOG, set(EXEMPT), id="log lines"),
        pytest.param(FLAGS, {*EXEMPT, *FLAGS_TOO}, id="flags"),
    ],
)
def test_no_spelling_of_vllm_outside_its_folder(words: re.Pattern[str], exempt: set[str]) -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {text[:80]!r}"
        for path in judged(exempt)
        for line, text in texts_of(path)
        if words.search(text)
    ]
    assert found == []


DIALECTS = tuple(f"kvpressure.engines.{dialect.name}" for dialect in dialects())


def test_nothing_but_the_registry_imports_a_dialect() -> None:
    found = [
        str(path.relative_to(PACKAGE))
        for path in judged({"engines"})
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith(DIALECTS))
        or (isinstance(node, ast.Import) and any(name.name.startswith(DIALECTS) for name in node.names))
    ]
    assert found == []
