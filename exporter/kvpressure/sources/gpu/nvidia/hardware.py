"""GPU vendors of this node by the PCI bus, without a driver."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvpressure.sources.catalog import registry

DISPLAY_CLASSES: Final = ("0x03", "0x12")  # display controllers and processing accelerators


def others_only(sysfs: Path, own: str = "nvidia") -> bool:
    """True when this node certainly has only another vendor's GPUs (of a source in the catalog) and none of ``own``.

    False when no GPU is visible: the bus may be hidden.
    """
    vendors, ids = _vendors(sysfs), _ids()
    return ids[own] not in vendors and any(pci_id in vendors for pci_id in ids.values())


def none_here(sysfs: Path, own: str = "nvidia") -> bool:
    """True when the node's bus is readable and has no GPU of ``own``."""
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
