"""The published state as metric families, engines in trouble first; nothing is kept between two renderings.

``Families`` takes values by metric name. ``None``, non-finite values and a second sample with the same labels (which
would void the whole exposition) are dropped; label values are bounded and free of control characters.
"""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, Final, TypeVar

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from kvpressure import __version__
from kvpressure.advice.action import HARMS, told
from kvpressure.diagnosis import conditions
from kvpressure.model import ceilings
from kvpressure.model import readings as r
from kvpressure.model.gpu_faults import NVIDIA_XIDS, OTHER_XID, UNLISTED
from kvpressure.model.isolation import (
    CONTAINER,
    ENGINE,
    GPU,
    NODE,
    RENDER,
    SOURCE,
    TARGET,
    Failure,
    Guard,
    container_name,
    engine_name,
)
from kvpressure.model.readings import ContainerReading, Discovered, EngineKey, GpuOwner, GpuReading, SourceHealth
from kvpressure.model.signals import Metric, Published, outputs
from kvpressure.model.state import (
    CALM,
    VERDICTS,
    Cause,
    ContainerState,
    Diagnosis,
    EngineState,
    GpuState,
    Objective,
    PodState,
    State,
    TargetState,
)
from kvpressure.publish.metrics import BY_NAME
from kvpressure.publish.metrics import CONTAINER as CONTAINER_LABELS
from kvpressure.publish.metrics import ENGINE as ENGINE_LABELS
from kvpressure.publish.metrics import GPU as GPU_LABELS

LABEL_LIMIT: Final = 256
_SUFFIX: Final = {"counter": "_total", "info": "_info", "gauge": "", "summary": ""}

Labels = tuple[str, ...]


def clean(value: str | None) -> str:
    """A safe label value: at most ``LABEL_LIMIT`` characters, only printable ones, ``""`` for ``None``."""
    return "" if value is None else _printable(value[:LABEL_LIMIT])


@lru_cache(maxsize=1024)  # a node of 64 engines has about 400
def _printable(value: str) -> str:
    return value if value.isprintable() else "".join(char for char in value if char.isprintable())


class Families:
    """Samples by metric, in the table's order."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, float]] = defaultdict(dict)

    def add(self, name: str, labels: Labels, value: float | None) -> None:
        """Add one sample of ``name``; booleans count as 1 and 0, ``None`` adds none."""
        if value is None or not ceilings.is_finite(value):
            return
        self._values[name].setdefault(labels, value)

    def each(self, name: str, labels: Labels, values: Mapping[str, float | None]) -> None:
        """Add samples that differ in the last label only."""
        rows = self._values[name]
        for key, value in values.items():
            if value is not None and ceilings.is_finite(value):
                rows.setdefault((*labels, clean(key)), value)

    def states(self, name: str, labels: Labels, names: tuple[str, ...], present: str | None) -> None:
        """Add a state set: 1 for ``present``, 0 for the other names."""
        for state in names:
            self.add(name, (*labels, state), float(state == present))

    def signal(self, labels: Labels, value: Any, published: Published) -> None:
        """Add what a signal group declares to publish of one of its values."""
        name = published.metric.name
        if published.labels:
            labels = (*labels, *published.labels)
        if value is not None and type(value) is not float and isinstance(value, Mapping):  # asking the last is dear
            self.each(name, labels, value)
        else:
            self.add(name, labels, value)

    def discard(self, label_names: Labels, labels: Labels) -> None:
        """Remove all samples of one subject: those with ``labels`` of metrics whose labels start with
        ``label_names``.
        """
        count = len(labels)
        known = BY_NAME
        for name, values in self._values.items():
            if known[name].labels[:count] == label_names:
                for key in [key for key in values if key[:count] == labels]:
                    del values[key]

    def collect(self) -> Iterator[Family]:
        """The families that have samples."""
        for metric in BY_NAME.values():
            if rows := self._values.get(metric.name):
                yield TableFamily(metric, rows)


class TableFamily(Family):
    """A family with one value per series. ``rows``: values by label values, in the table's order."""

    def __init__(self, metric: Metric, rows: Mapping[Labels, float]) -> None:
        super().__init__(metric.full_name.removesuffix(_SUFFIX[metric.kind]), metric.help, metric.kind)
        self.sample_name = metric.full_name
        self.label_names = metric.labels
        self.rows = rows

    def series(self, key: Labels) -> tuple[str, dict[str, str]]:
        """Name and labels of the sample of a row."""
        return self.sample_name, dict(zip(self.label_names, key, strict=True))

    @property
    def samples(self) -> list[Sample]:
        """The library's samples, built on demand."""
        return [Sample(*self.series(key), value) for key, value in self.rows.items()]

    @samples.setter
    def samples(self, _: list[Sample]) -> None:
        """The library sets them to none at first."""


