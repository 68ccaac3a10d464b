"""The packages are layers, and the pure core opens no socket and starts no thread (contracts in ``pyproject.toml``)."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "exporter" / "kvpressure"


def test_no_package_imports_one_above_it() -> None:
    """The linter in a process of its own, because it switches off the loggers of the one it runs in."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.slow
def test_no_circle_between_modules() -> None:
    """Not even within a package, and not even one that only a type checker sees."""
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    graph = {name: imported(path, names.keys()) & names.keys() - {name} for name, path in names.items()}
    graphlib.TopologicalSorter(graph).prepare()


def imported(path: Path, modules: Collection[str]) -> set[str]:
    """Those of ``modules`` that a file imports, at its head, inside a function or for its types."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{one.name}" for one in node.names]
            found |= {name if name in modules else node.module for name in whole}
        elif isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
    return found
