"""The NVIDIA source: all GPUs of the node through NVML.

Failures stay local: a value is absent, a GPU has ``error``, and ``read`` raises only when the library is down.
Recovery needs no restart, except after a driver upgrade (``library_mismatch``) and for a container that has lost its
devices (every GPU ``unknown`` or ``blocked`` for long).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvpressure.model.readings import GpuReading
from kvpressure.sources.base import FatalSourceError, NothingHere, Reading, SourceError
from kvpressure.sources.gpu.nvidia import codes, hardware
from kvpressure.sources.gpu.nvidia.backoff import Backoff
from kvpressure.sources.gpu.nvidia.call_guard import HangGuard, Hung, result_of
from kvpressure.sources.gpu.nvidia.device import NvmlDevice
from kvpressure.sources.gpu.nvidia.device_ids import VENDOR
from kvpressure.sources.gpu.nvidia.events import EventLog
from kvpressure.sources.gpu.nvidia.query import DeviceDown, LibraryDown, NvmlDown, Queries
from kvpressure.sources.gpu.nvidia.session import NODE, OpenedGpus, Session

log = logging.getLogger(__name__)

OPEN_FIRST_SECONDS: Final = 0.5
OPEN_LONGEST_SECONDS: Final = 60.0
"""Back-off between attempts to open the library."""

REPAIR_FIRST_SECONDS: Final = 60.0
REPAIR_LONGEST_SECONDS: Final = 1800.0
"""Back-off between attempts to bring a lost GPU back by reopening the library, which is slow
and disturbs the others.
"""

HOPELESS_FAILURES: Final = 10
HOPELESS_SECONDS_FROM_START: Final = 1800.0
"""After ``HOPELESS_FAILURES`` in a row that only a new container cures, the process ends. One that never saw a GPU
waits this long first: its container is new, and ending it stops everything else it watches.
"""

SHARE_OF_DEADLINE: Final = 0.8
"""A reading abandons hanging calls at this share of the source's deadline, so that the other GPUs' readings arrive in
time.
"""

SHARE_OF_ONE_GPU: Final = 0.5
"""Share of a reading's time that one hanging GPU may use, so that the others get theirs."""

CLOSE_SECONDS: Final = 1.0