def number_text(value: float) -> str:
    """As Go formats it; below a million Python does the same."""
    if 0.0 <= value < 1e6:
        return repr(float(value))
    return floatToGoString(value)  # type: ignore[no-untyped-call,no-any-return]  # the library is not typed there


_REJECTED_STATUS: Final = ("4xx", "5xx")


def engine_labels(key: EngineKey) -> Labels:
    """The labels that all series of an engine start with."""
    return clean(key.namespace), clean(key.pod), clean(key.model_name), clean(key.engine)


def add_engine(out: Families, engine: EngineState) -> None:
    """Everything that is published about ``engine``."""
    labels, pool = engine_labels(engine.key), engine.pool
    in_pool = (*labels, clean(pool.name), pool.role)
    out.add("engine_up", (*in_pool, clean(pool.revision)), engine.up)
    out.add(
        "engine_info",
        (*labels, clean(engine.version), clean(engine.flavour), clean(engine.container), clean(engine.target)),
        1,
    )
    for uuid in engine.gpus:
        out.add("engine_gpu_info", (*in_pool, clean(uuid)), 1)
    if engine.group:
        out.add("engine_group_info", (*labels, clean(engine.group)), 1)
    if pool.name:
        out.add("engine_pool_info", (*in_pool, clean(pool.pair), pool.source), 1)
    _add_diagnosis(out, labels, engine.diagnosis)
    published = engine.diagnosis.published
    out.each("finding", in_pool, published)
    said = Cause("no verdict is published for this engine")
    if engine.explain is not None:
        said, found = engine.explain(engine), engine.diagnosis
        words = (clean(said.cause), clean(said.action))
        out.add("cause_info", (*labels, found.verdict, found.stage or "", *words), found.confidence)
    out.add("engine_trouble", labels, trouble(engine))
    _add_limits(out, labels, engine)
    if engine.up:
        for name, harm in HARMS.items():
            if published.get(name):
                page = _printable(told(engine, harm, said))
                out.add("harm", (*in_pool, harm.name, harm.level, page), harm.value(engine) if harm.value else 1)
        out.each("documented_number", in_pool, engine.diagnosis.documented)
        for group in engine.signals.groups():
            for output in outputs(type(group)):
                out.signal(labels, output.read(group), output.published)
        _add_counters(out, labels, engine.counters)
        _add_objectives(out, labels, in_pool, engine.objectives)


def _add_diagnosis(out: Families, labels: Labels, diagnosis: Diagnosis) -> None:
    out.states("verdict", labels, VERDICTS, diagnosis.verdict)
    out.add("verdict_confidence", (*labels, diagnosis.verdict, diagnosis.stage or ""), diagnosis.confidence)
    out.add("verdict_since_timestamp_seconds", labels, diagnosis.since)
    out.each("verdict_reason", labels, diagnosis.reasons)


def _add_limits(out: Families, labels: Labels, engine: EngineState) -> None:
    for name, limit in engine.limits.items():
        one = (*labels, clean(name))
        out.add("limit", one, limit.known)
        out.add("limit_explicit", one, limit.explicit)
        out.add("limit_recommended", one, limit.recommended)


def _add_objectives(out: Families, labels: Labels, in_pool: Labels, objectives: Iterable[Objective]) -> None:
    for objective in objectives:
        one, counted = (*labels, objective.name), (*in_pool, objective.name)
        out.add("objective_requests_total", counted, objective.total)
        out.add("objective_good_requests_total", counted, objective.good)
        out.add("objective_target_ratio", one, objective.target)
        out.add("objective_bound_seconds", one, objective.bound_seconds)


