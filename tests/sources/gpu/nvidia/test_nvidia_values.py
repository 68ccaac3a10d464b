"""What the NVIDIA source reads, through the real binding from a stub driver."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sources.gpu.nvml_stub import GIB, Gpu, World, gpu_uuid
from tests.sources.gpu.nvml_stub.driver import StartChild

pytestmark = pytest.mark.live

ALL_FIELDS = {
    "memory_total_bytes",
    "memory_used_bytes",
    "utilization_ratio",
    "power_watts",
    "power_limit_watts",
    "throttle_reasons",
    "name",
    "minor",
    "pci_bus_id",
}


def known(gpu: dict[str, Any]) -> set[str]:
    """Fields of ``ALL_FIELDS`` that have a value."""
    return {name for name in ALL_FIELDS if gpu[name] is not None}


def test_every_value_in_base_units(start: StartChild) -> None:
    child = start(
        World(
            gpus=[
                Gpu(
                    memory_total=80 * GIB,
                    memory_free=20 * GIB,
                    utilization=37,
                    power_mw=412_345,
                    power_limit_mw=700_000,
                    clocks_reasons=0x04 | 0x40 | 0x01,
                    minor=3,
                    bus="00000000:3B:00.0",
                    processes=[(4242, 50 * GIB), (4243, None), (4244, 0)],
                )
            ],
            driver_version="580.65.06",
        )
    )
    (gpu,) = child.gpus()
    assert gpu["uuid"] == gpu_uuid(0)
    assert (gpu["index"], gpu["vendor"], gpu["driver"]) == (0, "nvidia", "580.65.06")
    assert (gpu["name"], gpu["minor"], gpu["pci_bus_id"]) == ("NVIDIA H100 80GB HBM3", 3, "0000:3b:00.0")
    assert gpu["memory_total_bytes"] == 80 * GIB
    assert gpu["memory_used_bytes"] == 60 * GIB  # total - free
    assert gpu["utilization_ratio"] == 0.37
    assert gpu["power_watts"] == 412.345
    assert gpu["power_limit_watts"] == 700.0
    assert gpu["throttle_reasons"] == ["sw_power_cap", "hw_thermal_slowdown"]  # idle is no throttling
    assert gpu["processes"] == [
        {"pid": 4242, "used_bytes": 50 * GIB},
        {"pid": 4243, "used_bytes": None},
        {"pid": 4244, "used_bytes": None},
    ]  # a context is never without memory
    assert gpu["error"] is None


def test_zero_is_a_value_where_it_can_be_true_and_clients_of_mps_are_added_once(start: StartChild) -> None:
    shared = Gpu(processes=[(1, None), (2, GIB)], mps_processes=[(1, GIB), (3, 2 * GIB)])
    gpu, of_mps = start(World(gpus=[Gpu(memory_free=80 * GIB, utilization=0, clocks_reasons=0), shared])).gpus()
    assert gpu["memory_used_bytes"] == 0
    assert gpu["utilization_ratio"] == 0.0
    assert gpu["throttle_reasons"] == []
    assert {(p["pid"], p["used_bytes"]) for p in of_mps["processes"]} == {(1, GIB), (2, GIB), (3, 2 * GIB)}


MEMORY = {"memory_total_bytes", "memory_used_bytes"}
CALLS = {
    "MemoryInfo": MEMORY,
    "UtilizationRates": {"utilization_ratio"},
    "PowerUsage": {"power_watts"},
    "EnforcedPowerLimit": {"power_limit_watts"},
    "CurrentClocksEventReasons": {"throttle_reasons"},
    "Name": {"name"},
    "MinorNumber": {"minor"},
    "PciInfo_v3": {"pci_bus_id"},
}


@pytest.mark.parametrize(("code", "errors"), [(3, {}), (4, {"no_permission": len(CALLS)})])
def test_each_value_is_absent_by_itself(start: StartChild, code: int, errors: dict[str, int]) -> None:
    got = start(World(gpus=[*(Gpu(codes={f"nvmlDeviceGet{call}": code}) for call in CALLS), Gpu()])).read()
    assert [ALL_FIELDS - known(gpu) for gpu in got["gpus"]] == [*CALLS.values(), set()]
    assert {gpu["error"] for gpu in got["gpus"]} == {None}
    assert got["errors"] == errors


def test_what_cannot_be_true_is_absent(start: StartChild) -> None:
    lacking = (
        (Gpu(memory_free=81 * GIB), MEMORY),
        (Gpu(memory_total=0, memory_free=0), MEMORY),
        (Gpu(utilization=101), {"utilization_ratio"}),
        (Gpu(utilization=0xFFFFFFFF), {"utilization_ratio"}),
        (Gpu(power_mw=0), {"power_watts"}),
        (Gpu(power_mw=0xFFFFFFFF), {"power_watts"}),
        (Gpu(power_limit_mw=0), {"power_limit_watts"}),
    )
    got = start(World(gpus=[gpu for gpu, _ in lacking])).gpus()
    assert [ALL_FIELDS - known(gpu) for gpu in got] == [fields for _, fields in lacking]


def test_text_that_is_no_text_is_absent(start: StartChild) -> None:
    world = World(gpus=[Gpu(name="H\udcff00")])
    child = start(World())
    child.world_path.write_bytes(world.render().encode("utf-8", "surrogateescape"))
    got = child.read()
    assert got["gpus"][0]["name"] is None
    assert got["gpus"][0]["memory_used_bytes"] is not None
    assert got["errors"] == {"invalid_data": 1}


def test_what_does_not_change_or_is_not_there_is_not_asked_each_second(start: StartChild) -> None:
    gpu = Gpu(power_mw=None, clocks_reasons=None, codes={"nvmlDeviceGetUtilizationRates": 4})
    child = start(World(gpus=[gpu]), missing=("nvmlDeviceGetMPSComputeRunningProcesses_v3",))
    for _ in range(100):
        child.gpus()
        child.advance(1.0)
    calls = child.calls()
    assert calls["nvmlDeviceGetMemoryInfo"] == 100
    asked = "Count_v2 HandleByIndex_v2 UUID Name MinorNumber PciInfo_v3 PowerUsage UtilizationRates"
    asked += " CurrentClocksEventReasons"
    once = ("nvmlInitWithFlags", *(f"nvmlDeviceGet{name}" for name in asked.split()))
    assert {name: calls[name] for name in once} == dict.fromkeys(once, 1)
    assert calls["nvmlDeviceGetComputeRunningProcesses_v3"] == 10
    assert calls["nvmlDeviceGetEnforcedPowerLimit"] == 10


def test_node_without_gpus(start: StartChild) -> None:
    got = start(World()).read()
    assert got["gpus"] == []
    assert got["expected"] == {"nvidia": 0}
