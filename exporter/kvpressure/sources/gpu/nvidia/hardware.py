"""Whether this node has NVIDIA GPUs, by the PCI bus and the kernel's modules, without the vendor's library."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvpressure.files import read_file

PCI_VENDOR: Final = "0x10de"
DISPLAY_CLASSES: Final = ("0x03", "0x12")  # display controllers and processing accelerators
_MAX_ID_BYTES: Final = 64


def none_here(sysfs: Path) -> bool:
    """True when this node has no NVIDIA GPU and its kernel driver is not loaded.

    False when the bus shows no device at all: it may be hidden.
    """
    visible = any((sysfs / "bus/pci/devices").glob("*"))
    return visible and PCI_VENDOR not in _vendors(sysfs) and not (sysfs / "module/nvidia").exists()


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
