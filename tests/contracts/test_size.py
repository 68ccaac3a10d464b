"""The project stays small enough that one person can hold it: each number of ``budget.toml`` is an upper bound."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

import pytest
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
JUDGING = ("signals", "diagnosis", "advice", "pipeline", "toolbox", "bundle")
DECIDES_NOTHING = {
    "bounds of memory, of what is read and of what is shown": """
        MAX_RESTARTS_KEPT BASELINE_VALUES IDLE_POINTS MAX_REPORTS MAX_ENTRIES MAX_SIZES MAX_NAMES MAX_GONE_ENGINES
        MAX_COMMAND_LINES MAX_EVENTS_KEPT MAX_STARTS MAX_POOLS MAX_BYTES MAX_PODS
        LOG_TAIL LOG_HEAD_BYTES _MAX_LINE _MAX_ERROR_BYTES _SHOWN
        MAX_CHANGES MAX_LIST_BYTES _ERROR_BYTES MAX_TARGETS _DEPTH _MAX_MAPPINGS _MOST MAX_SERVERS
        MAX_ANSWER_BYTES _PART_BYTES _MAX_CHANGES_SHOWN _NAME_WIDTH _NAME_LIMIT _SAID_LIMIT""",
    "how finely and how long history is kept": """
        TREND_STEP_SECONDS IDLE_STEP_SECONDS FINE_SECONDS MID_SECONDS LONG_SECONDS MID_STEP LONG_STEP
        STEP_BACK_SECONDS FORGET_SECONDS""",
    "pace and patience of what is read over a network": """
        INTERVAL_SECONDS TIMEOUT_SECONDS _CALLS_AT_ONCE MAX_SECONDS _FIRST_TICKS
        CHUNK_SECONDS ANSWER_SECONDS SAMPLE_SECONDS RETURN_SECONDS BASELINE_SECONDS""",
    "what a probe sends": "SHORT_TOKENS CONCURRENT CONCURRENT_TOKENS LONG_TOKENS FILL LEAST_TOKENS",
    "units, ranks, names and defaults of other programs": """
        QUANTILES TWICE MILLICORE _RANKS _PEAKS ROUNDING
        EXPORTER_PORT DEFERRED_HOST
        _ENVELOPE_BYTES _EXAMPLE _SHAPE_STEP""",
    "how a grade is published": "GRADE_CONFIDENCE",
    "layout and tests of the bundle": """
        EVALUATION_INTERVALS MOST_ALERTS MOST_SERIES NO_TRAFFIC SCHEMA_VERSION WIDTH TOP SCREEN _SPANS
        _WIDTH""",
}


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


def plain_numbers(node: ast.AST) -> list[float]:
    """The numbers, 0 and 1 apart, of a ``Final`` that holds no code."""
    if not isinstance(node, ast.AnnAssign) or not ast.unparse(node.annotation).startswith("Final"):
        return []
    parts = list(ast.walk(node))
    if any(isinstance(part, ast.Lambda) or (isinstance(part, ast.Call) and part.keywords) for part in parts):
        return []
    return [
        part.value
        for part in parts
        if isinstance(part, ast.Constant) and type(part.value) in (int, float) and part.value not in (0, 1)
    ]


def constants_in_code() -> dict[str, int]:
    """How many numbers each constant of the packages that judge holds, by ``file:NAME``. Whatever is not in
    ``DECIDES_NOTHING`` decides something.
    """
    files = [path for name in JUDGING for path in (ROOT / "exporter/kvpressure" / name).rglob("*.py")]
    counted = {
        (path.stem, ast.unparse(node.target)): len(numbers)
        for path in files
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.AnnAssign) and (numbers := plain_numbers(node))
    }
    nothing = {name for names in DECIDES_NOTHING.values() for name in names.split()}
    assert nothing - {name for _, name in counted} == set(), "names that are gone"
    return {f"{stem}:{name}": number for (stem, name), number in counted.items() if name not in nothing}


def measured() -> dict[str, int]:
    """Today's figures, by their names in the budget."""
    return {
        "statements": statements("exporter"),
        "laboratory_statements": statements("plugin", "lab"),
        "files_on_the_walk": files_on_the_walk(),
        "thresholds": len(builtin().settable()),
        "numbers": len(builtin().entries()) + sum(constants_in_code().values()),
        "alerts": alerts(),
        "generated_files": sum(path.is_file() for name in GENERATED for path in (ROOT / name).rglob("*")),
        "words": words([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]),
        "test_lines": lines("tests", "lab/tests"),
    }


@pytest.mark.slow
def test_every_figure_is_within_its_budget() -> None:
    today = measured()
    print(*(f"{name}: {value} of {BUDGET[name]}" for name, value in today.items()), sep="\n")  # pytest -s shows it
    assert {name: value for name, value in today.items() if value > BUDGET[name]} == {}, "shrink, or raise budget.toml"
