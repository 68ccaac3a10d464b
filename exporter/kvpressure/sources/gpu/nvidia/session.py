"""The open library and the GPUs found in it.

Opening may be slow (it initialises a GPU without persistence mode) and closing is dangerous while a call hangs, so
both go through here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import pynvml

from kvpressure.model.readings import GpuReading
from kvpressure.sources.gpu.nvidia import codes
from kvpressure.sources.gpu.nvidia.device import NvmlDevice
from kvpressure.sources.gpu.nvidia.device_ids import VENDOR
from kvpressure.sources.gpu.nvidia.events import EventLog, EventWatch
from kvpressure.sources.gpu.nvidia.query import DeviceDown, LibraryDown, Queries

MOST_DEVICES: Final = 256
"""More GPUs than a node has; a larger count is cut."""

NODE: Final = "node"  # key of queries that concern no device


@dataclass
class OpenedGpus:
    """Result of opening: GPUs by UUID, and the reasons of others by index."""

    devices: dict[str, NvmlDevice] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


class Session:
    """NVML's state in this process. The shared object is loaded once and stays loaded when closed, so a driver
    upgrade needs a new process. ``gpm``: read SM, tensor and DRAM activity.
    """

    def __init__(self, queries: Queries, clock: Callable[[], float], gpm: bool, events: EventLog) -> None:
        self.is_open = False
        self._initialised = 0  # calls of nvmlInit without nvmlShutdown; the driver is released by the last shutdown
        self._queries = queries
        self._clock = clock
        self._gpm = gpm
        self._watch = EventWatch(events, count=queries.count)
        self._driver: str | None = None

    def open(self, before: dict[str, NvmlDevice]) -> OpenedGpus:
        """Initialise and find the GPUs; those in ``before`` keep their state. No GPUs is no failure.

        Raises:
            LibraryDown, DeviceDown: nothing can be read; call ``close`` all the same.
        """
        try:
            pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
        except pynvml.NVMLError as error:
            raise LibraryDown(codes.reason_of(error.value)) from error
        self.is_open = True
        self._initialised += 1
        self._driver = self._queries.ask(NODE, "driver", pynvml.nvmlSystemGetDriverVersion).value
        count = self._queries.ask(NODE, "count", pynvml.nvmlDeviceGetCount)
        if count.value is None:
            raise LibraryDown(count.reason or codes.UNKNOWN)
        found = OpenedGpus()
        for index in range(min(count.value, MOST_DEVICES)):
            reason: str | None = codes.INTERNAL
            with self._queries.isolated(f"GPU {index}"):
                reason = self._find(index, found.devices, before)
            if reason is not None:
                found.failed[index] = reason
        self._watch.start([(uuid, device.handle) for uuid, device in found.devices.items()])
        return found

    def close(self, devices: dict[str, NvmlDevice], safe: bool = True) -> None:
        """Release the driver. ``safe`` False: another thread's call is under way, so the
        library is left initialised.
        """
        if not self.is_open:
            return
        self.is_open = False
        if not self._watch.stop() or not safe:
            return
        for uuid, device in devices.items():
            with self._queries.isolated(f"GPU {uuid}"):
                device.release()
        try:
            while self._initialised:
                self._initialised -= 1
                pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            self._initialised = 0  # the driver went first; there is nothing left to release

    def _find(self, index: int, found: dict[str, NvmlDevice], before: dict[str, NvmlDevice]) -> str | None:
        """Add the GPU at ``index`` to ``found``; returns the reason if that is impossible."""
        key = f"index {index}"
        self._queries.forget(key)
        try:
            handle = self._queries.ask(key, "handle", pynvml.nvmlDeviceGetHandleByIndex, index)
            if handle.value is None:
                return handle.reason or codes.INVALID_DATA
            uuid = self._queries.ask(key, "uuid", pynvml.nvmlDeviceGetUUID, handle.value)
        except DeviceDown as down:
            return down.reason
        if uuid.reason is not None:
            return uuid.reason
        if not uuid.value or uuid.value in found:
            self._queries.count(codes.INVALID_DATA)
            return codes.INVALID_DATA
        identity = GpuReading(uuid.value, index, VENDOR)
        device = before.get(uuid.value) or NvmlDevice(self._queries, self._clock, self._gpm, identity, handle.value)
        device.attach(index, self._driver, handle.value)
        found[uuid.value] = device
        return None
