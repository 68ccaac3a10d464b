"""The eight triage steps of the guide "KV Cache Diagnostics", with the answers of this moment."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from kvpressure.publish.wording import (
    clock_text,
    number_text,
    percent_text,
    seconds_text,
    words,
)
from kvpressure.signals.logevents import ALLOCATION_EVENTS
from kvpressure.state import ContainerState, EngineState, State
from kvpressure.thresholds import Thresholds

Finding = Literal["fine", "look", "bad", "unknown"]
OOM_EXIT_CODE: Final = 137
TELLING_EVENTS: Final = frozenset({"host_oom", "preemption", "engine_dead", "start_failed", "broadcast_wait"})


@dataclass(frozen=True, slots=True)
class Step:
    """One step: ``finding`` fine, look (worth a look), bad or unknown; ``answers`` are sentences with their numbers and
    thresholds; ``command`` is what the guide runs by hand.
    """

    number: int
    question: str
    finding: Finding
    answers: tuple[str, ...]
    command: str


@dataclass(frozen=True, slots=True)
class _Case:
    engine: EngineState
    container: ContainerState | None
    state: State
    thresholds: Thresholds

    @property
    def pod(self) -> str:
        """Namespace and pod as arguments of kubectl, safe to paste. A server that was given by its address has none."""
        key = self.engine.key
        return (
            f"-n {shlex.quote(key.namespace or '<namespace>')} pod/{shlex.quote(key.pod if self.has_pod else '<pod>')}"
        )

    @property
    def has_pod(self) -> bool:
        """Whether the server is known as a pod."""
        return bool(self.engine.key.pod) and ":" not in self.engine.key.pod


def steps(engine: EngineState, state: State, thresholds: Thresholds) -> tuple[Step, ...]:
    """All eight, in the guide's order."""
    key = engine.key
    container = next(
        (
            one
            for one in state.containers
            if one.reading.container == engine.container
            and (one.reading.namespace, one.reading.pod) == (key.namespace, key.pod)
        ),
        None,
    )
    case = _Case(engine, container, state, thresholds)
    return tuple(step(case) for step in _STEPS)


def gravest(*findings: Finding) -> Finding:
    """The one to show for several: bad, look, fine, unknown."""
    return next((one for one in _ORDER if one in findings), "unknown")


_ORDER: Final[tuple[Finding, ...]] = ("bad", "look", "fine")


def _pods(case: _Case) -> Step:
    engine, held = case.engine, case.container
    gpus = [gpu.reading for gpu in case.state.gpus if gpu.reading.uuid in engine.gpus]
    on = ", ".join(f"GPU {gpu.index} ({gpu.name or gpu.vendor})" for gpu in gpus) or "GPU not known"
    ready = held.reading.ready if held else None
    says = "readiness not known" if ready is None else ("ready" if ready else "not ready")
    where = (
        f"{engine.key.namespace or '–'}/{engine.key.pod}, container {engine.container or '–'}: {says}; {on}."
        if case.has_pod
        else f"Only its address is known, {engine.target}, and not which pod answers there; {on}."
    )
    finding: Finding = "unknown" if ready is None else ("fine" if ready else "bad")
    return Step(
        1,
        "Which pod serves the model?",
        finding,
        (where,),
        f"kubectl get -n {shlex.quote(engine.key.namespace or '<namespace>')} pods -o wide",
    )


def _restarts(case: _Case) -> Step:
    held, host = case.container, case.engine.signals.host
    command = f"kubectl describe {case.pod}"
    if held is None or held.reading.restarts is None:
        return Step(2, "Restarts or OOMKills?", "unknown", ("The pod's status is not read.",), command)
    reading, ended = held.reading, held.reading.last_termination
    recent = host.restarts_recent
    lately = (
        "how many of them in the last half hour is not known (yet)"
        if recent is None
        else f"{'' if host.restarts_all_known else 'at least '}{number_text(recent)} of them in the last half hour"
    )
    answers = [f"{reading.restarts} restarts, {lately}."]
    finding: Finding = "look" if recent else "unknown" if recent is None else "fine"
    if ended is not None:
        code = "" if ended.exit_code is None else f", exit code {ended.exit_code}"
        answers.append(f"Ended last: {ended.reason or 'reason not known'}{code}, {clock_text(ended.finished_at)}.")
        killed = ended.reason == "OOMKilled" or ended.exit_code == OOM_EXIT_CODE
        if killed:
            answers.append(
                "The guide reads OOMKilled or 137 as the end stage; what ran out is the container's memory limit, not "
                "the GPU's memory."
            )
        if killed and recent:
            finding = "bad"
    return Step(2, "Restarts or OOMKills?", finding, tuple(answers), command)


