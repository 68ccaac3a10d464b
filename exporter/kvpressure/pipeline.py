"""Snapshot in, published state out: the one path that live, demo and replay share.

Time comes from the snapshots. What the pipeline keeps is bounded: engines, containers and GPUs that have not been
seen for ``FORGET_SECONDS`` are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from kvpressure.args import EngineArgs
from kvpressure.diagnosis import advice
from kvpressure.readings import (
    ContainerReading,
    EngineKey,
    EnginePage,
    GpuReading,
    Snapshot,
)
from kvpressure.signals import limits as limit_signals
from kvpressure.signals import memory
from kvpressure.signals.context import Shape
from kvpressure.signals.engine import Surroundings
from kvpressure.signals.limits import InForce
from kvpressure.signals.model import KvSignals, Signals
from kvpressure.signals.pool import from_configuration as pool_from_configuration
from kvpressure.state import (
    LIMITS,
    ContainerState,
    Diagnosis,
    EngineState,
    GpuState,
    Limit,
    State,
    TargetState,
)
from kvpressure.thresholds import Thresholds, builtin
from kvpressure.tracks import ContainerTrack, EngineTrack, GpuTrack

FORGET_SECONDS: Final = 300.0
ABSENT: Final = "absent"  # why an engine is down whose page has only others
MAX_GONE_ENGINES: Final = 64  # of all targets, kept until they are forgotten although their pages have others now
MAX_COMMAND_LINES: Final = 256  # understood ones that are remembered
_NO_SIGNALS: Final[Mapping[str, int]] = {}
_NO_FIGURES: Final[Mapping[str, float]] = {}

ContainerKey = tuple[str, str, str]


class Pipeline:
    """Keeps the windows of every engine and turns each snapshot into a state."""

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self._thresholds = thresholds or builtin()
        self._engines: dict[EngineKey, EngineTrack] = {}
        self._containers: dict[ContainerKey, ContainerTrack] = {}
        self._gpus: dict[str, GpuTrack] = {}
        self._target_errors: dict[str, dict[str, int]] = {}
        self._targets: dict[str, TargetState] = {}
        self._args: dict[object, EngineArgs] = {}  # by command line and environment

    def observe(self, snapshot: Snapshot) -> State:
        """Take one snapshot and say what is the case now."""
        now = snapshot.time
        for gpu in snapshot.gpus:
            self._gpu(gpu.uuid).observe(now, gpu)
        for reading in snapshot.containers:
            track = self._container((reading.namespace, reading.pod, reading.container))
            track.window.observe(now, reading)
            track.seen_t = now
        for line in snapshot.logs:
            self._container((line.namespace, line.pod, line.container)).take_line(now, line)
        for page in snapshot.pages:
            self._take_page(now, page)
        for stats in snapshot.steps:
            for engine in self._engines.values():
                if (engine.key.namespace, engine.key.pod, engine.key.engine) == (stats.namespace, stats.pod, stats.engine):
                    engine.tracker.steps.observe(stats)
        owners = _owners_by_pod(snapshot)
        self._forget(now, snapshot.targets)
        engines, empty_pools = self._engine_states(now, snapshot, owners)
        return State(
            time=now, engines=engines, gpus=self._gpu_states(snapshot, empty_pools), owners=snapshot.owners,
            containers=self._container_states(snapshot), targets=tuple(self._targets.values()),
            node_conditions=snapshot.node_conditions, health=snapshot.health, expected_gpus=snapshot.expected_gpus,
        )

    # --- taking in ------------------------------------------------------------------------------------------

    def _container(self, key: ContainerKey) -> ContainerTrack:
        if key not in self._containers:
            self._containers[key] = ContainerTrack(self._thresholds)
        return self._containers[key]

    def _gpu(self, uuid: str) -> GpuTrack:
        if uuid not in self._gpus:
            self._gpus[uuid] = GpuTrack(self._thresholds)
        return self._gpus[uuid]

    def _take_page(self, now: float, page: EnginePage) -> None:
        errors = self._target_errors.setdefault(page.target, {})
        if page.error is not None:
            errors[page.error] = errors.get(page.error, 0) + 1
        self._targets[page.target] = TargetState(page.target, page.error is None, page.duration_seconds, page.bad_lines,
                                                 dict(errors), page.cut)
        known = [track for track in self._engines.values()
                 if track.target == page.target and track.key.namespace == page.namespace
                 and track.key.pod == page.pod]
        if page.error is not None or not page.engines:
            if not known:
                self._engine(EngineKey(page.namespace, page.pod, self._model_from_args(page), "0"), page)
                known = [self._engines[EngineKey(page.namespace, page.pod, self._model_from_args(page), "0")]]
            for track in known:
                track.tracker.fail(page.error or ABSENT)
                track.seen_t = now
            return
        present = {EngineKey(page.namespace, page.pod, reading.model_name, reading.engine): reading
                   for reading in page.engines}
        for track in known:
            if track.key not in present and track.tracker.window.last is None:
                del self._engines[track.key]  # was only a name from the arguments until the page told the right one
        gone = sorted((track for track in known if track.key not in present and track.key in self._engines),
                      key=lambda track: track.seen_t)
        for track in gone:
            track.tracker.fail(ABSENT)
        for track in gone[:-max(1, MAX_GONE_ENGINES // len(self._targets))]:
            del self._engines[track.key]  # a page that renames its engines every second is no reason to keep them all
        for key, reading in present.items():
            track = self._engine(key, page)
            track.target, track.container, track.gpus = page.target, page.container, page.gpus
            track.seen_t = now
            if track.tracker.observe(page, reading):
                last = track.tracker.window.last
                track.counters = {**last.counters, **last.page} if last else {}

    def _engine(self, key: EngineKey, page: EnginePage) -> EngineTrack:
        if key not in self._engines:
            self._engines[key] = EngineTrack(key, page, self._thresholds)
        return self._engines[key]

    def _parsed(self, page: EnginePage) -> EngineArgs:
        key = (page.args, tuple(page.env.items()))
        if key not in self._args:
            if len(self._args) > MAX_COMMAND_LINES:
                self._args.clear()
            self._args[key] = limit_signals.from_page(page)
        return self._args[key]

    def _model_from_args(self, page: EnginePage) -> str:
        args = self._parsed(page)
        return args.served_model_name or args.model or ""

    def _forget(self, now: float, targets: Sequence[str] | None) -> None:
        """Drop what is gone: engines whose target was removed at once, everything else after a while (or when the clock
        stepped back and it was seen in what is now the future).
        """
        known = None if targets is None else set(targets)
        for key in [key for key, track in self._engines.items()
                    if abs(now - track.seen_t) > FORGET_SECONDS or (known is not None and track.target not in known)]:
            del self._engines[key]
        for uuid in [uuid for uuid, gpu in self._gpus.items() if abs(now - gpu.seen_t) > FORGET_SECONDS]:
            del self._gpus[uuid]
        for name in [name for name, held in self._containers.items() if abs(now - held.seen_t) > FORGET_SECONDS]:
            del self._containers[name]
        alive = {track.target for track in self._engines.values()}
        for target in [target for target in self._targets if target not in alive]:
            del self._targets[target]
            self._target_errors.pop(target, None)

    # --- concluding -----------------------------------------------------------------------------------------

    def _engine_states(self, now: float, snapshot: Snapshot, owners: Mapping[tuple[str, str], tuple[str, ...]],
                       ) -> tuple[tuple[EngineState, ...], dict[str, list[float | None]]]:
        first: list[tuple[EngineTrack, Surroundings, KvSignals, Shape, Mapping[str, InForce], tuple[str, ...]]] = []
        empty_pools: dict[str, list[float | None]] = {}
        for track in self._engines.values():
            gpus = track.gpus or owners.get((track.key.namespace, track.key.pod), ())
            around, found_limits = self._surroundings(now, track, gpus, snapshot)
            cache, shape = track.tracker.kv_signals(around)
            pool = around.facts.get("pool_bytes")
            empty = None if pool is None or cache.kv_used_ratio is None else pool * (1.0 - cache.kv_used_ratio)
            for uuid in gpus:
                empty_pools.setdefault(uuid, []).append(empty)
            first.append((track, around, cache, shape, found_limits, gpus))
        states = []
        for track, around, cache, shape, found_limits, gpus in first:
            demands = [self._demand(now, uuid, empty_pools) for uuid in gpus]
            known = [demand for demand in demands if demand is not None]
            around = replace(around, demand=max(known) if known and len(known) == len(demands) else None)
            states.append(self._engine_state(now, track, around, cache, shape, found_limits, gpus))
        return tuple(states), empty_pools

    def _surroundings(self, now: float, track: EngineTrack, gpus: Iterable[str],
                      snapshot: Snapshot) -> tuple[Surroundings, Mapping[str, InForce]]:
        key, page, reading = track.key, track.tracker.page, track.tracker.reading
        container = self._containers.get((key.namespace, key.pod, track.container))
        known_gpus = [self._gpus[uuid] for uuid in gpus if uuid in self._gpus]
        windows = [gpu.window for gpu in known_gpus if self._fresh(gpu.window.last_t, now)]
        facts = dict(container.facts) if container else {}
        found_limits: Mapping[str, InForce] = {}
        merged = EngineArgs()
        if page is not None:
            merged = self._parsed(page).merged(container.logged) if container and container.logged else self._parsed(page)
            gpu = known_gpus[0].window.last if known_gpus else None  # the card stays what it is between two readings
            found_limits = limit_signals.in_force(self._parsed(page), container.logged if container else None, facts,
                                                  reading.cache_config if reading else {}, self._version(track), page.flavour, gpu)
            if "pool_bytes" not in facts:
                pool = pool_from_configuration(merged, reading.cache_config if reading else {}, len(page.engines))
                if pool is not None:
                    facts["pool_bytes"] = pool
        pod = (key.namespace, key.pod)
        allocator = [rank for rank in snapshot.allocator if (rank.namespace, rank.pod) == pod]
        seqs, length = found_limits.get("max_num_seqs"), found_limits.get("max_model_len")
        return Surroundings(
            now=now, gpus=windows,
            container=container.window if container and self._fresh(container.window.last_t, now) else None,
            allocator=allocator, processes=_process_bytes_of(snapshot, pod) if allocator else (),
            facts=facts, events=container.recent_events(now) if container else _NO_SIGNALS,
            events_known=container.seen_log if container else False,
            oom=container.recent_oom(now) if container else _NO_FIGURES,
            gpu_faults=sum(gpu.recent_faults(now) for gpu in known_gpus) if known_gpus else None,
            max_num_seqs=seqs.value if seqs else None, max_num_seqs_source=seqs.source if seqs else None,
            max_model_len=length.value if length else None, args=merged,
            first_t=track.first_t,
        ), found_limits

    def _version(self, track: EngineTrack) -> str | None:
        """Version of vLLM: as logged at start, else as the discovery of the page knows it."""
        container = self._containers.get((track.key.namespace, track.key.pod, track.container))
        logged = container.version if container else None
        return logged or (track.tracker.page.version if track.tracker.page else None)

    def _fresh(self, read_at: float, now: float) -> bool:
        """Whether a reading still describes this moment: its source may have died since."""
        return now - read_at <= self._thresholds["stale_page_seconds"]

    def _demand(self, now: float, uuid: str, empty_pools: Mapping[str, Sequence[float | None]]) -> float | None:
        gpu = self._gpus.get(uuid)
        if gpu is None or gpu.window.last is None or not self._fresh(gpu.window.last_t, now):
            return None
        return memory.demand_ratio(gpu.window.last, empty_pools.get(uuid, ()))

    def _engine_state(self, now: float, track: EngineTrack, around: Surroundings, cache: KvSignals, shape: Shape,
                      found_limits: Mapping[str, InForce], gpus: tuple[str, ...]) -> EngineState:
        tracker, page = track.tracker, track.tracker.page
        signals = tracker.signals(around, cache, shape)
        utilization = found_limits.get("gpu_memory_utilization")
        diagnosis = track.diagnoser.diagnose(signals, tracker.recent_waiting(), tracker.window.samples_seen,
                                             utilization.value if utilization else None)
        up = diagnosis.evidence["page_fresh"].value is True
        return EngineState(
            key=track.key, target=track.target, container=track.container, gpus=gpus, up=up, error=tracker.error,
            version=self._version(track), flavour=page.flavour if page else None,
            reading=tracker.reading if up else None, counters=track.counters if up else {},
            signals=signals if up else Signals(time=now, host=signals.host, progress=signals.progress,
                                                      events=signals.events, events_known=signals.events_known,
                                                      oom=signals.oom),
            diagnosis=diagnosis, limits=self._limits(track, signals, diagnosis, found_limits),
        )

    def _limits(self, track: EngineTrack, s: Signals, diagnosis: Diagnosis,
                found: Mapping[str, InForce]) -> dict[str, Limit]:
        t = self._thresholds
        finished = s.context.context_max_5m if s.context.prompt_quantiles else None  # whole requests, not their prefill
        longest = track.longest.observe(s.time, finished, diagnosis.verdict)
        values = {name: found[name].value if name in found else None for name in LIMITS}
        confident = diagnosis.verdict if diagnosis.confidence >= t["confident"] else "unknown"
        recommended = {
            "max_num_seqs": advice.max_num_seqs(s, confident, t),
            "max_num_batched_tokens": advice.max_num_batched_tokens(values["max_num_batched_tokens"], confident, t),
            "gpu_memory_utilization": advice.gpu_memory_utilization(
                s, values["gpu_memory_utilization"], diagnosis.conditions.get("gpu_out_of_memory"), t),
            "max_model_len": advice.max_model_len(longest, values["max_model_len"], confident, t),
        }
        return {name: Limit(name, values[name], found[name].explicit if name in found else None,
                            found[name].source if name in found else None, recommended[name])
                for name in LIMITS if values[name] is not None or recommended[name] is not None}

    def _gpu_states(self, snapshot: Snapshot,
                    empty_pools: Mapping[str, Sequence[float | None]]) -> tuple[GpuState, ...]:
        return tuple(GpuState(gpu, self._demand(snapshot.time, gpu.uuid, empty_pools), _process_bytes(gpu, snapshot.process_pods))
                     for gpu in snapshot.gpus)

    def _container_states(self, snapshot: Snapshot) -> tuple[ContainerState, ...]:
        """Containers read now; one that only its log tells of, or whose source fails, has its events and nothing else."""
        states = []
        for key, track in self._containers.items():
            window = track.window
            if window.last is not None and window.last_t == snapshot.time:
                states.append(ContainerState(window.last, window.throttled_ratio(), window.cpu_used_ratio(),
                                             window.memory_used_ratio(), dict(track.counts)))
            elif window.last is None or not snapshot.containers:
                states.append(ContainerState(ContainerReading(*key), log_events=dict(track.counts)))
        return tuple(states)


def _process_bytes(gpu: GpuReading, pods: Mapping[int, tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Device memory of processes by pod, as far as the driver tells the memory and the host the pod."""
    sums: dict[tuple[str, str], int] = {}
    for process in gpu.processes:
        if process.used_bytes is not None and process.pid in pods:
            sums[pods[process.pid]] = sums.get(pods[process.pid], 0) + process.used_bytes
    return sums


def _process_bytes_of(snapshot: Snapshot, pod: tuple[str, str]) -> list[int]:
    """Device memory of a pod's processes on each GPU that has some; empty where it is not known of one of them."""
    found = []
    for gpu in snapshot.gpus:
        sizes = [process.used_bytes for process in gpu.processes if snapshot.process_pods.get(process.pid) == pod]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return []
        if known:
            found.append(sum(known))
    return found


def _owners_by_pod(snapshot: Snapshot) -> dict[tuple[str, str], tuple[str, ...]]:
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for owner in snapshot.owners:
        pod = (owner.namespace, owner.pod)
        if owner.uuid not in found.get(pod, ()):
            found[pod] = (*found.get(pod, ()), owner.uuid)
    return found
