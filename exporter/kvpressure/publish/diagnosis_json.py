"""The published state as a JSON document (``/api/v1/diagnosis``): all that ``/metrics`` and the triage page show.
``docs/diagnosis.schema.json`` describes every field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvpressure import __version__
from kvpressure.model import ceilings
from kvpressure.model.isolation import CONTAINER, GPU, NODE, SOURCE, TARGET, Failure, container_name
from kvpressure.model.readings import SourceHealth
from kvpressure.model.state import ContainerState, Diagnosis, EngineState, GpuState, Limit, PodState, State
from kvpressure.publish.links import DASHBOARDS
from kvpressure.publish.page.view import PageEngine, ViewContext, headline, rendered_engines


def diagnosis_document(state: State, node_name: str, around: ViewContext | None = None) -> dict[str, Any]:
    """The document as plain JSON values; numbers that JSON cannot represent become null."""
    around = around or ViewContext()
    each = around.guard.each
    engines = rendered_engines(state.engines, state, around, _entry)
    document = {
        "version": __version__,
        "node": node_name,
        "time": _plain(state.time),
        "headline": headline((view.said for view, _ in engines), len(state.engines)),
        "engines": [entry for _, entry in engines],
        "gpus": each(
            GPU,
            state.gpus,
            lambda one: one.reading.uuid,
            lambda one: _plain(_gpu(one, state)),
            GpuState.without_values,
        ),
        "containers": each(
            CONTAINER,
            state.containers,
            lambda one: container_name(one.reading),
            lambda one: _plain(_container(one)),
            ContainerState.without_values,
        ),
        "pods": each(NODE, state.pods, lambda one: f"{one.namespace}/{one.pod}", _pod),
        "discovered": each(CONTAINER, state.discovered, container_name, _fields),
        "node_conditions": {condition.type: condition.status for condition in state.node_conditions},
        "sources": dict(each(SOURCE, state.health.values(), lambda one: one.name, _source)),
        "targets": each(TARGET, state.targets, lambda one: one.target, _fields),
        "expected_gpus": _plain(state.expected_gpus),
        "ticks": state.ticks,
        "lag_seconds": _plain(state.lag_seconds),
        "recorder": _fields(state.recorder, "name", "duration_seconds") if state.recorder else None,
        "web_refused": _plain(state.web_refused),
        "dashboards": {uid: around.links.dashboard(uid).url or None for uid in DASHBOARDS},
    }
    counted = (*state.failures.items(), *around.guard.counts.items())  # last: what failed above is among them
    return {**document, "failures": [{**_fields(failure), "count": count} for failure, count in counted]}


def _fields(one: Any, *without: str) -> dict[str, Any]:
    return {name: _plain(value) for name, value in asdict(one).items() if name not in without}


def _source(health: SourceHealth) -> tuple[str, dict[str, Any]]:
    return health.name, _fields(health, "name")


def engine_entry(engine: EngineState, state: State, around: ViewContext) -> dict[str, Any]:
    """One engine of the document; if rendering fails, its identity and the reason."""
    ((_, entry),) = rendered_engines((engine,), state, around, _entry)
    return entry


def _entry(view: PageEngine) -> dict[str, Any]:
    entry: dict[str, Any] = _plain(_engine(view))
    return entry


def _pod(pod: PodState) -> dict[str, Any]:
    # "ever" is of use to the exporter alone
    return {**_fields(pod, "ever"), "pool": pod.pool.name, "revision": pod.pool.revision}


def _container(container: ContainerState) -> dict[str, Any]:
    return {
        **{name: value for name, value in asdict(container.reading).items() if name not in ("pool", "run")},
        "pool": container.pool.name,
        "model_name": container.model_name,
        "out_of_memory": [asdict(one) for one in container.out_of_memory],
        "cpu_throttled_ratio": container.cpu_throttled_ratio,
        "cpu_used_ratio": container.cpu_used_ratio,
        "memory_used_ratio": container.memory_used_ratio,
        "log_events": container.log_events,
        "failure": _failure(container.failure),
    }


def _failure(failure: Failure | None) -> dict[str, str] | None:
    return None if failure is None else {"stage": failure.stage, "reason": failure.reason}


def _engine(view: PageEngine) -> dict[str, Any]:
    engine = view.state
    return {
        "namespace": engine.key.namespace,
        "pod": engine.key.pod,
        "model_name": engine.key.model_name,
        "engine": engine.key.engine,
        "target": engine.target,
        "container": engine.container,
        "gpus": engine.gpus,
        "group": engine.group,
        "pool": engine.pool.name,
        "role": engine.pool.role,
        "imbalance": None if engine.imbalance is None else asdict(engine.imbalance),
        "up": engine.up,
        "error": engine.error,
        "failure": _failure(engine.failure),
        "version": engine.version,
        "dialect": engine.dialect,
        "flavour": engine.flavour,
        **_diagnosis(engine.diagnosis),
        "condition_texts": {one.name: one.text for one in view.standings},
        "signals": engine.signals.flat() if engine.up else {},
        "counters": engine.counters if engine.up else {},
        "limits": {name: _limit(limit) for name, limit in engine.limits.items()},
        "triage": [asdict(step) for step in view.triage],
        "mitigation": {"summary": view.plan.summary, "actions": [asdict(action) for action in view.plan.actions]},
        "dashboard": view.dashboard.url or None,
        "runbooks": {link.title: link.url or None for link in view.runbooks},
    }


def _diagnosis(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "verdict": diagnosis.verdict,
        "confidence": diagnosis.confidence,
        "grade": diagnosis.grade,
        "row": diagnosis.row,
        "runner_up": diagnosis.runner_up,
        "stage": diagnosis.stage,
        "since": diagnosis.since,
        "evidence": {name: {"value": item.value, "text": item.text} for name, item in diagnosis.evidence.items()},
        "supporting": list(diagnosis.supporting),
        "opposing": list(diagnosis.opposing),
        "missing": list(diagnosis.missing),
        "conditions": dict(diagnosis.conditions),
        "documented_signature": {
            "met": diagnosis.documented_signature_met,
            "conditions": dict(diagnosis.documented_signature),
            "note": diagnosis.signature_note,
        },
    }


def _limit(limit: Limit) -> dict[str, Any]:
    return {"value": limit.value, "explicit": limit.explicit, "source": limit.source, "recommended": limit.recommended}


def _gpu(gpu: GpuState, state: State) -> dict[str, Any]:
    reading = gpu.reading
    return {
        **{key: value for key, value in asdict(reading).items() if key != "processes"},
        "demand_ratio": gpu.demand_ratio,
        "failure": _failure(gpu.failure),
        "owners": [
            {key: value for key, value in asdict(owner).items() if key != "uuid"}
            for owner in state.owners
            if owner.uuid == reading.uuid
        ],
        "process_bytes": [
            {"namespace": namespace, "pod": pod, "bytes": size} for (namespace, pod), size in gpu.process_bytes.items()
        ],
    }


def _plain(value: Any) -> Any:
    """``value`` as JSON types: text keys, lists, finite numbers. The most frequent types are tested first."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float):  # larger numbers are published as null
        return value if ceilings.is_finite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    raise TypeError(type(value).__name__)
