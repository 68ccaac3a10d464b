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
from kvpressure.engines import FORGET_SECONDS, Engines
from kvpressure.readings import (
    ContainerReading,
    EnginePage,
    GpuOwner,
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
)
from kvpressure.thresholds import Thresholds, builtin
from kvpressure.tracks import ContainerTrack, EngineTrack, GpuTrack

MAX_COMMAND_LINES: Final = 256  # understood ones that are remembered
_NO_SIGNALS: Final[Mapping[str, int]] = {}
_NO_FIGURES: Final[Mapping[str, float]] = {}

ContainerKey = tuple[str, str, str]


class Pipeline:
    """Keeps the windows of every engine and turns each snapshot into a state."""

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self._thresholds = thresholds or builtin()
        self._engines = Engines(self._thresholds)
        self._containers: dict[ContainerKey, ContainerTrack] = {}
        self._gpus: dict[str, GpuTrack] = {}
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
        self._engines.expect(snapshot.targets)
        for page in snapshot.pages:
            self._engines.take(now, page, self._model_from_args)
        for stats in snapshot.steps:
            named = [
                engine
                for engine in self._engines
                if (engine.key.namespace, engine.key.pod, engine.named[1]) == (stats.namespace, stats.pod, stats.engine)
            ]
            if len(named) == 1:  # of two servers in a pod that count alike, nobody knows whose steps these are
                named[0].tracker.steps.observe(stats)
        owners = _owners_by_pod(snapshot)
        self._engines.forget(now)
        self._forget(now)
        engines, empty_pools = self._engine_states(now, snapshot, owners)
        return State(
            time=now,
            engines=engines,
            gpus=self._gpu_states(snapshot, empty_pools),
            owners=snapshot.owners,
            containers=self._container_states(snapshot),
            targets=self._engines.targets,
            node_conditions=snapshot.node_conditions,
            health=snapshot.health,
            expected_gpus=snapshot.expected_gpus,
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

    def _forget(self, now: float) -> None:
        """Drop GPUs and containers that have not been seen for a while (or were seen in what is now the future, when the
        clock stepped back).
        """
        for uuid in [uuid for uuid, gpu in self._gpus.items() if abs(now - gpu.seen_t) > FORGET_SECONDS]:
            del self._gpus[uuid]
        for name in [name for name, held in self._containers.items() if abs(now - held.seen_t) > FORGET_SECONDS]:
            del self._containers[name]

    # --- concluding -----------------------------------------------------------------------------------------

    def _engine_states(
        self,
        now: float,
        snapshot: Snapshot,
        owners: Mapping[tuple[str, str], Sequence[GpuOwner]],
    ) -> tuple[tuple[EngineState, ...], dict[str, list[float | None]]]:
        first: list[
            tuple[
                EngineTrack,
                Surroundings,
                KvSignals,
                Shape,
                Mapping[str, InForce],
                tuple[str, ...],
                tuple[str, ...] | None,
            ]
        ] = []
        empty_pools: dict[str, list[float | None]] = {}
        for track in self._engines:
            gpus = track.gpus or _gpus_of(track, owners.get((track.key.namespace, track.key.pod), ()))
            around, found_limits = self._surroundings(now, track, gpus, snapshot)
            cache, shape = track.tracker.kv_signals(around)
            pool = around.facts.get("pool_bytes")
            empty = None if pool is None or cache.kv_used_ratio is None else pool * (1.0 - cache.kv_used_ratio)
            cards = self._cards(track, gpus, around)
            for uuid in gpus if cards is None else cards:
                empty_pools.setdefault(uuid, []).append(None if cards is None else empty)
            first.append((track, around, cache, shape, found_limits, gpus, cards))
        states = []
        for track, around, cache, shape, found_limits, gpus, cards in first:
            demands = [self._demand(now, uuid, empty_pools) for uuid in cards or ()]
            known = [demand for demand in demands if demand is not None]
            around = replace(around, demand=max(known) if known and len(known) == len(demands) else None)
            states.append(self._engine_state(now, track, around, cache, shape, found_limits, gpus))
        return tuple(states), empty_pools

    def _cards(self, track: EngineTrack, gpus: tuple[str, ...], around: Surroundings) -> tuple[str, ...] | None:
        """The cards that hold this engine's KV pool, of those that its container has; ``None`` when that cannot be told.

        Data-parallel engines of one page share the container's cards. vLLM gives rank i the i-th part of the visible devices
        (``set_device_control_env_var`` in its ``v1/engine/utils.py``), which are in the order of the driver.
        """
        page = track.tracker.page
        ranks = sorted((reading.engine for reading in page.engines), key=lambda name: (len(name), name)) if page else []
        if len(ranks) <= 1 or not gpus:
            return gpus
        needs = around.args.engine_gpus
        known = [(gpu.window.last.index, uuid) for uuid in gpus if (gpu := self._gpus.get(uuid)) and gpu.window.last]
        if needs is None or len(known) != needs * len(ranks) or len(known) < len(gpus):
            return None
        rank = ranks.index(track.named[1])
        return tuple(uuid for _, uuid in sorted(known)[rank * needs : (rank + 1) * needs])

    def _surroundings(
        self, now: float, track: EngineTrack, gpus: Sequence[str], snapshot: Snapshot
    ) -> tuple[Surroundings, Mapping[str, InForce]]:
        key, page, reading = track.key, track.tracker.page, track.tracker.reading
        container = self._containers.get((key.namespace, key.pod, track.container))
        known_gpus = [self._gpus[uuid] for uuid in gpus if uuid in self._gpus]
        windows = [gpu.window for gpu in known_gpus if self._fresh(gpu.window.last_t, now)]
        facts = dict(container.facts) if container else {}
        found_limits: Mapping[str, InForce] = {}
        merged = EngineArgs()
        if page is not None:
            merged = (
                self._parsed(page).merged(container.logged) if container and container.logged else self._parsed(page)
            )
            gpu = known_gpus[0].window.last if known_gpus else None  # the card stays what it is between two readings
            found_limits = limit_signals.in_force(
                self._parsed(page),
                container.logged if container else None,
                facts,
                reading.cache_config if reading else {},
                self._version(track),
                page.flavour,
                gpu,
            )
            if "pool_bytes" not in facts:
                pool = pool_from_configuration(merged, reading.cache_config if reading else {}, len(page.engines))
                if pool is not None:
                    facts["pool_bytes"] = pool
        pod = (key.namespace, key.pod)
        allocator = [rank for rank in snapshot.allocator if (rank.namespace, rank.pod) == pod]
        others = any(owner.uuid in gpus and (owner.namespace, owner.pod) != pod for owner in snapshot.owners)
        processes = _process_bytes_of(snapshot, pod) if allocator or others else {}
        seqs, length = found_limits.get("max_num_seqs"), found_limits.get("max_model_len")
        return Surroundings(
            now=now,
            gpus=windows,
            container=container.window if container and self._fresh(container.window.last_t, now) else None,
            allocator=allocator,
            processes=tuple(processes.values()),
            others=others,
            own_bytes=tuple(processes.get(gpu.last.uuid) for gpu in windows if gpu.last),
            facts=facts,
            events=container.recent_events(now) if container else _NO_SIGNALS,
            events_known=container.seen_log if container else False,
            oom=container.recent_oom(now) if container else _NO_FIGURES,
            gpu_faults=sum(gpu.recent_faults(now) for gpu in known_gpus) if known_gpus else None,
            max_num_seqs=seqs.value if seqs else None,
            max_num_seqs_source=seqs.source if seqs else None,
            max_model_len=length.value if length else None,
            args=merged,
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

    def _engine_state(
        self,
        now: float,
        track: EngineTrack,
        around: Surroundings,
        cache: KvSignals,
        shape: Shape,
        found_limits: Mapping[str, InForce],
        gpus: tuple[str, ...],
    ) -> EngineState:
        tracker, page = track.tracker, track.tracker.page
        signals = tracker.signals(around, cache, shape)
        utilization = found_limits.get("gpu_memory_utilization")
        diagnosis = track.diagnoser.diagnose(
            signals, tracker.recent_waiting(), tracker.window.samples_seen, utilization.value if utilization else None
        )
        up = diagnosis.evidence["page_fresh"].value is True
        return EngineState(
            key=track.key,
            target=track.target,
            container=track.container,
            gpus=gpus,
            up=up,
            error=tracker.error,
            version=self._version(track),
            flavour=page.flavour if page else None,
            reading=tracker.reading if up else None,
            counters=track.counters if up else {},
            signals=signals
            if up
            else Signals(
                time=now,
                host=signals.host,
                progress=signals.progress,
                events=signals.events,
                events_known=signals.events_known,
                oom=signals.oom,
            ),
            diagnosis=diagnosis,
            limits=self._limits(track, signals, diagnosis, found_limits),
        )

    def _limits(
        self, track: EngineTrack, s: Signals, diagnosis: Diagnosis, found: Mapping[str, InForce]
    ) -> dict[str, Limit]:
        t = self._thresholds
        finished = s.context.context_max_5m if s.context.prompt_quantiles else None  # whole requests, not their prefill
        longest = track.longest.observe(s.time, finished, diagnosis.verdict)
        values = {name: found[name].value if name in found else None for name in LIMITS}
        confident = diagnosis.verdict if diagnosis.confidence >= t["confident"] else "unknown"
        recommended = {
            "max_num_seqs": advice.max_num_seqs(s, confident, t),
            "max_num_batched_tokens": advice.max_num_batched_tokens(values["max_num_batched_tokens"], confident, t),
            "gpu_memory_utilization": advice.gpu_memory_utilization(
                s, values["gpu_memory_utilization"], diagnosis.conditions.get("gpu_out_of_memory"), t
            ),
            "max_model_len": advice.max_model_len(longest, values["max_model_len"], confident, t),
        }
        return {
            name: Limit(
                name,
                values[name],
                found[name].explicit if name in found else None,
                found[name].source if name in found else None,
                recommended[name],
            )
            for name in LIMITS
            if values[name] is not None or recommended[name] is not None
        }

    def _gpu_states(
        self, snapshot: Snapshot, empty_pools: Mapping[str, Sequence[float | None]]
    ) -> tuple[GpuState, ...]:
        return tuple(
            GpuState(
                gpu, self._demand(snapshot.time, gpu.uuid, empty_pools), _process_bytes(gpu, snapshot.process_pods)
            )
            for gpu in snapshot.gpus
        )

    def _container_states(self, snapshot: Snapshot) -> tuple[ContainerState, ...]:
        """Containers read now; one that only its log tells of, or whose source fails, has its events and nothing else."""
        states = []
        for key, track in self._containers.items():
            window = track.window
            if window.last is not None and window.last_t == snapshot.time:
                states.append(
                    ContainerState(
                        window.last,
                        window.throttled_ratio(),
                        window.cpu_used_ratio(),
                        window.memory_used_ratio(),
                        dict(track.counts),
                    )
                )
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


def _process_bytes_of(snapshot: Snapshot, pod: tuple[str, str]) -> dict[str, int]:
    """Device memory of a pod's processes on each GPU that has some; empty where it is not known of one of them."""
    found = {}
    for gpu in snapshot.gpus:
        sizes = [process.used_bytes for process in gpu.processes if snapshot.process_pods.get(process.pid) == pod]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return {}
        if known:
            found[gpu.uuid] = sum(known)
    return found


def _owners_by_pod(snapshot: Snapshot) -> dict[tuple[str, str], list[GpuOwner]]:
    found: dict[tuple[str, str], list[GpuOwner]] = {}
    for owner in snapshot.owners:
        found.setdefault((owner.namespace, owner.pod), []).append(owner)
    return found


def _gpus_of(track: EngineTrack, owners: Iterable[GpuOwner]) -> tuple[str, ...]:
    """The GPUs of the engine's container; those of its pod where the container of either is not known."""
    return tuple(
        dict.fromkeys(owner.uuid for owner in owners if not track.container or owner.container in ("", track.container))
    )
