"""The project stays small enough that one person can hold it: each number of ``budget.toml`` is an upper bound."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

import yaml

import kvpressure
from kvpressure.settings.thresholds import builtin
from tests.e2e.test_golden_pages import replayed, scenario

ROOT = Path(__file__).parents[2]
BUDGET = tomllib.loads((ROOT / "tests/contracts/budget.toml").read_text(encoding="utf-8"))
GENERATED = (
    "alerts",
    "dashboards",
    "deploy/manifests",
    "deploy/helm/kvpressure/files",
    "docs/runbooks",
    "docs/reference",
)


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def statements(*folders: str) -> int:
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py") if "/tests/" not in path.as_posix())
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return sum(isinstance(node, ast.stmt) and not is_docstring(node) for node in nodes)


def words(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def lines(*folders: str) -> int:
    return sum(
        len(path.read_text(encoding="utf-8").splitlines()) for name in folders for path in (ROOT / name).rglob("*.py")
    )


def alerts() -> int:
    groups = yaml.safe_load((ROOT / "alerts/kvpressure-rules.yaml").read_text(encoding="utf-8"))["groups"]
    return len({rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule})


def files_on_the_walk() -> int:
    """The files of the package that run, in the tick after 20 others, from one engine's page to our page."""
    package = f"{Path(kvpressure.__file__).parent}/"
    files: set[str] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            files.add(frame.f_code.co_filename)

    def pages() -> Iterator[str]:
        *before, last = scenario("kv_pressure")[:21]
        yield from before
        sys.setprofile(profile)
        yield last

    try:
        replayed(pages())
    finally:
        sys.setprofile(None)
    return len(files)


def measured() -> dict[str, int]:
    """Today's figures, by their names in the budget."""
    return {
        "statements": statements("exporter"),
        "laboratory_statements": statements("plugin", "lab"),
        "files_on_the_walk": files_on_the_walk(),
        "thresholds": len(builtin().settable()),
        "numbers": len(builtin().entries()),
        "alerts": alerts(),
        "generated_files": sum(path.is_file() for name in GENERATED for path in (ROOT / name).rglob("*")),
        "words": words([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]),
        "test_lines": lines("tests", "lab/tests"),
    }


def test_every_figure_is_within_its_budget() -> None:
    today = measured()
    print(*(f"{name}: {value} of {BUDGET[name]}" for name, value in today.items()), sep="\n")  # pytest -s shows it
    assert {name: value for name, value in today.items() if value > BUDGET[name]} == {}
