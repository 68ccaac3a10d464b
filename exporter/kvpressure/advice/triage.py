"""The eight triage steps of the guide "KV Cache Diagnostics", answered from the published state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvpressure.advice.wording import (
    capital,
    clock_text,
    counted,
    named,
    number_text,
    percent_text,
    reason_text,
    seconds_text,
    words,
)
from kvpressure.diagnosis.numbers import minutes
from kvpressure.engines.registry import dialect
from kvpressure.model.log_events import ALLOCATION_EVENTS
from kvpressure.model.readings import EngineKey, GpuReading
from kvpressure.model.state import ContainerState, EngineState, State
from kvpressure.printable import BESIDE, OR, PIPE, command
from kvpressure.settings.thresholds import Thresholds

Mark = Literal["fine", "look", "bad", "unknown"]
OOM_EXIT_CODE: Final = 137
NOTABLE_EVENTS: Final = frozenset({"host_oom", "preemption", "engine_dead", "start_failed", "broadcast_wait"})


@dataclass(frozen=True, slots=True)
class TriageStep:
    """One step. ``finding``: fine, look (worth a look), bad or unknown. ``answers``: sentences with numbers and
    thresholds. ``command``: what the guide runs by hand.
    """

    number: int
    question: str
    finding: Mark
    answers: tuple[str, ...]
    command: str


UNIT: Final = "<unit>"
_FORWARDED: Final = "localhost:8000/metrics"
_KERNEL_LOG: Final = command("dmesg", "--ctime", PIPE, "grep", "-iE", "out of memory|xid|amdgpu")
_UNIT_LOG: Final = command(
    *("journalctl", "-u", UNIT, "--since", "-2h", OR, "docker", "logs", "--since", "2h", "<container>")
)


@dataclass(frozen=True, slots=True)
class _TriagedEngine:
    engine: EngineState
    container: ContainerState | None
    state: State
    thresholds: Thresholds

    @property
    def pod(self) -> tuple[str, ...]:
        """The pod in words of kubectl."""
        return of_pod(self.engine.key)

    def by_hand(self, in_pod: str, on_host: str) -> str:
        """The command for a pod, or for a server known only by its address."""
        return in_pod if self.has_pod else on_host

    @property
    def metrics_url(self) -> str:
        """Address of the metrics endpoint."""
        return self.engine.target or "http://localhost:8000/metrics"

    @property
    def has_pod(self) -> bool:
        """Whether the server is known as a pod."""
        return is_pod(self.engine.key)


def is_pod(key: EngineKey) -> bool:
    """Whether an engine belongs to a pod; False for a server given by its address."""
    return bool(key.pod) and ":" not in key.pod


def in_namespace(key: EngineKey) -> tuple[str, ...]:
    """The engine's namespace in words of kubectl."""
    return "-n", key.namespace or "<namespace>"


def of_pod(key: EngineKey) -> tuple[str, ...]:
    """The engine's pod in words of kubectl; no name in it can be taken for an option."""
    return *in_namespace(key), f"pod/{key.pod or '<pod>'}"


def steps(engine: EngineState, state: State, thresholds: Thresholds) -> tuple[TriageStep, ...]:
    """All eight triage steps, in the guide's order."""
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
    case = _TriagedEngine(engine, container, state, thresholds)
    return tuple(step(case) for step in _STEPS)


def gravest(*findings: Mark) -> Mark:
    """The most serious of several findings: bad, look, fine, unknown."""
    return next((one for one in _ORDER if one in findings), "unknown")


_ORDER: Final[tuple[Mark, ...]] = ("bad", "look", "fine")


def _gpus_text(gpus: Sequence[GpuReading]) -> str:
    """GPUs by their index, those of one name together: ``GPU 0, 1 (NVIDIA H100)``."""
    by_name: dict[str, list[str]] = {}
    for gpu in gpus:
        by_name.setdefault(gpu.name or gpu.vendor, []).append(str(gpu.index))
    return ", ".join(f"GPU {', '.join(indices)} ({name})" for name, indices in by_name.items())


