"""Ids of AMD's device plugin and DRA driver that are no PCI address: ``amdgpu_xcp_<n>``, ``gpu-<card>-<render>``.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from kvpressure.model.readings import GpuReading
from kvpressure.sources.vendors import OwnedDevice

VENDOR: Final = "amd"
_PARTITION: Final = re.compile(r"amdgpu_xcp_\d{1,4}")
_DRA: Final = re.compile(r"gpu-(\d{1,4})-(\d{1,4})")


def from_plugin(device_id: str, gpus: Sequence[GpuReading]) -> OwnedDevice | None:
    """The partition with this driver name; where partitions cannot be read, the only GPU that has some, as a shared
    one.
    """
    if not _PARTITION.fullmatch(device_id):
        return None
    named = [gpu for gpu in gpus if gpu.pci_bus_id == device_id]
    part = next((gpu for gpu in named if gpu.parent_uuid is not None and gpu.vendor == VENDOR), None)
    gpu = part or next((gpu for gpu in named if gpu.parent_uuid is None), None)
    if gpu is not None:
        return OwnedDevice(gpu.uuid)
    split = [gpu for gpu in gpus if gpu.unseen_parts]
    return OwnedDevice(split[0].uuid, shared=True) if len(split) == 1 else None


def from_dra(name: str, gpus: Sequence[GpuReading]) -> OwnedDevice | None:
    """The GPU with this render node number."""
    found = _DRA.fullmatch(name)
    gpu = next((gpu for gpu in gpus if found and gpu.vendor == VENDOR and gpu.minor == int(found[2])), None)
    return None if gpu is None else OwnedDevice(gpu.uuid, gpu.unseen_parts)
