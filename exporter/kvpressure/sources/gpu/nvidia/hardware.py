"""Whether this node has a vendor's GPUs, by the PCI bus and the kernel's modules, without the vendor's library."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvpressure.files import read_file
from kvpressure.sources.catalog import registry

DISPLAY_CLASSES: Final = ("0x03", "0x12")  # display controllers and processing accelerators
_MAX_ID_BYTES: Final = 64


def none_here(sysfs: Path, own: str = "nvidia") -> bool:
    """True when this node has no GPU of ``own`` and its kernel driver is not loaded.

    False when the bus shows no device at all: it may be hidden.
    """
    visible = any((sysfs / "bus/pci/devices").glob("*"))
    return visible and _pci_id(own) not in _vendors(sysfs) and not (sysfs / "module" / own).exists()


def _pci_id(name: str) -> str | None:
    gpus = registry()[name].gpus
    return None if gpus is None else gpus.pci_id


def _vendors(sysfs: Path) -> set[str]:
    """PCI ids of the vendors of the node's display devices and accelerators."""
    found = set()
    for device in (sysfs / "bus/pci/devices").glob("*"):
        try:
            if _id(device / "class").startswith(DISPLAY_CLASSES):
                found.add(_id(device / "vendor"))
        except OSError:
            continue  # unplugged while looking
    return found


def _id(path: Path) -> str:
    return read_file(path, _MAX_ID_BYTES).decode("ascii", "replace").strip()
