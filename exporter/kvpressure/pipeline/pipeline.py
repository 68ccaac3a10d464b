"""Snapshot in, published state out: the path that live, demo and replay share.

Time comes from the snapshots. Memory is bounded: engines, containers and GPUs not seen for ``FORGET_SECONDS`` are
dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from kvpressure import redaction
from kvpressure.advice.mitigation import explained
from kvpressure.capacity.own_models import ModelShapes
from kvpressure.diagnosis.diagnose import compared
from kvpressure.diagnosis.finding import Recent
from kvpressure.engines.base import EngineDialect, Features, Known, Tier
from kvpressure.engines.registry import dialect
from kvpressure.model.arguments import EngineArgs
from kvpressure.model.frozen import frozen
from kvpressure.model.isolation import NODE, TARGET, TICK, Failure, Guard
from kvpressure.model.readings import (
    CacheReading,
    ContainerReading,
    GpuOwner,
    GpuReading,
    LogLine,
    Scrape,
    Snapshot,
    StepStats,
)
from kvpressure.model.signals import Signals
from kvpressure.model.state import (
    Cause,
    ContainerState,
    EngineState,
    GpuState,
    Limit,
    State,
    engine_without_values,
    limit_of,
)
from kvpressure.pipeline.engines import (
    FORGET_SECONDS,
    ContainerTrack,
    Engines,
    EngineTrack,
    GpuTrack,
    SubjectTrack,
    is_gone,
)
from kvpressure.pipeline.pods import EnginesAround, Pods
from kvpressure.settings.thresholds import Thresholds, builtin
from kvpressure.signals import kv
from kvpressure.signals.hardware import EngineContext, GpuContext, GpuWindow, LimitContext, LogContext
from kvpressure.signals.kv import PoolSizes
from kvpressure.signals.requests import objectives

MAX_COMMAND_LINES: Final = 256  # parsed ones, cached

ContainerKey = tuple[str, str, str]
T = TypeVar("T")


@frozen
class _GatheredEngine:
    """An engine before the required memory of its GPUs is known, which depends on all engines on them. ``conclude``:
    its state, given that. ``own_gpus``: those that hold its KV pool, ``None`` = unknown. ``pool_bytes``: its pool on
    each; ``empty_bytes``: the unused part.
    """

    gpus: tuple[str, ...]
    conclude: Callable[[_GpuDemand], EngineState]
    own_gpus: tuple[str, ...] | None = None
    pool_bytes: float | None = None
    empty_bytes: float | None = None


@frozen
class _GpuDemand:
    """Second phase: required memory of each GPU."""

    windows: Mapping[str, GpuWindow]  # of GPUs that were read recently
    pools: Mapping[str, Sequence[_GatheredEngine | None]]  # by GPU, each engine that is or may be on it

    def of(self, uuid: str) -> float | None:
        """Required share of one GPU's memory, 0-1; ``None`` if unknown."""
        return self._without(uuid, [engine.empty_bytes if engine else None for engine in self.pools.get(uuid, ())])

    def floor(self, uuid: str) -> float | None:
        """Share of one GPU's memory that is in use outside KV pools, 0-1; ``None`` if unknown, or without an engine."""
        return self._without(uuid, [engine.pool_bytes if engine else None for engine in self.pools.get(uuid, (None,))])

    def _without(self, uuid: str, sizes: Sequence[float | None]) -> float | None:
        window = self.windows.get(uuid)
        return None if window is None or window.last is None else kv.demand_ratio(window.last, sizes)

    def each(self, uuids: Sequence[str]) -> tuple[tuple[float, float | None], ...]:
        """The required share of each GPU where it is known, with its floor."""
        return tuple((share, self.floor(uuid)) for uuid in uuids if (share := self.of(uuid)) is not None)


def _largest(demands: Sequence[tuple[float, float | None]], least: int) -> float | None:
    """The largest required share of those known; ``None`` if there are fewer than ``least``: another is unknown, or on
    another node.
    """
    return max(share for share, _ in demands) if len(demands) >= least else None


