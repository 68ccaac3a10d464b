"""One engine as samples.

An engine that is down keeps its identity (``engine_up`` 0, ``engine_info``, its GPUs), what is concluded about it
(verdict, findings, reasons, because a crash loop shows just then) and its configured limits; measured values are
absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kvpressure.model import readings as r
from kvpressure.model.metrics import outputs
from kvpressure.model.readings import EngineKey
from kvpressure.model.state import STAGES, VERDICTS, Diagnosis, EngineState, Objective
from kvpressure.publish.engine_order import trouble
from kvpressure.publish.metric_families import Families, Labels, clean

_REJECTED_STATUS: Final = ("4xx", "5xx")


def engine_labels(key: EngineKey) -> Labels:
    """The labels that all series of an engine start with."""
    return clean(key.namespace), clean(key.pod), clean(key.model_name), clean(key.engine)


def add_engine(out: Families, engine: EngineState) -> None:
    """Everything that is published about ``engine``."""
    labels = engine_labels(engine.key)
    out.add("engine_up", labels, engine.up)
    out.add(
        "engine_info",
        (*labels, clean(engine.version), clean(engine.flavour), clean(engine.container), clean(engine.target)),
        1,
    )
    for uuid in engine.gpus:
        out.add("engine_gpu_info", (*labels, clean(uuid)), 1)
    if engine.group:
        out.add("engine_group_info", (*labels, clean(engine.group)), 1)
    _add_diagnosis(out, labels, engine.diagnosis)
    out.add("engine_trouble", labels, trouble(engine))
    _add_limits(out, labels, engine)
    if engine.up:
        frozen = engine.diagnosis.conditions.get("metrics_frozen")
        out.add("wait_seconds", labels, engine.signals.requests.wait(engine.diagnosis.verdict, frozen))
        for group in engine.signals.groups():
            for output in outputs(type(group)):
                out.signal(labels, group, output.read(group), output.published)
        _add_counters(out, labels, engine.counters)
        _add_objectives(out, labels, engine.objectives)


def _add_diagnosis(out: Families, labels: Labels, diagnosis: Diagnosis) -> None:
    out.states("verdict", labels, VERDICTS, diagnosis.verdict)
    out.add("verdict_confidence", (*labels, diagnosis.verdict, diagnosis.stage or ""), diagnosis.confidence)
    out.add("verdict_since_timestamp_seconds", labels, diagnosis.since)
    out.states("pressure_stage", labels, STAGES, diagnosis.stage)
    out.each("verdict_reason", labels, diagnosis.reasons)
    out.each("finding", labels, diagnosis.published)


def _add_limits(out: Families, labels: Labels, engine: EngineState) -> None:
    for name, limit in engine.limits.items():
        one = (*labels, clean(name))
        out.add("limit", one, limit.value)
        out.add("limit_explicit", one, limit.explicit)
        out.add("limit_recommended", one, limit.recommended)


def _add_objectives(out: Families, labels: Labels, objectives: Iterable[Objective]) -> None:
    for objective in objectives:
        one = (*labels, objective.name)
        out.add("objective_requests_total", one, objective.total)
        out.add("objective_good_requests_total", one, objective.good)
        out.add("objective_missed_requests_total", one, objective.total - objective.good)
        out.add("objective_target_ratio", one, objective.target)
        out.add("objective_bound_seconds", one, objective.bound_seconds)


def _add_counters(out: Families, labels: Labels, counters: Mapping[str, float]) -> None:
    out.add("preemptions_total", labels, counters.get(r.PREEMPTIONS))
    out.add("prompt_tokens_total", labels, counters.get(r.PROMPT_TOKENS))
    out.add("generation_tokens_total", labels, counters.get(r.GENERATION_TOKENS))
    for name, value in counters.items():
        if name.startswith(r.FINISHED_PREFIX):
            out.add("requests_finished_total", (*labels, clean(name.removeprefix(r.FINISHED_PREFIX))), value)
        elif name.startswith(r.REJECTED_PREFIX):
            out.add("requests_rejected_total", (*labels, clean(name.removeprefix(r.REJECTED_PREFIX))), value)
        elif name.removeprefix(r.HTTP_PREFIX) in _REJECTED_STATUS:
            out.add("requests_rejected_total", (*labels, f"http_{name.removeprefix(r.HTTP_PREFIX)}"), value)
