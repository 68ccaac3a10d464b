"""Engines over time: which exist, and the state kept of each container, GPU and engine between snapshots; all
bounded.

A track of a container or an engine is of one pod, by its uid: a new pod of the same name begins anew. So does a track
on which the exporter failed, because what it has may be half of a reading.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import urlsplit

from kvpressure.advice.limits import AdvisedLimits
from kvpressure.diagnosis.diagnose import Diagnoser
from kvpressure.model.arguments import EngineArgs
from kvpressure.model.gpu_faults import LOST, hardware_faults, kernel_faults
from kvpressure.model.isolation import CONTAINER, ENGINE, GPU, Failure, engine_name
from kvpressure.model.log_events import PAUSING
from kvpressure.model.pools import EnginePool, Workload, pool_of
from kvpressure.model.readings import (
    PROCESS_START,
    ContainerReading,
    EngineKey,
    EngineReading,
    GpuReading,
    LogLine,
    Scrape,
)
from kvpressure.model.reasons import INTERNAL, SAME_SERVER, SEVERAL_SERVERS
from kvpressure.model.state import NO_ENGINE, EngineState, TargetState
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
        self.told: tuple[bool | None, float] = None, 0.0  # as ``LogContext.told``
        self.uid: str | None = None  # of its pod; None = not known yet
        self.pool = EnginePool()

    def _begin(self) -> None:
        self.window = ContainerWindow()

    def observe(self, t: float, reading: ContainerReading) -> None:
        """Take a reading."""
        self.window.observe(t, reading)
        self.seen_t, self.pool = t, reading.pool or self.pool

    def take_line(self, t: float, line: LogLine) -> None:
        """Count the event of a log line and keep its facts."""
        self.seen_log, self.seen_t = True, t
        event = line.event
        if event is None:
            return
        self.counts[event.event] = self.counts.get(event.event, 0) + 1
        self._events.setdefault(event.event, deque(maxlen=MAX_EVENTS_KEPT)).append(t)
        if event.event in PAUSING:
            self.told = PAUSING[event.event], t
        self.logged = event.arguments or self.logged
        self.version = event.version or self.version
        if event.event == "args":
            self.facts = {}  # of an earlier start
        self.facts.update(event.facts)
        if event.allocator:
            self._oom = t, event.allocator

    def recent_events(self, now: float) -> dict[str, int]:
        """Events of the last ``log_window_seconds``, by name."""
        counted = {name: sum(1 for t in times if self._news(t, now)) for name, times in self._events.items()}
        return {name: count for name, count in counted.items() if count}

    def last_event(self, name: str, now: float) -> float | None:
        """When an event came last, within ``log_window_seconds``."""
        return max((t for t in self._events.get(name, ()) if self._news(t, now)), default=None)

    def recent_oom(self, now: float) -> Mapping[str, float]:
        """Allocator numbers in bytes of the last out-of-memory error with numbers, within ``log_window_seconds``."""
        return self._oom[1] if self._oom is not None and self._news(self._oom[0], now) else _NO_FIGURES

    def _news(self, t: float, now: float) -> bool:
        return now - self._log_window <= t <= now


class GpuTrack(SubjectTrack):
    """A GPU: its activity window, the faults seen recently, and an engine on it."""

    def __init__(self, thresholds: Thresholds, uuid: str) -> None:
        super().__init__(GPU, uuid)
        self._fault_window = thresholds["crash_loop_window_seconds"]
        self._engine, self._engine_t = NO_ENGINE, float("-inf")

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

    def take_engine(self, t: float, engine: EngineState) -> None:
        """Note an engine on it."""
        self._engine = engine.key.namespace, engine.key.pod, engine.key.model_name, engine.pool.name
        self._engine_t = t

    def engine(self, now: float) -> tuple[str, str, str, str]:
        """The engine noted last, as in ``GpuState``: a fault may end the engine before the driver reports it."""
        return self._engine if 0 <= now - self._engine_t <= FORGET_SECONDS else NO_ENGINE

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
        self.last_gpus: tuple[str, ...] = ()  # whoever said so
        self.group = ""
        self.pool = page.pool or pool_of(key.pod, Workload(), None)
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
        self.advised = AdvisedLimits()
        self.counters: Mapping[str, float] = {}

    def rename(self, key: EngineKey) -> None:
        """Set the labels of its series."""
        self.key, self.name = key, engine_name(key)

    def observe(self, page: Scrape, reading: EngineReading) -> None:
        """Take this engine's part of a successful scrape."""
        self.group, self.was_read = page.group, True
        self.pool = page.pool or self.pool
        process = self.tracker.process_start
        if self.tracker.observe(page, reading):
            if process is not None and process != self.tracker.process_start:
                self.last_gpus = ()  # a process that begins and answers is on GPUs that do
            last = self.tracker.window.last
            self.counters = {**last.counters, **last.page} if last else {}

    def lose(self, reason: str, rival_label: str = "") -> None:
        """Note that the scrape failed or did not list this engine; ``rival_label``: in which its series collide."""
        self.failure, self.was_read = None, False
        self.tracker.fail(reason, rival_label)


