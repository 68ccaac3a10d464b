"""One GPU across readings: its handle, identity, rarely read values and MIG instances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import pynvml

from kvpressure.model.readings import GpuProcess, GpuReading
from kvpressure.sources.gpu.nvidia import codes, fields
from kvpressure.sources.gpu.nvidia.gpm import Activity, Gpm
from kvpressure.sources.gpu.nvidia.mig import Mig
from kvpressure.sources.gpu.nvidia.query import DeviceQuery, Queries

SLOW_SECONDS: Final = 10.0
"""Interval of rarely changing or expensive values: process lists, the power limit, MIG, missing identity."""


class NvmlDevice:
    """A GPU with a known UUID. Not thread-safe."""

    def __init__(
        self, queries: Queries, clock: Callable[[], float], gpm: bool, identity: GpuReading, handle: Any
    ) -> None:
        self.identity = identity
        self._queries = queries
        self._clock = clock
        self.handle = handle  # NVML's, valid while the library is open
        self._slow_due = 0.0
        self._gpm = Gpm(queries, clock) if gpm else None
        self._mig: Mig | None = None
        self._power_limit: float | None = None
        self._processes: tuple[GpuProcess, ...] = ()

    @property
    def identities(self) -> tuple[GpuReading, ...]:
        """GpuReading of the GPU and of its MIG instances."""
        return (self.identity, *(self._mig.identities if self._mig is not None else ()))

    def attach(self, index: int, driver: str | None, handle: Any) -> None:
        """Take the handle that NVML gives since the library was opened."""
        self.identity = replace(self.identity, index=index, driver=driver)
        self.handle = handle

    def release(self) -> None:
        """Free what the library holds for this GPU, before it is closed."""
        if self._gpm is not None:
            self._gpm.release()

    def read(self) -> list[GpuReading]:
        """Readings of the GPU and of its MIG instances; a device of which nothing could be read has ``error``.

        Raises:
            DeviceDown, LibraryDown: see ``Queries.ask``.
        """
        slow = self._clock() >= self._slow_due
        if slow:
            self._slow_due = self._clock() + SLOW_SECONDS
            self._identify()
            self._look_for_mig()
        instances = [] if self._mig is None else self._read_instances(self._mig, slow)
        reading, error = self._read_gpu(slow)
        if error == codes.NO_PERMISSION and self._mig is not None:
            error = None  # reading the whole GPU needs privileges; its instances are readable
        if error in codes.NEEDS_NEW_CONTAINER:
            self._queries.forget(self.identity.uuid)  # the whole GPU is out: ask for everything again next time
        if error is not None:
            self._slow_due = 0.0
            reading = replace(self.identity, error=error)
        return [reading, *instances]

    def _read_gpu(self, slow: bool) -> tuple[GpuReading, str | None]:
        """The GPU itself, and why nothing could be read."""
        ask = DeviceQuery(self._queries, self.identity.uuid)
        handle = self.handle
        total, used = fields.memory(ask, handle)
        utilization = fields.utilization(ask, handle)
        power = fields.power(ask, handle)
        throttle = fields.throttle_reasons(ask, handle)
        activity = Activity()
        if self._gpm is not None and self._mig is None:
            activity = self._gpm.read(handle, ask, self.identity.uuid)
        if slow:
            self._power_limit = fields.power_limit(ask, handle)
            self._processes = () if self._mig is not None else fields.processes(ask, handle)
        reading = replace(
            self.identity,
            memory_total_bytes=total,
            memory_used_bytes=used,
            utilization_ratio=utilization,
            sm_activity_ratio=activity.sm,
            tensor_activity_ratio=activity.tensor,
            dram_activity_ratio=activity.dram,
            power_watts=power,
            power_limit_watts=self._power_limit,
            throttle_reasons=throttle,
            processes=self._processes,
        )
        return reading, ask.why_silent()

    def _read_instances(self, mig: Mig, slow: bool) -> list[GpuReading]:
        activity = None if self._gpm is None else partial(self._gpm.read, self.handle)
        readings = mig.read(self.identity, self.handle, slow, activity)
        if self._gpm is not None:
            self._gpm.keep_only({reading.uuid for reading in readings})
        return readings

    def _look_for_mig(self) -> None:
        """Detect that MIG was switched, which changes what the GPU can answer."""
        mode = self._queries.ask(self.identity.uuid, "mig_mode", pynvml.nvmlDeviceGetMigMode, self.handle)
        if mode.value is None and mode.reason not in codes.LASTING:
            return  # no answer is no reason to think otherwise than before
        enabled = mode.value is not None and mode.value[0] == pynvml.NVML_DEVICE_MIG_ENABLE
        if enabled != (self._mig is not None):
            self._queries.forget(self.identity.uuid)
            if self._gpm is not None:
                self._gpm.release()
            self._mig = Mig(self._queries) if enabled else None

    def _identify(self) -> None:
        """Complete the identity. Apart from the reading: names come from the library's memory even when the GPU is
        unreachable, so they are no sign that it answers.
        """
        if None not in (self.identity.name, self.identity.minor, self.identity.pci_bus_id):
            return
        ask = DeviceQuery(self._queries, self.identity.uuid)
        pci = ask("pci", pynvml.nvmlDeviceGetPciInfo_v3, self.handle)
        self.identity = replace(
            self.identity,
            name=ask("name", pynvml.nvmlDeviceGetName, self.handle) or None,
            minor=ask("minor", pynvml.nvmlDeviceGetMinorNumber, self.handle),
            pci_bus_id=None if pci is None else _sysfs_bus_id(pci.busId),
        )


def _sysfs_bus_id(bus_id: str) -> str | None:
    """NVML's ``00000000:3B:00.0`` as the kernel writes it; a domain above 16 bits keeps its digits."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:] if domain.startswith('0000') else domain}:{rest}" if rest else None
