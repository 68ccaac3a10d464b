"""Reads an exporter's diagnosis document into the pipeline's objects; tolerant, because it may
be of another version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import UnionType
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

from kvpressure.advice.action import Action
from kvpressure.advice.mitigation import MitigationPlan
from kvpressure.advice.triage import Mark, TriageStep
from kvpressure.diagnosis.conditions import NAMES
from kvpressure.model.pools import EnginePool
from kvpressure.model.readings import EngineKey, GpuReading
from kvpressure.model.signals import Signals
from kvpressure.model.state import IMBALANCES, VERDICTS, Diagnosis, EngineState, Found, Imbalance, Limit
from kvpressure.parsed import items, mapping, mappings, text
from kvpressure.toolbox.engine_view import EngineView, flag, number

_MARKS: Final[tuple[Mark, ...]] = ("fine", "look", "bad", "unknown")
T = TypeVar("T")


def engine_views(document: Mapping[str, Any]) -> list[EngineView]:
    """All engines of a document."""
    time = number(document.get("time")) or 0.0
    return [_view(entry, document, time) for entry in mappings(document.get("engines"))]


def _view(entry: Mapping[str, Any], document: Mapping[str, Any], time: float) -> EngineView:
    engine = _engine(entry, time)
    plan = mapping(entry.get("mitigation"))
    actions = [
        Action(
            text(item.get("title")),
            text(item.get("text")),
            _texts(item, "flags"),
            _texts(item, "commands"),
            item.get("now") is not False,
            _numbers(item.get("values")),
        )
        for item in mappings(plan.get("actions"))
    ]
    return EngineView(
        engine,
        tuple(_gpu(item) for item in mappings(document.get("gpus")) if item.get("uuid") in engine.gpus),
        tuple(_step(item) for item in mappings(entry.get("triage"))),
        MitigationPlan(text(plan.get("summary")), tuple(actions)),
        entry=lambda: entry,
        published_cause=text(entry.get("cause")),
    )


def _engine(entry: Mapping[str, Any], time: float) -> EngineState:
    return EngineState(
        key=EngineKey(*(text(entry.get(name)) for name in ("namespace", "pod", "model_name", "engine"))),
        target=text(entry.get("target")),
        container=text(entry.get("container")),
        gpus=_texts(entry, "gpus"),
        up=entry.get("up") is True,
        error=text(entry.get("error")) or None,
        version=text(entry.get("version")) or None,
        flavour=text(entry.get("flavour")) or None,
        dialect=text(entry.get("dialect")),
        reading=None,
        counters=_numbers(entry.get("counters")),
        signals=signals_from(mapping(entry.get("signals")), time),
        diagnosis=_diagnosis(entry),
        limits={name: _limit(name, mapping(found)) for name, found in mapping(entry.get("limits")).items()},
        pool=EnginePool(text(entry.get("pool")), text(entry.get("role"))),
        imbalance=_imbalance(mapping(entry.get("imbalance"))),
    )


def _imbalance(found: Mapping[str, Any]) -> Imbalance | None:
    alike, seen = number(found.get("alike")), number(found.get("seen"))
    if found.get("kind") not in IMBALANCES or alike is None or seen is None:
        return None
    return Imbalance(text(found.get("kind")), text(found.get("side")), int(alike), int(seen))


def _diagnosis(entry: Mapping[str, Any]) -> Diagnosis:
    verdict, signature = text(entry.get("verdict")), mapping(entry.get("documented_signature"))
    evidence = {name: mapping(found) for name, found in mapping(entry.get("evidence")).items()}
    given, texts = _flags(entry.get("conditions")), mapping(entry.get("condition_texts"))
    conditions = {name: value for name, value in given.items() if name in NAMES}  # a newer release has more
    return Diagnosis(
        verdict=verdict if verdict in VERDICTS else "unknown",
        confidence=number(entry.get("confidence")) or 0.0,
        stage=text(entry.get("stage")) or None,
        since=number(entry.get("since")) or 0.0,
        evidence={
            name: Found(name, flag(found.get("value")), text(found.get("text"))) for name, found in evidence.items()
        },
        supporting=_texts(entry, "supporting"),
        opposing=_texts(entry, "opposing"),
        missing=_texts(entry, "missing"),
        conditions=conditions,
        beside={name: Found(name, value, text(texts.get(name))) for name, value in conditions.items()},
        documented_signature=_flags(signature.get("conditions")),
        documented_signature_met=flag(signature.get("met")),
        signature_note=text(signature.get("note")),
    )


def _limit(name: str, found: Mapping[str, Any]) -> Limit:
    return Limit(
        name,
        number(found.get("value")),
        flag(found.get("explicit")),
        text(found.get("source")) or None,
        number(found.get("recommended")),
    )


def _step(step: Mapping[str, Any]) -> TriageStep:
    return TriageStep(
        int(number(step.get("number")) or 0),
        text(step.get("question")),
        next((one for one in _MARKS if one == step.get("finding")), "unknown"),
        _texts(step, "answers"),
        text(step.get("command")),
    )


def _gpu(found: Mapping[str, Any]) -> GpuReading:
    size = number(found.get("memory_total_bytes"))
    return GpuReading(
        text(found.get("uuid")),
        int(number(found.get("index")) or 0),
        text(found.get("vendor")),
        name=text(found.get("name")) or None,
        memory_total_bytes=None if size is None else int(size),
    )


def signals_from(flat: Mapping[str, Any], time: float) -> Signals:
    """Signals from their flat names (the reverse of ``Signals.flat``); unknown names and non-numbers are left out."""
    values = {name: value for name, raw in flat.items() if (value := number(raw)) is not None}
    by_field: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        field, colon, key = name.partition(":")
        if colon:
            by_field.setdefault(field, {})[key] = value
    groups = {name: _group(kind, hints, values, by_field) for name, (kind, hints) in _groups().items()}
    events = {name: int(count) for name, count in by_field.get("log_events", {}).items()}
    return Signals(time, events=events, events_known=bool(events), oom=by_field.get("oom", {}), **groups)


@lru_cache(maxsize=1)
def _groups() -> dict[str, tuple[type[Any], dict[str, Any]]]:
    """Classes of signals by their name in ``Signals``, and the types of their fields."""
    hints = get_type_hints(Signals)
    kinds = [(item.name, hints[item.name]) for item in fields(Signals) if is_dataclass(hints[item.name])]
    return {name: (kind, get_type_hints(kind)) for name, kind in kinds}


def _group(
    kind: type[T], hints: Mapping[str, Any], values: Mapping[str, float], by_field: Mapping[str, Mapping[str, float]]
) -> T:
    found: dict[str, Any] = {}
    for item in fields(kind):  # type: ignore[arg-type]  # every group is a dataclass
        hint = hints[item.name]
        if get_origin(hint) is not None and get_origin(hint) is not UnionType:
            if get_args(hint)[0] is str:
                found[item.name] = by_field.get(item.name, {})
        elif item.name in values:
            found[item.name] = values[item.name] != 0 if bool in (hint, *get_args(hint)) else values[item.name]
    return kind(**found)


# --- plain values -----------------------------------------------------------------------------------------


def _texts(found: Mapping[str, Any], name: str) -> tuple[str, ...]:
    return tuple(item for item in items(found.get(name)) if isinstance(item, str))


def _flags(value: object) -> dict[str, bool | None]:
    return {name: flag(item) for name, item in mapping(value).items()}


def _numbers(value: object) -> dict[str, float]:
    return {name: found for name, item in mapping(value).items() if (found := number(item)) is not None}