FORGET_SECONDS: Final = 300.0
ABSENT: Final = "absent"  # reason of an engine that its endpoint no longer lists
MAX_GONE_ENGINES: Final = 64  # of all targets together, kept for a while after their endpoint stopped listing them


@dataclass(slots=True)
class _KeptTarget:
    """State of one target between scrapes."""

    state: TargetState
    seen_t: float
    pod: tuple[str, str, str | None] | None = None  # namespace, name and uid of the one whose page came last
    errors: dict[str, int] = field(default_factory=dict)
    start: float | None = None  # of the process whose page came last
    starts: dict[float, float] = field(
        default_factory=dict
    )  # of all processes that answered recently -> when they last did
    returned_t: float = float("-inf")  # when a process last answered again after another one had


class Engines:
    """All engines, each with its track, and the targets they are scraped from."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._tracks: dict[EngineKey, EngineTrack] = {}
        self._targets: dict[str, _KeptTarget] = {}
        self._known: Collection[str] | None = None
        self.pods: Mapping[tuple[str, str], str] = {}  # as last known

    def __iter__(self) -> Iterator[EngineTrack]:
        return iter(self._tracks.values())

    @property
    def targets(self) -> tuple[TargetState, ...]:
        """Scrape health of every target."""
        return tuple(target.state for target in self._targets.values())

    def set_present(self, targets: Collection[str] | None, pods: Mapping[tuple[str, str], str] | None) -> None:
        """Set the targets that are scraped now and the uids of the pods that exist (``None`` = unknown), and drop the
        engines of pods that do not.
        """
        self._known = None if targets is None else frozenset(targets)
        if pods is not None:
            self.pods = pods
            self._drop(track for track in self if is_gone(track, pods))

    def observe(
        self, now: float, page: Scrape, model_from_args: Callable[[Scrape], str]
    ) -> Sequence[tuple[EngineTrack, EngineReading]]:
        """The engines of the scrape, each with its reading to take in; known engines without one count as failed."""
        page = self._of_one_server(now, page)
        at_address = [track for track in self if track.target == page.target]
        known = [track for track in at_address if track.pod == (page.namespace, page.pod)]
        if self.pods:  # unknown in old recordings, some of which have two replicas at one address
            self._drop(track for track in at_address if track not in known)
        if page.error == SAME_SERVER:
            self._drop(known)
            return ()
        if page.error is not None or not page.engines:
            if not known:
                known = [] if page.assumed else [self._new(now, page, (model_from_args(page), "0"))]
            for track in known:
                track.lose(page.error or ABSENT, page.rival_label)
                track.seen_t = now
            return ()
        names = {(reading.model_name, reading.engine) for reading in page.engines}
        self._drop_missing([track for track in known if track.named not in names])
        of_page = {track.named: track for track in known}
        listed = []
        for reading in page.engines:
            name = (reading.model_name, reading.engine)
            track = of_page.get(name) or self._new(now, page, name)
            track.target, track.container, track.gpus = page.target, page.container, page.gpus
            track.seen_t = page.time  # one read before the clock was stepped says nothing of now
            listed.append((track, reading))
        return listed

    def fail(self, now: float, page: Scrape, failure: Failure) -> None:
        """Mark the page's engines as failed: the exporter could not take the page in."""
        known = [track for track in self if track.target == page.target]
        if not known and not page.assumed:
            key = EngineKey(page.namespace, page.pod, "", "0")
            known = [self._tracks.setdefault(key, self._begun(key, page, ("", "0")))]
        for track in known:
            track.begin_anew(now, failure)
            track.was_read = page.error is None
        self._count(page, self._target(now, page), INTERNAL)

    def forget(self, now: float) -> None:
        """Drop engines whose target was removed, at once, and those not seen for ``FORGET_SECONDS`` (or seen in what
        is now the future, after the clock stepped back).
        """
        self._drop(
            track for track in self if abs(now - track.seen_t) > FORGET_SECONDS or not self._is_read(track.target)
        )
        alive = {track.target for track in self}
        for name in [
            name
            for name, target in self._targets.items()
            if name not in alive and not (abs(now - target.seen_t) <= FORGET_SECONDS and self._is_read(name))
        ]:
            del self._targets[name]

    def _of_one_server(self, now: float, page: Scrape) -> Scrape:
        """The page, counted; failed when its address stands for several servers, or for one that is scraped already."""
        target = self._target(now, page)
        pod = (page.namespace, page.pod, self.pods.get((page.namespace, page.pod)))
        if target.pod != pod:  # the processes of another pod say nothing of this one's
            target.pod, target.start, target.starts, target.returned_t = pod, None, {}, float("-inf")
        error = page.error or self._identity_conflict(now, page, target)
        self._count(page, target, error)
        return page if error == page.error else replace(page, engines=(), error=error)

    def _target(self, now: float, page: Scrape) -> _KeptTarget:
        target = self._targets.setdefault(page.target, _KeptTarget(TargetState(page.target, True, None, 0), now))
        target.seen_t = now
        return target

    def _count(self, page: Scrape, target: _KeptTarget, error: str | None) -> None:
        if error is not None:
            target.errors[error] = target.errors.get(error, 0) + 1
        target.state = TargetState(
            page.target, error is None, page.duration_seconds, page.bad_lines, dict(target.errors), page.cut
        )

    def _identity_conflict(self, now: float, page: Scrape, target: _KeptTarget) -> str | None:
        """Why the page cannot be used, if so. A replaced process does not come back: one that answers again after
        another is one of several behind the address, and their counters would look like resets.
        """
        start = page.page.get(PROCESS_START)
        if start is None:
            return None
        if start != target.start and start in target.starts:
            target.returned_t = now
        target.start = start
        target.starts[start] = now
        target.starts = {each: t for each, t in target.starts.items() if abs(now - t) <= FORGET_SECONDS}
        if 0 <= now - target.returned_t <= FORGET_SECONDS:
            return SEVERAL_SERVERS
        for reading in page.engines:
            other = self._tracks.get(EngineKey(page.namespace, page.pod, reading.model_name, reading.engine))
            if other is not None and self._is_other(now, other, page) and self._start_of(now, other) == start:
                return SAME_SERVER
        return None

    def _new(self, now: float, page: Scrape, named: tuple[str, str]) -> EngineTrack:
        """The track of an engine that this page names first. It takes over the track of that name whose target is no
        longer scraped. If that target still is, the smaller target keeps the name, whichever came first; the other
        gets its container or port added to the label ``engine``.
        """
        model, engine = named
        key = EngineKey(page.namespace, page.pod, model, engine)
        other = self._tracks.get(key)
        if other is not None and self._is_other(now, other, page):
            if page.target > other.target:
                key = self._disambiguate(
                    now, key, page.target, page.container if page.container != other.container else "", page
                )
            else:
                del self._tracks[key]
                apart = other.container if other.container != page.container else ""
                other.rename(self._disambiguate(now, key, other.target, apart, page))
                self._tracks[other.key] = other
        if key not in self._tracks:
            self._tracks[key] = self._begun(key, page, named)
        return self._tracks[key]

    def _begun(self, key: EngineKey, page: Scrape, named: tuple[str, str]) -> EngineTrack:
        track = EngineTrack(key, page, self._thresholds, named)
        track.uid = self.pods.get(track.pod)
        return track

    def _disambiguate(self, now: float, key: EngineKey, target: str, container: str, page: Scrape) -> EngineKey:
        """``key`` with what distinguishes ``target`` in its pod: the container's name, else the port, else the whole
        target.
        """
        apart = (container, str(urlsplit(target).port or ""), target)
        keys = [replace(key, engine=f"{key.engine}/{each}") for each in apart if each]
        return next(
            (
                each
                for each in keys
                if each not in self._tracks
                or self._tracks[each].target == target
                or not self._is_other(now, self._tracks[each], page)
            ),
            keys[-1],
        )

    def _is_other(self, now: float, track: EngineTrack, page: Scrape) -> bool:
        """Whether the track's target is another one than the page's and is still scraped."""
        if track.target == page.target or not self._is_read(track.target):
            return False
        return self._known is not None or 0 <= now - track.seen_t <= self._thresholds["stale_page_seconds"]

    def _start_of(self, now: float, track: EngineTrack) -> float | None:
        """Start time of the process that was scraped recently; ``None`` without one."""
        page = track.tracker.page
        fresh = page is not None and 0 <= now - page.time <= self._thresholds["stale_page_seconds"]
        return page.page.get(PROCESS_START) if page is not None and fresh else None

    def _is_read(self, target: str) -> bool:
        return self._known is None or target in self._known

    def _drop(self, tracks: Iterable[EngineTrack]) -> None:
        for track in list(tracks):
            del self._tracks[track.key]

    def _drop_missing(self, tracks: list[EngineTrack]) -> None:
        """Fail the engines that the page no longer has, and drop the oldest beyond the limit, because an endpoint may
        rename its engines at every scrape.
        """
        # one without a reading was only a name from the arguments until the page told the right one
        self._drop(track for track in tracks if track.tracker.window.last is None)
        gone = sorted((track for track in tracks if track.key in self._tracks), key=lambda track: track.seen_t)
        for track in gone:
            track.lose(ABSENT)
        self._drop(gone[: -max(1, MAX_GONE_ENGINES // len(self._targets))])
