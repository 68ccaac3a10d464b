"""What to do now, with the values to set: for KV pressure the guide "Emergency Mitigation" in its order."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor
from typing import Final

from kvpressure.args import option, value_text
from kvpressure.publish.pressure import Step, pressure_plan
from kvpressure.publish.wording import number_text, percent_text, seconds_text, words
from kvpressure.state import EngineState, Limit
from kvpressure.thresholds import Thresholds


@dataclass(frozen=True, slots=True)
class Action:
    """One step. ``flags`` are arguments of vLLM exactly as to be set, ``commands`` are for a shell."""

    title: str
    text: str
    flags: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do about one engine; ``actions`` in order, empty when nothing has to be done."""

    summary: str
    actions: tuple[Action, ...] = ()


def plan(engine: EngineState, thresholds: Thresholds) -> Plan:
    """The plan for the present verdict; a verdict without confidence gets none but its question."""
    verdict, confidence = engine.diagnosis.verdict, engine.diagnosis.confidence
    found = _PLANS.get(verdict)
    if found is None:
        return Plan("Nothing to do.")
    made = found(engine, thresholds)
    if verdict != "unknown" and confidence < thresholds["confident"]:
        return Plan(
            f"The verdict is not confident ({percent_text(confidence)}, confident from "
            f"{percent_text(thresholds['confident'])}): look at the triage before you change anything. If it holds: "
            + made.summary,
            made.actions,
        )
    return made


def _flag(engine: EngineState, name: str) -> tuple[str, str]:
    """The argument with the value to set ("" when there is none), and the value in force in words."""
    limit = engine.limits.get(name)
    if limit is None:
        return "", "not known"
    now = "not known" if limit.value is None else f"{value_text(limit.value)} ({limit.source or 'source not known'})"
    return ("" if limit.recommended is None else f"{option(name)} {value_text(limit.recommended)}"), now


def _where(engine: EngineState) -> str:
    return f"-n {shlex.quote(engine.key.namespace or '<namespace>')} deploy/<deployment>"


def _kv_pressure(engine: EngineState, t: Thresholds) -> Plan:
    made = pressure_plan(_Published(engine), t, _where(engine))
    return Plan(
        "Let the cache grow less, first at the edge, then in the engine.", tuple(_action(step) for step in made.steps)
    )


def _action(step: Step) -> Action:
    mark = {"do": "", "if it stays": " (if it stays)", "not here": ": not now"}[step.advice]
    text = f"{step.text[:1].upper()}{step.text[1:]}" + ("" if step.text.endswith(".") else ".")
    return Action(
        step.title + mark,
        text
        + (f" Cost: {step.cost}." if step.cost else "")
        + (f" Measured: {step.measured}." if step.measured else ""),
        step.flags,
        step.commands if step.advice == "do" else (),
    )


def _roll_out(engine: EngineState) -> Action:
    return Action(
        "Roll out and watch",
        "Change the arguments in the deployment or in its Helm values.",
        commands=(f"kubectl edit {_where(engine)}", f"kubectl rollout status {_where(engine)}"),
    )


class _Published:
    """A published engine as the plan asks for it. Memory of its GPUs is not at hand."""

    def __init__(self, engine: EngineState) -> None:
        self._engine = engine
        self._signals = engine.signals.flat()

    @property
    def stage(self) -> str | None:
        return self._engine.diagnosis.stage

    @property
    def version(self) -> str | None:
        return self._engine.version

    @property
    def address(self) -> str:
        target = self._engine.target.removesuffix("/metrics")
        return target if target.startswith("http") else ""

    def gpu_bytes(self) -> Sequence[float]:
        return ()

    def limit(self, name: str) -> Limit:
        return self._engine.limits.get(name) or Limit(name)

    def signal(self, name: str) -> float | None:
        return self._signals.get(name)

    shape = signal

    def evidence(self, name: str) -> bool | None:
        found = self._engine.diagnosis.evidence.get(name)
        return None if found is None else found.value

    def condition(self, name: str) -> bool | None:
        return self._engine.diagnosis.conditions.get(name)


def _concurrency_limited(engine: EngineState, t: Thresholds) -> Plan:
    del t
    s, (flag, now) = engine.signals, _flag(engine, "max_num_seqs")
    fits = s.load.limits.get("kv_capacity")
    text = f"max_num_seqs is reached, now {now}, and the KV cache has room ({percent_text(s.kv.kv_used_ratio_max)} at most)."
    if flag and fits is not None:
        text += (
            f" About {number_text(floor(fits))} requests of the present length fit into the cache; go up by no more "
            "than twice at a time and watch it."
        )
    return Plan(
        "Let more requests run: the cache has room. Lowering KV limits would make it worse.",
        (
            Action("Raise max_num_seqs", text, (flag,) if flag else ()),
            _roll_out(engine),
            Action(
                "Or add replicas",
                "If time per output token is already at its limit, more requests in one batch make it longer: "
                f"p95 is {seconds_text(s.latency.inter_token.get('0.95'))} now.",
            ),
        ),
    )


