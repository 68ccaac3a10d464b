"""Generated reference documents name everything that exists, and only that."""

from __future__ import annotations

import re

from kvpressure.publish.metrics import METRICS
from kvpressure.publish.reference import render_metrics_reference, render_settings_reference
from kvpressure.settings import options


def test_every_metric_has_one_row() -> None:
    rows = [line for line in render_metrics_reference().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] != []
    assert sorted(row.split("`")[1] for row in rows) == sorted(metric.full_name for metric in METRICS)
    for row in rows:
        assert len(re.split(r"(?<!\\)\|", row)) == 7, row


def test_every_setting_has_one_row() -> None:
    rows = [line for line in render_settings_reference().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1].removeprefix("--") for row in rows] == list(options())
    for row in rows:
        assert len(re.split(r"(?<!\\)\|", row)) == 7, row