def _signature(case: _Case) -> Step:
    s, t = case.engine.signals, case.thresholds
    used, needed, busy = s.memory.device_used_ratio, s.memory.device_demand_ratio, s.compute.gpu_utilization
    answers = (
        f"GPU memory used {percent_text(used)} (documented: above {percent_text(t['signature_memory_ratio'])}); really needed "
        f"{percent_text(needed)}: an engine reserves its KV pool at start, full or empty (warning from {percent_text(t['memory_warning_ratio'])}).",
        f"GPU utilization {percent_text(busy)} (documented: below {percent_text(t['signature_utilization_ratio'])} while "
        "traffic is present).",
    )
    conditions = case.engine.diagnosis.documented_signature
    pair = (conditions.get("gpu_memory_high"), conditions.get("gpu_utilization_low"))
    finding: Finding = "unknown" if None in pair and False not in pair else "fine"
    if pair == (True, True) or (needed is not None and needed >= t["memory_warning_ratio"]):
        finding = "look"
    return Step(
        3, "GPU memory high and GPU utilization low?", finding, answers, f"kubectl exec {case.pod} -- nvidia-smi"
    )


def _log(case: _Case) -> Step:
    s = case.engine.signals
    command = f"kubectl logs {case.pod} --since=2h | grep -iE 'kv|cache|cuda|oom|alloc|memory'"
    if not s.events_known:
        return Step(4, "Allocation failures in the log?", "unknown", ("The container's log is not read.",), command)
    failures = {name: count for name, count in s.events.items() if name in ALLOCATION_EVENTS}
    others = {name: count for name, count in s.events.items() if name in TELLING_EVENTS}
    answers = [_counted("Allocation failures in the last 10 minutes", failures)]
    if case.engine.diagnosis.conditions.get("gpu_out_of_memory"):
        text = case.engine.diagnosis.evidence["gpu_out_of_memory"].text
        answers.append(f"{text[:1].upper()}{text[1:]}.")
    if others:
        answers.append(_counted("Other lines worth knowing", others))
    return Step(4, "Allocation failures in the log?", "bad" if failures else "fine", tuple(answers), command)


def _counted(title: str, events: Mapping[str, int]) -> str:
    return f"{title}: {', '.join(f'{words(name)} {count}' for name, count in events.items()) or 'none'}."


def _requests(case: _Case) -> Step:
    s, t = case.engine.signals, case.thresholds
    shape, burst, over = s.context, s.load.arrival_burst_ratio, s.kv.kv_overcommit_ratio
    answers = (
        *_sent(case),
        f"Growth law, concurrency x tokens in flight: {number_text(s.load.in_flight)} requests x "
        f"{number_text(shape.context_mean)} tokens, cache of {number_text(s.kv.kv_capacity_tokens)} tokens; load and limits "
        f"can reach {_times(over)} the cache.",
    )
    marks = (
        (shape.context_spike_ratio, "context_spike_ratio"),
        (burst, "arrival_burst_ratio_high"),
        (over, "kv_overcommit_warning_ratio"),
    )
    found: list[Finding] = ["look" if value >= t[name] else "fine" for value, name in marks if value is not None]
    return Step(5, "What is being sent?", gravest(*found), answers, "look at the gateway's or the application's log")


def _sent(case: _Case) -> tuple[str, ...]:
    """Lengths and bursts, as far as requests were seen."""
    s, t = case.engine.signals, case.thresholds
    shape, burst = s.context, s.load.arrival_burst_ratio
    if not shape.prompt_quantiles and shape.context_max_5m is None and burst is None:
        return ("No request was seen to finish in the last five minutes.",)
    return (
        f"p95 of five minutes: prompts {_tokens(shape.prompt_quantiles)}, answers {_tokens(shape.output_quantiles)}, max_tokens "
        f"asked for {_tokens(shape.max_tokens_quantiles)}, streams {seconds_text(shape.stream_quantiles.get('0.95'))}.",
        f"Longest context {number_text(shape.context_max_5m)} tokens, {_times(shape.context_spike_ratio)} the mean (spike from "
        f"{number_text(t['context_spike_ratio'])} times); busiest ten seconds {_times(burst)} the mean rate (burst from "
        f"{number_text(t['arrival_burst_ratio_high'])} times).",
    )


