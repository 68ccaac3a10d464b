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
    devices = list((sysfs / "bus/pci/devices").glob("*"))
    return bool(devices) and not any(map(_is_gpu, devices)) and not (sysfs / "module/nvidia").exists()


def _is_gpu(device: Path) -> bool:
    """Whether a PCI device is a display device or accelerator of NVIDIA's."""
    try:
        return _id(device / "class").startswith(DISPLAY_CLASSES) and _id(device / "vendor") == PCI_VENDOR
    except OSError:
        return False  # unplugged while looking


def _id(path: Path) -> str:
    return read_file(path, _MAX_ID_BYTES).decode("ascii", "replace").strip()