def _compute_bound(engine: EngineState, t: Thresholds) -> Plan:
    del t
    s = engine.signals
    rates = (
        f"{number_text(_round(s.throughput.prompt_tokens_per_second))} prompt and "
        f"{number_text(_round(s.throughput.generation_tokens_per_second))} generated tokens a second"
    )
    return Plan(
        "The GPU computes all it can and the cache has room: less work per GPU, not smaller limits.",
        (
            Action(
                "Find who sends the prompts",
                f"{rates}; prompt p95 "
                f"{number_text(_round(s.context.prompt_quantiles.get('0.95')))} tokens. Throttle that client at the gateway, or give "
                "it a deployment of its own.",
            ),
            Action("Add replicas", f"{number_text(s.load.waiting)} requests wait. Requests spread over more GPUs."),
            Action(
                "Leave the KV limits alone",
                f"The KV cache is used {percent_text(s.kv.kv_used_ratio_max)} at most: it does not bind.",
            ),
        ),
    )


def _round(value: float | None) -> float | None:
    return None if value is None else round(value)


def _host_bound(engine: EngineState, t: Thresholds) -> Plan:
    host = engine.signals.host
    cpu = (
        "its CPU use is not known"
        if host.cpu_used_ratio is None
        else f"CPU used {percent_text(host.cpu_used_ratio)} of its limit"
    )
    return Plan(
        "The GPU waits for its host: CPU first, not the KV cache.",
        (
            Action(
                "Give the container more CPU",
                f"{percent_text(host.cpu_throttled_ratio)} of CFS periods are throttled (much from "
                f"{percent_text(t['cpu_throttled_ratio'])}), {cpu}, GPU "
                f"utilization {percent_text(engine.signals.compute.gpu_utilization)}. Raise or remove resources.limits.cpu.",
                commands=(
                    f"kubectl set resources {_where(engine)} -c {shlex.quote(engine.container or '<container>')} "
                    "--limits=cpu=<cores>",
                ),
            ),
            Action(
                "If the CPU is free, look at the API server",
                f"It uses {number_text(host.api_cpu_cores)} cores, and one event loop "
                "has no more than one. Time outside the engine is "
                f"{percent_text(engine.signals.latency.outside_engine_share)} of the whole request.",
                ("--api-server-count 2",) if (host.api_cpu_cores or 0.0) >= t["api_cpu_cores"] else (),
            ),
            Action("Leave the KV limits alone", "The cache is not what requests wait for."),
        ),
    )


def _stalled(engine: EngineState, t: Thresholds) -> Plan:
    del t
    key = engine.key
    pod = f"-n {shlex.quote(key.namespace or '<namespace>')} {shlex.quote(key.pod or '<pod>')}"
    return Plan(
        "The engine has stopped: a restart is the cure, evidence first.",
        (
            Action(
                "Keep the evidence",
                "One minute, while it hangs; after the restart it is gone.",
                commands=(
                    f"kubectl logs {pod} --since=2h > stalled.log",
                    f"kubectl exec {pod} -- sh -c 'for p in $(pgrep -f vllm); do py-spy dump --pid $p; done' > stacks.txt",
                ),
            ),
            Action(
                "Restart the pod",
                "Health checks stay green, so Kubernetes does not restart it by itself.",
                commands=(f"kubectl delete pod {pod}",),
            ),
            Action("Verify on this page", "The verdict leaves stalled within a minute of the first requests."),
        ),
    )


def _unknown(engine: EngineState, t: Thresholds) -> Plan:
    del t
    if not engine.up:
        key = engine.key
        pod = f"-n {shlex.quote(key.namespace or '<namespace>')} pod/{shlex.quote(key.pod or '<pod>')}"
        return Plan(
            "Find out why the engine's metrics cannot be read.",
            (
                Action(
                    "Is the pod running?",
                    f"{engine.target}: {words(engine.error) if engine.error else 'no answer yet'}.",
                    commands=(f"kubectl describe {pod}", f"kubectl logs {pod} --since=2h"),
                ),
            ),
        )
    missing = engine.diagnosis.missing
    return Plan(
        "Change nothing yet: there is too little evidence.",
        (Action("Get what is missing", "; ".join(missing) + "."),) if missing else (),
    )


_PLANS: Final[dict[str, Callable[[EngineState, Thresholds], Plan]]] = {
    "kv_pressure": _kv_pressure,
    "concurrency_limited": _concurrency_limited,
    "compute_bound": _compute_bound,
    "host_bound": _host_bound,
    "stalled": _stalled,
    "unknown": _unknown,
}
