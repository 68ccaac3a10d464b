"""Times every call into NVML where the binding makes it, and counts what each returned."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final

import pynvml

_UNTIMED: Final = ("nvmlErrorString",)  # the binding sets attributes on it


class CallTimes:
    """Seconds and return codes by function of the library, as C knows it (with its ``_v2``)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._codes: dict[str, Counter[int]] = defaultdict(Counter)

    def install(self) -> None:
        """From now on every call of this process is noted."""
        find = pynvml._nvmlGetFunctionPointer

        def timed_pointer(name: str) -> Any:
            try:
                function = find(name)
            except pynvml.NVMLError as error:  # the driver is older than the call
                self._note(name, None, error.value)
                raise
            return function if name in _UNTIMED else self._timed(name, function)

        pynvml._nvmlGetFunctionPointer = timed_pointer

    def table(self) -> dict[str, dict[str, Any]]:
        """By function: number, min, median, p99, max in microseconds, and how often each code came."""
        with self._lock:
            return {
                name: {
                    **summary([1e6 * s for s in self._seconds[name]]),
                    "codes": {str(code): n for code, n in sorted(codes.items())},
                }
                for name, codes in sorted(self._codes.items())
            }

    def _timed(self, name: str, function: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            started = time.perf_counter()
            code = function(*arguments)
            self._note(name, time.perf_counter() - started, code)
            return code

        return call

    def _note(self, name: str, seconds: float | None, code: int) -> None:
        with self._lock:
            self._codes[name][code] += 1
            if seconds is not None:
                self._seconds[name].append(seconds)


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Number, min, median, p99 and max, rounded to a tenth; only the number when there are none."""
    if not values:
        return {"n": 0}
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {
        "n": len(ordered),
        "min": round(ordered[0], 1),
        "median": round(statistics.median(ordered), 1),
        "p99": round(p99, 1),
        "max": round(ordered[-1], 1),
    }