class Pipeline:
    """Turns snapshots into states, with windows of every engine. ``give_way``, called between subjects, may wait."""

    def __init__(
        self,
        thresholds: Thresholds | None = None,
        shapes: ModelShapes | None = None,
        give_way: Callable[[], object] = int,
    ) -> None:
        self._thresholds = thresholds or builtin()
        self._give_way = give_way
        self._pools = PoolSizes(shapes)
        self._pods = Pods(self._thresholds)
        self._guard = Guard(TICK)
        self._engines = Engines(self._thresholds)
        self._containers: dict[ContainerKey, ContainerTrack] = {}
        self._gpus: dict[str, GpuTrack] = {}
        self._args: dict[object, EngineArgs] = {}  # by command line and environment

    def observe(self, snapshot: Snapshot) -> State:
        """Take one snapshot; return the state now."""
        now = snapshot.time
        self._engines.set_present(snapshot.targets, snapshot.pods)
        self._drop_containers_of_gone_pods(snapshot.pods)
        for gpu in snapshot.gpus:
            device = self._gpu(gpu.uuid)
            self._take(now, device, partial(device.observe, now, gpu))
        for reading in snapshot.containers:
            container = self._container(reading)
            self._take(now, container, partial(container.observe, now, reading))
        for line in snapshot.logs:
            self._take_line(now, line)
        for cache in snapshot.caches:
            self._take_cache(now, cache)
        for page in snapshot.pages:
            self._take_page(now, page)
        for stats in snapshot.steps:
            self._take_steps(now, stats)
        owners = _owners_by_pod(snapshot)
        self._engines.forget(now)
        self._forget(now)
        gathered = [self._gather(now, track, snapshot, owners) for track in self._engines]
        demand = self._gpu_demand(now, gathered, snapshot)
        alone = tuple(engine.conclude(demand) for engine in gathered)
        engines = self._guard.run(NODE, lambda: "pools", partial(compared, alone, self._thresholds), lambda _: alone)
        for engine in reversed(engines):  # of several on a GPU, the first
            for uuid in self._gpus.keys() & engine.gpus:
                self._gpus[uuid].take_engine(now, engine)
        pods = self._guard.run(NODE, lambda: "pods", partial(self._pods.observe, snapshot, engines), lambda _: ())
        return State(
            time=now,
            engines=engines,
            gpus=tuple(self._gpu_state(snapshot, gpu, demand) for gpu in snapshot.gpus),
            owners=snapshot.owners,
            containers=self._container_states(snapshot, EnginesAround(engines, pods, self._thresholds)),
            pods=pods,
            targets=self._engines.targets,
            node_conditions=snapshot.node_conditions,
            discovered=snapshot.discovered,
            health=snapshot.health,
            expected_gpus=snapshot.expected_gpus,
            failures=self._guard.counts,
        )

    def _guarded(self, now: float, track: SubjectTrack, work: Callable[[], T], without: Callable[[Failure], T]) -> T:
        """What ``work`` makes of a subject; ``without`` values when it raises, now or since the last reading."""

        def failed(failure: Failure) -> T:
            track.begin_anew(now, failure)
            return without(failure)

        self._give_way()
        if track.failure is not None:
            return without(track.failure)
        return self._guard.run(track.kind, lambda: track.name, work, failed)

    # --- taking in ------------------------------------------------------------------------------------------

    def _take(self, now: float, track: SubjectTrack, work: Callable[[], None]) -> None:
        """Take in a reading."""
        track.failure = None
        self._guarded(now, track, work, lambda _: None)

    def _take_line(self, now: float, line: LogLine) -> None:
        """Take a log line; one that raises is skipped."""
        track = self._container(line)
        self._guard.run(track.kind, lambda: track.name, partial(track.take_line, now, line), lambda _: None)

    def _take_page(self, now: float, page: Scrape) -> None:
        work = partial(self._engines.observe, now, page, self._model_from_args)
        listed = self._guard.run(TARGET, lambda: page.target, work, partial(self._engines.fail, now, page))
        for track, reading in listed or ():
            self._take(now, track, partial(track.observe, page, reading))

    def _take_steps(self, now: float, stats: StepStats) -> None:
        named = [
            engine
            for engine in self._engines
            if (engine.key.namespace, engine.key.pod, engine.named[1]) == (stats.namespace, stats.pod, stats.engine)
        ]
        if len(named) == 1:  # of two servers in a pod that count alike, it is unknown whose steps these are
            self._guarded(now, named[0], partial(named[0].tracker.steps.observe, stats), lambda _: None)

    def _take_cache(self, now: float, cache: CacheReading) -> None:
        named = [track for track in self._engines if (track.target, track.named[1]) == (cache.target, cache.engine)]
        if len(named) == 1:  # of two models that one endpoint counts alike, it is unknown whose cache this is
            self._guarded(now, named[0], partial(named[0].tracker.take_cache, cache), lambda _: None)

    def _container(self, of: ContainerReading | LogLine) -> ContainerTrack:
        key = (of.namespace, of.pod, of.container)
        if key not in self._containers:
            self._containers[key] = track = ContainerTrack(self._thresholds, *key)
            track.uid = self._engines.pods.get(track.pod)
        return self._containers[key]

    def _gpu(self, uuid: str) -> GpuTrack:
        if uuid not in self._gpus:
            self._gpus[uuid] = GpuTrack(self._thresholds, uuid)
        return self._gpus[uuid]

    def _parsed(self, page: Scrape) -> EngineArgs:
        key = (page.dialect, page.args, tuple(page.env.items()), page.args_source)
        if key not in self._args:
            if len(self._args) > MAX_COMMAND_LINES:
                self._args.clear()
            args = dialect(page.dialect).read_command(page.args, page.env).args
            self._args[key] = replace(args, source=page.args_source)
        return self._args[key]

    def _model_from_args(self, page: Scrape) -> str:
        args = self._parsed(page)
        return redaction.text(args.served_model_name or args.model or "")  # it may be a URL with a password

    def _forget(self, now: float) -> None:
        """Drop GPUs and containers that have not been seen for a while (or were seen in what is now the future, when
        the clock stepped back).
        """
        for uuid in [uuid for uuid, gpu in self._gpus.items() if abs(now - gpu.seen_t) > FORGET_SECONDS]:
            del self._gpus[uuid]
        for name in [name for name, held in self._containers.items() if abs(now - held.seen_t) > FORGET_SECONDS]:
            del self._containers[name]

    def _drop_containers_of_gone_pods(self, pods: Mapping[tuple[str, str], str] | None) -> None:
        if pods is not None:
            self._containers = {
                key: track for key, track in self._containers.items() if track.pod in pods and not is_gone(track, pods)
            }

    # --- concluding -----------------------------------------------------------------------------------------

    def _gather(
        self, now: float, track: EngineTrack, snapshot: Snapshot, owners: Mapping[tuple[str, str], Sequence[GpuOwner]]
    ) -> _GatheredEngine:
        def failed(failure: Failure) -> _GatheredEngine:
            return _GatheredEngine(gpus, lambda _: unknown(failure))

        work = partial(_gpus_of, track, owners.get(track.pod, ()))
        found = self._guard.run(track.kind, lambda: track.name, work, partial(track.begin_anew, now))
        gpus = track.last_gpus = _with_silent(track.gpus or found or (), track.last_gpus, snapshot.gpus)
        unknown = partial(self._engine_without_values, now, track, gpus)
        return self._guarded(now, track, partial(self._gathered, now, track, gpus, snapshot, unknown), failed)

    def _gathered(
        self,
        now: float,
        track: EngineTrack,
        gpus: tuple[str, ...],
        snapshot: Snapshot,
        unknown: Callable[[Failure], EngineState],
    ) -> _GatheredEngine:
        context, limits = self._context(now, track, gpus, snapshot, self._known(track, gpus))
        cache = track.tracker.kv_signals(context)
        pool, used = context.log.facts.get("pool_bytes"), cache.kv.kv_used_ratio
        empty = None if pool is None or used is None else pool * (1.0 - used)
        own_gpus = self._own_gpus(track, gpus, context.limits.args)

        def state(demand: _GpuDemand) -> EngineState:
            demands = demand.each(own_gpus or ())
            largest = _largest(demands, max(len(own_gpus or ()), context.limits.args.engine_gpus or 1))
            signals = track.tracker.signals(context, cache, largest, demands)
            found = self._engine_state(track, signals, limits, gpus)
            track.failed_since = None
            return found

        return _GatheredEngine(
            gpus, lambda demand: self._guarded(now, track, partial(state, demand), unknown), own_gpus, pool, empty
        )

    def _gpu_demand(self, now: float, engines: Sequence[_GatheredEngine], snapshot: Snapshot) -> _GpuDemand:
        pools: dict[str, list[_GatheredEngine | None]] = {}
        for engine in engines:
            for uuid in engine.gpus if engine.own_gpus is None else engine.own_gpus:
                pools.setdefault(uuid, []).append(None if engine.own_gpus is None else engine)
        for uuid in _with_unread_pools(snapshot, unplaced=any(not engine.gpus for engine in engines)):
            pools.setdefault(uuid, [None])
        fresh = {uuid: gpu.window for uuid, gpu in self._gpus.items() if self._fresh(gpu.window.last_t, now)}
        return _GpuDemand(fresh, pools)

    def _engine_without_values(
        self, now: float, track: EngineTrack, gpus: tuple[str, ...], failure: Failure
    ) -> EngineState:
        track.failed_since = now if track.failed_since is None else track.failed_since
        up = track.was_read and self._fresh(track.seen_t, now)
        return engine_without_values(
            track.key,
            track.target,
            track.container,
            gpus,
            track.group,
            track.pool,
            up,
            now,
            track.failed_since,
            failure,
        )

    def _own_gpus(self, track: EngineTrack, gpus: tuple[str, ...], args: EngineArgs) -> tuple[str, ...] | None:
        """The container's GPUs that hold this engine's KV pool; ``None`` if unknown.

        Data-parallel engines of one server share the container's GPUs: rank i has the i-th part of the visible
        devices (vLLM: ``set_device_control_env_var`` in ``v1/engine/utils.py``), in the driver's order.
        """
        page = track.tracker.page
        ranks = sorted((reading.engine for reading in page.engines), key=lambda name: (len(name), name)) if page else []
        if len(ranks) <= 1 or not gpus:
            return gpus
        needs = args.engine_gpus
        known = [(gpu.window.last.index, uuid) for uuid in gpus if (gpu := self._gpus.get(uuid)) and gpu.window.last]
        if needs is None or len(known) != needs * len(ranks) or len(known) < len(gpus):
            return None
        rank = ranks.index(track.named[1])
        return tuple(uuid for _, uuid in sorted(known)[rank * needs : (rank + 1) * needs])

    def _known(self, track: EngineTrack, gpus: Sequence[str]) -> Known | None:
        """Inputs of the engine's limits; ``None`` before its first scrape."""
        page = track.tracker.page
        if page is None:
            return None
        container = self._container_of(track)
        return Known(
            self._parsed(page),
            container.logged if container else None,
            container.facts if container else {},
            track.tracker.reading,
            self._version(track),
            page.flavour,
            # the GPU stays what it is between two readings
            next((self._gpus[uuid].window.last for uuid in gpus if uuid in self._gpus), None),
        )

    def _context(
        self, now: float, track: EngineTrack, gpus: Sequence[str], snapshot: Snapshot, known: Known | None
    ) -> tuple[EngineContext, Mapping[str, Limit]]:
        container = self._container_of(track)
        engine, page, last = _dialect_of(track), track.tracker.page, track.tracker.window.last
        args, features = EngineArgs(), Features()
        limits: Mapping[str, Limit] = {}
        if known is not None and page is not None:
            args, limits = known.merged, engine.limits(known)
            gauges = (*(last.gauges if last else ()), *page.page)
            features = engine.features(args, page.flavour, gauges).in_pool(track.pool)
        seqs, tokens, length = (
            limit_of(limits, name) for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
        )
        pod, reading = track.pod, track.tracker.reading
        allocator = [rank for rank in snapshot.allocator if (rank.namespace, rank.pod) == pod]
        return EngineContext(
            now=now,
            gpus=self._gpu_context(now, gpus, pod, snapshot, bool(allocator)),
            log=self._log_context(now, track, container, args, len(gpus)),
            limits=LimitContext(
                seqs.known,
                None if seqs.known is None else seqs.source,
                tokens.known,
                length.known,
                args,
                features,
                engine.tier(args, reading) if reading else Tier(),
            ),
            container=container.window if container and self._fresh(container.window.last_t, now) else None,
            allocator=allocator,
        ), limits

    def _log_context(
        self, now: float, track: EngineTrack, container: ContainerTrack | None, args: EngineArgs, gpus: int
    ) -> LogContext:
        page, reading = track.tracker.page, track.tracker.reading
        facts = dict(container.facts) if container else {}
        if page is not None:
            engines = page.engines_of_server(reading) if reading is not None else 1
            pool = _dialect_of(track).pool(args, reading, engines)
            several = gpus > 1 or bool(page.group)  # pods of its group on other nodes have more
            size = None if "pool_bytes" in facts else self._pools.of(args, pool, track.target, track.named[0], several)
            if size is not None:
                facts["pool_bytes"] = size
            if pool.blocks and pool.block_size:
                facts.setdefault("capacity_tokens", float(pool.blocks * pool.block_size))
        if container is None:
            return LogContext(facts)
        return LogContext(
            facts,
            container.recent_events(now),
            container.recent_oom(now),
            container.seen_log,
            container.told,
        )

    def _gpu_context(
        self, now: float, gpus: Sequence[str], pod: tuple[str, str], snapshot: Snapshot, allocator: bool
    ) -> GpuContext:
        known = [self._gpus[uuid] for uuid in gpus if uuid in self._gpus]
        windows = [gpu.window for gpu in known if self._fresh(gpu.window.last_t, now)]
        others = any(owner.uuid in gpus and (owner.namespace, owner.pod) != pod for owner in snapshot.owners)
        processes = _process_bytes_of(snapshot, pod) if allocator or others else {}
        return GpuContext(
            windows,
            others,
            own_bytes=tuple(processes.get(gpu.last.uuid) for gpu in windows if gpu.last),
            processes=tuple(processes.values()),
            faults=sum(gpu.recent_faults(now) for gpu in known) if known else None,
            kernel_faults=sum(gpu.recent_kernel_faults(now) for gpu in known),
        )

    def _container_of(self, track: EngineTrack) -> ContainerTrack | None:
        return self._containers.get((track.key.namespace, track.key.pod, track.container))

    def _version(self, track: EngineTrack) -> str | None:
        """Version of the server: as logged at start, else as published or discovered."""
        container = self._container_of(track)
        logged = container.version if container else None
        return logged or (track.tracker.page.version if track.tracker.page else None)

    def _fresh(self, read_at: float, now: float) -> bool:
        """Whether a reading is recent enough to describe ``now``."""
        return now - read_at <= self._thresholds["stale_page_seconds"]

    def _engine_state(
        self,
        track: EngineTrack,
        signals: Signals,
        limits: Mapping[str, Limit],
        gpus: tuple[str, ...],
    ) -> EngineState:
        tracker, page, t = track.tracker, track.tracker.page, self._thresholds
        diagnosis = track.diagnoser.diagnose(
            signals,
            Recent(*tracker.queue()),
            tracker.window.samples_seen,
            limit_of(limits, "gpu_memory_utilization").known,
        )
        up = diagnosis.evidence["page_fresh"].value is True
        return EngineState(
            key=track.key,
            target=track.target,
            container=track.container,
            gpus=gpus,
            up=up,
            error=tracker.error,
            rival_label=tracker.rival_label,
            version=self._version(track),
            flavour=page.flavour if page else None,
            dialect=page.dialect if page else "",
            group=track.group,
            pool=track.pool,
            reading=tracker.reading if up else None,
            counters=track.counters if up else {},
            signals=signals if up else signals.without_metrics(),
            diagnosis=diagnosis,
            limits=track.advised.observe(limits, signals, diagnosis, t),
            objectives=tuple(objectives(tracker.reading, track.counters, t)) if up and tracker.reading else (),
            explain=self._explain,
        )

    def _explain(self, engine: EngineState) -> Cause:
        return explained(engine, self._thresholds)

    def _gpu_state(self, snapshot: Snapshot, gpu: GpuReading, demand: _GpuDemand) -> GpuState:
        def state() -> GpuState:
            return GpuState(
                gpu, demand.of(gpu.uuid), demand.floor(gpu.uuid), _process_bytes(gpu, snapshot.process_pods), engine
            )

        track = self._gpu(gpu.uuid)
        engine = track.engine(snapshot.time)
        return self._guarded(snapshot.time, track, state, GpuState(gpu, engine=engine).without_values)

    def _container_states(self, snapshot: Snapshot, around: EnginesAround) -> tuple[ContainerState, ...]:
        """Containers read in this tick; one known only from its log, or whose source fails, has its log events only.
        One of a pod that is gone has nothing, although its last lines may still come.
        """
        states = [
            self._guarded(
                snapshot.time,
                track,
                partial(_container_state, key, track, snapshot, around),
                partial(_container_without_values, key, track),
            )
            for key, track in self._containers.items()
            if snapshot.pods is None or track.pod in snapshot.pods
        ]
        return tuple(state for state in states if state is not None)


