"""CPU, memory and restarts of the container around the engine."""

from __future__ import annotations

from collections import deque
from typing import Final

from kvpressure.model import readings as r
from kvpressure.model.readings import ContainerReading
from kvpressure.model.signals import HostSignals
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.window import MINUTE, STEP_BACK_SECONDS, EngineWindow, History

MAX_RESTARTS_KEPT: Final = 64
MILLICORE: Final = 0.001  # Kubernetes knows no smaller CPU limit


class ContainerWindow:
    """History of one container."""

    __slots__ = ("_restarts", "first_t", "history", "last", "last_t")

    def __init__(self) -> None:
        self.history: History[tuple[float, ContainerReading]] = History()
        self.last: ContainerReading | None = None
        self.first_t = self.last_t = float("-inf")
        self._restarts: deque[float] = deque(maxlen=MAX_RESTARTS_KEPT)

    def observe(self, t: float, reading: ContainerReading) -> None:
        """Take a reading. One that is not newer than all before is ignored, unless the clock stepped back far."""
        if t < self.last_t - STEP_BACK_SECONDS:
            self.history.clear()
            self._restarts.clear()
        elif t <= self.last_t:
            return
        if t < self.last_t or self.last is None:
            self.first_t = t
        before, self.last, self.last_t = self.last, reading, t
        if reading == before:
            return  # the same one, held until its source reads again: no second point of anything
        if before is not None and before.restarts is not None and reading.restarts is not None:
            for _ in range(min(MAX_RESTARTS_KEPT, max(0, reading.restarts - before.restarts))):
                self._restarts.append(t)
        self.history.append(t, (t, reading))

    def restarts_since(self, start: float) -> int:
        """Restarts seen since ``start`` (Unix seconds)."""
        return sum(1 for t in self._restarts if t >= start)

    def cpu_used_ratio(self) -> float | None:
        """CPU time per second over the last minute, divided by the limit; ``None`` without a limit or a second
        reading.
        """
        pair = self._pair("cpu_usage_seconds")
        limit = self.last.cpu_limit_cores if self.last else None
        if pair is None or limit is None or limit < MILLICORE:
            return None
        (begin, first), (end, last) = pair
        used = (last.cpu_usage_seconds or 0.0) - (first.cpu_usage_seconds or 0.0)
        return used / (end - begin) / limit if used >= 0 else None

    def throttled_ratio(self) -> float | None:
        """Share of CFS periods throttled over the last minute; ``None`` without elapsed periods."""
        pair = self._pair("cpu_periods")
        if pair is None:
            return None
        (_, first), (_, last) = pair
        periods = (last.cpu_periods or 0) - (first.cpu_periods or 0)
        throttled = (last.cpu_throttled_periods or 0) - (first.cpu_throttled_periods or 0)
        return min(1.0, throttled / periods) if periods > 0 and throttled >= 0 else None

    def memory_used_ratio(self) -> float | None:
        """Working set divided by the memory limit; ``None`` without either."""
        reading = self.last
        if reading is None or reading.memory_working_set_bytes is None or not reading.memory_limit_bytes:
            return None
        return reading.memory_working_set_bytes / reading.memory_limit_bytes

    def _pair(self, name: str) -> tuple[tuple[float, ContainerReading], tuple[float, ContainerReading]] | None:
        entries = self.history.since(self.last_t - MINUTE)
        first = next((entry for entry in entries if getattr(entry[1], name) is not None), None)
        last = next((entry for entry in reversed(entries) if getattr(entry[1], name) is not None), None)
        return None if first is None or last is None or first is last else (first, last)


def compute(window: EngineWindow, container: ContainerWindow | None, now: float, t: Thresholds) -> HostSignals:
    """CPU, memory and restarts of the engine's container; ``now`` in Unix seconds."""
    api_cpu = None
    if (ends := window.ends(MINUTE, lambda sample: sample.page.get(r.PROCESS_CPU_SECONDS))) is not None:
        (begin, before), (end, after) = ends
        api_cpu = max(0.0, after - before) / (end - begin)
    if container is None or container.last is None:
        return HostSignals(api_cpu_cores=api_cpu)
    ended = container.last.last_termination
    ago = None if ended is None or ended.finished_at is None else abs(now - ended.finished_at)
    recent, all_known = _restarts(container, ago, now, t["crash_loop_window_seconds"])
    return HostSignals(
        api_cpu_cores=api_cpu,
        cpu_used_ratio=container.cpu_used_ratio(),
        cpu_throttled_ratio=container.throttled_ratio(),
        cpu_pressure_ratio=container.last.cpu_pressure_some_ratio,
        memory_used_ratio=container.memory_used_ratio(),
        restarts=None if container.last.restarts is None else float(container.last.restarts),
        restarts_recent=recent,
        restarts_all_known=all_known,
        terminated_seconds_ago=ago,
        last_termination_reason=ended.reason if ended else None,
        last_exit_code=None if ended is None or ended.exit_code is None else float(ended.exit_code),
    )


def _restarts(
    container: ContainerWindow, ended_ago: float | None, now: float, window: float
) -> tuple[float | None, bool]:
    """Restarts in the last ``window`` seconds, and whether that is all of them. From before the first reading only
    the last termination is known: if it is older than the window there were none since, if younger at least one.
    """
    total = container.last.restarts if container.last else None
    if total is None:
        return None, False
    seen = container.restarts_since(now - window)
    if total == 0 or now - container.first_t >= window or (ended_ago is not None and ended_ago > window):
        return float(seen), True
    least = max(seen, 0 if ended_ago is None else 1)
    return float(least) if least else None, False
