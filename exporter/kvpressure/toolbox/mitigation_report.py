"""A mitigation plan as text and JSON; and the outcome of a verification."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from kvpressure import __version__
from kvpressure.advice.mitigation import cause
from kvpressure.advice.plan import PressurePlan
from kvpressure.advice.wording import words
from kvpressure.toolbox import gateway_config as edge
from kvpressure.toolbox.engine_view import EngineView
from kvpressure.toolbox.mitigation_check import Outcome
from kvpressure.toolbox.report import action_lines, next_steps, verdict_words

PRESSURE: Final = "kv_pressure"


def not_pressure(engine: EngineView, others: Sequence[EngineView], again: str) -> list[str]:
    """What to do instead where the verdict is not KV pressure, or unknown."""
    lines = [f"{engine.name}: {_found(engine)} ({cause(engine.engine)})", *_also(others), "", "What to do:"]
    for number, action in enumerate(next_steps(engine, again), 1):
        lines += action_lines(number, action)
    if engine.diagnosis.verdict == "unknown":
        return [*lines, "", "The plan for KV pressure may not help: lower limits can make another problem worse."]
    return [*lines, "", "The plan for KV pressure does not help here, and lower limits can make it worse."]


def _found(engine: EngineView) -> str:
    """``KV PRESSURE (thrashing), confidence 0.95``."""
    verdict = verdict_words(engine.diagnosis.verdict, engine.diagnosis.stage)
    return f"{verdict}, confidence {engine.diagnosis.confidence:.2f}"


def _also(others: Sequence[EngineView]) -> list[str]:
    """A line with the other engines in trouble; none without any."""
    named = ", ".join(f"{other.name} ({words(other.diagnosis.verdict)})" for other in others)
    return [f"also in trouble: {named} (choose one with --pod, --model or its own URL)"] if others else []


def as_gateway_configuration(engine: EngineView, others: Sequence[EngineView], plan: PressurePlan) -> str:
    """The caps for Envoy Gateway and nginx."""
    head = [f"{engine.name}: {_found(engine)}", *_also(others)]
    head += [] if engine.diagnosis.verdict == PRESSURE else ["not KV pressure: this does not help"]
    head += [] if plan.caps.known else ["example caps: no request lengths are known"]
    files = ("--- Envoy Gateway ---", edge.envoy_gateway(plan.caps), "--- nginx ---", edge.nginx(plan.caps))
    return "\n".join((*(f"# {line}" for line in head), *files))


def as_text(engine: EngineView, others: Sequence[EngineView], plan: PressurePlan) -> str:
    """The plan for a person."""
    lines = [
        f"{engine.name}: {_found(engine)}",
        *_also(others),
        "",
        "Mitigation, in this order (nothing is applied automatically):",
    ]
    for number, action in enumerate(plan.steps, 1):
        lines += action_lines(number, action)
    if flags := " ".join(flag for step in plan.steps for flag in step.flags):
        lines += ["", f"all together: {flags}"]
    lines += ["ready configuration for Envoy Gateway and nginx: --edge"]
    return "\n".join(lines)


def as_json(engine: EngineView, others: Sequence[EngineView], plan: PressurePlan, again: str) -> dict[str, Any]:
    """Plain JSON values."""
    applies = engine.diagnosis.verdict == PRESSURE
    return {
        "version": __version__,
        **engine.identity,
        "verdict": engine.diagnosis.verdict,
        "stage": engine.diagnosis.stage,
        "confidence": engine.diagnosis.confidence,
        "cause": cause(engine.engine),
        "applies": applies,
        "also_in_trouble": [{**other.identity, "verdict": other.diagnosis.verdict} for other in others],
        "instead": [] if applies else [asdict(action) for action in next_steps(engine, again)],
        "steps": [asdict(step) for step in plan.steps],
        "set": plan.values,
        "caps": asdict(plan.caps),
        "edge": {"envoy_gateway": edge.envoy_gateway(plan.caps), "nginx": edge.nginx(plan.caps)},
    }


def outcome_lines(outcome: Outcome) -> Iterator[str]:
    """Whether the server recovered, and why."""
    verdict = verdict_words(outcome.verdict, None)
    yield f"{_headline(outcome)} after {outcome.seconds:.0f} s: {outcome.engine}: {verdict}"
    for check in outcome.checks:
        mark = {True: "ok", False: "BAD", None: "?"}[check.value]
        yield f"  {mark:4} {check.name}: {check.text}"
    if outcome.verdict == "idle" and not outcome.recovered:
        yield "no traffic: recovery can only be checked under load. Verify again then (--verify-seconds waits longer)"
    elif not outcome.recovered and _well_at_the_end(outcome):
        yield "recovered at the end, but not for 30 s without a break: verify again for longer (--verify-seconds)"
    elif not outcome.recovered:
        yield (
            "if it persists: the next step of the plan (kvpressure mitigate URL), or check for another cause"
            " (kvpressure diagnose URL)"
        )
    elif not outcome.trouble:
        yield "no problem while watched: an earlier problem is over"


def _headline(outcome: Outcome) -> str:
    if outcome.recovered:
        return "RECOVERED" if outcome.trouble else "WELL"
    return "NOT PROVEN" if outcome.verdict == "idle" or _well_at_the_end(outcome) else "NOT RECOVERED"


def _well_at_the_end(outcome: Outcome) -> bool:
    return outcome.verdict == "healthy" and all(check.value is not False for check in outcome.checks)
