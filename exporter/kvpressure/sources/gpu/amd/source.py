"""AMD GPUs: from sysfs, which needs no library, device node or privilege. Values of whole devices that sysfs lacks come
from AMD's library, if that is usable.

Reasons of ``SourceError``: ``no_devices`` (no AMD GPU: normal, ``NothingHere``). Reasons in ``Reading.errors``: those
of ``files``, and ``amdsmi_failed``. ``GpuReading.error``: ``lost``, ``no_permission``, ``internal``.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from kvpressure.model.readings import GpuProcess, GpuReading
from kvpressure.model.reasons import INTERNAL
from kvpressure.sources.base import NothingHere, Reading, SourceSettings
from kvpressure.sources.gpu.amd import kfd, smi, sysfs
from kvpressure.sources.gpu.amd.files import LOST, CountingFiles

log = logging.getLogger(__name__)

NO_DEVICES: Final = "no_devices"
RESCAN_SECONDS: Final = 30.0  # devices, partition mode, names, power limits, and a failed library
PROCESS_SECONDS: Final = 5.0  # bare-metal KFD lists every process under every GPU: too many files for each second

_MEMORY: Final = ("memory_total_bytes", "memory_used_bytes")
_ACTIVITY: Final = ("utilization_ratio", "power_watts", "power_limit_watts")


class AmdSource:
    """Reads every AMD GPU of the node. ``clock`` gives monotonic seconds."""

    name = "amd"

    def __init__(self, settings: SourceSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = str(settings.host_sys).rstrip("/")
        self._node = settings.node_name
        self._clock = clock
        self._files = CountingFiles()
        self._known: dict[str, sysfs.SysfsDevice] = {}  # by PCI address; a device that was seen once stays
        self._present: frozenset[str] = frozenset()
        self._processes: dict[int, tuple[GpuProcess, ...]] = {}
        self._scan_due = self._processes_due = self._library_due = float("-inf")
        self._library: smi.Smi | None = None

    def read(self) -> Reading:
        """All devices now, each followed by its partitions.

        Raises:
            NothingHere: no AMD GPU has been seen.
        """
        now = self._clock()
        self._refresh(now)
        if not self._known:
            raise NothingHere(NO_DEVICES, f"no AMD GPU under {self._root}/class/drm")
        readings: list[GpuReading] = []
        for index, bus in enumerate(sorted(self._known)):
            device = self._known[bus]
            if bus not in self._present:
                readings.append(sysfs.unreadable(device, index, LOST))
                continue
            found = [sysfs.unreadable(device, index, INTERNAL)]
            with self._files.isolated(f"GPU {device.uuid}"):
                found = sysfs.read(device, index, self._processes, self._files)
            if found[0].error == LOST:
                self._scan_due = now  # look again at the next read: it may be back at another place
            readings += found
        if self._wants_library(readings, now):
            readings = self._with_library(readings, now)
        errors = Counter(self._files.take_errors())
        errors.update(self._library.take_errors() if self._library is not None else {})
        return Reading(gpus=tuple(readings), expected_gpus={sysfs.VENDOR: len(self._known)}, errors=dict(errors))

    def close(self) -> None:
        """Shut the library down, if it was opened."""
        if self._library is not None:
            self._library.close()

    def _refresh(self, now: float) -> None:
        if now >= self._scan_due:
            found, complete = sysfs.devices(self._root, self._files, self._node)
            self._scan_due = now + RESCAN_SECONDS
            self._present = frozenset(found) if complete else self._present | found.keys()
            for bus, device in found.items():
                before = self._known.get(bus)
                self._known[bus] = replace(before, error=device.error) if before and device.error else device
        if now >= self._processes_due:
            self._processes = {}
            with self._files.isolated("the list of processes"):
                self._processes = kfd.processes(self._root, self._gpu_ids(), self._files)
                self._processes_due = now + PROCESS_SECONDS

    def _gpu_ids(self) -> frozenset[int]:
        devices = [self._known[bus] for bus in self._present]
        return frozenset(part.gpu_id for device in devices for part in device.partitions) | frozenset(
            device.gpu_id for device in devices if device.gpu_id is not None
        )

    def _wants_library(self, readings: Iterable[GpuReading], now: float) -> bool:
        return now >= self._library_due and any(
            r.error is None
            and r.parent_uuid is None
            and not self._known[r.pci_bus_id or ""].unified
            and (r.memory_used_bytes is None or r.utilization_ratio is None or r.power_watts is None)
            for r in readings
        )

    def _with_library(self, readings: list[GpuReading], now: float) -> list[GpuReading]:
        """The readings with the library's values where sysfs has none."""
        try:
            if self._library is None:
                known = [(bus, self._known[bus]) for bus in sorted(self._present)]
                self._library = smi.Smi({bus: None if one.unified else one.memory_bytes for bus, one in known})
            figures = self._library.figures()
        except smi.SmiError as error:
            log.info("amdsmi is not used: %s", error)
            self.close()
            self._library, self._library_due = None, now + RESCAN_SECONDS
            return readings
        merged = [
            self._merged(r, figures[r.pci_bus_id])
            if r.parent_uuid is None and r.error is None and r.pci_bus_id in figures
            else r
            for r in readings
        ]
        if merged == readings:
            self._library_due = now + RESCAN_SECONDS  # it knows no more than sysfs: do not ask each second
        return merged

    def _merged(self, reading: GpuReading, figures: smi.Figures) -> GpuReading:
        """``reading`` with the library's values where it has none."""
        names = _ACTIVITY if self._known[reading.pci_bus_id or ""].unified else _ACTIVITY + _MEMORY
        found = {name: getattr(figures, name) for name in names}
        return replace(
            reading,
            **{name: value for name, value in found.items() if value is not None and getattr(reading, name) is None},
        )
