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
    vendors = set()
    for device in (sysfs / "bus/pci/devices").glob("*"):
        try:
            if (device / "class").read_text().startswith(DISPLAY_CLASSES):
                vendors.add((device / "vendor").read_text().strip())
        except OSError:
            continue  # unplugged while looking
    ids = {name: spec.gpus.pci_id for name, spec in registry().items() if spec.gpus is not None}
    return ids[own] not in vendors and any(pci_id in vendors for pci_id in ids.values())
