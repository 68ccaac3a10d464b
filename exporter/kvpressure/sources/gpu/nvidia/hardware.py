"""What the PCI bus says, without any driver: whose GPUs this node has."""

from __future__ import annotations

from pathlib import Path
from typing import Final

NVIDIA: Final = "0x10de"
AMD: Final = "0x1002"
DISPLAY_CLASSES: Final = ("0x03", "0x12")  # display controllers and processing accelerators


def others_only(sysfs: Path) -> bool:
    """True when this node certainly is another vendor's: it has a GPU of theirs and none of NVIDIA.

    A node on which no GPU is to be seen at all is not: its bus may be hidden, or its driver be what is missing.
    """
    vendors = set()
    for device in (sysfs / "bus/pci/devices").glob("*"):
        try:
            if (device / "class").read_text().startswith(DISPLAY_CLASSES):
                vendors.add((device / "vendor").read_text().strip())
        except OSError:
            continue  # unplugged while looking
    return AMD in vendors and NVIDIA not in vendors