def _pods(case: _TriagedEngine) -> TriageStep:
    engine, held = case.engine, case.container
    gpus = [gpu.reading for gpu in case.state.gpus if gpu.reading.uuid in engine.gpus]
    on = _gpus_text(gpus) or "GPU: unknown"
    if engine.group:
        on += f"; GPUs that {engine.group} has on other nodes are not included"
    ready = held.reading.ready if held else None
    says = "readiness: unknown" if ready is None else ("ready" if ready else "not ready")
    where = (
        f"{engine.key.namespace or '–'}/{engine.key.pod}, container {engine.container or '–'}: {says}; {on}."
        if case.has_pod
        else f"Server at {engine.target} (not a pod); {on}."
    )
    finding: Mark = "unknown" if ready is None else ("fine" if ready else "bad")
    return TriageStep(
        1,
        "Which pod serves the model?",
        finding,
        (where,),
        case.by_hand(
            command("kubectl", "get", *in_namespace(engine.key), "pods", "-o", "wide"),
            command("curl", "-s", engine.target.removesuffix("/metrics") + "/v1/models"),
        ),
    )


def _restarts(case: _TriagedEngine) -> TriageStep:
    held, host = case.container, case.engine.signals.host
    by_hand = case.by_hand(
        command("kubectl", "describe", *case.pod),
        command("systemctl", "status", UNIT, OR, "docker", "ps", "--all"),
    )
    if held is None or held.reading.restarts is None:
        why = "the pod's status is not available" if case.has_pod else "only Kubernetes reports restarts"
        return TriageStep(2, "Restarts or OOMKills?", "unknown", (f"Unknown: {why}.",), by_hand)
    restarts, ended, recent = held.reading.restarts, held.reading.last_termination, host.restarts_recent
    least = "" if host.restarts_all_known or (recent or 0.0) >= restarts else "at least "
    lately = f"in the last 30 minutes: {'unknown' if recent is None else least + number_text(recent)}"
    answers = [f"{counted(restarts, 'restart')} since the pod was created ({lately})." if restarts else "0 restarts."]
    finding: Mark = "look" if recent else "unknown" if recent is None else "fine"
    if ended is not None:
        code = "" if ended.exit_code is None else f", exit code {ended.exit_code}"
        answers.append(
            f"Last termination: {ended.reason or 'reason: unknown'}{code},"
            f" {named('at', clock_text(ended.finished_at))}."
        )
        killed = ended.reason == "OOMKilled" or ended.exit_code == OOM_EXIT_CODE
        if ended.reason == "OOMKilled":
            answers.append("OOMKilled: the container reached its host memory limit. GPU memory is not involved.")
        elif killed:
            answers.append("Exit code 137: SIGKILL, for example for lack of host memory or after a failed probe.")
        if killed and recent:
            finding = "bad"
    return TriageStep(2, "Restarts or OOMKills?", finding, tuple(answers), by_hand)


def _signature(case: _TriagedEngine) -> TriageStep:
    s, t = case.engine.signals, case.thresholds
    used, needed, busy = s.memory.device_used_ratio, s.memory.device_demand_ratio, s.compute.gpu_utilization
    answers = (
        (
            f"{named('GPU memory used', percent_text(used))}. Used memory above"
            f" {percent_text(t['signature_memory_ratio'])} is a sign of pressure"
            f" ({t.entry('signature_memory_ratio').cited})."
            f" {named('Required memory', percent_text(needed))}."
            " Required memory means used memory minus free KV blocks (warning at"
            f" {percent_text(t['memory_warning_ratio'])}). The engine reserves its KV pool at start."
        ),
        (
            f"{named('GPU utilization', percent_text(busy))}. With traffic, GPU utilization below"
            f" {percent_text(t['signature_utilization_ratio'])} is a sign of pressure"
            f" ({t.entry('signature_utilization_ratio').cited})."
        ),
    )
    conditions = case.engine.diagnosis.documented_signature
    pair = (conditions.get("gpu_memory_high"), conditions.get("gpu_utilization_low"))
    finding: Mark = "unknown" if None in pair and False not in pair else "fine"
    if pair == (True, True) or (needed is not None and needed >= t["memory_warning_ratio"]):
        finding = "look"
    return TriageStep(
        3,
        "GPU memory high and GPU utilization low?",
        finding,
        answers,
        case.by_hand(command("kubectl", "exec", *case.pod, "--", "nvidia-smi"), command("nvidia-smi", OR, "rocm-smi")),
    )


