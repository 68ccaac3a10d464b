"""Generated reference documents name everything that exists, and only that."""

from __future__ import annotations

from pathlib import Path

from kvpressure.publish.collector import families
from kvpressure.publish.reference import ENGINE_SERIES, GPU_SERIES, render_metrics_reference
from tests.recording.strategies import replayed

GOLDEN = Path(__file__).parents[1] / "golden"


def test_the_series_of_an_engine_and_a_gpu_are_stated_as_they_are() -> None:
    most = 0
    for state in replayed("vllm-cpu/d_kv_pressure"):
        shown = [sample for family in families(state).collect() for sample in family.samples]
        most = max(most, sum(1 for sample in shown if "engine" in sample.labels))
    assert abs(most - ENGINE_SERIES) <= 10, "ENGINE_SERIES in publish/reference.py, which is said to be about right"
    gpu = (GOLDEN / "gpu_h100.metrics").read_text().splitlines()
    assert sum(1 for line in gpu if line.startswith("kvpressure_gpu_")) == GPU_SERIES
    assert f"about {ENGINE_SERIES} series" in render_metrics_reference()
