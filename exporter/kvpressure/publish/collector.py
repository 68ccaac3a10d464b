"""The published state as metric families; nothing is concluded here."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Final, TypeVar

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.process_collector import ProcessCollector

from kvpressure import __version__
from kvpressure.model.gpu_faults import OTHER_XID
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
from kvpressure.model.readings import ContainerReading, Discovered, GpuOwner, GpuReading, SourceHealth
from kvpressure.model.state import ContainerState, EngineState, GpuState, State, TargetState
from kvpressure.publish.engine_families import add_engine, engine_labels
from kvpressure.publish.metric_families import Families, Labels, clean
from kvpressure.publish.metrics import CONTAINER as CONTAINER_LABELS
from kvpressure.publish.metrics import ENGINE as ENGINE_LABELS
from kvpressure.publish.metrics import GPU as GPU_LABELS

_MEMORY_FIELDS: Final = ("memory_total_bytes", "memory_used_bytes", "memory_reserved_bytes")
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
    guard.each(CONTAINER, state.discovered, container_name, partial(_add_discovered, out))
    for condition in state.node_conditions:
        out.add("node_condition", (clean(condition.type),), condition.status)
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
        ("gpu_dram_activity_ratio", reading.dram_activity_ratio),
        ("gpu_power_watts", reading.power_watts),
        ("gpu_power_limit_watts", reading.power_limit_watts),
    ):
        out.add(name, labels, value)
    for reason in reading.throttle_reasons or ():
        out.add("gpu_throttled", (*labels, clean(reason)), 1)
    for xid, count in reading.xid_errors.items():
        out.add("gpu_xid_errors_total", (*labels, _xid(xid)), count)
    for xid, time in reading.xid_last_times.items():
        out.add("gpu_xid_last_timestamp_seconds", (*labels, _xid(xid)), time)
    out.each("gpu_ecc_errors_total", labels, reading.ecc_errors)
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
    out.add("container_restarts_total", labels, reading.restarts)
    out.add("container_ready", labels, reading.ready)
    ended = reading.last_termination
    if ended is not None:
        code = "" if ended.exit_code is None else str(ended.exit_code)
        out.add("container_last_termination_info", (*labels, clean(ended.reason), code), 1)
    if reading.alerts is not None:
        out.add("container_alerts_info", (*labels, clean(reading.alerts)), 1)
    out.add("container_cpu_throttled_ratio", labels, container.cpu_throttled_ratio)
    out.add("container_cpu_used_ratio", labels, container.cpu_used_ratio)
    out.add("container_memory_used_ratio", labels, container.memory_used_ratio)
    out.each("log_events_total", labels, container.log_events)


def _add_source(out: Families, name: str, health: SourceHealth) -> None:
    source = (clean(name),)
    out.add("source_up", source, health.up)
    out.add("source_last_success_timestamp_seconds", source, health.last_success)
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
        out.add("recorder_last_success_timestamp_seconds", (), state.recorder.last_success)
        out.each("recorder_errors_total", (), state.recorder.errors)
        out.add("recorder_dropped_ticks_total", (), state.recorder.dropped)
    out.add("ticks_total", (), state.ticks)
    out.add("tick_lag_seconds", (), state.lag_seconds)
    out.add("build_info", _BUILD, 1)