def _log(case: _TriagedEngine) -> TriageStep:
    s = case.engine.signals
    by_hand = case.by_hand(
        command(
            *("kubectl", "logs", *case.pod, "--since=2h"), PIPE, *("grep", "-iE", "kv|cache|cuda|oom|alloc|memory")
        ),
        _UNIT_LOG,
    )
    if not s.events_known:
        return TriageStep(
            4,
            "Allocation failures in the log?",
            "unknown",
            ("Unknown: no log is read.",),
            by_hand,
        )
    window = minutes(case.thresholds["log_window_seconds"])
    failures = {name: count for name, count in s.events.items() if name in ALLOCATION_EVENTS}
    others = {name: count for name, count in s.events.items() if name in NOTABLE_EVENTS}
    own = dialect(case.engine.dialect).words
    answers = [_counted(f"Allocation failures in the last {window}", failures, own)]
    if case.engine.diagnosis.conditions.get("gpu_out_of_memory"):
        answers.append(f"{capital(case.engine.diagnosis.evidence['gpu_out_of_memory'].text)}.")
    if others:
        answers.append(_counted("Other notable log lines", others, own))
    return TriageStep(4, "Allocation failures in the log?", "bad" if failures else "fine", tuple(answers), by_hand)


def _counted(title: str, events: Mapping[str, int], own: Mapping[str, str]) -> str:
    lines = (f"{own.get(name) or words(name)} ({count} ×)" for name, count in events.items())
    return f"{title}: {', '.join(lines) or 'none'}."


def _requests(case: _TriagedEngine) -> TriageStep:
    s, t = case.engine.signals, case.thresholds
    shape, burst, over = s.context, s.load.arrival_burst_ratio, s.kv.kv_overcommit_ratio
    answers = (*_sent(case), *_demand(case))
    marks = (
        (shape.context_spike_ratio, t["context_spike_ratio"]),
        (burst, t["arrival_burst_ratio_high"]),
        (over, 1),
    )
    found: list[Mark] = ["look" if value >= level else "fine" for value, level in marks if value is not None]
    return TriageStep(
        5, "What is being sent?", gravest(*found), answers, "check the gateway's or the application's log"
    )


def _demand(case: _TriagedEngine) -> tuple[str, ...]:
    """Requests in flight, and what the load can ask of the KV cache, with the factors of the ratio as far as known."""
    s = case.engine.signals
    in_flight, mean = named("Requests in flight", number_text(s.load.in_flight)), s.context.context_mean
    capacity, over, reached = s.kv.kv_capacity_tokens, s.kv.kv_overcommit_ratio, s.kv.requests_reached
    if over is None or mean is None or capacity is None or reached is None:
        return (f"{in_flight}, {named('mean length', _length(mean))}, {named('KV capacity', _length(capacity))}.",)
    return (
        f"{in_flight}.",
        f"Highest token demand at the current load and limits: {number_text(reached)} requests × {_length(mean)} ="
        f" {_length(reached * mean)}. The highest demand is {_times(over)} the KV capacity of {_length(capacity)}.",
    )


