"""The budget of a replay: 1 000 times real time, and memory that does not grow with the recording."""

from __future__ import annotations

import pytest
from benchmarks import replay


def test_replay_keeps_its_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    missed = replay.main(["1600"])
    assert missed == 0, capsys.readouterr().out
