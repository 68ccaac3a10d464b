"""Identity of a GPU or MIG instance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvpressure.model.readings import GpuReading

VENDOR: Final = "nvidia"


@dataclass(frozen=True, slots=True)
class Identity:
    """Constant properties of a GPU or MIG instance. ``pci_bus_id`` as in sysfs (``0000:3b:00.0``). An instance has
    index, minor and bus of its GPU.
    """

    uuid: str
    index: int
    driver: str | None = None
    name: str | None = None
    minor: int | None = None
    pci_bus_id: str | None = None
    parent_uuid: str | None = None
    gpu_instance_id: int | None = None

    @property
    def complete(self) -> bool:
        """Whether name, minor and bus are known."""
        return None not in (self.name, self.minor, self.pci_bus_id)

    def reading(self, **values: Any) -> GpuReading:
        """A reading of this device with the given values."""
        return GpuReading(
            uuid=self.uuid,
            index=self.index,
            vendor=VENDOR,
            name=self.name,
            driver=self.driver,
            pci_bus_id=self.pci_bus_id,
            minor=self.minor,
            parent_uuid=self.parent_uuid,
            gpu_instance_id=self.gpu_instance_id,
            **values,
        )
