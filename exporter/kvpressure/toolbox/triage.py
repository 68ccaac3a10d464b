"""The eight triage steps of the guide, with kubectl's facts where these are better."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvpressure.advice.triage import Mark, TriageStep, gravest
from kvpressure.model.log_events import ALLOCATION_EVENTS, FACT_EVENTS
from kvpressure.model.readings import OOM_EXIT_CODE
from kvpressure.toolbox.engine_view import EngineView

_HARD: Final = ALLOCATION_EVENTS | {"host_oom", "engine_dead", "start_failed"}
_PERIODIC: Final = frozenset({"stats", "iteration", "sleep"})
_SHOWN: Final = 8
_SHAPE_STEP: Final = 5


@dataclass(frozen=True, slots=True)
class PodFacts:
    """kubectl's facts about the engine's pod. Log events are counts of the last two hours by name; None = no log,
    because of ``log_errors``.
    """

    phase: str = ""
    node: str = ""
    running_log: Mapping[str, int] | None = None
    previous_log: Mapping[str, int] | None = None
    log_lines: tuple[str, ...] = ()
    log_errors: tuple[str, ...] = ()
    events: tuple[str, ...] | None = None
    port: int | None = None
    page_error: str = ""


def triage(engine: EngineView, pod: PodFacts | None = None) -> list[TriageStep]:
    """All steps in the guide's order; empty for an older exporter's document without them."""
    steps = [_shape(step, engine) if step.number == _SHAPE_STEP else step for step in engine.triage]
    if pod is None:
        return steps
    return [_REFINED[step.number](step, engine, pod) if step.number in _REFINED else step for step in steps]


def _shape(step: TriageStep, engine: EngineView) -> TriageStep:
    """The step with lengths since the server started, because no request finishes in a short watch."""
    shape = engine.plan_input
    told = [
        f"{words} {value:.0f}"
        for words, value in (
            ("prompts", shape.prompts.get("0.95")),
            ("outputs", shape.outputs.get("0.95")),
            ("max_tokens", shape.asked.get("0.95")),
        )
        if value is not None
    ]
    if not told or "0.95" in engine.signals.context.prompt_quantiles:
        return step
    return replace(step, answers=(*step.answers, f"Since the server started, p95 in tokens: {', '.join(told)}."))


def _pods(step: TriageStep, _engine: EngineView, pod: PodFacts) -> TriageStep:
    where = f"Phase {pod.phase or 'unknown'}" + (f" on node {pod.node}." if pod.node else ".")
    return replace(step, finding=step.finding if pod.phase == "Running" else "bad", answers=(*step.answers, where))


def _restarts(step: TriageStep, engine: EngineView, _pod: PodFacts) -> TriageStep:
    """The step with a killed container however long ago, because kubectl has no history of half an hour."""
    readings = [container.reading for container in engine.containers]
    ended = [reading.last_termination for reading in readings if reading.last_termination is not None]
    killed = any(end.reason == "OOMKilled" or end.exit_code == OOM_EXIT_CODE for end in ended)
    restarts = sum(reading.restarts or 0 for reading in readings)
    return replace(step, finding="bad" if killed and restarts else "look" if restarts else step.finding)


def _log(step: TriageStep, _engine: EngineView, pod: PodFacts) -> TriageStep:
    answers = list(pod.log_errors)
    findings: set[Mark] = set()
    for title, counts in (
        ("Running container, last two hours", pod.running_log),
        ("Previous container", pod.previous_log),
    ):
        if counts is None:
            continue
        told = {name: count for name, count in counts.items() if name not in FACT_EVENTS | _PERIODIC}
        findings.add("bad" if _HARD & told.keys() else "look" if told else "fine")
        said = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in sorted(told.items()))
        answers.append(f"{title}: {said or 'no failed allocation'}.")
    finding = gravest(*findings)
    return replace(step, finding=finding, answers=(*answers, *pod.log_lines))


def _events(step: TriageStep, _engine: EngineView, pod: PodFacts) -> TriageStep:
    if pod.events is None:
        return step
    if not pod.events:
        return replace(step, finding="fine", answers=("No memory pressure, eviction, scheduling delay or restart.",))
    return replace(
        step,
        finding="look",
        answers=(f"{len(pod.events)} events that make memory pressure worse (not its cause):", *pod.events[-_SHOWN:]),
    )


def _endpoint(step: TriageStep, engine: EngineView, pod: PodFacts) -> TriageStep:
    where = f"Port {pod.port} of the pod." if pod.port else "The pod declares no metrics port."
    if engine.engine.up:
        return replace(step, answers=(*step.answers, where))
    return replace(step, finding="bad", answers=(*step.answers, where, *([pod.page_error] if pod.page_error else ())))


_REFINED: Final[Mapping[int, Callable[[TriageStep, EngineView, PodFacts], TriageStep]]] = {
    1: _pods,
    2: _restarts,
    4: _log,
    6: _events,
    7: _endpoint,
}