def _add_counters(out: Families, labels: Labels, counters: Mapping[str, float]) -> None:
    for name, value in counters.items():
        if name.startswith(r.FINISHED_PREFIX):
            out.add("requests_finished_total", (*labels, clean(name.removeprefix(r.FINISHED_PREFIX))), value)
        elif name.startswith(r.REJECTED_PREFIX):
            out.add("requests_rejected_total", (*labels, clean(name.removeprefix(r.REJECTED_PREFIX))), value)
        elif name.removeprefix(r.HTTP_PREFIX) in _REJECTED_STATUS:
            out.add("requests_rejected_total", (*labels, f"http_{name.removeprefix(r.HTTP_PREFIX)}"), value)


ORDER: Final = (
    "stalled",
    "kv_pressure",
    "transfer_bound",
    "concurrency_limited",
    "host_bound",
    "compute_bound",
    "unknown",
    "healthy",
    "idle",
)
"""Verdicts, worst first."""
RANKS: Final = {verdict: rank for rank, verdict in enumerate(reversed(ORDER), 1)}
"""The larger, the worse."""


def rank(engine: EngineState) -> int:
    """Rank of the engine's verdict, the larger the worse; 0 for a verdict that is not in ``ORDER``."""
    return RANKS.get(engine.diagnosis.verdict, 0)


def trouble(engine: EngineState) -> float:
    """Order of an engine, the larger the worse: rank of the verdict plus a fraction below 1 that grows with the
    queue.
    """
    waiting = max(0.0, engine.signals.load.waiting or 0.0) if engine.up else 0.0
    return rank(engine) + waiting / (waiting + 1)


def fine(engine: EngineState) -> bool:
    """Whether the verdict is calm and no condition holds that is bad news by itself."""
    found = engine.diagnosis
    return found.verdict in CALM and not any(
        found.conditions.get(declared.name) for declared in conditions.CONDITIONS if declared.serious
    )


def worst_first(engine: EngineState) -> tuple[bool, float, EngineKey]:
    """Sort key of engines: those in trouble before those that are fine, then by ``trouble``."""
    return fine(engine), -trouble(engine), engine.key


_MEMORY_FIELDS: Final = ("memory_total_bytes", "memory_used_bytes")
S = TypeVar("S", EngineState, GpuState, ContainerState)
_BUILD: Final = (__version__, platform.python_version())


@lru_cache(maxsize=1)
def _process() -> ProcessCollector:
    return ProcessCollector(registry=None)


def collect(state: State, guard: Guard | None = None) -> Iterator[Family]:
    """Every family that has a value in ``state``, and ``process_*`` of this process."""
    yield from families(state, guard).collect()
    yield from _process().collect()


def families(state: State, guard: Guard | None = None) -> Families:
    """All metrics of ``state``. A subject that ``guard`` sees fail has its identity only."""
    out, guard = Families(), guard or Guard(RENDER)
    split = _told_by_parts(state)

    def add_gpu(gpu: GpuState) -> None:
        _add_gpu(out, gpu, split.get(gpu.reading.uuid))

    guard.each(
        GPU,
        state.gpus,
        lambda one: one.reading.uuid,
        add_gpu,
        _bare(out, GPU_LABELS, lambda one: _gpu_labels(one.reading)),
    )
    guard.each(NODE, (state,), lambda _: "gpus", partial(_add_gpu_counts, out))
    guard.each(GPU, state.owners, lambda owner: owner.uuid, partial(_add_owner, out))
    guard.each(
        ENGINE,
        state.engines,
        lambda one: engine_name(one.key),
        partial(add_engine, out),
        _bare(out, ENGINE_LABELS, lambda one: engine_labels(one.key)),
    )
    guard.each(
        CONTAINER,
        state.containers,
        lambda one: container_name(one.reading),
        partial(_add_container, out),
        _bare(out, CONTAINER_LABELS, lambda one: _container_labels(one.reading)),
    )
    guard.each(NODE, state.pods, lambda one: f"{one.namespace}/{one.pod}", partial(_add_pod, out))
    guard.each(NODE, (state,), lambda _: "pools", partial(_add_pools, out))
    guard.each(CONTAINER, state.discovered, container_name, partial(_add_discovered, out))
    _add_exporter(out, guard, state)
    return out


