"""Tracks: the state kept of each container, GPU and engine between snapshots; all of it bounded.

A track of a container or an engine is of one pod, by its uid: a new pod of the same name begins anew. So does a track
on which the exporter failed, because what it has may be half of a reading.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from kvpressure.diagnosis.diagnose import Diagnoser, LongestRequest
from kvpressure.model.arguments import EngineArgs
from kvpressure.model.gpu_faults import LOST, hardware_faults, kernel_faults
from kvpressure.model.isolation import CONTAINER, ENGINE, GPU, Failure, engine_name
from kvpressure.model.readings import ContainerReading, EngineKey, EngineReading, GpuReading, LogLine, Scrape
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.engine import EngineTracker
from kvpressure.signals.hardware import ContainerWindow, GpuWindow

MAX_EVENTS_KEPT: Final = 512  # of one kind
_NO_FIGURES: Final[Mapping[str, float]] = {}


def is_gone(track: ContainerTrack | EngineTrack, pods: Mapping[tuple[str, str], str]) -> bool:
    """Whether the track's pod is gone or has been replaced, by the uids of the pods that exist; notes its uid when that
    is first known. False for an engine named by hand, whose pod is not among them.
    """
    uid = pods.get(track.pod)
    track.uid = uid if track.uid is None else track.uid
    return track.uid != uid


class SubjectTrack:
    """The state of one subject. ``kind`` and ``name``: as in failures; ``failure``: since the last reading."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name
        self.seen_t = float("-inf")
        self.failure: Failure | None = None
        self._begin()

    def _begin(self) -> None:
        """Begin with no reading."""

    def begin_anew(self, t: float, failure: Failure) -> None:
        """Forget all readings."""
        self._begin()
        self.seen_t, self.failure = t, failure


class ContainerTrack(SubjectTrack):
    """A container: its window, its log events, and the facts of its start-up lines, which it never forgets, because
    the log states them only once.
    """

    def __init__(self, thresholds: Thresholds, namespace: str, pod: str, container: str) -> None:
        super().__init__(CONTAINER, f"{namespace}/{pod}/{container}")
        self.pod = namespace, pod
        self.counts: dict[str, int] = {}
        self._log_window = thresholds["log_window_seconds"]
        self._events: dict[str, deque[float]] = {}  # times by event: a chatty one must not push out a rare one
        self.facts: dict[str, float] = {}
        self.logged: EngineArgs | None = None
        self.version: str | None = None  # the server's own word
        self._oom: tuple[float, Mapping[str, float]] | None = None  # when an out-of-memory text came, its figures
        self.seen_log = False
        self.uid: str | None = None  # of its pod; None = not known yet

    def _begin(self) -> None:
        self.window = ContainerWindow()

    def observe(self, t: float, reading: ContainerReading) -> None:
        """Take a reading."""
        self.window.observe(t, reading)
        self.seen_t = t

    def take_line(self, t: float, line: LogLine) -> None:
        """Count the event of a log line and keep its facts."""
        self.seen_log, self.seen_t = True, t
        event = line.event
        if event is None:
            return
        self.counts[event.event] = self.counts.get(event.event, 0) + 1
        self._events.setdefault(event.event, deque(maxlen=MAX_EVENTS_KEPT)).append(t)
        self.logged = event.arguments or self.logged
        self.version = event.version or self.version
        self.facts.update(event.facts)
        if event.allocator:
            self._oom = t, event.allocator

    def recent_events(self, now: float) -> dict[str, int]:
        """Events of the last ``log_window_seconds``, by name."""
        counted = {name: sum(1 for t in times if self._news(t, now)) for name, times in self._events.items()}
        return {name: count for name, count in counted.items() if count}

    def recent_oom(self, now: float) -> Mapping[str, float]:
        """Allocator numbers in bytes of the last out-of-memory error with numbers, within ``log_window_seconds``."""
        return self._oom[1] if self._oom is not None and self._news(self._oom[0], now) else _NO_FIGURES

    def _news(self, t: float, now: float) -> bool:
        return now - self._log_window <= t <= now


class GpuTrack(SubjectTrack):
    """A GPU: its activity window and the faults seen recently."""

    def __init__(self, thresholds: Thresholds, uuid: str) -> None:
        super().__init__(GPU, uuid)
        self._fault_window = thresholds["crash_loop_window_seconds"]

    def _begin(self) -> None:
        self.window = GpuWindow()
        self._codes: Mapping[int, int] | None = None
        self._faults: deque[float] = deque(maxlen=MAX_EVENTS_KEPT)
        self._kernel_faults: deque[float] = deque(maxlen=MAX_EVENTS_KEPT)

    def observe(self, t: float, gpu: GpuReading) -> None:
        """Take a reading; new hardware errors and a lost device count as faults, new kernel errors as kernel faults."""
        self.seen_t = t
        self.window.observe(t, gpu)
        before = gpu.xid_errors if self._codes is None else self._codes
        for found, kept in ((hardware_faults, self._faults), (kernel_faults, self._kernel_faults)):
            kept.extend(t for code, count in found(gpu).items() if count > before.get(code, 0))
        self._codes = dict(gpu.xid_errors)
        if gpu.error in LOST:
            self._faults.append(t)

    def recent_faults(self, now: float) -> int:
        """Hardware faults of the last ``crash_loop_window_seconds``."""
        return self._recent(self._faults, now)

    def recent_kernel_faults(self, now: float) -> int:
        """Kernel errors of the last ``crash_loop_window_seconds``."""
        return self._recent(self._kernel_faults, now)

    def _recent(self, times: Iterable[float], now: float) -> int:
        return sum(1 for t in times if now - self._fault_window <= t <= now)


class EngineTrack(SubjectTrack):
    """An engine: tracker, diagnoser and identity."""

    def __init__(self, key: EngineKey, page: Scrape, thresholds: Thresholds, named: tuple[str, str]) -> None:
        self._thresholds = thresholds
        super().__init__(ENGINE, engine_name(key))
        self.key = key
        self.named = named  # model and engine as the page calls them
        self.failed_since: float | None = None  # since when it has been published without values
        self.target, self.container, self.gpus = page.target, page.container, page.gpus
        self.group = ""
        self.was_read = False  # whether the last scrape succeeded and listed it
        self.seen_t = page.time
        self.uid: str | None = None  # of its pod; None = not known yet, or named by hand

    @property
    def pod(self) -> tuple[str, str]:
        """Namespace and name of its pod."""
        return self.key.namespace, self.key.pod

    def _begin(self) -> None:
        self.tracker = EngineTracker(self._thresholds)
        self.diagnoser = Diagnoser(self._thresholds)
        self.longest = LongestRequest()
        self.counters: Mapping[str, float] = {}

    def rename(self, key: EngineKey) -> None:
        """Set the labels of its series."""
        self.key, self.name = key, engine_name(key)

    def observe(self, page: Scrape, reading: EngineReading) -> None:
        """Take this engine's part of a successful scrape."""
        self.group, self.was_read = page.group, True
        if self.tracker.observe(page, reading):
            last = self.tracker.window.last
            self.counters = {**last.counters, **last.page} if last else {}

    def lose(self, reason: str) -> None:
        """Note that the scrape failed or did not list this engine."""
        self.failure, self.was_read = None, False
        self.tracker.fail(reason)
