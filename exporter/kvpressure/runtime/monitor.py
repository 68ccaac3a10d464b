"""The loop: gathers readings into snapshots, and publishes what the pipeline concludes.

Every source reads in its own worker (``kvpressure.runtime.worker``), so that a slow or hanging one delays no other. A
tick takes what is available, never waits for a source, and publishes by one assignment to ``Monitor.state``;
renderers only read that attribute.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kvpressure.capacity import own_models
from kvpressure.model.isolation import TICK, FailureLog
from kvpressure.model.readings import Snapshot, SourceHealth
from kvpressure.model.reasons import INTERNAL
from kvpressure.model.state import RecorderHealth, State
from kvpressure.pipeline.joins import join_containers, join_owners
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.runtime.worker import Worker, next_due
from kvpressure.sources.base import FatalSourceError, Reading, Source, SourceError
from kvpressure.sources.catalog import SourceSpec, registry

if TYPE_CHECKING:
    from kvpressure.settings.settings import Settings

log = logging.getLogger(__name__)

PIPELINE: Final = "pipeline"  # the pipeline's own entry among the sources' health
HEARTBEAT_SECONDS: Final = 30.0  # a loop that has not ticked for this long (or 5 ticks) is dead
HANG_SECONDS: Final = 600.0  # a read that hangs this long needs a new process
FIRST_TICK_SECONDS: Final = 1.0  # maximum wait of the first tick for every source to answer
LATE_INTERVALS: Final = 2  # a tick that comes later than this many intervals waits like the first one
STOP_SECONDS: Final = 0.8  # bound of a clean stop, whatever hangs

Listener = Callable[[Snapshot, State], None]


class Monitor:
    """Drives sources and pipeline. ``state``: the newest state, swapped as a whole. ``fatal``: set when only a new
    process can help; ``wait`` then returns. ``recorder``, ``web_refused``: what tells the health of the flight recorder
    (one of the listeners), and the counts of refused connections and requests.

    Snapshots have wall-clock time; schedules and deadlines use the monotonic clock, so a clock step does not move
    them.
    """

    def __init__(
        self,
        sources: Mapping[str, tuple[SourceSpec, Source]],
        pipeline: Pipeline,
        interval: float = 1.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.interval = interval
        self.fatal: FatalSourceError | None = None
        self.recorder: Callable[[], RecorderHealth | None] = lambda: None
        self.web_refused: Callable[[], Mapping[str, int]] = dict
        self.workers = {
            name: Worker(spec, source, self._on_fatal, clock=clock, wall=wall)
            for name, (spec, source) in sources.items()
        }
        self.state = State(time=wall())
        self._pipeline = pipeline
        self._clock = clock
        self._wall = wall
        self._listeners: list[Listener] = []
        self._health = SourceHealth(PIPELINE)
        self._ticks = 0
        self._beat = clock()
        self._stop = threading.Event()
        self._failures = FailureLog()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def add_listener(self, listener: Listener) -> None:
        """Call ``listener(snapshot, state)`` after every tick, in the loop's thread. Its exceptions are logged."""
        self._listeners.append(listener)

    def start(self) -> None:
        """Start the workers and the loop."""
        for worker in self.workers.values():
            worker.start(self._stop)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the monitor was stopped or a source was fatal; False when ``timeout`` passed first."""
        return self._stop.wait(timeout)

    def stop(self) -> None:
        """Stop within ``STOP_SECONDS``; hanging daemon threads are left behind."""
        self._stop.set()
        end = time.monotonic() + STOP_SECONDS
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS / 4)
        for worker in self.workers.values():
            worker.join(max(0.0, end - STOP_SECONDS / 2 - time.monotonic()))
        closers = [
            threading.Thread(target=_close, args=(worker.source,), name=f"close-{name}", daemon=True)
            for name, worker in self.workers.items()
        ]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(max(0.0, end - time.monotonic()))

    def tick(self, lag: float = 0.0) -> State:
        """Gather, conclude, publish. Never waits for a source and never raises."""
        now = self._clock()
        readings = [reading for worker in self.workers.values() if (reading := worker.take(now)) is not None]
        health = {name: worker.health(now) for name, worker in self.workers.items()}
        snapshot = self._gathered(self._wall(), readings, health)
        self._ticks += 1
        state = self._observe(snapshot)
        state = replace(
            state,
            ticks=self._ticks,
            lag_seconds=max(0.0, lag),
            health={**health, PIPELINE: self._health},
            recorder=self.recorder(),
            web_refused=self.web_refused(),
        )
        self.state = state
        self._beat = self._clock()
        for listener in self._listeners:
            try:
                listener(snapshot, state)
            except Exception as error:
                self._failures.add("a listener", TICK, error)
        return state

    def why_unhealthy(self) -> str | None:
        """Why a new process is needed; ``None`` while the loop ticks.

        A hanging read counts only after ``HANG_SECONDS``: a call into a driver cannot be cancelled, and until then
        everything else still works.
        """
        now = self._clock()
        silent = now - self._beat
        if silent > max(HEARTBEAT_SECONDS, 5 * self.interval):
            return f"no tick for {silent:.0f} s"
        for name, worker in self.workers.items():
            hanging = worker.hanging_seconds(now)
            if hanging > HANG_SECONDS:
                return f"source {name} has been hanging for {hanging:.0f} s"
        return None

    def why_not_ready(self) -> str | None:
        """What is missing after the start; ``None`` once every source has answered or failed once."""
        waiting = [name for name, worker in self.workers.items() if not worker.answered]
        if waiting:
            return f"waiting for {', '.join(waiting)}"
        return "waiting for the first tick" if self._ticks == 0 else None

    def _run(self) -> None:
        self._wait_while(lambda worker: not worker.answered, min(self.interval, FIRST_TICK_SECONDS))
        planned = due = self._clock()
        while not self._stop.is_set():
            self._beat = self._clock()
            lag = self._beat - planned
            if lag > LATE_INTERVALS * self.interval:  # the process stood still, and so did what reads the sources
                self._wait_while(lambda worker: worker.behind(self._clock()), FIRST_TICK_SECONDS)
            self.tick(lag)
            planned = due + self.interval  # a tick that takes longer than that makes the next one late
            due = next_due(due, self.interval, self._clock())
            self._stop.wait(max(0.0, due - self._clock()))

    def _wait_while(self, unfinished: Callable[[Worker], bool], seconds: float) -> None:
        """Wait at most ``seconds`` while ``unfinished`` is true of some worker."""
        limit = self._clock() + seconds
        while self._clock() < limit and any(map(unfinished, self.workers.values())):
            if self._stop.wait(0.01):
                return

    def _gathered(self, now: float, readings: list[Reading], health: Mapping[str, SourceHealth]) -> Snapshot:
        """The readings joined; if two cannot be joined, those that need no join."""
        try:
            return _snapshot(now, readings, health)
        except Exception as error:
            self._failures.add("joining the sources' readings", TICK, error)
        alone: list[Reading] = []
        for reading in readings:
            try:
                _snapshot(now, [*alone, reading], health)
            except Exception as error:
                self._failures.add("joining one source's reading", TICK, error)
                continue
            alone.append(reading)
        return _snapshot(now, alone, health)

    def _observe(self, snapshot: Snapshot) -> State:
        """The pipeline's state; after an exception, one with only the sources' health."""
        started = self._clock()
        try:
            state = self._pipeline.observe(snapshot)
        except Exception as error:
            self._failures.add("the pipeline", TICK, error)
            self._health = self._health.failed(INTERNAL)
            return State(time=snapshot.time)
        self._health = replace(
            self._health, up=True, reason=None, last_success=snapshot.time, duration_seconds=self._clock() - started
        )
        return state

    def _on_fatal(self, error: FatalSourceError) -> None:
        self.fatal = error
        self._stop.set()


def _snapshot(now: float, readings: Iterable[Reading], health: Mapping[str, SourceHealth]) -> Snapshot:
    readings = list(readings)

    def gathered(kind: str) -> tuple[Any, ...]:
        return tuple(item for reading in readings for item in getattr(reading, kind) or ())

    return Snapshot(
        time=now,
        gpus=gathered("gpus"),
        pages=gathered("pages"),
        containers=join_containers(gathered("containers")),
        owners=join_owners(gathered("owners")),
        logs=gathered("logs"),
        allocator=gathered("allocator"),
        steps=gathered("steps"),
        caches=gathered("caches"),
        node_conditions=gathered("node_conditions"),
        discovered=gathered("discovered"),
        health=health,
        targets=gathered("targets") if any(reading.targets is not None for reading in readings) else None,
        pods=_pods(readings),
        process_pods={pid: pod for reading in readings for pid, pod in (reading.process_pods or {}).items()},
        expected_gpus={vendor: n for reading in readings for vendor, n in (reading.expected_gpus or {}).items()},
    )


def _pods(readings: Iterable[Reading]) -> dict[tuple[str, str], str] | None:
    named = [reading.pods for reading in readings if reading.pods is not None]
    return {name: uid for pods in named for name, uid in pods.items()} if named else None


def _close(source: Source) -> None:
    try:
        source.close()
    except Exception:
        log.debug("closing %s failed", source.name, exc_info=True)


class DeferredSource:
    """A source built by its first read, in its own worker: a hanging or missing library delays no start, and a failed
    build is repeated at the next read (except for a missing library).
    """

    def __init__(self, name: str, build: Callable[[], Source]) -> None:
        self.name = name
        self._build = build
        self._source: Source | None = None
        self._missing: str | None = None

    def read(self) -> Reading:
        """Read, after building if necessary. Raises ``SourceError("not_installed")`` without the library."""
        if self._missing is not None:
            raise SourceError("not_installed", self._missing)
        if self._source is None:
            try:
                self._source = self._build()
            except ImportError as error:
                self._missing = str(error)
                raise SourceError("not_installed", self._missing) from error
        return self._source.read()

    def close(self) -> None:
        """Close the source if it was built."""
        if self._source is not None:
            self._source.close()


def build_sources(settings: Settings) -> dict[str, tuple[SourceSpec, Source]]:
    """The sources that are switched on, with the intervals and deadlines of the settings."""
    sources: dict[str, tuple[SourceSpec, Source]] = {}
    for name, spec in registry().items():
        chosen = settings.collectors[name]
        if not chosen.enabled:
            continue
        # A slower source is held longer in proportion, so that it stays part of the snapshots between two reads.
        stretch = max(1.0, chosen.interval_seconds / spec.interval_seconds)
        tuned = replace(
            spec,
            interval_seconds=chosen.interval_seconds,
            deadline_seconds=chosen.deadline_seconds,
            hold_seconds=spec.hold_seconds * stretch,
        )

        def build(spec: SourceSpec = spec) -> Source:
            built: Source = spec.factory(settings)
            return built

        sources[name] = (tuned, DeferredSource(name, build))
    return sources


def monitor_of(settings: Settings) -> Monitor:
    """The monitor that the settings ask for: their sources, thresholds and models. Raises ``InputError``."""
    models = {target.name: target.model_config for target in settings.engine_targets if target.model_config}
    shapes = own_models.read(settings.engine_model_configs, models)
    pipeline = Pipeline(settings.thresholds, shapes, settings.shared.give_way)
    monitor = Monitor(build_sources(settings), pipeline, settings.interval_seconds)
    monitor.add_listener(settings.shared.observe)
    return monitor