def _bare(out: Families, names: Labels, labels: Callable[[S], Labels]) -> Callable[[S, Failure], S]:
    """Makes a subject one without values, and removes what ``out`` has of it already."""

    def bare(one: S, failure: Failure) -> S:
        out.discard(names, labels(one))
        return one.without_values(failure)

    return bare


def _add_owner(out: Families, owner: GpuOwner) -> None:
    where = clean(owner.uuid), clean(owner.namespace), clean(owner.pod)
    out.add("gpu_pod_info", (*where, clean(owner.container), str(owner.shared).lower()), 1)
    if owner.group:
        out.add("worker_gpu_info", (*where, clean(owner.group)), 1)


def _add_discovered(out: Families, found: Discovered) -> None:
    place = (clean(found.namespace), clean(found.pod), clean(found.container))
    out.add("container_discovery_info", (*place, found.result, found.reason), 1)


def _told_by_parts(state: State) -> dict[str, frozenset[str]]:
    """For each GPU split into instances or partitions, by UUID: the memory fields that some part reports."""
    found: dict[str, frozenset[str]] = {}
    for reading in (gpu.reading for gpu in state.gpus):
        if reading.parent_uuid is not None:
            own = frozenset(name for name in _MEMORY_FIELDS if getattr(reading, name) is not None)
            found[reading.parent_uuid] = found.get(reading.parent_uuid, frozenset()) | own
    return found


def _memory(gpu: GpuState, reported_by_instances: frozenset[str] | None) -> dict[str, float | None]:
    """Memory fields of a GPU, so that sums count every byte once: a split GPU publishes only what its parts do not
    report, and no used ratio, which would alarm for what engines in its parts reserve. ``reported_by_instances`` None
    = not split.
    """
    reading = gpu.reading
    found: dict[str, float | None] = {
        f"gpu_{name}": getattr(reading, name) for name in _MEMORY_FIELDS if name not in (reported_by_instances or ())
    }
    if reported_by_instances is None:
        found["gpu_memory_used_ratio"] = reading.memory_used_ratio
    found["gpu_memory_demand_ratio"] = gpu.demand_ratio
    found["gpu_memory_floor_ratio"] = gpu.floor_ratio
    return found


def _gpu_labels(reading: GpuReading) -> Labels:
    return clean(reading.uuid), str(reading.index), clean(reading.vendor)


def _container_labels(reading: ContainerReading) -> Labels:
    return clean(reading.namespace), clean(reading.pod), clean(reading.container)


def _add_gpu(out: Families, gpu: GpuState, reported_by_instances: frozenset[str] | None) -> None:
    reading = gpu.reading
    labels = _gpu_labels(reading)
    out.add("gpu_info", (*labels, clean(reading.name), clean(reading.driver)), 1)
    out.add("gpu_up", labels, reading.error is None)
    for name, value in (
        *_memory(gpu, reported_by_instances).items(),
        ("gpu_utilization_ratio", reading.utilization_ratio),
        ("gpu_sm_activity_ratio", reading.sm_activity_ratio),
        ("gpu_tensor_activity_ratio", reading.tensor_activity_ratio),
        ("gpu_power_watts", reading.power_watts),
        ("gpu_power_limit_watts", reading.power_limit_watts),
    ):
        out.add(name, labels, value)
    for reason in reading.throttle_reasons or ():
        out.add("gpu_throttled", (*labels, clean(reason)), 1)
    for fault, holds in (("lost", reading.error is not None), ("xid", reading.xid_errors)):
        if holds:
            out.add("faulty_gpu_info", (*labels, fault, *map(clean, gpu.engine)), 1)
    for xid, count in reading.xid_errors.items():
        event = NVIDIA_XIDS.get(xid, UNLISTED)
        out.add("gpu_xid_errors_total", (*labels, _xid(xid), event.kind, event.meaning, event.action), count)
    for xid, time in reading.xid_last_times.items():
        out.add("gpu_xid_last_timestamp_seconds", (*labels, _xid(xid)), time)
    for (namespace, pod), size in gpu.process_bytes.items():
        out.add("gpu_process_memory_bytes", (*labels, clean(namespace), clean(pod)), size)


def _xid(number: int) -> str:
    return "other" if number == OTHER_XID else str(number)