def _tokens(quantiles: Mapping[str, float]) -> str:
    value = quantiles.get("0.95")
    return "not known" if value is None else f"{number_text(round(value))} tokens"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} times"


def _events(case: _Case) -> Step:
    known = {one.type: one.status for one in case.state.node_conditions if one.status is not None}
    command = (
        f"kubectl get events -n {shlex.quote(case.engine.key.namespace or '<namespace>')} --sort-by=.lastTimestamp"
    )
    if not known:
        return Step(
            6, "What does Kubernetes say about the node?", "unknown", ("The node's conditions are not read.",), command
        )
    wrong = [name for name, status in known.items() if status is (name != "Ready")]
    answer = (
        f"Holds now: {', '.join(wrong)}."
        if wrong
        else f"Nothing of {', '.join(n for n in known if n != 'Ready')} holds."
    )
    return Step(
        6,
        "What does Kubernetes say about the node?",
        "look" if wrong else "fine",
        (answer, "Evictions and scheduling delays amplify memory pressure; they are not its cause."),
        command,
    )


def _endpoint(case: _Case) -> Step:
    engine = case.engine
    target = next((one for one in case.state.targets if one.target == engine.target), None)
    took = f" in {seconds_text(target.duration_seconds)}" if target and target.duration_seconds is not None else ""
    answers = [f"{engine.target}: " + (f"read{took}." if engine.up else f"cannot be read ({words(engine.error)}).")]
    if target is not None and target.bad_lines:
        answers.append(f"{target.bad_lines} lines could not be understood.")
    if target is not None and target.cut:
        answers.append(
            f"A limit left out {', '.join(f'{count} {what}' for what, count in target.cut.items())} of this page."
        )
    return Step(
        7,
        "Can the metrics be read?",
        "fine" if engine.up else "bad",
        tuple(answers),
        f"kubectl port-forward {case.pod} 8000:8000, then curl -s localhost:8000/metrics | head",
    )


def _metrics(case: _Case) -> Step:
    s, t, up = case.engine.signals, case.thresholds, case.engine.up
    worst = max(s.latency.baseline_ratios.items(), key=lambda item: item[1], default=None)
    batch = case.engine.diagnosis.documented_signature.get("batch_collapsed")
    answers = (
        f"Effective batch p95 {number_text(s.batch.batch_p95)}, mean {number_text(s.batch.batch_mean)} (documented: collapsed at "
        f"{number_text(t['signature_batch_size'])} or less with traffic); {number_text(s.load.running)} run, "
        f"{number_text(s.load.waiting)} wait.",
        f"p95 / p99: first token {_pair(s.latency.ttft)}, time per output token {_pair(s.latency.inter_token)}, whole request "
        f"{_pair(s.latency.e2e)}."
        if s.latency.ttft or s.latency.inter_token or s.latency.e2e
        else "No token came out: no latency to tell.",
        "Against the engine's own baseline: "
        + (
            "not known yet."
            if worst is None
            else f"{words(worst[0])} p95 is {worst[1]:.1f} times (rising from "
            f"{number_text(t['latency_rising_ratio'])}, multiplied from {number_text(t['latency_multiplied_ratio'])} times)."
        ),
    )
    found: list[Finding] = []
    if batch is not None:
        found.append("look" if batch and (s.load.waiting or 0) > 0 else "fine")
    if worst is not None:
        found.append(
            "bad"
            if worst[1] >= t["latency_multiplied_ratio"]
            else "look"
            if worst[1] >= t["latency_rising_ratio"]
            else "fine"
        )
    return Step(
        8,
        "Batch size, latency, time per output token?",
        gravest(*found) if up else "unknown",
        answers,
        "curl -s localhost:8000/metrics | grep -E 'running|waiting|time_per_output|inter_token'",
    )


def _pair(quantiles: Mapping[str, float]) -> str:
    return f"{seconds_text(quantiles.get('0.95'))} / {seconds_text(quantiles.get('0.99'))}"


_STEPS: Final[tuple[Callable[[_Case], Step], ...]] = (
    _pods,
    _restarts,
    _signature,
    _log,
    _requests,
    _events,
    _endpoint,
    _metrics,
)
