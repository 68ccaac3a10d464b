"""Faults in random order against the real process, for a few seconds; ``make -C lab soak`` goes on for hours."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.soak import soak

pytestmark = [pytest.mark.live, pytest.mark.slow]


def test_faults_cost_nobody_else_and_everything_comes_back(tmp_path: Path) -> None:
    result = soak(seed=7, seconds=8, where=tmp_path, most=8)
    assert result.problems == []
    assert result.faults > 0
    assert result.looks == 2 * result.faults
