"""Which GPU a device id of a device plugin or DRA driver means. Pure.

Forms: ``GPU-<uuid>``, ``MIG-<uuid>`` and ``MIG-GPU-<uuid>/gi/ci`` (NVIDIA plugin), each with ``::<replica>`` when the
GPU is time-sliced or under MPS; ``nvidia<minor>[/gi<instance>][/vgpu<n>]`` (GKE); DRA names ``gpu-<minor>`` and
``gpu-<minor>-mig-...`` (NVIDIA) and ``gpu-<card>-<render>`` (AMD); PCI addresses and ``amdgpu_xcp_<n>`` (AMD plugin).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvpressure.readings import GpuReading

NVIDIA: Final = "nvidia"
AMD: Final = "amd"

_REPLICA: Final = re.compile(r"::\d{1,6}$")
_VGPU: Final = re.compile(r"/vgpu\d{1,6}$")
_UUID: Final = re.compile(r"(?:GPU|MIG)-[\w./-]{1,120}")
_GKE: Final = re.compile(r"nvidia(\d{1,4})(?:/gi(\d{1,4}))?")
_DRA: Final = re.compile(r"gpu-(\d{1,4})(-mig-[\w.+-]{1,80})?")
_DRA_AMD: Final = re.compile(r"gpu-(\d{1,4})-(\d{1,4})")
_PCI: Final = re.compile(r"(?:[0-9a-fA-F]{0,4})([0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])")
_PARTITION: Final = re.compile(r"amdgpu_xcp_\d{1,4}")


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU by its UUID. ``shared``: the id itself says that others may use the same GPU."""

    uuid: str
    shared: bool = False


def from_plugin(device_id: str, gpus: Sequence[GpuReading]) -> Device | None:
    """The GPU of a device plugin's id. ``gpus`` are needed for ids that are no UUIDs; None = not known."""
    plain = _VGPU.sub("", _REPLICA.sub("", device_id))
    shared = plain != device_id
    if _UUID.fullmatch(plain):
        return Device(plain, shared)
    gke = _GKE.fullmatch(plain)
    if gke:
        return _nvidia(int(gke[1]), None if gke[2] is None else int(gke[2]), gpus, shared)
    address = plain if _PARTITION.fullmatch(plain) else _address(plain)
    matching = [gpu for gpu in gpus if gpu.pci_bus_id is not None and address == _address(gpu.pci_bus_id)]
    part = next((gpu for gpu in matching if gpu.parent_uuid is not None and gpu.vendor == AMD), None)
    gpu = part or next((gpu for gpu in matching if gpu.parent_uuid is None), None)
    return None if gpu is None or not address else Device(gpu.uuid, shared)


def from_dra(driver: str, device_name: str, gpus: Sequence[GpuReading]) -> Device | None:
    """The GPU of a DRA driver's device name."""
    if driver == "gpu.amd.com":
        found = _DRA_AMD.fullmatch(device_name)
        gpu = next((gpu for gpu in gpus if found and gpu.vendor == AMD and gpu.minor == int(found[2])), None)
        return None if gpu is None else Device(gpu.uuid)
    if driver != "gpu.nvidia.com":
        return None
    if _UUID.fullmatch(device_name):
        return Device(device_name)
    found = _DRA.fullmatch(device_name)
    if found is None:
        return None
    if found[2] is None:
        return _nvidia(int(found[1]), None, gpus, shared=False)
    return _only_instance(int(found[1]), gpus)


def _nvidia(minor: int, instance: int | None, gpus: Sequence[GpuReading], shared: bool) -> Device | None:
    """``/dev/nvidia<minor>``, or its MIG instance ``instance``."""
    for gpu in gpus:
        if (
            gpu.vendor == NVIDIA
            and gpu.minor == minor
            and (
                gpu.parent_uuid is None
                if instance is None
                else gpu.parent_uuid is not None and gpu.gpu_instance_id == instance
            )
        ):
            return Device(gpu.uuid, shared)
    return None


def _only_instance(minor: int, gpus: Sequence[GpuReading]) -> Device | None:
    """A MIG device whose name tells profile and place but not the instance: the only instance of its GPU, or, where
    there are several, the GPU itself as a shared one.
    """
    parent = _nvidia(minor, None, gpus, shared=True)
    parts = [gpu for gpu in gpus if parent is not None and gpu.parent_uuid == parent.uuid]
    return Device(parts[0].uuid) if len(parts) == 1 else parent


def _address(text: str) -> str:
    """A PCI address as sysfs writes it (NVML gives the domain eight digits); other names as they are; "" for junk."""
    found = _PCI.fullmatch(text)
    if found:
        return found[1].lower()
    return text if _PARTITION.fullmatch(text) else ""
