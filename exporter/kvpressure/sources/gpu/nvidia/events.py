"""Driver events (XIDs), counted by a thread that waits for them.

Only events while the library is open are seen. MIG instances have none of their own; their GPU has.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import pynvml

from kvpressure.model.gpu_faults import OTHER_XID
from kvpressure.model.readings import GpuReading
from kvpressure.sources.gpu.nvidia import codes

log = logging.getLogger(__name__)

WAIT_MILLISECONDS: Final = 500  # how long a stop may take
PAUSE_SECONDS: Final = 5.0  # after a failed wait, so that a failing driver is not asked in a tight loop
XIDS: Final = frozenset(
    {8, 11, 13, 25, 31, 32, *range(37, 49), 54, *range(56, 91), *range(92, 111), *range(119, 138), *range(139, 173)}
)
"""Numbers to which NVIDIA's catalogue (r580, and that of older GPUs) gives a meaning; all others count as one."""


class EventLog:
    """Counters since start, by GPU; they survive reopening the library."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._xids: dict[str, Counter[int]] = {}
        self._xid_times: dict[str, dict[int, float]] = {}

    def add(self, uuid: str, number: int, when: float) -> None:
        """Count one event of this XID; ``when`` in Unix seconds."""
        with self._lock:
            xid = number if number in XIDS else OTHER_XID
            self._xids.setdefault(uuid, Counter())[xid] += 1
            self._xid_times.setdefault(uuid, {})[xid] = when

    def onto(self, reading: GpuReading) -> GpuReading:
        """The reading with the counters of its GPU."""
        with self._lock:
            if reading.uuid not in self._xids:
                return reading
            return replace(
                reading,
                xid_errors=dict(self._xids[reading.uuid]),
                xid_last_times=dict(self._xid_times[reading.uuid]),
            )


class EventWatch:
    """Waits for events of the given GPUs while the library is open."""

    def __init__(
        self, events: EventLog, wall: Callable[[], float] = time.time, count: Callable[[str], None] = lambda _: None
    ) -> None:
        self._events = events
        self._count = count  # a failure that is not NVML's, by its reason
        self._wall = wall
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []  # still running, the newest last

    def start(self, devices: Iterable[tuple[str, Any]]) -> None:
        """Register (uuid, handle) pairs and wait in a thread; without event support, do nothing."""
        try:
            event_set, uuids = _register(list(devices), self._count)
        except Exception as error:
            log.info("no driver events: %s", _reason(error, self._count))
            return
        if not uuids:
            _free(event_set)
            return
        self._stop = threading.Event()
        self._threads.append(
            threading.Thread(target=self._run, args=(event_set, uuids, self._stop), name="nvml-events", daemon=True)
        )
        self._threads[-1].start()

    def stop(self) -> bool:
        """Stop waiting. False when a thread hangs in the driver: the library must then stay open."""
        self._stop.set()
        if self._threads:
            self._threads[-1].join(1.5 * WAIT_MILLISECONDS / 1000)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return not self._threads

    def _run(self, event_set: Any, uuids: Mapping[int, str], stop: threading.Event) -> None:
        while not stop.is_set():
            started = time.monotonic()
            try:
                event = pynvml.nvmlEventSetWait_v2(event_set, WAIT_MILLISECONDS)
            except Exception as error:
                reason = _reason(error, self._count)
                if reason in codes.LIBRARY_DOWN or reason == codes.OLD_DRIVER:
                    break
                waited = time.monotonic() - started
                if reason != codes.TIMEOUT or waited < WAIT_MILLISECONDS / 2000:
                    stop.wait(PAUSE_SECONDS)
                continue
            uuid = uuids.get(_address(event.device))
            if uuid is not None:
                self._events.add(uuid, int(event.eventData), self._wall())
        _free(event_set)


def _register(devices: list[tuple[str, Any]], count: Callable[[str], None]) -> tuple[Any, dict[int, str]]:
    """An event set, and the UUIDs in it by handle address; GPUs that refuse are left out.

    A registration that fails other than by "not supported" makes the set unusable, so a new one is created without
    that GPU.
    """
    refused: set[str] = set()
    while True:
        event_set = pynvml.nvmlEventSetCreate()
        uuids: dict[int, str] = {}
        failed = None
        for uuid, handle in devices:
            if uuid in refused:
                continue
            try:
                kinds = pynvml.nvmlDeviceGetSupportedEventTypes(handle) & pynvml.nvmlEventTypeXidCriticalError
                if kinds:
                    pynvml.nvmlDeviceRegisterEvents(handle, kinds, event_set)
                    uuids[_address(handle)] = uuid
            except Exception as error:
                reason = _reason(error, count)
                log.info("no events of GPU %s: %s", uuid, reason)
                if reason not in codes.NORMAL:
                    failed = uuid
                    break
        if failed is None:
            return event_set, uuids
        refused.add(failed)
        _free(event_set)


def _reason(error: Exception, count: Callable[[str], None]) -> str:
    if isinstance(error, pynvml.NVMLError):
        return codes.reason_of(error.value)
    count(codes.INTERNAL)
    return codes.INTERNAL


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _free(event_set: Any) -> None:
    with suppress(pynvml.NVMLError):
        pynvml.nvmlEventSetFree(event_set)
