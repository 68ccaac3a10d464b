"""What to do now, with values to set; for KV pressure by the guide "Emergency Mitigation"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from math import floor
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from kvpressure.advice.action import (
    Action,
    container_limits,
    failures,
    is_pod,
    mended_tier,
    of_pod,
    of_transfers,
    on_host,
    reuse_plan,
    roll_out,
    stacks_of,
    start_failure,
    value_and_flag,
    workload,
)
from kvpressure.advice.limits import PlanInput, past_peak, peer_of, requests_that_fit, side_of
from kvpressure.advice.plan import of_pools, pressure_steps
from kvpressure.advice.wording import clock_text, other_place, scrape_error
from kvpressure.engines.registry import dialect
from kvpressure.model.arguments import value_text
from kvpressure.model.log_events import EVENTS
from kvpressure.model.reasons import TARGET_LIMIT
from kvpressure.model.state import (
    ALONE_FULL,
    ALONE_SLOW,
    CALM,
    OTHER_HAS_ROOM,
    OTHER_IS_FULL,
    REUSE,
    STEP_TOKENS,
    Cause,
    EngineState,
)
from kvpressure.printable import INTO, PIPE, capital, command, named, say
from kvpressure.settings.thresholds import Thresholds

CAUSES: Final = {
    "kv_pressure": "requests are queueing for KV cache blocks or being {preempted}",
    "concurrency_limited": "{max_num_seqs} is reached; the KV cache is not full",
    "compute_bound": "prefill or decode saturates the GPU; the KV cache is not the limit",
    "host_bound": "the GPU waits for the host: CPU, tokenizer, the engine's API server or network",
    "transfer_bound": "requests wait for KV blocks to move between this server and another",
    "stalled": "requests are pending but no tokens are being produced",
    "healthy": "tokens are being produced and queueing is short",
    "idle": "no requests running or waiting",
    "unknown": "not enough data for a verdict",
}
TWO_LIMITS: Final = (
    "{max_num_seqs} is reached and the KV cache is full: do not raise {max_num_seqs}, it would cause {preemptions}"
)
_SLOW: Final = "slow, cause not found"
STEP_BUDGET: Final = "steps use up {max_num_batched_tokens}; the KV cache is not full"
_ELSE: Final = "Nothing to do for requests, but for what else was found."
REUSE_LOST: Final = "prompts are computed again after their KV blocks were evicted; the KV cache has room for what runs"
_NO_CAUSE: Final = ("Undecided", "No fresh metrics")  # tables whose rows name what is missing
_Planned = tuple[str, Iterable[Action]]  # summary and actions of a plan whose actions are made when they are asked for


class MitigationPlan(NamedTuple):
    """What to do about one engine; ``actions`` in order, empty when nothing is to be done."""

    summary: str
    actions: tuple[Action, ...] = ()

    @property
    def actions_now(self) -> tuple[Action, ...]:
        """Without those that do not help at present."""
        return tuple(action for action in self.actions if action.now)


def plan(engine: EngineState, thresholds: Thresholds) -> MitigationPlan:
    """The plan for the current verdict; without confidence, its summary says to check first, and what mends a fault
    that was found comes before what searches for a cause. So does what sends a decode server its prompts' work.
    """
    summary, actions = _planned(engine, thresholds)
    return MitigationPlan(summary, tuple(actions))


def _planned(engine: EngineState, thresholds: Thresholds) -> _Planned:
    verdict, confidence = engine.diagnosis.verdict, engine.diagnosis.confidence
    found, tiers = _PLANS.get(verdict), tuple(filter(None, (mended_tier(engine, thresholds),)))
    of_pool = tuple(of_pools(engine, workload(engine))) if engine.imbalance else ()
    if found is None:
        failed, peer = tuple(failures(engine)), tuple(of_transfers(engine))
        summary = "This server is well, its pair is not." if peer else _ELSE if failed or tiers else "Nothing to do."
        return of_pool[0].title + "." if of_pool else summary, (*of_pool, *failed, *peer, *tiers)
    summary, actions = found(engine, thresholds)
    beside = () if verdict == "transfer_bound" else tuple(of_transfers(engine))
    if verdict != "kv_pressure":  # its plan has its own steps for failed allocations, tiers and pools
        beside = (*failures(engine), *beside, *tiers)
    unsettled = not engine.up or confidence < thresholds["confident"] or engine.diagnosis.holds("prefill_wasted")
    actions = chain(beside, actions) if unsettled else chain(actions, beside)
    actions = actions if verdict == "kv_pressure" else chain(of_pool, actions)
    if engine.diagnosis.holds("clients_give_up"):
        summary, actions = _with_fewer_retries(engine, summary, actions)
    if verdict != "unknown" and confidence < thresholds["confident"]:
        summary = (
            f"Low confidence ({say(confidence, 'ratio')}; confident at {say(thresholds['confident'], 'ratio')}). "
            f"Check the triage steps first, and change nothing unless they confirm the verdict. {summary}"
        )
    return summary, actions


def _with_fewer_retries(engine: EngineState, summary: str, actions: Iterator[Action]) -> tuple[str, Iterator[Action]]:
    """The plan where clients do not wait for their answers: each retry takes capacity from a request that could end."""
    share = say(engine.signals.requests.given_up_ratio, "ratio")
    retries = Action(
        "Limit retries, or let clients wait longer",
        f"Clients gave up {share} of the answers in the last minute: what was computed for them is thrown away, and a"
        " retry computes it again. Refuse early (HTTP 429) instead of letting requests time out.",
    )
    return (
        f"{summary} Work is thrown away: clients give up {share} of the answers.",
        chain(islice(actions, 1), (retries,), actions),
    )


def _kv_pressure(engine: EngineState, t: Thresholds) -> _Planned:
    if engine.diagnosis.stage == REUSE:
        return MitigationPlan(
            "Keep more of what was computed: the KV cache has room for what runs. Lower limits do not help.",
            (*filter(None, (mended_tier(engine, t),)), *reuse_plan(PlanInput(engine), t)),
        )
    return _FIRST[side_of(engine)], pressure_steps(PlanInput(engine), t, workload(engine))


_FIRST: Final = {
    "": "Reduce KV cache demand: first at the gateway, then in the engine.",
    "decode": "Give decode more capacity, and reduce KV cache demand at the gateway.",
    "prefill": "See that decode fetches what prefill has computed, and reduce KV cache demand at the gateway.",
}
"""Summary of the plan for KV pressure, by the side of a pair."""


def _roll_out(engine: EngineState) -> Action:
    return Action(
        "Roll out and watch",
        "Change the arguments in the deployment or in its Helm values."
        if workload(engine)
        else "Change the arguments where the server is started, then restart it.",
        commands=roll_out(engine.key, workload(engine)),
    )


def _two_limits(engine: EngineState) -> MitigationPlan:
    """The plan where ``max_num_seqs`` is reached and the cache is full: raising the limit would cause preemptions."""
    s, called = engine.signals, dialect(engine.dialect).called
    return MitigationPlan(
        f"{called('max_num_seqs')} is reached and the KV cache is full. A higher limit would cause"
        f" {called('preemptions')}, a lower one a longer queue.",
        (
            Action(
                "Cap input and output tokens at the gateway, or add replicas",
                f"{named('Requests waiting', say(s.load.waiting))}. Shorter requests free both limits; more"
                " replicas share the queue.",
            ),
            Action(
                f"Leave {called('max_num_seqs')} where it is",
                f"{named('KV cache now', say(s.kv.kv_used_ratio, 'ratio'))},"
                f" {named('recent peak', say(s.kv.kv_used_ratio_max, 'ratio'))}.",
            ),
        ),
    )


def _step_budget(engine: EngineState, t: Thresholds) -> MitigationPlan:
    """The plan where steps use up their token budget."""
    s, (flag, now) = engine.signals, value_and_flag(engine, "max_num_batched_tokens")
    cut, _ = value_and_flag(engine, "max_num_seqs")
    called, usual = dialect(engine.dialect).called("max_num_batched_tokens"), t["max_num_batched_tokens_usual"]
    text = f"{named('Tokens in a step', say(_round(s.batch.step_tokens)))}. {named('Current value', now)}. "
    if not flag:
        text += f"Look the value up in the start-up log; if it is below {usual:.0f}, set it to {usual:.0f}. "
    if cut:
        text += "A larger budget lets in more requests than fit into the KV cache: limit those, too. "
    return MitigationPlan(
        f"Let each step compute more tokens: steps use up {called}, and the KV cache is not full. Lower limits would"
        " make the queue longer.",
        (
            Action(
                f"Raise {called}",
                f"{text}{named('KV cache peak', say(s.kv.kv_used_ratio_max, 'ratio'))}. A larger budget takes"
                " GPU memory for activations, and steps that compute long prompts take longer"
                f" ({named('p95 time per output token now', say(s.latency.inter_token.get('0.95'), 'seconds'))}).",
                tuple(value for value in (flag, cut) if value),
            ),
            _roll_out(engine),
            _replicas(engine),
        ),
    )


def _past_peak(engine: EngineState) -> MitigationPlan:
    """The plan where ``max_num_seqs`` is reached and throughput was higher with fewer requests at once."""
    s, one = engine.signals, dialect(engine.dialect)
    called, best, (_, now) = one.called("max_num_seqs"), past_peak(s), value_and_flag(engine, "max_num_seqs")
    text = (
        f"{named('Current value', now)}. Steps take {say(s.batch.step_ratio)} × as long as the fastest steps of"
        " a similar batch size. "
    )
    return MitigationPlan(
        f"Do not raise {called}: throughput no longer grows with the number of running requests. More at once would"
        " slow all of them.",
        (
            Action(
                f"Leave {called} where it is",
                f"{text}Number of running requests with the most output tokens/s: not below {called}, or unknown.",
            )
            if best is None
            else Action(
                f"Lower {called}",
                f"{text}In the last 15 minutes, most output tokens came with about {say(best)} requests running.",
                (f"{one.flag('max_num_seqs')} {value_text(best)}",),
            ),
            Action(
                "Find what slowed the steps",
                "Batches larger than the engine's CUDA graphs, longer contexts, and lower GPU clocks slow every step.",
            ),
            _replicas(engine),
        ),
    )


def _replicas(engine: EngineState, title: str = "Or add replicas") -> Action:
    return Action(
        title, f"{named('Requests waiting', say(engine.signals.load.waiting))}. More replicas share the queue."
    )


def _concurrency_limited(engine: EngineState, t: Thresholds) -> MitigationPlan:
    holds = engine.diagnosis.holds
    if engine.diagnosis.stage == STEP_TOKENS:
        return _step_budget(engine, t)
    if holds("kv_full"):
        return _two_limits(engine)
    slower = holds("steps_slower") and holds("throughput_fell") is not False
    if slower or holds("past_peak"):
        return _past_peak(engine)
    s, (flag, now) = engine.signals, value_and_flag(engine, "max_num_seqs")
    called, fit = dialect(engine.dialect).called, requests_that_fit(s, t)
    peak = named("KV cache peak", say(s.kv.kv_used_ratio_max, "ratio"))
    text = f"{called('max_num_seqs')} is reached. {named('Current value', now)}. {peak}."
    if fit is not None:
        text += (
            f" At what each request held in the last five minutes, about {say(floor(fit))} fit with"
            f" {say(t['max_num_seqs_cut_min_ratio'], 'ratio')} of the KV cache to spare."
        )
    if flag:
        text += f" In each step, raise {called('max_num_seqs')} to at most twice the requests in flight."
    elif fit is not None and s.context.output_mean is not None:
        return MitigationPlan(
            f"{called('max_num_seqs')} is reached, and the KV cache has too little room for a higher one.",
            (
                _replicas(engine, "Add replicas or KV memory"),
                Action(f"Leave {called('max_num_seqs')} where it is", text),
            ),
        )
    return MitigationPlan(
        "Let more requests run: the KV cache is not full. Lower limits would make the queue longer.",
        (
            Action(f"Raise {called('max_num_seqs')}", text, (flag,) if flag else ()),
            _roll_out(engine),
            Action(
                "Or add replicas",
                "A larger batch raises time per output token "
                f"({named('p95 now', say(s.latency.inter_token.get('0.95'), 'seconds'))}).",
            ),
        ),
    )


def _small_steps(engine: EngineState, t: Thresholds) -> tuple[Action, ...]:
    """The step budget to raise where prompts take most of the work, and a step computes few of their tokens."""
    budget, usual = engine.limit("max_num_batched_tokens").known, t["max_num_batched_tokens_usual"]
    if budget is None or budget >= usual or not engine.diagnosis.holds("prefill_dominates"):
        return ()
    one, (_, now) = dialect(engine.dialect), value_and_flag(engine, "max_num_batched_tokens")
    return (
        Action(
            f"Raise {one.called('max_num_batched_tokens')}",
            f"{named('Current value', now)}. Each step computes at most that many tokens, so a long prompt takes many"
            " steps, and others wait behind it. A larger budget takes GPU memory for activations.",
            (f"{one.flag('max_num_batched_tokens')} {value_text(usual)}",),
        ),
    )


def _compute_bound(engine: EngineState, t: Thresholds) -> MitigationPlan:
    s = engine.signals
    rates = (
        f"{named('Prompt tokens/s', say(_round(s.throughput.prompt_tokens_per_second)))}, "
        f"{named('output tokens/s', say(_round(s.throughput.generation_tokens_per_second)))}"
    )
    return MitigationPlan(
        "The GPU is saturated and the KV cache is not full: give each GPU less work; lower limits do not help.",
        (
            Action(
                "Find the client that sends the most prompt tokens",
                f"{rates},"
                f" {named('prompt p95 in tokens', say(_round(s.context.prompt_quantiles.get('0.95'))))}."
                " Throttle the heaviest client at the gateway, or move that client to a separate deployment.",
            ),
            *_small_steps(engine, t),
            Action(
                "Add replicas",
                f"{named('Requests waiting', say(s.load.waiting))}. More GPUs would share the load.",
            ),
            Action(
                f"Leave {dialect(engine.dialect).called('max_num_seqs')} and KV memory as they are",
                f"The KV cache is not the limit ({named('peak', say(s.kv.kv_used_ratio_max, 'ratio'))}).",
            ),
        ),
    )


def _round(value: float | None) -> float | None:
    return None if value is None else round(value)


def _host_bound(engine: EngineState, t: Thresholds) -> MitigationPlan:
    host, servers = engine.signals.host, dialect(engine.dialect).flag("api_server_count")
    what, limit = (
        ("container", "resources.limits.cpu")
        if is_pod(engine.key)
        else ("server", "CPUQuota= of its unit, or --cpus of its container")
    )
    cpu = (
        "CPU usage: unknown"
        if host.cpu_used_ratio is None
        else f"CPU usage {say(host.cpu_used_ratio, 'ratio')} of the limit"
    )
    return MitigationPlan(
        "The GPU waits for the host: check the CPU first, not the KV cache.",
        (
            Action(
                f"Give the {what} more CPU",
                f"{named('CFS periods throttled', say(host.cpu_throttled_ratio, 'ratio'))} (threshold"
                f" {say(t['cpu_throttled_ratio'], 'ratio')}). {cpu}."
                f" {named('GPU utilization', say(engine.signals.compute.gpu_utilization, 'ratio'))}. Raise or remove"
                f" {limit}.",
                commands=container_limits(engine, "--limits=cpu=<cores>"),
            ),
            Action(
                "If the CPU is not the limit, check the engine's API server",
                f"{named('CPU cores used by its processes', say(host.api_cpu_cores))}. Each API server process"
                " has one event loop, which can use only one core. "
                f"{named('Share of the request duration outside the engine', say(engine.signals.latency.outside_engine_share, 'ratio'))}.",  # noqa: E501
                (f"{servers} 2",) if servers and (host.api_cpu_cores or 0.0) >= t["container_limit_ratio"] else (),
            ),
            Action("Leave the engine's limits as they are", "Requests are not waiting for KV cache."),
        ),
    )


def _transfer_bound(engine: EngineState, _t: Thresholds) -> MitigationPlan:
    peer, loads = peer_of(engine), say(engine.signals.transfers.loads)
    look = Action(
        f"Look at the transfers between this server and the {peer} servers",
        f"{named('Requests whose KV blocks are on their way', loads)}. Check the network, and what the {peer} servers"
        " hold back.",
    )
    return MitigationPlan(
        "Act on the transfers and on the other server of the pair. Lower limits here free nothing: the requests that"
        " wait have what they need from this server.",
        tuple(of_transfers(engine)) or (look,),
    )


def _ask_for_a_pause(engine: EngineState, otherwise: str = "") -> Action:
    """What to ask before anything is killed: an engine that was told to stand still looks like one that has stopped.
    ``otherwise``: what follows where it was not told.
    """
    one, server, key = dialect(engine.dialect), urlsplit(engine.target), engine.key
    outside = engine.target.removesuffix("/metrics")
    ends = " or ".join(f"POST {path}" for path in one.pauses.values())
    within = ("kubectl", "exec", *of_pod(key), "--") if is_pod(key) else ()
    place = f"http://localhost:{server.port or one.default_port}" if is_pod(key) else outside
    return Action(
        f"Ask whether it was told to pause{otherwise}",
        "A pause, sleep mode, a weight update and a drain stop an engine in the same way, and a restart would lose the"
        " update and every request. Ask whoever operates it"
        + (
            f"; an answer of true ends with {ends}, once the operation is over. 404: not served. No answer: the engine"
            " has stopped without being told."
            if ends
            else "."
        ),
        commands=tuple(command(*within, "curl", "-sS", "--max-time", "5", place + path) for path in one.pauses),
    )


def _if_it_stops_again(engine: EngineState, t: Thresholds) -> Action:
    """What outlasts a restart: a fixed release, and where the cache was full, fewer requests at once."""
    limit, used = dialect(engine.dialect).called("max_num_seqs"), engine.signals.kv.kv_used_ratio_max
    full = used is not None and used >= t["kv_full_ratio"]
    return Action(
        "If it stops again: a newer version" + (f", and a lower {limit}" if full else ""),
        "A restart does not remove the cause. Report the stall with the saved evidence, version and arguments."
        + (
            f" {named('KV cache peak', say(used, 'ratio'))} when it stopped: fewer requests at once leave it room."
            if full
            else ""
        ),
    )


def _stalled(engine: EngineState, t: Thresholds) -> MitigationPlan:
    key, pod = engine.key, of_pod(engine.key)
    stacks = stacks_of(engine)
    right = "SYS_PTRACE (kubectl debug --profile=sysadmin has it)" if is_pod(key) else "root"
    return MitigationPlan(
        "The engine makes no progress. If it was not told to pause, save the evidence, then restart it.",
        (
            _ask_for_a_pause(engine, "; if not, save the evidence and restart it"),
            Action(
                "Save the evidence",
                f"A restart destroys it; saving it takes a minute. Python stacks need py-spy and {right};"
                " otherwise the state of each thread and what it waits in are saved.",
                commands=(
                    command("kubectl", "logs", *pod, "--since=2h", INTO, "stalled.log"),
                    command("kubectl", "exec", *pod, "--", "sh", "-c", stacks, INTO, "stacks.txt"),
                )
                if is_pod(key)
                else (
                    *on_host(key, "log", INTO, "stalled.log"),
                    command("sh", "-c", stacks, INTO, "stacks.txt"),
                ),
            ),
            Action(
                "Restart the pod" if is_pod(key) else "Restart the server",
                "Nothing restarts it by itself, because its health checks still pass.",
                commands=(command("kubectl", "delete", *pod),) if is_pod(key) else on_host(key, "restart"),
            ),
            _if_it_stops_again(engine, t),
            Action(
                "Verify on this page",
                "Within a minute of the first requests after the restart, another verdict should replace stalled.",
            ),
        ),
    )


def _unscraped(engine: EngineState) -> Action:
    """What to do first about a target that cannot be scraped."""
    key, text = engine.key, f"{engine.target}: {scrape_error(engine)}."
    if engine.error == TARGET_LIMIT:
        return Action("Raise --engine.max-targets", text)
    describe = command("kubectl", "describe", *of_pod(key))
    instead = other_place(engine.error)
    if instead:
        look = describe if is_pod(key) else command("curl", "-s", engine.target, PIPE, "head")
        return Action(f"Point the target at {instead}", text, commands=(look,))
    return Action(
        "Check that the pod is running" if is_pod(key) else "Check that the server is running",
        text,
        commands=(describe, command("kubectl", "logs", *of_pod(key), "--since=2h"))
        if is_pod(key)
        else (
            *on_host(key, "status"),
            command("curl", "-sv", engine.target, "-o", "/dev/null"),
        ),
    )


def _unknown(engine: EngineState, t: Thresholds) -> MitigationPlan:
    if not engine.up:
        return MitigationPlan("The engine's metrics cannot be scraped.", (_unscraped(engine),))
    for name, summary in _TOLD.items():
        if engine.diagnosis.holds(name):
            return MitigationPlan(summary, (_ask_for_a_pause(engine),))
    inputs, missing = engine.diagnosis.inputs, engine.diagnosis.missing
    unsettled = [text for text in missing if text not in inputs]
    actions = []
    if slow := degraded(engine):
        actions.append(
            Action(
                "Find what changed when it became slow",
                f"{'. '.join(map(capital, slow))}. Compare with the time before: requests at once, prompt lengths,"
                " adapters, accepted draft tokens, clocks and temperature of the GPU.",
            )
        )
    if unsettled:
        actions.append(Action(_until_known(engine, t), f"Evidence still missing: {'; '.join(unsettled)}."))
    if inputs:
        named = f"{engine.key.namespace}/{engine.key.pod}=" if engine.key.namespace else ""
        flag = dialect(engine.dialect).flag("max_num_seqs")
        give = f" Its limit: --engine.target '{named}{engine.target};args={flag} N'."
        text = f"Inputs missing for a verdict: {'; '.join(inputs)}."
        text += give if engine.limit("max_num_seqs").known is None else ""
        actions.append(Action("Provide the missing inputs", text))
    return MitigationPlan("Change nothing yet: the evidence is not sufficient.", tuple(actions))


_TOLD: Final = {
    "engine_asleep": "Do not restart it: it is asleep.",
    "engine_paused": "Do not restart it: it was told to stand still.",
    "server_refuses": "Send requests to another server: this one shuts down, or was told to abort them.",
}
"""What an engine was told to do, by the finding that shows it."""


def degraded(engine: EngineState) -> list[str]:
    """Sentences on what users feel, where the verdict does not explain it."""
    evidence = engine.diagnosis.evidence
    named = (evidence.get(name) for name in ("steps_slower", "latency_multiplied", "throughput_fell", "tokens_trickle"))
    return [found.text for found in named if found is not None and found.value]


def cause(engine: EngineState) -> str:
    """What is known, in one sentence: the verdict's cause; for an unknown one why it is down, what the row found, or
    that it is slow.
    """
    found, called = engine.diagnosis, dialect(engine.dialect).called
    beside = "" if engine.imbalance is None else _BESIDE[engine.imbalance.kind].format(engine.imbalance.side)
    if found.verdict == "unknown":
        return _unknown_because(engine) + beside
    text = TWO_LIMITS if found.holds("kv_full") else CAUSES["concurrency_limited"]
    text = text if found.verdict == "concurrency_limited" else CAUSES.get(found.verdict, CAUSES["unknown"])
    names = ("max_num_batched_tokens", "max_num_seqs", "preempted", "preemptions")
    text = {STEP_TOKENS: STEP_BUDGET, REUSE: REUSE_LOST}.get(found.stage or "", text)
    return text.format_map({name: called(name) for name in names}) + beside


_BESIDE: Final = {
    OTHER_HAS_ROOM: "; {} has spare capacity",
    OTHER_IS_FULL: "; {} is saturated, too, and prefill waits for it",
    ALONE_FULL: "; most engines of its pool have spare capacity",
    ALONE_SLOW: "; most engines of its pool are not slow",
}
"""What a cause says of the engines beside it; without numbers, because alerts carry it in a label."""


def _unknown_because(engine: EngineState) -> str:
    found, slow, failed = engine.diagnosis, degraded(engine), start_failure(engine)
    if not engine.up:
        why = scrape_error(engine)
        return f"down since {clock_text(found.since)} ({why})" + (f": {EVENTS[failed]}" if failed else "")
    return f"{_SLOW}: {slow[0]}" if slow else _unknown_row(engine)


def _unknown_row(engine: EngineState) -> str:
    title, _, row = engine.diagnosis.row.partition(": ")
    return f"{title[:1].lower()}{title[1:]}: {row}" if row and title not in _NO_CAUSE else CAUSES["unknown"]


def explained(engine: EngineState, thresholds: Thresholds) -> Cause:
    """What an alert says of an engine. The texts are labels, so their only number is the recommended one, which is as
    steady as the verdict.
    """
    found = engine.diagnosis
    if not engine.up:
        why = "its metrics cannot be scraped"
    elif found.verdict in ("unknown", *CALM):
        why = _SLOW if found.slow or degraded(engine) else _unknown_row(engine)
    else:
        why = cause(engine)
    _, actions = _planned(engine, thresholds)  # a scrape needs the first that helps, and nothing made of the others
    action = next((one for one in actions if one.now), None)
    if action is None:
        return Cause(why)
    return Cause(why, action.title + (f" ({action.flags[0]})" if action.flags else ""))


def _until_known(engine: EngineState, t: Thresholds) -> str:
    """What to do while something is unknown that nobody can provide."""
    stuck, first = engine.signals.progress.seconds_without_progress, engine.diagnosis.evidence.get("first_reading")
    if first is not None and first.value:
        return "Wait for the next scrape"
    if stuck is not None and t["no_progress_seconds"] <= stuck < t["stalled_seconds"]:
        return "Wait a few seconds for a verdict"
    return "Check the triage steps"


_PLANS: Final[dict[str, Callable[[EngineState, Thresholds], _Planned]]] = {
    "kv_pressure": _kv_pressure,
    "concurrency_limited": _concurrency_limited,
    "compute_bound": _compute_bound,
    "host_bound": _host_bound,
    "transfer_bound": _transfer_bound,
    "stalled": _stalled,
    "unknown": _unknown,
}
