"""A little of the fuzzing, and every case that once failed."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.fuzz.__main__ import write_figures
from tests.fuzz.guided import DrawnFrom
from tests.fuzz.run import SUBJECTS, Count, decoded, encoded, failure, kept, load, quiet, run

pytestmark = pytest.mark.slow

CASES = {"node": 12}
FEW = 150
SEED = 20_261


@pytest.mark.parametrize("name", SUBJECTS)
def test_what_has_to_hold_holds_for_some_cases(name: str) -> None:
    subject = SUBJECTS[name]
    count = run(subject, SEED, 0, CASES.get(name, FEW))
    assert count.failed == {}, f"python -m tests.fuzz --only {name} --seed {SEED}"
    assert count.cases == CASES.get(name, FEW)


@pytest.mark.parametrize("path", kept(), ids=lambda path: path.stem)
def test_what_once_failed_holds(path: Path) -> None:
    subject, case = load(path)
    with quiet():
        assert failure(subject, case) is None


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_case_can_be_made_again_and_kept(name: str) -> None:
    make = SUBJECTS[name].make
    case = make(Random("1:7"))
    assert repr(make(Random("1:7"))) == repr(case)
    assert decoded(encoded(case)) == case or "nan" in repr(case)


def test_a_failure_is_seen() -> None:
    """The check of a subject that does not hold is not swallowed."""
    subject = SUBJECTS["http_request"]
    assert (failure(subject, "no bytes") or "").startswith("TypeError at http:")
    assert failure(SUBJECTS["pod_resources"], b"\x0a\x02\x0a\x00") is None


def test_figures_have_a_row_for_every_subject(tmp_path: Path) -> None:
    document = tmp_path / "figures.md"
    counts = {name: Count(1_000_000, 60.0) for name in SUBJECTS} | {"http_request": Count(7, 6.0, {"x": 2})}
    write_figures(counts, document)
    rows = [line.split(" | ") for line in document.read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(SUBJECTS)
    cells = {name: row[2:5] for name, row in zip(SUBJECTS, rows, strict=True)}
    assert cells.pop("http_request") == ["7", "0.1", "2"]
    assert set(map(tuple, cells.values())) == {("1,000,000", "1.0", "0")}
    assert f"{1_000_000 * len(cells) + 7:,} cases in {len(cells)} minutes" in document.read_text()


@pytest.mark.parametrize("name", SUBJECTS)
def test_bytes_of_a_guiding_fuzzer_draw_cases(name: str) -> None:
    make = SUBJECTS[name].make
    beginnings = [Random("8").randbytes(2048), b"", b"\x00" * 64, b"\xff" * 64]
    for data in beginnings:
        assert repr(make(DrawnFrom(data))) == repr(make(DrawnFrom(data)))
    changed = [beginnings[0][:place] + b"\x55" + beginnings[0][place + 1 :] for place in range(2000, 2048)]
    assert len({repr(make(DrawnFrom(data))) for data in (*changed, *beginnings)}) > 4
