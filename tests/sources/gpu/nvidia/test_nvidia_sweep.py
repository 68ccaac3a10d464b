"""Every driver call failing in every way: what is not known is absent - never 0, never what is not true - and the
other GPU goes on.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvpressure.sources.gpu.nvidia.codes import REASONS
from tests.sources.gpu.nvml_stub import GIB, Gpu, Mig, World, gpu_uuid
from tests.sources.gpu.nvml_stub.driver import StartChild

pytestmark = pytest.mark.live

CODES = [1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 15, 16, 17, 18, 28, 999]  # one of each reason that is handled apart

OF_DEVICE = """
    HandleByIndex_v2 UUID Name MinorNumber PciInfo_v3 MemoryInfo UtilizationRates PowerUsage EnforcedPowerLimit
    CurrentClocksEventReasons ComputeRunningProcesses_v3 MPSComputeRunningProcesses_v3 MigMode MaxMigDeviceCount
    MigDeviceHandleByIndex GpuInstanceId SupportedEventTypes
"""
PER_GPU = [
    *(f"nvmlDeviceGet{name}" for name in OF_DEVICE.split()),
    *("nvmlDeviceRegisterEvents", "nvmlGpmQueryDeviceSupport", "nvmlGpmSampleGet", "nvmlGpmMigSampleGet", "all"),
]
LIBRARY_WIDE = [
    *("nvmlInitWithFlags", "nvmlShutdown", "nvmlSystemGetDriverVersion", "nvmlDeviceGetCount_v2"),
    *("nvmlGpmSampleAlloc", "nvmlGpmSampleFree", "nvmlGpmMetricsGet", "nvmlEventSetCreate", "nvmlEventSetWait_v2"),
]
EVENT_CALLS = {"nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2", "nvmlEventSetCreate"}
LIBRARY_DOWN = {1, 9, 18}  # no GPU can be read then

TRUTH: dict[str, Any] = {
    "memory_total_bytes": 80 * GIB,
    "memory_used_bytes": 50 * GIB,
    "utilization_ratio": 0.7,
    "sm_activity_ratio": 0.5,
    "tensor_activity_ratio": 0.25,
    "dram_activity_ratio": 0.75,
    "power_watts": 350.0,
    "power_limit_watts": 700.0,
    "throttle_reasons": ["sw_power_cap"],
    "name": "NVIDIA H100 80GB HBM3",
    "driver": "580.65.06",
}
MIG_TRUTH: dict[str, Any] = {
    "memory_total_bytes": 10 * GIB,
    "memory_used_bytes": 6 * GIB,
    "sm_activity_ratio": 0.5,
    "tensor_activity_ratio": 0.25,
    "dram_activity_ratio": 0.75,
    "utilization_ratio": None,
    "power_watts": None,
    "power_limit_watts": None,
    "throttle_reasons": None,
    "driver": "580.65.06",
}


def world(call: str, code: int, gpu: bool, mig: bool) -> World:
    """Two GPUs that can do everything; ``call`` fails with ``code`` on the first, or for all."""
    activity = {"sm": 50, "tensor": 25, "dram": 75}
    full: dict[str, Any] = {"gpm": 1, "processes": [(1, GIB)], "mps_processes": [(3, GIB)]}
    first = Gpu(
        **full | activity,
        clocks_reasons=4,
        mig=int(mig),
        migs=[Mig("MIG-a", processes=[(2, GIB)], **activity)] if mig else [],
        codes={call: code} if gpu else {},
        event_types=8 if call in EVENT_CALLS else None,
    )
    return World(gpus=[first, Gpu(**full | activity, clocks_reasons=4)], codes={} if gpu else {call: code})


def check(reading: dict[str, Any], truth: dict[str, Any]) -> None:
    """Each value is the true one or absent; a GPU that could not be read has none."""
    for name, value in truth.items():
        assert reading[name] in (None, value), (name, reading)
    assert all(process["used_bytes"] in (None, GIB) for process in reading["processes"])
    assert reading["error"] in REASONS | {None}
    if reading["error"] is not None:
        assert all(reading[name] is None for name in truth if name not in ("name", "driver")), reading
        assert reading["processes"] == []


def sweep(start: StartChild, calls: list[str], gpu: bool, mig: bool) -> list[tuple[str, int, list[dict[str, Any]]]]:
    """Three readings for every call and code."""
    cases = [(call, code) for call in calls for code in CODES]
    child = start(World())
    reads = 3
    answers = child.sweep([world(call, code, gpu, mig) for call, code in cases], reads, nvidia_gpm=True)
    return [(*case, answers[reads * i : reads * (i + 1)]) for i, case in enumerate(cases)]


@pytest.mark.parametrize("mig", [False, True])
def test_a_failing_gpu_call(start: StartChild, mig: bool) -> None:
    for call, code, answers in sweep(start, PER_GPU, gpu=True, mig=mig):
        for answer in answers:
            if "reason" in answer:
                assert code in LIBRARY_DOWN, (call, code, answer)
                assert answer["reason"] in REASONS
                assert answer["fatal"] == (code == 18)
                continue
            assert set(answer["errors"]) <= REASONS
            assert answer["expected"] == {"nvidia": 2}
            for reading in answer["gpus"]:
                check(reading, MIG_TRUTH if reading["parent_uuid"] else TRUTH)
            assert [reading["error"] for reading in answer["gpus"] if reading["uuid"] == gpu_uuid(1)] == [None]
        if "gpus" in answers[-1]:
            other = next(reading for reading in answers[-1]["gpus"] if reading["uuid"] == gpu_uuid(1))
            assert {name: other[name] for name in TRUTH} == TRUTH, (call, code)
            assert len(other["processes"]) == 2


def test_a_failing_library_call(start: StartChild) -> None:
    for call, code, answers in sweep(start, LIBRARY_WIDE, gpu=False, mig=True):
        for answer in answers:
            if "reason" in answer:
                assert answer["reason"] in REASONS, (call, code)
                assert answer["fatal"] == (answer["reason"] == "library_mismatch")
                continue
            for reading in answer["gpus"]:
                check(reading, MIG_TRUTH if reading["parent_uuid"] else TRUTH)


def test_without_a_failure_everything_is_known(start: StartChild) -> None:
    """What the sweep compares with is really reached, so that "absent or true" is not simply always absent."""
    child = start(World())
    whole, parted = child.sweep([world("nothing", 0, True, mig) for mig in (False, True)], 2, nvidia_gpm=True)[1::2]
    for reading in whole["gpus"]:
        assert {name: reading[name] for name in TRUTH} == TRUTH
    instance = next(reading for reading in parted["gpus"] if reading["parent_uuid"])
    assert {name: instance[name] for name in MIG_TRUTH} == MIG_TRUTH
