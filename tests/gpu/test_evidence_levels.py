"""The best activity evidence there is is used, by the score and by the verdict."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest

from kvpressure.model.readings import GpuReading
from kvpressure.model.state import EngineState
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.signals.hardware import peak
from tests.gpu.loads import LEVELS, LOADS, snapshot

pytestmark = pytest.mark.slow

TICKS = 40


@cache
def engine(load: str, *levels: str, vendor: str = "nvidia") -> EngineState:
    pipeline = Pipeline()
    for tick in range(TICKS):
        found = pipeline.observe(snapshot(1000.0 + tick, load, *levels, vendor=vendor))
    return found.engines[0]


def subsets() -> list[tuple[str, ...]]:
    return [chosen for size in range(len(LEVELS) + 1) for chosen in combinations(LEVELS, size)]


@pytest.mark.parametrize("levels", subsets(), ids="+".join)
def test_the_best_level_is_used(levels: tuple[str, ...]) -> None:
    """Levels stand in ``LEVELS`` best first."""
    found = engine("decode", *levels).signals.compute
    assert found.activity_level == (levels[0] if levels else "none")
    if levels:
        alone = engine("decode", levels[0]).signals.compute
        assert found.score_compute_factor == alone.score_compute_factor
    assert not engine("host", *levels).diagnosis.evidence["gpu_saturated"].value, "a starved one"


@pytest.mark.parametrize("level", ["profiling", "utilization_weak"])
def test_a_starved_gpu_is_proven_by_what_ran_on_it(level: str) -> None:
    for load in LOADS:
        assert engine(load, level).diagnosis.evidence["gpu_starved"].value is (load == "host"), load
    found = engine("host", level).diagnosis
    assert found.verdict == "host_bound"
    assert found.confidence >= 0.7


@pytest.mark.parametrize("level", ["power", "estimated_flops"])
def test_little_power_or_work_leaves_open_whether_the_gpu_is_starved(level: str) -> None:
    """Small models at their best look the same; calling them host-bound would be wrong and confident."""
    values = {load: engine(load, level).diagnosis.evidence["gpu_starved"].value for load in LOADS}
    assert values == {"decode": False, "prefill": False, "host": None}
    assert engine("host", level).diagnosis.verdict == "healthy"
    assert engine("host", level, "utilization_weak").diagnosis.verdict == "host_bound"


@pytest.mark.parametrize(
    ("level", "text"),
    [
        ("profiling", "tensor activity 60 %"),
        ("power", "power 95 % of the limit"),
        ("estimated_flops", "estimated work 56 % of the GPU's peak"),
        ("utilization_weak", "NVML utilization 99 %"),
    ],
)
def test_a_gpu_that_prompts_saturate_is_known_at_each_level(level: str, text: str) -> None:
    evidence = engine("prefill", level).diagnosis.evidence["gpu_saturated"]
    assert evidence.value is True
    assert text in evidence.text


@pytest.mark.parametrize("levels", subsets(), ids="+".join)
@pytest.mark.parametrize(("load", "verdict"), [("decode", "kv_pressure"), ("prefill", "compute_bound")])
def test_the_verdict_on_a_queue_is_the_same_at_every_level_and_of_every_vendor(
    levels: tuple[str, ...], load: str, verdict: str
) -> None:
    for vendor in ("nvidia", "amd"):
        assert engine(load, *levels, vendor=vendor).diagnosis.verdict == verdict


def test_without_activity_the_verdict_says_what_is_missing() -> None:
    found = engine("prefill").diagnosis
    assert found.evidence["gpu_starved"].value is None
    assert found.evidence["gpu_saturated"].value is None
    assert "GPU activity" in found.missing


def test_peaks_by_the_names_of_drivers() -> None:
    terabytes = {
        "NVIDIA H100 80GB HBM3": 3.35,
        "NVIDIA H100 PCIe": 2.0,
        "NVIDIA GH200 480GB": 4.9,
        "NVIDIA A100-SXM4-80GB": 2.04,
        "NVIDIA A10": 0.6,
        "NVIDIA L4": 0.3,
        "NVIDIA L40S": 0.864,
        "AMD Instinct MI300X OAM": 5.3,
        "AMD INSTINCT MI250X": 1.6,
    }
    assert {name: peak(GpuReading("u", 0, "x", name)).bytes / 1e12 for name in terabytes} == pytest.approx(terabytes)
    for name in ("NVIDIA A10G", "AMD Instinct MI300A", "NVIDIA GB10", "Some Future Card", None):
        assert peak(GpuReading("u", 0, "x", name)) is None
    assert peak(GpuReading("u", 0, "x", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", parent_uuid="GPU-1")) is None
