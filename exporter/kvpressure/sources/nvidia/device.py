"""One GPU across readings: its handle, who it is, and what was read when."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import pynvml

from kvpressure.readings import GpuProcess, GpuReading
from kvpressure.sources.nvidia import fields
from kvpressure.sources.nvidia.query import Ask, Queries

VENDOR: Final = "nvidia"

SLOW_SECONDS: Final = 10.0
"""How often what changes seldom or costs much is read: process lists, the power limit, missing identity."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What stays the same about a GPU. ``pci_bus_id`` as sysfs writes it (``0000:3b:00.0``)."""

    uuid: str
    index: int
    driver: str | None = None
    name: str | None = None
    minor: int | None = None
    pci_bus_id: str | None = None

    def reading(self, **values: Any) -> GpuReading:
        """A reading of this GPU with the given values."""
        return GpuReading(uuid=self.uuid, index=self.index, vendor=VENDOR, name=self.name, driver=self.driver,
                          pci_bus_id=self.pci_bus_id, minor=self.minor, **values)


class Device:
    """A GPU that gave its UUID. ``identity`` outlives the handle."""

    def __init__(self, queries: Queries, identity: Identity, handle: Any) -> None:
        self.identity = identity
        self._queries = queries
        self._handle = handle
        self._slow_due = 0.0
        self._power_limit: float | None = None
        self._processes: tuple[GpuProcess, ...] = ()

    def attach(self, index: int, driver: str | None, handle: Any) -> None:
        """The library was opened anew: same GPU, new handle."""
        self.identity = replace(self.identity, index=index, driver=driver)
        self._handle = handle

    def read(self, now: float) -> GpuReading:
        """Read it. ``now`` is monotonic seconds. A GPU of which nothing could be read has ``error``.

        Raises:
            DeviceDown, LibraryDown: see ``Queries.ask``.
        """
        slow = now >= self._slow_due
        if slow:
            self._identify()
        ask = Ask(self._queries, self.identity.uuid)
        handle = self._handle
        memory = fields.memory(ask, handle)
        utilization = fields.utilization(ask, handle)
        power = fields.power(ask, handle)
        throttle = fields.throttle_reasons(ask, handle)
        if slow:
            self._power_limit = fields.power_limit(ask, handle)
            self._processes = fields.processes(ask, handle)
            self._slow_due = now + SLOW_SECONDS
        error = ask.why_silent()
        if error is not None:
            self._slow_due = 0.0
            return self.identity.reading(error=error)
        return self.identity.reading(
            memory_total_bytes=memory.total, memory_used_bytes=memory.used, memory_reserved_bytes=memory.reserved,
            utilization_ratio=utilization, power_watts=power, power_limit_watts=self._power_limit,
            throttle_reasons=throttle, processes=self._processes,
        )

    def _identify(self) -> None:
        """Complete the identity. Apart from the reading: names come from the library's memory even when the GPU is
        out of reach, so they are no sign that it answers."""
        if None not in (self.identity.name, self.identity.minor, self.identity.pci_bus_id):
            return
        ask = Ask(self._queries, self.identity.uuid)
        pci = ask("pci", pynvml.nvmlDeviceGetPciInfo_v3, self._handle)
        self.identity = replace(
            self.identity,
            name=ask("name", pynvml.nvmlDeviceGetName, self._handle) or None,
            minor=ask("minor", pynvml.nvmlDeviceGetMinorNumber, self._handle),
            pci_bus_id=None if pci is None else _sysfs_bus_id(pci.busId),
        )


def _sysfs_bus_id(bus_id: str) -> str | None:
    """NVML's ``00000000:3B:00.0`` in the kernel's spelling; a domain above 16 bits keeps its digits."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:] if domain.startswith('0000') else domain}:{rest}" if rest else None
