"""Ids of NVIDIA's device plugin, of GKE's and of NVIDIA's DRA driver. Pure.

Forms: ``GPU-<uuid>``, ``MIG-<uuid>`` (NVIDIA's plugin); ``nvidia<minor>[/gi<instance>]`` (GKE); DRA names
``gpu-<minor>`` and ``gpu-<minor>-mig-<profile>-<profile id>-<first slice>``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from kvpressure.model.readings import GpuReading
from kvpressure.sources.vendors import OwnedDevice

VENDOR: Final = "nvidia"
_UUID: Final = re.compile(r"(?:GPU|MIG)-[\w.-]{1,120}")
_GKE: Final = re.compile(r"nvidia(\d{1,4})(?:/gi(\d{1,4}))?")
_DRA: Final = re.compile(r"gpu-(\d{1,4})(?:-mig-[\w.+-]{1,80}-(\d{1,4}))?")


def from_plugin(device_id: str, gpus: Sequence[GpuReading]) -> OwnedDevice | None:
    """The GPU or MIG instance of a device plugin's id."""
    if _UUID.fullmatch(device_id):
        return _named(device_id, gpus)
    gke = _GKE.fullmatch(device_id)
    return _at(int(gke[1]), None if gke[2] is None else int(gke[2]), gpus) if gke else None


def from_dra(name: str, gpus: Sequence[GpuReading]) -> OwnedDevice | None:
    """The GPU or MIG instance of a DRA device."""
    if _UUID.fullmatch(name):
        return _named(name, gpus)
    found = _DRA.fullmatch(name)
    if found is None:
        return None
    return _at(int(found[1]), None, gpus) if found[2] is None else _placed(int(found[1]), int(found[2]), gpus)


def _named(uuid: str, gpus: Sequence[GpuReading]) -> OwnedDevice | None:
    """The GPU or instance of this UUID if it was read, lost ones included. If none of its kind was read (library down
    or not used, instances not wanted), the kubelet's UUID is taken as it is.
    """
    instance = uuid.startswith("MIG-")
    read = [gpu for gpu in gpus if gpu.vendor == VENDOR and (gpu.parent_uuid is not None) == instance]
    return OwnedDevice(uuid) if not read or uuid in {gpu.uuid for gpu in read} else None


def _at(minor: int, instance: int | None, gpus: Sequence[GpuReading]) -> OwnedDevice | None:
    """``/dev/nvidia<minor>``, or its MIG instance ``instance``."""
    for gpu in gpus:
        if (
            gpu.vendor == VENDOR
            and gpu.minor == minor
            and (
                gpu.parent_uuid is None
                if instance is None
                else gpu.parent_uuid is not None and gpu.gpu_instance_id == instance
            )
        ):
            return OwnedDevice(gpu.uuid)
    return None


def _placed(minor: int, start: int, gpus: Sequence[GpuReading]) -> OwnedDevice | None:
    """A MIG device by its first memory slice: its name has profile and placement, but not the instance. Where the
    driver does not tell slices: the only instance of its GPU, else the GPU as a shared one.
    """
    parent = _at(minor, None, gpus)
    if parent is None:
        return None
    parts = [gpu for gpu in gpus if gpu.parent_uuid == parent.uuid and gpu.gpu_instance_start in (start, None)]
    return OwnedDevice(parts[0].uuid) if len(parts) == 1 else OwnedDevice(parent.uuid, shared=True)