def _container_without_values(
    key: ContainerKey, track: ContainerTrack, failure: Failure | None = None
) -> ContainerState:
    return ContainerState(ContainerReading(*key), log_events=dict(track.counts), failure=failure)


def _container_state(
    key: ContainerKey, track: ContainerTrack, snapshot: Snapshot, around: EnginesAround
) -> ContainerState | None:
    window, state = track.window, _container_without_values(key, track)
    if window.last is not None and window.last_t == snapshot.time:
        state = ContainerState(
            window.last,
            window.throttled_ratio(),
            window.cpu_used_ratio(),
            window.memory_used_ratio(),
            state.log_events,
        )
    elif window.last is not None and snapshot.containers:
        return None
    return around.completed(snapshot.time, state, track)


def _process_bytes(gpu: GpuReading, pods: Mapping[int, tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Device memory of a GPU's processes in bytes by pod, as far as driver and host report both."""
    sums: dict[tuple[str, str], int] = {}
    for process in gpu.processes:
        if process.used_bytes is not None and process.pid in pods:
            sums[pods[process.pid]] = sums.get(pods[process.pid], 0) + process.used_bytes
    return sums


def _process_bytes_of(snapshot: Snapshot, pod: tuple[str, str]) -> dict[str, int]:
    """Device memory in bytes of a pod's processes on each GPU; empty if it is unknown for one process."""
    found = {}
    for gpu in snapshot.gpus:
        sizes = [process.used_bytes for process in gpu.processes if snapshot.process_pods.get(process.pid) == pod]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return {}
        if known:
            found[gpu.uuid] = sum(known)
    return found


def _with_unread_pools(snapshot: Snapshot, unplaced: bool) -> set[str]:
    """GPUs, by UUID, that may hold the KV pool of an engine whose metrics are not read here: of a container that is
    not scraped, of a worker whose engine is on another node, and, where some engine's GPUs are unknown (``unplaced``),
    every GPU without an owner. A split GPU is counted with them, because engines are in its parts.
    """
    unread = {(one.namespace, one.pod, one.container) for one in snapshot.discovered if one.result == "no_target"}
    held = {
        owner.uuid
        for owner in snapshot.owners
        if owner.group or (owner.namespace, owner.pod, owner.container) in unread
    }
    split = {gpu.parent_uuid for gpu in snapshot.gpus if gpu.parent_uuid is not None}
    owned = {owner.uuid for owner in snapshot.owners}
    free = {gpu.uuid for gpu in snapshot.gpus if gpu.uuid not in owned} if unplaced else set()
    return held | split | free


def _owners_by_pod(snapshot: Snapshot) -> dict[tuple[str, str], list[GpuOwner]]:
    found: dict[tuple[str, str], list[GpuOwner]] = {}
    for owner in snapshot.owners:
        found.setdefault((owner.namespace, owner.pod), []).append(owner)
    return found


def _gpus_of(track: EngineTrack, owners: Iterable[GpuOwner]) -> tuple[str, ...]:
    """The GPUs of the engine's container; those of its pod where a container is unknown."""
    return tuple(
        dict.fromkeys(owner.uuid for owner in owners if not track.container or owner.container in ("", track.container))
    )


def _with_silent(gpus: tuple[str, ...], before: tuple[str, ...], readings: Iterable[GpuReading]) -> tuple[str, ...]:
    """An engine's GPUs, with those of ``before`` that do not answer: a driver lists no processes of a lost GPU."""
    missing = set(before).difference(gpus)
    silent = [gpu.uuid for gpu in readings if gpu.uuid in missing and gpu.error is not None] if missing else []
    return (*gpus, *silent)[: max(len(gpus), len(before))]


def _dialect_of(track: EngineTrack) -> EngineDialect:
    reading, page = track.tracker.reading, track.tracker.page
    return dialect(reading.dialect if reading else page.dialect if page else "")
