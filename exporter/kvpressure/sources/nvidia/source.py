"""The NVIDIA source: all GPUs of the node through NVML.

What fails stays where it fails: a value is absent, a GPU carries ``error``, and only when the library itself is
down does ``read`` raise. Recovery needs no restart, except for a replaced driver (``library_mismatch``) and for a
container that has lost its devices (every GPU ``unknown`` or ``blocked`` for long).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import pynvml

from kvpressure.readings import GpuReading
from kvpressure.sources.base import FatalSourceError, Reading, SourceError
from kvpressure.sources.nvidia import codes
from kvpressure.sources.nvidia.device import VENDOR, Device, Identity
from kvpressure.sources.nvidia.library import FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS, Backoff, Library
from kvpressure.sources.nvidia.options import NvidiaOptions
from kvpressure.sources.nvidia.query import DeviceDown, LibraryDown, Queries

log = logging.getLogger(__name__)

MOST_DEVICES: Final = 256
"""More GPUs than a node has; a count above it is no count."""

REPAIR_FIRST_SECONDS: Final = 60.0
REPAIR_LONGEST_SECONDS: Final = 1800.0
"""A GPU that went comes back only after the library is opened anew, which is slow and disturbs the others: seldom."""

HOPELESS_FAILURES: Final = 10
HOPELESS_SECONDS_FROM_START: Final = 1800.0
"""After so many failures in a row that only a new container cures, the process ends. One that never saw a GPU waits
longer: its container is new already, and ending it takes everything else it watches along."""

NODE: Final = "node"  # stands for a device in questions that concern none


class NvidiaSource:
    """Implements ``sources.base.Source``. ``clock`` gives monotonic seconds.

    Failures give the words of ``codes.REASONS`` as ``SourceError.reason``, ``GpuReading.error`` and keys of
    ``Reading.errors``.
    """

    name = VENDOR

    def __init__(self, settings: Any = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = NvidiaOptions.of(settings)
        self._clock = clock
        self._lock = threading.Lock()  # close() may be called while read() runs
        self._queries = Queries(clock)
        self._library = Library()
        self._opening = Backoff(FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS)
        self._repair = Backoff(REPAIR_FIRST_SECONDS, REPAIR_LONGEST_SECONDS)
        self._down_reason: str | None = None
        self._devices: dict[str, Device] = {}
        self._known: dict[str, Identity] = {}  # every GPU that ever answered
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
            FatalSourceError: only a new container can help.
        """
        with self._lock:
            try:
                self._ensure_open()
                gpus = self._read_devices()
            except (LibraryDown, DeviceDown) as down:
                raise self._went_down(down.reason) from down
            finally:
                if self._options.release_between_readings:
                    self._library.close()
            self._judge(gpus)
            self._expected = max(self._expected, len(gpus) + self._unidentified)
            return Reading(gpus=gpus, errors=self._queries.take_errors(), expected_gpus={VENDOR: self._expected})

    def close(self) -> None:
        """Release the driver, unless a reading hangs in it: then the process must end for that."""
        if self._lock.acquire(timeout=0.5):
            try:
                self._library.close()
            finally:
                self._lock.release()

    # --- opening ---------------------------------------------------------------------------------------------

    def _ensure_open(self) -> None:
        now = self._clock()
        if self._ailing() and not self._repair.wait(now):
            self._repair.failed(now)  # until a reading shows that it is cured
            self._library.close()
        if self._library.is_open:
            return
        wait = self._opening.wait(now)
        if wait and self._down_reason is not None:
            raise SourceError(self._down_reason, f"next attempt in {wait:.0f} s")
        self._library.open()
        self._enumerate()

    def _enumerate(self) -> None:
        """Find the GPUs. One that fails here is left out and counted, the rest counts."""
        count = self._queries.ask(NODE, "count", pynvml.nvmlDeviceGetCount)
        if count.value is None:
            raise LibraryDown(count.reason or codes.UNKNOWN)
        found: dict[str, Device] = {}
        failed: dict[int, str] = {}
        for index in range(min(count.value, MOST_DEVICES)):
            reason = self._find(index, found)
            if reason is not None:
                failed[index] = reason
        self._devices = found
        self._known.update((uuid, device.identity) for uuid, device in found.items())
        if failed and not self._known:
            raise LibraryDown(next(iter(failed.values())))
        missing = [identity for uuid, identity in self._known.items() if uuid not in found]
        self._broken = {identity.uuid: failed.pop(identity.index, codes.GPU_NOT_FOUND) for identity in missing}
        self._unidentified = len(failed)

    def _find(self, index: int, found: dict[str, Device]) -> str | None:
        """Add the GPU at ``index`` to ``found``; the reason when that cannot be done."""
        key = f"index {index}"
        self._queries.forget(key)
        try:
            handle = self._queries.ask(key, "handle", pynvml.nvmlDeviceGetHandleByIndex, index)
            if handle.value is None:
                return handle.reason
            uuid = self._queries.ask(key, "uuid", pynvml.nvmlDeviceGetUUID, handle.value)
        except DeviceDown as down:
            return down.reason
        if not uuid.value or uuid.value in found:
            if uuid.reason is None:
                self._queries.count(codes.INVALID_DATA)
            return uuid.reason or codes.INVALID_DATA
        device = self._devices.get(uuid.value)
        if device is None:
            device = Device(self._queries, Identity(uuid.value, index, self._library.driver), handle.value)
        else:
            device.attach(index, self._library.driver, handle.value)
        found[uuid.value] = device
        return None

    # --- reading ---------------------------------------------------------------------------------------------

    def _read_devices(self) -> tuple[GpuReading, ...]:
        now = self._clock()
        readings = []
        for uuid, device in list(self._devices.items()):
            try:
                readings.append(device.read(now))
            except DeviceDown as down:
                log.warning("GPU %s: %s", uuid, down.reason)
                self._broken[uuid] = down.reason
                del self._devices[uuid]
            self._known[uuid] = device.identity
        readings += [self._known[uuid].reading(error=reason) for uuid, reason in self._broken.items()]
        return tuple(sorted(readings, key=lambda reading: reading.index))

    # --- judging ---------------------------------------------------------------------------------------------

    def _judge(self, gpus: tuple[GpuReading, ...]) -> None:
        """What a reading that arrived says about the state of things."""
        if self._down_reason is not None:
            log.info("NVML is back after: %s", self._down_reason)
            self._down_reason = None
        self._opening.reset()
        errors = {gpu.error for gpu in gpus}
        if gpus and errors <= codes.NEEDS_NEW_CONTAINER:
            self._count_hopeless(gpus[0].error or codes.UNKNOWN)
        else:
            self._hopeless = 0
            self._worked = self._worked or None in errors
        if not self._ailing():
            self._repair.reset()
        elif not self._repair.wait(self._clock()):
            self._repair.failed(self._clock())

    def _ailing(self) -> bool:
        """True while opening the library anew may bring something back."""
        return bool(self._broken or self._unidentified or self._hopeless)

    def _went_down(self, reason: str) -> SourceError:
        """Close, back off; the error to raise."""
        self._library.close()
        self._devices.clear()
        self._queries.forget()
        self._queries.take_errors()  # the reason is counted by whoever gets the error
        self._opening.failed(self._clock())
        if reason != self._down_reason:
            log.warning("NVML is down: %s", reason)
        self._down_reason = reason
        if reason == codes.LIBRARY_MISMATCH:
            return FatalSourceError(reason, "the driver was replaced; only a new container gets the new library")
        if reason in codes.NEEDS_NEW_CONTAINER:
            self._count_hopeless(reason)
        else:
            self._hopeless = 0
        return SourceError(reason)

    def _count_hopeless(self, reason: str) -> None:
        self._hopeless += 1
        patient = not self._worked and self._clock() - self._started < HOPELESS_SECONDS_FROM_START
        if self._hopeless >= HOPELESS_FAILURES and not patient:
            raise FatalSourceError(reason, f"{self._hopeless} times in a row; a new container may get the GPUs back")
