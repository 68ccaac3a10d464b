"""Which GPU a device id of a device plugin or DRA driver means. Pure.

Vendors of the catalog know their own forms. Common forms are here: ``::<replica>`` after an id (time slicing or MPS),
``/vgpu<n>`` on GKE, the UUID of a GPU that was read, and its PCI address.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from kvpressure.model.readings import GpuReading
from kvpressure.sources.catalog import registry
from kvpressure.sources.vendors import OTHER_ACCELERATORS, GpuVendor, OwnedDevice, is_network

_REPLICA: Final = re.compile(r"::\d{1,6}$")
_VGPU: Final = re.compile(r"/vgpu\d{1,6}$")
_PCI: Final = re.compile(r"(?:[0-9a-fA-F]{0,4})([0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])")


def vendors() -> Iterator[tuple[str, GpuVendor]]:
    """Every vendor whose GPUs a source reads, by the source's name."""
    for name, spec in registry().items():
        if spec.gpus is not None:
            yield name, spec.gpus


_ACCELERATORS: Final = (*(prefix for _, vendor in vendors() for prefix in vendor.resources), *OTHER_ACCELERATORS)


def is_accelerator(resource: str) -> bool:
    """Whether a resource is a GPU or another accelerator, or a share of one (HAMi's ``nvidia.com/gpumem``)."""
    return resource.startswith(_ACCELERATORS) and not is_network(resource)


def from_plugin(device_id: str, gpus: Sequence[GpuReading]) -> OwnedDevice | None:
    """The GPU of a device plugin's id; None = unknown. ``gpus`` are needed for ids that are not UUIDs."""
    plain = _VGPU.sub("", _REPLICA.sub("", device_id))
    found = next((found for _, vendor in vendors() if (found := vendor.from_plugin(plain, gpus)) is not None), None)
    found = found or _as_read(plain, gpus)
    return replace(found, shared=True) if found is not None and plain != device_id else found


def from_dra(driver: str, device_name: str, gpus: Sequence[GpuReading]) -> Iterator[OwnedDevice | None]:
    """The GPU of a DRA driver's device name, None = unknown; nothing for a driver that allocates no GPUs that are read
    here.
    """
    return (vendor.from_dra(device_name, gpus) for _, vendor in vendors() if vendor.dra_driver == driver)


def _as_read(name: str, gpus: Sequence[GpuReading]) -> OwnedDevice | None:
    """The GPU with this UUID or PCI address; the first partition if that has the address too."""
    address = _address(name)
    matching = [gpu for gpu in gpus if gpu.uuid == name or (address and _address(gpu.pci_bus_id or "") == address)]
    own_parts = [gpu for gpu in matching if gpu.parent_uuid is not None and gpu.gpu_instance_id is None]
    gpu = next(iter(own_parts), None) or next((gpu for gpu in matching if gpu.parent_uuid is None), None)
    return None if gpu is None else OwnedDevice(gpu.uuid, gpu.unseen_parts)


def _address(text: str) -> str:
    """A PCI address as in sysfs (NVML's domain has eight digits); "" for anything else."""
    found = _PCI.fullmatch(text)
    return found[1].lower() if found else ""
