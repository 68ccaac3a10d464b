"""The only place that calls NVML and turns its errors into reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, Generic, NamedTuple, TypeVar

import pynvml

from kvpressure.sources.base import BeyondSubject, CountedFailures
from kvpressure.sources.gpu.nvidia import codes

T = TypeVar("T")

ASK_AGAIN_SECONDS: Final = 600.0
"""How long "not supported", "symbol missing" and "no permission" are remembered per (device, metric). They may
change: MIG is switched, a driver is still initialising, an administrator opens the counters.
"""

REFUSED_TIMES: Final = 5
"""This many ``blocked`` or ``unknown`` in a row count as lasting: a sandbox (such as gVisor) passes some calls on to
the driver and always refuses others. ``NvmlDevice`` forgets them while the device answers nothing at all.
"""


class NvmlAnswer(NamedTuple, Generic[T]):
    """A value, or None and the reason from ``codes.REASONS``."""

    value: T | None
    reason: str | None = None


class NvmlDown(BeyondSubject):
    """``reason``: one of ``codes.REASONS``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class LibraryDown(NvmlDown):
    """No call can succeed before the library is reopened."""


class DeviceDown(NvmlDown):
    """One GPU is gone until the library is reopened."""


class Queries(CountedFailures):
    """Calls NVML, counts failures by reason, and remembers what a device cannot answer, so that it is not asked each
    second.

    ``clock`` gives monotonic seconds. Threads may ask concurrently, each about its own device.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._silent: dict[str, dict[str, tuple[float, str]]] = {}
        self._refused: dict[str, Counter[str]] = {}  # refusals in a row by device and metric

    def ask(self, device: str, metric: str, function: Callable[..., T], *arguments: Any) -> NvmlAnswer[T]:
        """Call ``function(*arguments)``; ``device`` and ``metric`` are the key under which a lasting failure is
        remembered.

        Raises:
            LibraryDown, DeviceDown: the failure concerns more than this value.
        """
        silent = self._silent.get(device)
        if silent is not None and metric in silent:
            until, reason = silent[metric]
            if self._clock() < until:
                return NvmlAnswer(None, reason)
        with self.isolated(f"GPU {device}, {metric}"):
            try:
                answer = NvmlAnswer(function(*arguments))
            except pynvml.NVMLError as error:
                return self._failed(device, metric, codes.reason_of(error.value))
            except UnicodeDecodeError:
                return self._failed(device, metric, codes.INVALID_DATA)
            if device in self._refused:
                del self._refused[device][metric]
            return answer
        return NvmlAnswer(None, codes.INTERNAL)

    def count(self, reason: str) -> None:
        """Count a failure that was not raised by a call."""
        self._errors[reason] += 1

    def forget(self, device: str | None = None) -> None:
        """Forget lasting failures of a device, or of all devices."""
        if device is None:
            self._silent.clear()
            self._refused.clear()
        else:
            self._silent.pop(device, None)
            self._refused.pop(device, None)

    def _failed(self, device: str, metric: str, reason: str) -> NvmlAnswer[Any]:
        if reason not in codes.NORMAL:
            self._errors[reason] += 1
        if reason in codes.LIBRARY_DOWN:
            raise LibraryDown(reason)
        if reason in codes.DEVICE_DOWN:
            raise DeviceDown(reason)
        if reason in codes.LASTING or self._refused_for_good(device, metric, reason):
            self._silent.setdefault(device, {})[metric] = (self._clock() + ASK_AGAIN_SECONDS, reason)
        return NvmlAnswer(None, reason)

    def _refused_for_good(self, device: str, metric: str, reason: str) -> bool:
        if reason not in codes.NEEDS_NEW_CONTAINER:
            return False
        refused = self._refused.setdefault(device, Counter())
        refused[metric] += 1
        return refused[metric] >= REFUSED_TIMES


class DeviceQuery:
    """Queries of one device during one reading; returns plain values and keeps the reasons of missing ones."""

    def __init__(self, queries: Queries, device: str) -> None:
        self._queries = queries
        self._device = device
        self._answered = False
        self._reasons: list[str] = []

    def __call__(self, metric: str, function: Callable[..., T], *arguments: Any) -> T | None:
        """The value, or None when the device does not provide it."""
        value, reason = self._queries.ask(self._device, metric, function, *arguments)
        if reason is None:
            self._answered = True
        else:
            self._reasons.append(reason)
        return value

    def isolated(self, part: str) -> AbstractContextManager[None]:
        """``base.isolated`` for a part of the device."""
        return self._queries.isolated(f"GPU {self._device}, {part}")

    def invalid(self) -> None:
        """Count an impossible answer."""
        self._queries.count(codes.INVALID_DATA)

    def why_silent(self) -> str | None:
        """Why the device counts as unreadable: nothing was answered, and not only for lack of support; else None."""
        if self._answered:
            return None
        return next((reason for reason in self._reasons if reason not in codes.NORMAL), None)
