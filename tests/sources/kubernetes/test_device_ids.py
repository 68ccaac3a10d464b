"""Every form of device id, and who owns a GPU when the kubelet names several pods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvpressure.model.readings import ContainerReading, GpuOwner, GpuReading
from kvpressure.pipeline.joins import join_containers
from kvpressure.sources.kubernetes.device_ids import from_dra, from_plugin
from kvpressure.sources.kubernetes.pod import Pod
from kvpressure.sources.kubernetes.podresources import of_engines, running
from kvpressure.sources.vendors import OwnedDevice

GPU0 = GpuReading("GPU-0", 1, "nvidia", pci_bus_id="00000000:19:00.0", minor=0)
GPU1 = GpuReading("GPU-1", 0, "nvidia", pci_bus_id="0000:1a:00.0", minor=1)
MIG3 = GpuReading("MIG-3", 1, "nvidia", pci_bus_id="0000:19:00.0", minor=0, parent_uuid="GPU-0", gpu_instance_id=3)
MIG4 = GpuReading("MIG-4", 1, "nvidia", pci_bus_id="0000:19:00.0", minor=0, parent_uuid="GPU-0", gpu_instance_id=4)
AMD0 = GpuReading("amd-0", 0, "amd", pci_bus_id="0000:c3:00.0", minor=128)
AMD1 = GpuReading("amd-1", 1, "amd", pci_bus_id="0000:c4:00.0", minor=129)
PART0 = GpuReading("amd-1/xcp0", 1, "amd", pci_bus_id="0000:c4:00.0", minor=129, parent_uuid="amd-1")
PART1 = GpuReading("amd-1/xcp1", 1, "amd", pci_bus_id="amdgpu_xcp_0", minor=130, parent_uuid="amd-1")
ALL = (GPU0, MIG3, MIG4, GPU1, AMD0, AMD1, PART0, PART1)


def of_dra(driver: str, name: str, gpus: Sequence[GpuReading]) -> OwnedDevice | None:
    (device,) = from_dra(driver, name, gpus)
    return device


def test_ids_of_device_plugins() -> None:
    devices = {
        **{uuid: OwnedDevice(uuid) for uuid in ("GPU-1", "MIG-4", "amd-0")},
        "GPU-0::3": OwnedDevice("GPU-0", True),
        "MIG-3::0": OwnedDevice("MIG-3", True),
        "nvidia0": OwnedDevice("GPU-0"),
        "nvidia1": OwnedDevice("GPU-1"),
        "nvidia0/gi3": OwnedDevice("MIG-3"),
        "nvidia0/gi4/vgpu2": OwnedDevice("MIG-4", True),
        "nvidia1/vgpu0": OwnedDevice("GPU-1", True),
        "0000:c3:00.0": OwnedDevice("amd-0"),
        "0000:C3:00.0": OwnedDevice("amd-0"),
        "0000:c4:00.0": OwnedDevice("amd-1/xcp0"),
        "amdgpu_xcp_0": OwnedDevice("amd-1/xcp1"),
    }
    assert {device_id: from_plugin(device_id, ALL) for device_id in devices} == devices
    unknown = ("nvidia7", "nvidia0/gi9", "nvidia1/gi3", "amdgpu_xcp_9", "0000:ff:00.0", "", "::1")
    numbered = ("GPU-0-3",)  # some plugins number parts of a GPU so, and give the container another one
    others = ("GPU-8a3b1c2d-0000-1111-2222-333344445555::0", "MIG-8a3b1c2d-0000-1111-2222-333344445555")
    assert {from_plugin(device_id, ALL) for device_id in (*unknown, *numbered, *others)} == {None}


@pytest.mark.parametrize("find", [from_plugin, lambda name, gpus: of_dra("gpu.nvidia.com", name, gpus)])
def test_a_uuid_is_believed_where_nothing_of_its_kind_was_read(
    find: Callable[[str, Sequence[GpuReading]], OwnedDevice | None],
) -> None:
    """No GPU is read while the library is down, and an instance may be new."""
    assert find("MIG-7", (GPU0, GPU1)) == OwnedDevice("MIG-7")
    assert find("GPU-7", (GPU0, GPU1)) is None
    assert find("GPU-7", (AMD0,)) == OwnedDevice("GPU-7")
    assert find("GPU-7", ()) == OwnedDevice("GPU-7")
    assert find("GPU-7", (replace(GPU0, uuid="GPU-7", error="lost"),)) == OwnedDevice("GPU-7")


def test_names_of_dra_drivers() -> None:
    nvidia = {
        "gpu-1": OwnedDevice("GPU-1"),
        "gpu-0": OwnedDevice("GPU-0"),
        "gpu-0-mig-1g.10gb-19-0": OwnedDevice("GPU-0", True),
        "GPU-1": OwnedDevice("GPU-1"),
        "MIG-3": OwnedDevice("MIG-3"),
        **dict.fromkeys(("gpu-9", "gpu-9-mig-1g.10gb-19-0", "GPU-8a")),
    }
    amd = {"gpu-0-128": OwnedDevice("amd-0"), "gpu-1-130": OwnedDevice("amd-1/xcp1"), "gpu-1-200": None, "gpu-1": None}
    for driver, devices in (("gpu.nvidia.com", nvidia), ("gpu.amd.com", amd)):
        assert {name: of_dra(driver, name, ALL) for name in devices} == devices
    assert [*from_dra("net.example.com", "gpu-1", ALL)] == [], "a driver of other devices"


def test_mig_instances_of_one_profile_are_told_apart_by_their_first_slice() -> None:
    gpus = (GPU0, *(replace(MIG3, uuid=f"MIG-{start}", gpu_instance_start=start) for start in range(7)))
    for start in range(7):
        assert of_dra("gpu.nvidia.com", f"gpu-0-mig-1g10gb-19-{start}", gpus) == OwnedDevice(f"MIG-{start}")
    assert of_dra("gpu.nvidia.com", "gpu-0-mig-1g10gb-19-3", gpus[:2]) == OwnedDevice("GPU-0", shared=True)


def test_the_only_mig_instance_of_a_gpu_is_meant_by_a_dra_name() -> None:
    assert of_dra("gpu.nvidia.com", "gpu-0-mig-7g.80gb-0-0", (GPU0, MIG3)) == OwnedDevice("MIG-3")


def pod(name: str, phase: str) -> Pod:
    return Pod("ns", name, name, phase)


def held(name: str, uuid: str = "GPU-0", shared: bool = False, container: str = "vllm") -> GpuOwner:
    return GpuOwner(uuid, "ns", name, container, shared)


def test_of_two_pods_on_an_exclusive_gpu_the_running_one_has_it() -> None:
    claims = [held("old"), held("new")]
    assert running(claims, [pod("old", "Succeeded"), pod("new", "Running")]) == [held("new")]
    assert running(claims, [pod("old", "Pending"), pod("new", "Running")]) == [held("new")]
    assert running(claims, [pod("new", "Running")]) == [held("new")]
    assert running(claims, [pod("old", "Failed")]) == [held("new")]
    assert running(claims, []) == claims


def test_a_shared_gpu_keeps_every_pod_that_has_not_ended() -> None:
    claims = [held("a", shared=True), held("b", shared=True), held("c", shared=True)]
    assert running(claims, [pod("a", "Running"), pod("c", "Failed")]) == claims[:2]


def test_owners() -> None:
    claims = [held("d", container="y"), held("d", container="x"), held("c", "GPU-2", True), held("c", "GPU-2", True)]
    assert of_engines(claims, []) == [claims[1], claims[0], claims[2]]


def test_readings_of_several_sources_are_joined() -> None:
    status = ContainerReading("ns", "a", "vllm", restarts=1, cpu_limit_cores=4.0)
    kernel = ContainerReading("ns", "a", "vllm", cpu_usage_seconds=5.0, cpu_limit_cores=8.0)
    other = ContainerReading("ns", "b", "vllm")
    assert join_containers([status, other, kernel]) == (replace(status, cpu_usage_seconds=5.0), other)