def _add_gpu_counts(out: Families, state: State) -> None:
    """Expected and seen GPUs by vendor; instances and partitions count as one GPU."""
    seen: dict[str, set[str]] = {vendor: set() for vendor in state.expected_gpus}
    for gpu in state.gpus:
        uuids = seen.setdefault(gpu.reading.vendor, set())
        if gpu.reading.error is None:
            uuids.add(gpu.reading.parent_uuid or gpu.reading.uuid)
    for vendor, count in state.expected_gpus.items():
        out.add("gpus_expected", (clean(vendor),), count)
    for vendor, uuids in seen.items():
        out.add("gpus_seen", (clean(vendor),), len(uuids))


def _add_container(out: Families, container: ContainerState) -> None:
    reading = container.reading
    labels = _container_labels(reading)
    in_pool = (*labels, clean(container.model_name), clean(container.pool.name))
    out.add("container_restarts_total", in_pool, reading.restarts)
    for ran_out in container.out_of_memory:
        level = "lost" if ran_out.lost else "sign"
        out.add("out_of_memory_timestamp_seconds", (*in_pool, ran_out.what, level), ran_out.time)
    ended = reading.last_termination
    if ended is not None:
        code = "" if ended.exit_code is None else str(ended.exit_code)
        out.add("container_last_termination_info", (*labels, clean(ended.reason), code), 1)
    if reading.alerts is not None:
        out.add("container_alerts_info", (*in_pool, clean(reading.alerts)), 1)
    out.add("container_cpu_throttled_ratio", labels, container.cpu_throttled_ratio)
    out.add("container_cpu_used_ratio", labels, container.cpu_used_ratio)
    out.add("container_memory_used_ratio", labels, container.memory_used_ratio)
    out.each("log_events_total", labels, container.log_events)


def _add_pod(out: Families, pod: PodState) -> None:
    labels = clean(pod.namespace), clean(pod.pod), clean(pod.pool.name)
    out.add("pod_answers", labels, pod.answers)
    if pod.starting:
        out.add("pod_starting", (*labels, clean(pod.pool.revision)), 1)
    out.add("pod_answers_since_timestamp_seconds", labels, pod.answers_since)
    out.add("start_usual_seconds", (labels[0], labels[2]), pod.usual_start)
    if pod.reason:
        out.add("down_info", (*labels, clean(pod.reason)), 1)


def _add_pools(out: Families, state: State) -> None:
    refusing = {(pod.namespace, pod.pod) for pod in state.pods if pod.answers is False}
    for key, pool in ((engine.key, engine.pool) for engine in state.engines if engine.up):
        if key.model_name and (key.namespace, key.pod) not in refusing:
            labels = clean(key.namespace), clean(pool.name), clean(key.model_name), pool.role, clean(pool.revision)
            out.add("pool_answers", labels, 1)


def _add_source(out: Families, name: str, health: SourceHealth) -> None:
    source = (clean(name),)
    out.add("source_up", source, health.up)
    out.add("source_duration_seconds", source, health.duration_seconds)
    out.each("source_errors_total", source, health.errors)


def _add_target(out: Families, target: TargetState) -> None:
    where = (clean(target.target),)
    out.each("target_errors_total", where, target.errors)
    out.add("target_scrape_seconds", where, target.duration_seconds)
    out.add("page_bad_lines", where, target.bad_lines if target.up else None)
    out.each("page_cut", where, target.cut)


def _add_exporter(out: Families, guard: Guard, state: State) -> None:
    guard.each(SOURCE, state.health.items(), lambda one: one[0], lambda one: _add_source(out, *one))
    guard.each(TARGET, state.targets, lambda one: one.target, partial(_add_target, out))
    for failures in (state.failures, guard.counts):
        for failure, count in failures.items():
            out.add(
                "isolated_failures_total", (failure.kind, clean(failure.name), failure.stage, failure.reason), count
            )
    out.each("web_refused_total", (), state.web_refused)
    if state.recorder is not None:
        out.add("recorder_up", (), state.recorder.up)
        out.each("recorder_errors_total", (), state.recorder.errors)
    out.add("ticks_total", (), state.ticks)
    out.add("tick_lag_seconds", (), state.lag_seconds)
    out.add("build_info", _BUILD, 1)
