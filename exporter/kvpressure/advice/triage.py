"""The eight triage steps of the guide "KV Cache Diagnostics", answered from the published state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvpressure.advice.action import in_namespace, is_pod, of_pod, on_host
from kvpressure.advice.wording import clock_text, no_events, scrape_error, words
from kvpressure.diagnosis import findings
from kvpressure.engines.registry import dialect
from kvpressure.model.log_events import ALLOCATION_EVENTS
from kvpressure.model.readings import OOM_EXIT_CODE, GpuReading
from kvpressure.model.signals import CacheSignals
from kvpressure.model.state import ContainerState, EngineState, State
from kvpressure.printable import BESIDE, OR, PIPE, UNKNOWN, capital, command, named, say
from kvpressure.settings.thresholds import Thresholds

Mark = Literal["fine", "look", "bad", "unknown"]
NOTABLE_EVENTS: Final = frozenset({"host_oom", "preemption", "engine_dead", "start_failed", "broadcast_wait"})
_LISTED: Final = ALLOCATION_EVENTS | NOTABLE_EVENTS


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


_FORWARDED: Final = "localhost:8000/metrics"
_KERNEL_LOG: Final = command("dmesg", "--ctime", PIPE, "grep", "-iE", "out of memory|xid|amdgpu")


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
    def has_pod(self) -> bool:
        """Whether the server is known as a pod."""
        return is_pod(self.engine.key)

    def holds(self, name: str) -> bool | None:
        """The value of a finding; ``None`` = unknown."""
        return self.engine.diagnosis.holds(name)

    def lines(self, *names: str) -> tuple[str, ...]:
        """The sentences of these findings."""
        evidence = self.engine.diagnosis.evidence
        return tuple(f"{capital(evidence[name].text)}." for name in names if name in evidence)

    def told(self, text: str) -> str:
        """A text with numbers by name, without its parts that name an unknown one."""
        return findings.about(self.engine.signals, self.thresholds).told(text)


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
    return tuple(
        TriageStep(number, question, *answer(case), by_hand(case))
        for number, (question, answer, by_hand) in enumerate(_STEPS, 1)
    )


def gravest(*marks: Mark) -> Mark:
    """The most serious of several findings: bad, look, fine, unknown."""
    return next((one for one in _ORDER if one in marks), "unknown")


_ORDER: Final[tuple[Mark, ...]] = ("bad", "look", "fine")
Told = tuple[Mark, tuple[str, ...]]
"""How serious a step is, and sentences."""


def _gpus_text(gpus: Sequence[GpuReading]) -> str:
    """GPUs by their index, those of one name together: ``GPU 0, 1 (NVIDIA H100)``."""
    by_name: dict[str, list[str]] = {}
    for gpu in gpus:
        by_name.setdefault(gpu.name or gpu.vendor, []).append(str(gpu.index))
    return ", ".join(f"GPU {', '.join(indices)} ({name})" for name, indices in by_name.items())


def _pods(case: _TriagedEngine) -> Told:
    engine = case.engine
    on = _gpus_text([gpu.reading for gpu in case.state.gpus if gpu.reading.uuid in engine.gpus]) or "GPU: unknown"
    if engine.group:
        on += f"; GPUs that {engine.group} has on other nodes are not included"
    ready = case.container.reading.ready if case.container else None
    says = "readiness: unknown" if ready is None else ("ready" if ready else "not ready")
    where = (
        f"{engine.key.namespace or '–'}/{engine.key.pod}, container {engine.container or '–'}: {says}; {on}."
        if case.has_pod
        else f"Server at {engine.target} (not a pod); {on}."
    )
    return _TRUE_IS_FINE[ready], (where,)


_TRUE_IS_FINE: Final[Mapping[bool | None, Mark]] = {True: "fine", False: "bad", None: "unknown"}
_TRUE_IS_BAD: Final[Mapping[bool | None, Mark]] = {True: "bad", False: "fine", None: "unknown"}
_KILLS: Final = {
    "OOMKilled": "OOMKilled: the container reached its host memory limit. GPU memory is not involved.",
    "": "Exit code 137: SIGKILL, for example for lack of host memory or after a failed probe.",
}


def _restarts(case: _TriagedEngine) -> Told:
    host = case.engine.signals.host
    if case.container is None or case.container.reading.restarts is None:
        why = "the pod's status is not available" if case.has_pod else "only Kubernetes reports restarts"
        return "unknown", (f"Unknown: {why}.",)
    restarts, ended = case.container.reading.restarts, case.container.reading.last_termination
    recent = host.restarts_recent
    least = "" if host.restarts_all_known or (recent or 0.0) >= restarts else "at least "
    lately = f" (in the last 30 minutes: {UNKNOWN if recent is None else least + say(recent)})" if restarts else ""
    mark: Mark = "look" if recent else "unknown" if recent is None else "fine"
    answers = [f"Restarts since the pod was created: {say(restarts)}{lately}."]
    if ended is None:
        return mark, tuple(answers)
    code = "" if ended.exit_code is None else f", exit code {ended.exit_code}"
    at = named("at", clock_text(ended.finished_at))
    answers.append(f"Last termination: {ended.reason or 'reason: unknown'}{code}, {at}.")
    if ended.reason == "OOMKilled" or ended.exit_code == OOM_EXIT_CODE:
        answers.append(_KILLS.get(ended.reason or "", _KILLS[""]))
        mark = "bad" if recent else mark
    return mark, tuple(answers)


def _signature(case: _TriagedEngine) -> Told:
    names = ("signature_gpu_memory_high", "signature_gpu_utilization_low", "memory_required_high")
    high, low, required = map(case.holds, names)
    look = (high and low) or required
    activity = case.told("GPU utilization {gpu_utilization}, power {power} of the limit")
    return "look" if look else "unknown" if None in (high, low) and False not in (high, low) else "fine", (
        *case.lines(*names),
        *((f"{activity}.",) if activity else ()),
        f"Thresholds are {case.thresholds.entry('signature_memory_ratio').cited}.",
        "The engine reserves its KV pool at start.",
    )


def _log(case: _TriagedEngine) -> Told:
    s = case.engine.signals
    own = dialect(case.engine.dialect).words
    others = (f"{own.get(name) or words(name)} ({count} ×)" for name, count in s.events.items() if name in _LISTED)
    said = ", ".join(others)
    errors = ("gpu_out_of_memory",) if case.holds("gpu_out_of_memory") else ()
    notable = (f"Notable log lines: {said}.",) if said else ()
    return _TRUE_IS_BAD[case.holds("allocation_failure_logged")], (
        *case.lines("allocation_failure_logged", *errors),
        *notable,
    )


def _requests(case: _TriagedEngine) -> Told:
    names = ("context_spike", "arrivals_bursty", "kv_overcommitted")
    known: list[Mark] = ["look" if value else "fine" for value in map(case.holds, names) if value is not None]
    lengths = case.told(
        "prompt {prompt_p95} tokens, output {output_p95} tokens, max_tokens {max_tokens_p95} tokens,"
        " duration {stream_p95}"
    )
    return gravest(*known), (
        f"p95 over 5 minutes: {lengths or 'unknown (no request finished, or no histograms of lengths)'}.",
        *case.lines(*names),
        *_holders(case.engine.signals.cache),
    )


def _holders(cache: CacheSignals) -> Iterator[str]:
    """Who holds the prefix cache, the largest holder with a name first, or why that is unknown."""
    if cache.events_complete and (missing := no_events(cache)):
        yield f"Who holds the prefix cache: unknown, because {missing}."
    for what, shares in (("Adapter", cache.held_by_adapter), ("Cache salt", cache.held_by_salt)):
        for name, share in list(shares.items())[:1]:
            rest = "".join(f"; {other} {say(held, 'ratio')}" for other, held in shares.items() if other != name)
            yield f"{what} {name} holds {say(share, 'ratio')} of the prefix cache{rest}."


def _events(case: _TriagedEngine) -> Told:
    known = {one.type: one.status for one in case.state.node_conditions if one.status is not None}
    if not known:
        return "unknown", ("Unknown: node conditions are not available.",)
    wrong = [name if name != "Ready" else "not ready" for name, status in known.items() if status is (name != "Ready")]
    fine = ", ".join(name for name in known if name != "Ready") or "the node is ready"
    return "look" if wrong else "fine", (
        f"Problems now: {', '.join(wrong)}." if wrong else f"No problem: {fine}.",
        "Evictions and scheduling delays make memory pressure worse. They do not cause it.",
    )


def _endpoint(case: _TriagedEngine) -> Told:
    engine = case.engine
    target = next((one for one in case.state.targets if one.target == engine.target), None)
    took = f" in {say(target.duration_seconds, 'seconds')}" if target and target.duration_seconds is not None else ""
    scraped = f"scraped{took}" if engine.up else f"scrape failed: {scrape_error(engine)}"
    answers = [f"{engine.target}: {scraped}."]
    if target is not None and target.bad_lines:
        answers.append(f"{target.bad_lines} lines could not be parsed.")
    if target is not None and target.cut:
        answers.append(f"Left out: {', '.join(f'{count} {words(what)}' for what, count in target.cut.items())}.")
    return _TRUE_IS_FINE[engine.up], tuple(answers)


def _metrics(case: _TriagedEngine) -> Told:
    up = case.engine.up
    stuck = ("no_progress",) if up and case.holds("no_progress") else ()
    load = case.told("Requests running {running}, waiting {waiting}, time in queue p95 {queue_p95}")
    times = case.told(
        "time to first token p95 {ttft_p95}, p99 {ttft_p99}, time per output token p95 {inter_token_p95},"
        " p99 {inter_token_p99}, whole request p95 {e2e_p95}, p99 {e2e_p99}"
    )
    return _slow(case) if up else "unknown", (
        *case.lines(*stuck, "signature_batch_collapsed"),
        *((f"{load}.",) if load else ()),
        f"Latency: {times or 'unknown (no token was produced, or no latency histograms)'}.",
        *case.lines("latency_multiplied"),
    )


def _slow(case: _TriagedEngine) -> Mark:
    """Whether users wait; without a baseline the thresholds of the latency alerts decide, without latency the queue."""
    rising, batch, long = map(case.holds, ("signature_latency_rising", "signature_batch_collapsed", "waits_long"))
    if rising is None and long is None:
        short = case.holds("queue_short")
        long = None if short is None else not short
    stalled = case.engine.diagnosis.verdict == "stalled"
    if stalled or case.holds("waits_very_long") or case.holds("latency_multiplied"):
        return "bad"
    small = batch and (case.engine.signals.load.waiting or 0) > 0
    if rising or small or case.holds("no_progress") or (rising is None and long):
        return "look"
    return "unknown" if rising is None and (batch is None or long is None) else "fine"


_STEPS: Final[
    tuple[
        tuple[str, Callable[[_TriagedEngine], Told], Callable[[_TriagedEngine], str]],
        ...,
    ]
] = (
    (
        "Which pod serves the model?",
        _pods,
        lambda case: case.by_hand(
            command("kubectl", "get", *in_namespace(case.engine.key), "pods", "-o", "wide"),
            command("curl", "-s", case.engine.target.removesuffix("/metrics") + "/v1/models"),
        ),
    ),
    (
        "Restarts or OOMKills?",
        _restarts,
        lambda case: case.by_hand(
            command("kubectl", "describe", *case.pod),
            "".join(on_host(case.engine.key, "status")),
        ),
    ),
    (
        "GPU memory high and GPU utilization low?",
        _signature,
        lambda case: case.by_hand(
            command("kubectl", "exec", *case.pod, "--", "nvidia-smi"), command("nvidia-smi", OR, "rocm-smi")
        ),
    ),
    (
        "Allocation failures in the log?",
        _log,
        lambda case: case.by_hand(
            command(
                *("kubectl", "logs", *case.pod, "--since=2h"), PIPE, *("grep", "-iE", "kv|cache|cuda|oom|alloc|memory")
            ),
            "".join(on_host(case.engine.key, "log")),
        ),
    ),
    ("What is being sent?", _requests, lambda _: ""),  # only the gateway's or the application's log has more
    (
        "What is reported about the node?",
        _events,
        lambda case: case.by_hand(
            command("kubectl", "get", "events", *in_namespace(case.engine.key), "--sort-by=.lastTimestamp"),
            _KERNEL_LOG,
        ),
    ),
    (
        "Can the metrics be scraped?",
        _endpoint,
        lambda case: case.by_hand(
            command(
                *("kubectl", "port-forward", *case.pod, "8000:8000", BESIDE),
                *("curl", "-s", "--retry", "5", "--retry-connrefused", _FORWARDED, PIPE, "head"),
            ),
            command("curl", "-s", case.engine.target, PIPE, "head"),
        ),
    ),
    (
        "Are batch size, latency and time per output token normal?",
        _metrics,
        lambda case: command(
            *("curl", "-s", _FORWARDED if case.has_pod else case.engine.target, PIPE),
            *("grep", "-E", "running|waiting|time_per_output|inter_token"),
        ),
    ),
)