class NvidiaSource:
    """Implements ``sources.base.Source``; ``clock`` gives monotonic seconds.

    ``SourceError.reason``, ``GpuReading.error`` and keys of ``Reading.errors`` are in ``codes.REASONS``.
    """

    name = VENDOR

    def __init__(self, settings: Any = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        collector = getattr(settings, "collectors", {}).get(VENDOR)
        self._budget_seconds = SHARE_OF_DEADLINE * (collector.deadline_seconds if collector else 5.0)
        self._host_sys = Path(getattr(settings, "host_sys", "/sys"))
        self._clock = clock
        self._lock = threading.Lock()  # close() may be called while read() runs
        self._lanes = HangGuard("nvml")
        self._queries = Queries(clock)
        self._events = EventLog()
        self._session = Session(self._queries, clock, getattr(settings, "nvidia_gpm", False), self._events)
        self._opening: Future[OpenedGpus] | None = None
        self._open_again = Backoff(OPEN_FIRST_SECONDS, OPEN_LONGEST_SECONDS)
        self._repair_again = Backoff(REPAIR_FIRST_SECONDS, REPAIR_LONGEST_SECONDS)
        self._down_reason: str | None = None
        self._devices: dict[str, NvmlDevice] = {}
        self._known: dict[str, tuple[GpuReading, ...]] = {}  # every GPU that ever answered, with its MIG instances
        self._broken: dict[str, str] = {}  # known GPUs that are out until the library is opened anew: why
        self._unidentified = 0  # GPUs that are counted but did not even give a UUID
        self._expected = 0
        self._worked = False
        self._started = clock()
        self._hopeless = 0

    def read(self) -> Reading:
        """Read every GPU once.

        Raises:
            SourceError: the library is down; it is tried again with back-off.
            NothingHere: the node has neither an NVIDIA GPU nor its driver.
            FatalSourceError: only a new container can help.
        """
        with self._lock:
            try:
                self._ensure_open()
                gpus = self._read_devices()
            except NvmlDown as down:
                raise self._went_down(down.reason) from down
            self._judge(gpus)
            self._expected = max(self._expected, len(self._known) + self._unidentified)
            return Reading(gpus=gpus, errors=self._queries.take_errors(), expected_gpus={VENDOR: self._expected})

    def close(self) -> None:
        """Release the driver, unless a reading hangs in it; then only the end of the process does."""
        if self._lock.acquire(timeout=CLOSE_SECONDS / 2):
            try:
                self._close()
                self._lanes.close()
            finally:
                self._lock.release()

    # --- opening and closing -----------------------------------------------------------------------------------

    def _ensure_open(self) -> None:
        now = self._clock()
        undisturbed = self._opening is None and not self._lanes.stuck()
        if undisturbed and self._ailing() and not self._repair_again.wait(now):
            self._repair_again.failed(now)  # until a reading shows that it is cured
            self._close()
        if self._session.is_open and self._opening is None:
            return
        wait = self._open_again.wait(now)
        if self._opening is None:
            if wait and self._down_reason is not None:
                raise _error(self._down_reason, f"next attempt in {wait:.0f} s")
            if NODE in self._lanes.stuck():
                raise SourceError(codes.TIMEOUT, "closing the library does not return")
            self._opening = self._lanes.start(self._open)
        self._finish_opening()

    def _open(self) -> OpenedGpus:
        with self._queries.isolated("NVML"):
            return self._session.open(self._devices)
        raise LibraryDown(codes.INTERNAL)

    def _finish_opening(self) -> None:
        """Take the result of opening; if this reading cannot wait so long, a later one does."""
        assert self._opening is not None
        try:
            found = result_of(self._opening, self._budget_seconds)
        except Hung:
            raise SourceError(codes.TIMEOUT, "opening the library does not return") from None
        except NvmlDown:
            self._opening = None
            raise
        self._opening = None
        self._adopt(found)

    def _adopt(self, found: OpenedGpus) -> None:
        if found.failed and not found.devices and not self._known:
            raise LibraryDown(next(iter(found.failed.values())))
        self._devices = found.devices
        failed = dict(found.failed)
        for index, reason in failed.items():
            log.warning("GPU %d: %s", index, reason)
        for uuid, device in found.devices.items():
            self._known[uuid] = device.identities
            if uuid in self._broken:
                log.info("GPU %s answers again after: %s", uuid, self._broken[uuid])
        self._broken = {
            uuid: failed.pop(identities[0].index, codes.GPU_NOT_FOUND)
            for uuid, identities in self._known.items()
            if uuid not in found.devices
        }
        self._unidentified = len(failed)

    def _close(self) -> None:
        safe = not self._lanes.stuck()
        try:
            self._lanes.call(NODE, lambda: self._session.close(self._devices, safe), CLOSE_SECONDS)
        except Hung:
            log.warning("closing NVML does not return")

    # --- reading -----------------------------------------------------------------------------------------------

    def _read_devices(self) -> tuple[GpuReading, ...]:
        end = time.monotonic() + self._budget_seconds
        most = SHARE_OF_ONE_GPU * self._budget_seconds
        readings: list[GpuReading] = []
        for uuid, device in list(self._devices.items()):
            left = end - time.monotonic()
            try:
                if left <= 0:
                    raise Hung
                readings += self._lanes.call(uuid, partial(self._read_device, device), min(left, most))
                self._known[uuid] = device.identities
            except DeviceDown as down:
                log.warning("GPU %s: %s", uuid, down.reason)
                self._broken[uuid] = down.reason
                del self._devices[uuid]
            except Hung:
                self._queries.count(codes.TIMEOUT)
                readings += self._unreadable(uuid, codes.TIMEOUT)
        for uuid, reason in self._broken.items():
            readings += self._unreadable(uuid, reason)
        if self._devices and all(reading.error == codes.TIMEOUT for reading in readings):
            self._queries.take_errors()  # counted by whoever gets this one
            raise SourceError(codes.TIMEOUT, "no GPU answers in time")
        return tuple(self._events.onto(reading) for reading in sorted(readings, key=lambda reading: reading.index))

    def _read_device(self, device: NvmlDevice) -> list[GpuReading]:
        uuid = device.identity.uuid
        with self._queries.isolated(f"GPU {uuid}"):
            return device.read()
        return self._unreadable(uuid, codes.INTERNAL)

    def _unreadable(self, uuid: str, reason: str) -> list[GpuReading]:
        return [replace(identity, error=reason) for identity in self._known[uuid]]

    # --- judging -----------------------------------------------------------------------------------------------

    def _judge(self, gpus: tuple[GpuReading, ...]) -> None:
        """Update the state of the library after a reading."""
        if self._down_reason is not None:
            log.info("NVML is back after: %s", self._down_reason)
            self._down_reason = None
        self._open_again.reset()
        errors = {gpu.error for gpu in gpus}
        self._worked = self._worked or None in errors
        self._count_hopeless(errors)
        if not self._ailing():
            self._repair_again.reset()
        elif not self._repair_again.begun:  # an attempt that falls due during this reading is made in the next one
            self._repair_again.failed(self._clock())

    def _ailing(self) -> bool:
        """Whether reopening the library may bring something back."""
        return bool(self._broken or self._unidentified or self._hopeless)

    def _went_down(self, reason: str) -> SourceError:
        """Close and back off; returns the error to raise."""
        self._close()
        self._devices = {}
        self._queries.forget()
        self._queries.take_errors()  # the reason is counted by whoever gets the error
        self._open_again.failed(self._clock())
        if reason in codes.NO_DRIVER and not self._worked and hardware.none_here(self._host_sys):
            reason = codes.NO_DEVICES
        elif reason != self._down_reason:
            log.warning("NVML is down: %s", reason)
        self._down_reason = reason
        if reason == codes.LIBRARY_MISMATCH:
            return FatalSourceError(reason, "the driver was replaced; only a new container gets the new library")
        self._count_hopeless({reason})
        return _error(reason)

    def _count_hopeless(self, errors: Collection[str | None]) -> None:
        """Note why each GPU, or the library, did not answer. Raises ``FatalSourceError`` when that has lasted."""
        reasons = codes.NEEDS_NEW_CONTAINER.intersection(errors)
        self._hopeless = self._hopeless + 1 if reasons and len(reasons) == len(errors) else 0
        patient = not self._worked and self._clock() - self._started < HOPELESS_SECONDS_FROM_START
        if self._hopeless >= HOPELESS_FAILURES and not patient:
            raise FatalSourceError(
                min(reasons), f"{self._hopeless} times in a row; a new container may get the GPUs back"
            )


def _error(reason: str, detail: str = "") -> SourceError:
    return NothingHere(reason, detail) if reason == codes.NO_DEVICES else SourceError(reason, detail)
