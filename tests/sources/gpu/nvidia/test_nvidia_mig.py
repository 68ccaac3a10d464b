"""MIG: instances beside their GPU, what each can tell, and reconfiguration under way."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sources.gpu.nvml_stub import GIB, Gpu, Mig, World, gpu_uuid
from tests.sources.gpu.nvml_stub.driver import Child, StartChild

pytestmark = pytest.mark.live


def mig_gpu(*migs: Mig | None, **changes: Any) -> Gpu:
    """A GPU in MIG mode: no utilization."""
    values: dict[str, Any] = {"mig": 1, "migs": list(migs), "utilization": None, "gpm": 1, **changes}
    return Gpu(**values)


def by_uuid(child: Child) -> dict[str, dict[str, Any]]:
    return {gpu["uuid"]: gpu for gpu in child.gpus()}


def test_instances_beside_their_gpu(start: StartChild) -> None:
    child = start(
        World(
            gpus=[
                Gpu(),
                mig_gpu(
                    Mig("MIG-a", gi=7, start=4, memory_total=10 * GIB, memory_free=4 * GIB, processes=[(5, GIB)]),
                    None,
                    Mig("MIG-b", gi=9, memory_total=20 * GIB, memory_free=GIB, name=None),
                    processes=[(5, GIB)],
                ),
            ]
        )
    )
    got = child.read()
    assert [gpu["uuid"] for gpu in got["gpus"]] == [gpu_uuid(0), gpu_uuid(1), "MIG-a", "MIG-b"]
    assert got["expected"] == {"nvidia": 2}
    assert got["errors"] == {}
    _, parent, first, second = got["gpus"]
    assert parent["parent_uuid"] is None
    assert parent["memory_used_bytes"] == 50 * GIB
    assert parent["processes"] == []  # each belongs to an instance
    assert (first["parent_uuid"], first["index"], first["minor"], first["gpu_instance_id"]) == (gpu_uuid(1), 1, 1, 7)
    assert (first["gpu_instance_start"], second["gpu_instance_start"]) == (4, 0)
    assert (first["memory_total_bytes"], first["memory_used_bytes"]) == (10 * GIB, 6 * GIB)
    assert first["processes"] == [{"pid": 5, "used_bytes": GIB}]
    assert first["name"].endswith("MIG 1g.10gb")
    assert second["name"] == "NVIDIA H100 80GB HBM3"
    for instance in (first, second):
        assert [
            instance[name]
            for name in ("utilization_ratio", "power_watts", "power_limit_watts", "throttle_reasons", "error")
        ] == [None] * 5


def test_figures_of_the_whole_gpu_only_where_permitted(start: StartChild) -> None:
    calls = ("MemoryInfo", "PowerUsage", "EnforcedPowerLimit", "CurrentClocksEventReasons", "UtilizationRates")
    denied = {f"nvmlDeviceGet{call}": 4 for call in calls}
    mig = Mig("MIG-a", codes={"nvmlDeviceGetMemoryInfo": 0})
    child = start(World(gpus=[mig_gpu(mig, codes=denied)]))
    parent, instance = child.gpus()
    assert parent["memory_used_bytes"] is None
    assert parent["error"] is None
    assert instance["memory_used_bytes"] == 6 * GIB
    for _ in range(20):
        child.advance(1)
        assert child.read()["errors"] == {}  # denied once, not asked again
    assert child.calls()["nvmlDeviceGetPowerUsage"] == 1


def test_reconfigured_under_way(start: StartChild) -> None:
    child = start(World(gpus=[mig_gpu(Mig("MIG-a"), Mig("MIG-b"))]))
    assert set(by_uuid(child)) == {gpu_uuid(0), "MIG-a", "MIG-b"}
    child.set(World(gpus=[mig_gpu(Mig("MIG-b"), None, Mig("MIG-c", memory_free=GIB))]))
    child.advance(1)
    got = by_uuid(child)
    assert set(got) == {gpu_uuid(0), "MIG-b", "MIG-c"}
    assert got["MIG-b"]["memory_used_bytes"] == 6 * GIB
    assert got["MIG-c"]["memory_used_bytes"] == 9 * GIB
    assert all(gpu["error"] is None for gpu in got.values())


@pytest.mark.fault(
    "sources", "MIG switched on or off", "instances in place of the GPU, or the other way", "`gpu_info`", "next reading"
)
def test_mig_switched_on_and_off(start: StartChild) -> None:
    whole = World(gpus=[Gpu(utilization=55)])
    parted = World(gpus=[mig_gpu(Mig("MIG-a"))])
    child = start(whole)
    for _ in range(2):
        assert [gpu["utilization_ratio"] for gpu in child.gpus()] == [0.55]
        child.set(parted)
        child.advance(10)
        assert [gpu["utilization_ratio"] for gpu in child.gpus()] == [None, None]
        child.set(whole)
        child.advance(10)


def test_an_unsure_answer_about_the_mode_changes_nothing(start: StartChild) -> None:
    child = start(World(gpus=[mig_gpu(Mig("MIG-a"))]))
    child.gpus()
    child.set(World(gpus=[mig_gpu(Mig("MIG-a"), codes={"nvmlDeviceGetMigMode": 999})]))
    child.advance(10)
    assert set(by_uuid(child)) == {gpu_uuid(0), "MIG-a"}


def test_instances_go_with_their_gpu(start: StartChild) -> None:
    child = start(World(gpus=[mig_gpu(Mig("MIG-a")), Gpu()]))
    child.gpus()
    child.set(World(gpus=[mig_gpu(Mig("MIG-a"), codes={"all": 15}), Gpu()]))
    child.advance(1)
    got = by_uuid(child)
    assert {uuid: gpu["error"] for uuid, gpu in got.items()} == {
        gpu_uuid(0): "lost",
        "MIG-a": "lost",
        gpu_uuid(1): None,
    }
    assert got["MIG-a"]["memory_total_bytes"] is None
    assert got["MIG-a"]["parent_uuid"] == gpu_uuid(0)


def test_nothing_is_kept_of_an_instance_that_is_gone(start: StartChild) -> None:
    denied = {"nvmlDeviceGetMemoryInfo": 4}
    child = start(World(gpus=[mig_gpu(Mig("MIG-a", codes=denied, sm=1))]), nvidia_gpm=True)
    for _ in range(2):
        assert by_uuid(child)["MIG-a"]["memory_total_bytes"] is None
        child.advance(1)
    child.set(World(gpus=[mig_gpu()]))
    child.advance(10)
    assert set(by_uuid(child)) == {gpu_uuid(0)}
    calls = child.calls()
    assert calls["nvmlGpmSampleFree"] == calls["nvmlGpmSampleAlloc"] == 2
    child.set(World(gpus=[mig_gpu(Mig("MIG-a"))]))
    child.advance(10)
    assert by_uuid(child)["MIG-a"]["memory_total_bytes"] == 10 * GIB
