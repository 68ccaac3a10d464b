"""What Kubernetes and the PCI bus call the GPUs of a vendor: the part of a GPU source that others have to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpressure.model.readings import GpuReading


@dataclass(frozen=True, slots=True)
class OwnedDevice:
    """A GPU by its UUID. ``shared``: the id itself says that others may use the same GPU."""

    uuid: str
    shared: bool = False


FindDevice = Callable[[str, Sequence[GpuReading]], OwnedDevice | None]


def unknown_device(_name: str, _gpus: Sequence[GpuReading]) -> OwnedDevice | None:
    """For a vendor without device ids of its own."""
    return None


@dataclass(frozen=True, slots=True)
class GpuVendor:
    """``pci_id`` as sysfs writes it; ``resources``: beginnings of the names under which Kubernetes counts its GPUs;
    ``dra_driver``: its driver of dynamic resource allocation. ``from_plugin`` finds the GPU of a device plugin's id
    (without a mark of sharing), ``from_dra`` that of a DRA device; PCI addresses and UUIDs of GPUs that were read need
    neither.
    """

    pci_id: str
    resources: tuple[str, ...] = ()
    dra_driver: str = ""
    from_plugin: FindDevice = unknown_device
    from_dra: FindDevice = unknown_device
