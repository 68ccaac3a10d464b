"""GPU activity: what each kind of evidence can prove and disprove."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

import pytest

from kvpressure.diagnosis.finding import GpuFacts
from kvpressure.model.signals import NO_ACTIVITY, ComputeSignals
from kvpressure.settings.thresholds import builtin

T = builtin()
WEAK = ComputeSignals(activity_level="utilization_weak")
Fact = Callable[[GpuFacts], bool | None]


computes: Fact = attrgetter("computes")
works: Fact = attrgetter("works")


@pytest.mark.parametrize(
    ("fact", "busy"),
    [(computes, T["tensor_busy_ratio"]), (works, min(T["tensor_busy_ratio"], T["most_ratio"]))],
)
def test_a_low_duty_cycle_disproves_busy_units_and_a_high_one_proves_nothing(fact: Fact, busy: float) -> None:
    for used, said in ((0.0, False), (busy - 0.001, False), (busy, None), (1.0, None)):
        assert fact(GpuFacts(replace(WEAK, gpu_utilization=used), T)) is said, used
    assert fact(GpuFacts(replace(WEAK, activity_level=NO_ACTIVITY), T)) is None


@pytest.mark.parametrize("fact", [computes, works])
def test_one_busy_gpu_of_several_is_enough_not_to_know(fact: Fact) -> None:
    gpus = replace(WEAK, gpu_utilization=0.3, gpu_utilization_low=0.0, gpu_utilization_high=0.6)
    assert fact(GpuFacts(gpus, T)) is None
    assert fact(GpuFacts(replace(gpus, gpu_utilization_high=0.35), T)) is False


@pytest.mark.parametrize("fact", [computes, works])
def test_power_decides_where_it_is_known(fact: Fact) -> None:
    drawing = replace(WEAK, activity_level="power", gpu_utilization=0.2, power_ratio=T["power_prefill_ratio"])
    assert fact(GpuFacts(drawing, T)) is True
