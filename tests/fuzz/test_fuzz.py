"""A little of the fuzzing, and every case that once failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.run import SUBJECTS, Count, failure, kept, load, quiet, run

pytestmark = pytest.mark.slow

CASES = {"node": 12}
FEW = 150
SEED = 20_261


@pytest.mark.parametrize("name", SUBJECTS)
def test_what_has_to_hold_holds_for_some_cases(name: str) -> None:
    subject = SUBJECTS[name]
    run(subject, SEED, count := Count(), CASES.get(name, FEW))
    assert count.failed == {}, f"python -m tests.fuzz --only {name} --seed {SEED}"


@pytest.mark.parametrize("path", kept(), ids=lambda path: path.stem)
def test_what_once_failed_holds(path: Path) -> None:
    subject, case = load(path)
    with quiet():
        assert failure(subject, case) is None


def test_a_failure_is_seen() -> None:
    """The check of a subject that does not hold is not swallowed."""
    subject = SUBJECTS["http_request"]
    assert (failure(subject, "no bytes") or "").startswith("TypeError at http:")
    assert failure(SUBJECTS["pod_resources"], b"\x0a\x02\x0a\x00") is None
