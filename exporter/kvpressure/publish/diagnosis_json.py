"""The published state as a JSON document (``/api/v1/diagnosis``): everything ``/metrics`` and the page say.

``docs/diagnosis.schema.json`` describes every field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvpressure import __version__
from kvpressure.publish.history import SLOT_SECONDS
from kvpressure.publish.links import BOARDS
from kvpressure.publish.view import EngineView, Surroundings, engine_view, headline
from kvpressure.state import Diagnosis, GpuState, Limit, State


def diagnosis_document(state: State, node_name: str, around: Surroundings | None = None) -> dict[str, Any]:
    """A document of plain JSON values; numbers that JSON cannot say become null."""
    around = around or Surroundings()
    document = {
        "version": __version__,
        "node": node_name,
        "time": state.time,
        "headline": headline(state),
        "engines": [_engine(engine_view(engine, state, around)) for engine in state.engines],
        "gpus": [_gpu(gpu, state) for gpu in state.gpus],
        "containers": [
            {
                **asdict(container.reading),
                "cpu_throttled_ratio": container.cpu_throttled_ratio,
                "cpu_used_ratio": container.cpu_used_ratio,
                "memory_used_ratio": container.memory_used_ratio,
                "log_events": container.log_events,
            }
            for container in state.containers
        ],
        "node_conditions": {condition.type: condition.status for condition in state.node_conditions},
        "sources": {
            name: {key: value for key, value in asdict(health).items() if key != "name"}
            for name, health in state.health.items()
        },
        "targets": [asdict(target) for target in state.targets],
        "expected_gpus": state.expected_gpus,
        "ticks": state.ticks,
        "lag_seconds": state.lag_seconds,
        "recorder": asdict(state.recorder) if state.recorder else None,
        "boards": {uid: around.links.board(uid).url or None for uid in BOARDS},
    }
    plain: dict[str, Any] = _plain(document)
    return plain


def _engine(view: EngineView) -> dict[str, Any]:
    engine = view.state
    return {
        "namespace": engine.key.namespace,
        "pod": engine.key.pod,
        "model_name": engine.key.model_name,
        "engine": engine.key.engine,
        "target": engine.target,
        "container": engine.container,
        "gpus": engine.gpus,
        "up": engine.up,
        "error": engine.error,
        "version": engine.version,
        "flavour": engine.flavour,
        **_diagnosis(engine.diagnosis),
        "condition_texts": {one.name: one.text for one in view.standings},
        "signals": engine.signals.flat() if engine.up else {},
        "counters": engine.counters if engine.up else {},
        "limits": {name: _limit(limit) for name, limit in engine.limits.items()},
        "triage": [asdict(step) for step in view.triage],
        "mitigation": asdict(view.plan),
        "history": {"slot_seconds": SLOT_SECONDS, "series": view.history},
        "board": view.board.url or None,
        "runbooks": {link.title: link.url or None for link in view.runbooks},
    }


def _diagnosis(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "verdict": diagnosis.verdict,
        "confidence": diagnosis.confidence,
        "stage": diagnosis.stage,
        "since": diagnosis.since,
        "evidence": {name: {"value": item.value, "text": item.text} for name, item in diagnosis.evidence.items()},
        "supporting": diagnosis.supporting,
        "opposing": diagnosis.opposing,
        "missing": diagnosis.missing,
        "conditions": diagnosis.conditions,
        "documented_signature": {
            "met": diagnosis.documented_signature_met,
            "conditions": diagnosis.documented_signature,
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
        "owners": [
            {"namespace": owner.namespace, "pod": owner.pod, "container": owner.container, "shared": owner.shared}
            for owner in state.owners
            if owner.uuid == reading.uuid
        ],
        "process_bytes": [
            {"namespace": namespace, "pod": pod, "bytes": size} for (namespace, pod), size in gpu.process_bytes.items()
        ],
    }


def _plain(value: Any) -> Any:
    """Only what JSON knows: text keys, lists, finite numbers."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
