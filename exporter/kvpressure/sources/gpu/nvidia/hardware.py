"""What the PCI bus says, without any driver: whose GPUs this node has."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvpressure.sources.catalog import registry

DISPLAY_CLASSES: Final = ("0x03", "0x12")  # display controllers and processing accelerators


def others_only(sysfs: Path, own: str = "nvidia") -> bool:
    """True when this node certainly is another vendor's: it has a GPU that another source of the catalog reads, and
    none of ``own``.

    A node on which no GPU is to be seen at all is not: its bus may be hidden, or its driver be what is missing.
    """
    vendors, ids = _vendors(sysfs), _ids()
    return ids[own] not in vendors and any(pci_id in vendors for pci_id in ids.values())


def none_here(sysfs: Path, own: str = "nvidia") -> bool:
    """True when the node's bus can be read and has no GPU of ``own``, as on a node without GPUs."""
    return any((sysfs / "bus/pci/devices").glob("*")) and _ids()[own] not in _vendors(sysfs)


def _ids() -> dict[str, str]:
    return {name: spec.gpus.pci_id for name, spec in registry().items() if spec.gpus is not None}


def _vendors(sysfs: Path) -> set[str]:
    """PCI ids of the vendors of the node's display devices and accelerators."""
    found = set()
    for device in (sysfs / "bus/pci/devices").glob("*"):
        try:
            if (device / "class").read_text().startswith(DISPLAY_CLASSES):
                found.add((device / "vendor").read_text().strip())
        except OSError:
            continue  # unplugged while looking
    return found
