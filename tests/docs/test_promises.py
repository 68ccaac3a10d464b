"""The pages on security and failures promise what tests prove and what the code's limits are."""

from __future__ import annotations

import ast
import importlib
import re
from functools import lru_cache
from pathlib import Path

import pytest
from docs.generate import promises

from kvpressure.publish.metrics import METRICS

ROOT = Path(__file__).parents[2]
GUARANTEES = ROOT / "docs/reference/guarantees.md"
DOCUMENTS = (GUARANTEES, ROOT / "docs/security.md")
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@lru_cache
def functions_of(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def rows(document: Path) -> list[list[str]]:
    """Cells of every table row but heads and rules."""
    lines = document.read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    heads = [index for index, row in enumerate(cells) if set("".join(row)) <= set("-: ")]
    return [row for index, row in enumerate(cells) if index not in heads and index + 1 not in heads]


NAMED = [match for document in DOCUMENTS for match in _TEST.findall(document.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)), ids=lambda part: str(part).rpartition("/")[2])
def test_every_test_that_is_named_exists(file: str, name: str) -> None:
    assert (ROOT / file).is_file()
    assert not name or name in functions_of(ROOT / file)


def test_every_row_names_its_test_or_its_limit() -> None:
    without = [row for row in rows(GUARANTEES) if not (_TEST.search(row[-1]) or is_limit(row))]
    assert without == []
    assert len(NAMED) > 50


def is_limit(row: list[str]) -> bool:
    return len(row) == 5 and re.fullmatch(r"`[a-z_.]+\.[A-Z_]+`", row[2]) is not None


LIMITS = [row for row in rows(GUARANTEES) if is_limit(row)]


@pytest.mark.parametrize("row", LIMITS, ids=lambda row: row[2].strip("`"))
def test_a_limit_is_what_the_code_says(row: list[str]) -> None:
    module, _, name = row[2].strip("`").rpartition(".")
    value = getattr(importlib.import_module(f"kvpressure.{module}"), name)
    number, _, unit = row[1].partition(" ")
    assert value == int(number) * {"": 1, "KiB": 2**10, "MiB": 2**20}[unit]


def test_every_metric_that_is_named_exists() -> None:
    known = {metric.name.removeprefix("kvpressure_").removesuffix("_total") for metric in METRICS}
    text = "".join(GUARANTEES.read_text(encoding="utf-8").partition("## Faults")[1:])
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)(?:\{[^}]*\})?(?: \d)?`", text))
    assert {name for name in named if name.removesuffix("_total") not in known} == set()


def test_a_mark_of_a_test_is_a_row_of_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tests/web").mkdir(parents=True)
    page = tmp_path / GUARANTEES.relative_to(ROOT)
    page.parent.mkdir(parents=True)
    page.write_text(GUARANTEES.read_text(encoding="utf-8"))
    (tmp_path / "tests/web/test_a.py").write_text(
        "class TestA:\n"
        "    @pytest.mark.attack('one', 'refused')\n"
        "    @pytest.mark.fault('web', 'two', 'nothing', '–', 'by itself')\n"
        "    def test_b(self) -> None: ...\n"
    )
    assert promises.main(tmp_path, check=True) == 1
    assert "docs/reference/guarantees.md: out of date" in capsys.readouterr().out
    assert promises.main(tmp_path) == 0
    assert "1 attacks are tests" in page.read_text()
    assert "| two | nothing | – | by itself | `tests/web/test_a.py::test_b` |" in page.read_text()
    assert promises.main(tmp_path, check=True) == 0


def test_every_part_of_a_fault_has_a_table() -> None:
    assert {one.cells[0] for one in promises.promises() if one.kind == "fault"} == set(promises.PARTS)