def _sent(case: _TriagedEngine) -> tuple[str, ...]:
    """Request lengths and bursts, as far as seen."""
    s, t = case.engine.signals, case.thresholds
    shape, burst = s.context, s.load.arrival_burst_ratio
    lengths = (shape.prompt_quantiles, shape.output_quantiles, shape.max_tokens_quantiles, shape.stream_quantiles)
    if not shape.prompt_quantiles and shape.context_max_5m is None and burst is None:
        return ("Request lengths of the last 5 minutes: unknown (no request finished, or no histograms of lengths).",)
    spike = shape.context_spike_ratio
    return (
        (
            f"p95 over 5 minutes: {named('prompt', _tokens(shape.prompt_quantiles))},"
            f" {named('output', _tokens(shape.output_quantiles))},"
            f" {named('max_tokens', _tokens(shape.max_tokens_quantiles))},"
            f" {named('duration', seconds_text(shape.stream_quantiles.get('0.95')))}."
            if any(lengths)
            else "p95 of request lengths in the last 5 minutes: unknown."
        ),
        f"Longest request: {_length(shape.context_max_5m)}"
        + (
            "."
            if spike is None
            else f", {_times(spike)} the mean (counts as a spike from {_times(t['context_spike_ratio'])})."
        ),
        (
            "Arrival bursts: unknown."
            if burst is None
            else (
                f"Busiest 10 s: {_times(burst)} the mean arrival rate (counts as a burst from"
                f" {_times(t['arrival_burst_ratio_high'])})."
            )
        ),
    )


def _tokens(quantiles: Mapping[str, float]) -> str:
    return _length(quantiles.get("0.95"))


def _length(tokens: float | None) -> str:
    return "unknown" if tokens is None else f"{number_text(round(tokens))} tokens"


def _times(value: float) -> str:
    return f"{number_text(value)} ×"


def _events(case: _TriagedEngine) -> TriageStep:
    known = {one.type: one.status for one in case.state.node_conditions if one.status is not None}
    events = command("kubectl", "get", "events", *in_namespace(case.engine.key), "--sort-by=.lastTimestamp")
    by_hand = case.by_hand(events, _KERNEL_LOG)
    question = case.by_hand("What does Kubernetes report about the node?", "What does the host report?")
    if not known:
        return TriageStep(6, question, "unknown", ("Unknown: node conditions are not available.",), by_hand)
    wrong = [name for name, status in known.items() if status is (name != "Ready")]
    answer = (
        f"Problems now: {', '.join(name if name != 'Ready' else 'not ready' for name in wrong)}."
        if wrong
        else f"No problem: {', '.join(n for n in known if n != 'Ready') or 'the node is ready'}."
    )
    return TriageStep(
        6,
        question,
        "look" if wrong else "fine",
        (answer, "Evictions and scheduling delays make memory pressure worse. They do not cause it."),
        by_hand,
    )


def _endpoint(case: _TriagedEngine) -> TriageStep:
    engine = case.engine
    target = next((one for one in case.state.targets if one.target == engine.target), None)
    took = f" in {seconds_text(target.duration_seconds)}" if target and target.duration_seconds is not None else ""
    answers = [
        f"{engine.target}: "
        + (f"scraped{took}." if engine.up else f"scrape failed: {reason_text(engine.error, engine.dialect)}.")
    ]
    if target is not None and target.bad_lines:
        answers.append(f"{target.bad_lines} lines could not be parsed.")
    if target is not None and target.cut:
        answers.append(f"Left out: {', '.join(f'{count} {words(what)}' for what, count in target.cut.items())}.")
    return TriageStep(
        7,
        "Can the metrics be scraped?",
        "fine" if engine.up else "bad",
        tuple(answers),
        case.by_hand(
            command(
                *("kubectl", "port-forward", *case.pod, "8000:8000", BESIDE),
                *("curl", "-s", "--retry", "5", "--retry-connrefused", _FORWARDED, PIPE, "head"),
            ),
            command("curl", "-s", case.metrics_url, PIPE, "head"),
        ),
    )


