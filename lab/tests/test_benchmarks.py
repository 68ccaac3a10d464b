"""Benchmarks that nobody runs every day still run."""

from __future__ import annotations

import pytest

from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.runtime.process_tuning import TIDY_SECONDS
from lab import churn, tick

pytestmark = pytest.mark.slow


def test_pods_come_and_go_and_what_is_published_comes_back() -> None:
    node = churn.Node(now=1_700_000_000.0, step=30.0)
    exporter = churn.Exporter(node)
    exporter.run(churn.CALM_SECONDS)
    before = exporter.series()
    node.calm = False
    exporter.run(2 * TIDY_SECONDS)
    assert node.happened
    node.calm = True
    node.fresh_pods()
    exporter.run(churn.CALM_SECONDS)
    assert exporter.series() == before


def test_the_conclusions_of_a_tick_are_measured() -> None:
    assert tick.milliseconds(Pipeline(), tick.snapshots(), 3, 0.0) > 0
