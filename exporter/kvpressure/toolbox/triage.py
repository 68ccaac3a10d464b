"""The eight triage steps of the guide, with what kubectl knows beside the exporter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvpressure.advice.triage import Mark, Told, TriageStep, gravest
from kvpressure.toolbox.engine_view import EngineView

_SHAPE_STEP: Final = 5


@dataclass(frozen=True, slots=True)
class PodFacts:
    """kubectl's facts about the engine's pod: what it tells by the number of a triage step (unknown where it is not for
    kubectl to say how serious that is), and the log events of the last two hours and of the previous container by name
    (None = no log was read).
    """

    steps: Mapping[int, Told]
    log_events: Mapping[str, int] | None


def triage(engine: EngineView, pod: PodFacts | None = None) -> list[TriageStep]:
    """All steps in the guide's order; empty for an older exporter's document without them."""
    told = {} if pod is None else pod.steps
    steps = (_shape(step, engine) if step.number == _SHAPE_STEP else step for step in engine.triage)
    return [_with(step, *told[step.number]) if step.number in told else step for step in steps]


def _with(step: TriageStep, mark: Mark, sentences: tuple[str, ...]) -> TriageStep:
    """The step with what kubectl tells, in place of why it is unknown."""
    own = () if sentences and step.finding == "unknown" else step.answers
    return replace(step, finding=gravest(mark, step.finding), answers=(*own, *sentences))


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
    if not told or "0.95" in engine.engine.signals.context.prompt_quantiles:
        return step
    return replace(step, answers=(*step.answers, f"Since the server started, p95 in tokens: {', '.join(told)}."))