def _metrics(case: _TriagedEngine) -> TriageStep:
    s, t, up = case.engine.signals, case.thresholds, case.engine.up
    worst = max(s.latency.baseline_ratios.items(), key=lambda item: item[1], default=None)
    batch = case.engine.diagnosis.documented_signature.get("batch_collapsed")
    stuck = case.engine.diagnosis.evidence.get("no_progress")
    answers = (
        *((f"{capital(stuck.text)}.",) if up and stuck is not None and stuck.value else ()),
        (
            f"{named('P95 batch size', number_text(s.batch.batch_p95))},"
            f" {named('mean batch size', number_text(s.batch.batch_mean))}. With traffic, a p95 batch"
            f" size of {number_text(t['signature_batch_size'])} or less is a sign of pressure"
            f" ({t.entry('signature_batch_size').cited})."
        ),
        (
            f"{named('Requests running', number_text(s.load.running))},"
            f" {named('waiting', number_text(s.load.waiting))};"
            f" {named('time in queue p95', seconds_text(s.latency.queue.get('0.95')))}."
        ),
        (
            f"p95 / p99: {named('time to first token', _pair(s.latency.ttft))},"
            f" {named('time per output token', _pair(s.latency.inter_token))},"
            f" {named('whole request', _pair(s.latency.e2e))}."
            if s.latency.ttft or s.latency.inter_token or s.latency.e2e
            else "Latency: unknown (no token was produced, or no latency histograms)."
        ),
        (
            "Baseline: unknown (latency is judged without a baseline)."
            if worst is None
            else (
                f"{words(worst[0])} p95: {worst[1]:.1f} × the baseline (rising at {_times(t['latency_rising_ratio'])}, "
                f"multiplied at {_times(t['latency_multiplied_ratio'])})."
            )
        ),
    )
    found: list[Mark] = []
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
    waits = _users_wait(case, worst is not None)
    finding = gravest(*found, *waits)
    return TriageStep(
        8,
        "Are batch size, latency and time per output token normal?",
        "unknown" if not up or (finding == "fine" and "unknown" in waits) else finding,
        answers,
        command(
            *("curl", "-s", _FORWARDED if case.has_pod else case.metrics_url, PIPE),
            *("grep", "-E", "running|waiting|time_per_output|inter_token"),
        ),
    )


def _users_wait(case: _TriagedEngine, baseline: bool) -> list[Mark]:
    """Findings on users' waiting times; without a baseline the thresholds of the latency alerts decide, without
    latency the queue.
    """
    latency, t, diagnosis = case.engine.signals.latency, case.thresholds, case.engine.diagnosis
    known = {
        name: diagnosis.evidence[name].value for name in ("no_progress", "queue_short") if name in diagnosis.evidence
    }
    waits = [quantiles["0.95"] for quantiles in (latency.ttft, latency.queue) if "0.95" in quantiles]
    if diagnosis.verdict == "stalled" or any(wait >= t["wait_page_seconds"] for wait in waits):
        return ["bad"]
    if known.get("no_progress") or (not baseline and any(wait >= t["ttft_floor_seconds"] for wait in waits)):
        return ["look"]
    if baseline or waits:
        return []
    short = known.get("queue_short")
    return ["unknown"] if short is None else [] if short else ["look"]


def _pair(quantiles: Mapping[str, float]) -> str:
    return f"{seconds_text(quantiles.get('0.95'))} / {seconds_text(quantiles.get('0.99'))}" if quantiles else "unknown"


_STEPS: Final[tuple[Callable[[_TriagedEngine], TriageStep], ...]] = (
    _pods,
    _restarts,
    _signature,
    _log,
    _requests,
    _events,
    _endpoint,
    _metrics,
)
