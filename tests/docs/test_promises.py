"""The pages on security and failures promise what tests prove and what the code's limits are."""

from __future__ import annotations

import ast
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


NAMED = [match for document in DOCUMENTS for match in _TEST.findall(document.read_text(encoding="utf-8"))]


def test_every_test_that_is_named_exists() -> None:
    for file, name in NAMED:
        assert not name or name in functions_of(ROOT / file), f"{file}::{name}"
        assert (ROOT / file).is_file()


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
