"""Activity of SMs, tensor cores and DRAM, by GPM."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sources.gpu.nvml_stub import Gpu, World
from tests.sources.gpu.nvml_stub.driver import Child, StartChild

pytestmark = pytest.mark.live


def activity(child: Child) -> tuple[float | None, float | None, float | None]:
    """SM, tensor and DRAM activity of the only GPU."""
    (gpu,) = child.gpus()
    return gpu["sm_activity_ratio"], gpu["tensor_activity_ratio"], gpu["dram_activity_ratio"]


def gpm(**changes: Any) -> World:
    return World(gpus=[Gpu(**{"gpm": 1, "sm": 80.0, "tensor": 12.5, "dram": 64.0, **changes})])


def test_activity_is_the_difference_between_two_readings_that_are_not_too_close(start: StartChild) -> None:
    child = start(gpm(), nvidia_gpm=True)
    assert activity(child) == (None, None, None)
    child.advance(0.05)
    assert activity(child) == (None, None, None)
    child.advance(0.06)
    assert activity(child) == (0.8, 0.125, 0.64)
    child.set(gpm(sm=0.0))
    child.advance(1)
    assert activity(child) == (0.0, 0.125, 0.64)


def test_permission_lost_and_regained(start: StartChild) -> None:
    child = start(gpm(), nvidia_gpm=True)
    activity(child)
    child.advance(1)
    assert activity(child)[0] == 0.8
    child.set(gpm(codes={"nvmlGpmSampleGet": 4}))
    errors = []
    for _ in range(100):
        child.advance(1)
        got = child.read()
        errors.append(got["errors"])
        assert got["gpus"][0]["sm_activity_ratio"] is None
        assert got["gpus"][0]["power_watts"] == 350.0
    assert errors == [{"no_permission": 1}] + [{}] * 99
    child.set(gpm())
    child.advance(600)
    assert activity(child) == (None, None, None)  # two new samples are needed
    child.advance(1)
    assert activity(child) == (0.8, 0.125, 0.64)
    assert child.calls()["nvmlGpmSampleAlloc"] == 2  # samples are used again, not piled up


def test_single_metrics_may_be_absent(start: StartChild) -> None:
    child = start(gpm(tensor=None, dram=100.4), nvidia_gpm=True)
    activity(child)
    child.advance(1)
    assert activity(child) == (0.8, None, 1.0)
    child.set(gpm(sm=130.0, tensor=float("nan")))
    child.advance(1)
    assert activity(child) == (None, None, 0.64)


def test_error_code_of_each_metric_counts(start: StartChild) -> None:
    child = start(gpm(gpm_status=999), nvidia_gpm=True)
    activity(child)
    child.advance(1)
    got = child.read()
    assert got["gpus"][0]["dram_activity_ratio"] is None
    assert got["errors"] == {"unknown": 3}
