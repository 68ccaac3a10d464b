"""The plan for KV pressure: the guide "Emergency Mitigation" in its order, with values computed for one engine and
the cost of each; then steps that measurements support beyond the guides (``docs/reports/mitigations.md``).

Shared by triage page, JSON and command line. Pure; nothing is applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import floor
from typing import Final

from kvpressure.advice.action import Action, added_tier, advised, mended_tier, on_host, roll_out, rolled_out
from kvpressure.advice.limits import (
    MAX_REJECTED,
    ROUNDING,
    UNSEEN,
    WATERMARK,
    Caps,
    PlanInput,
    caps_for,
    measured_at_once,
    must_fit_together,
    requests_that_fit,
    running_at_once,
    side_of,
)
from kvpressure.diagnosis.finding import limit_source
from kvpressure.engines.registry import dialect
from kvpressure.model.arguments import parse_version, value_text
from kvpressure.model.pools import OTHER_SIDE
from kvpressure.model.state import ALONE_FULL, ALONE_SLOW, OTHER_HAS_ROOM, OTHER_IS_FULL, EngineState
from kvpressure.printable import command, named, say
from kvpressure.settings.thresholds import Thresholds

_BEYOND_GUIDE: Final = '(this step is not in the guide "Emergency Mitigation")'

CAP: Final = "Cap input and output tokens at the gateway"
MEASURED: Final = {
    "caps": "preemptions fell from 40 to 24; all engine steps together took 57 % less time, but only 60 of 72 requests"
    " were admitted",
    "limit": "halving the configured max_num_seqs prevented none of 40 preemptions",
    "cut": (
        "preemptions fell from 40 to 28 with max_num_seqs 25 % below the number of running requests,"
        " and to 5 with max_num_seqs 50 % below it"
    ),
    "pool": "with a KV pool 30 % smaller, preemptions rose from 40 to 50; all engine steps together took 18 % more"
    " time",
    "watermark": "preemptions fell from 40 to 5; all engine steps together took 5 % less time",
}
"""Effect of each step on the same overload of a real vLLM, from ``docs/reports/mitigations.md``; a test
compares the figures.
"""


@dataclass(frozen=True, slots=True)
class PressurePlan:
    """Steps in order, and the caps for the gateway."""

    steps: tuple[Action, ...]
    caps: Caps

    @property
    def values(self) -> dict[str, float]:
        """All arguments to set now."""
        return {name: value for step in self.steps for name, value in step.values.items()}


def pressure_plan(
    engine: PlanInput, t: Thresholds, workload: tuple[str, ...], max_rejected: float = MAX_REJECTED
) -> PressurePlan:
    """The plan for ``engine``. ``workload``: in words of kubectl, e.g. ``("-n", "inference", "deploy/chat")``, empty
    outside Kubernetes. ``max_rejected``: largest share of requests that caps may reject or cut short.
    """
    caps = caps_for(engine, max_rejected)
    return PressurePlan(tuple(pressure_steps(engine, t, workload, caps)), caps)


def pressure_steps(
    engine: PlanInput, t: Thresholds, workload: tuple[str, ...], caps: Caps | None = None
) -> Iterator[Action]:
    """The steps of the plan, each made when it is asked for."""
    changes = False
    for step in _changes(engine, t, workload, caps):
        changes = changes or bool(step.values)
        yield step
    if changes:
        yield _roll_out(engine, workload)
    yield _restart(engine, workload)
    yield _verify(engine)


def _changes(engine: PlanInput, t: Thresholds, workload: tuple[str, ...], caps: Caps | None) -> Iterator[Action]:
    yield from of_pools(engine.engine, workload)
    yield _edge(engine, caps or caps_for(engine))
    if not side_of(engine.engine):
        yield _sequences(engine, t)
        yield _batched_tokens(engine, t)
    yield _memory_share(engine, t)
    yield from _beyond(engine, t)


# --- pools --------------------------------------------------------------------------------------------


def of_pools(engine: EngineState, workload: tuple[str, ...]) -> Iterator[Action]:
    """The step before all others where the remedy is another server: of the pool, or of the other side of its pair."""
    found, on, load = engine.imbalance, side_of(engine), engine.signals.load
    late = on == "decode" and (load.waiting_deferred or 0.0) > (load.running or 0.0)
    kind = f"{on}, {'blocks late' if late else 'others unseen'}" if found is None else found.kind
    if kind not in _OF_POOLS:
        return
    title, text, cost = _OF_POOLS[kind]
    here = (
        "" if found is None else " ".join(f"{found.alike} of the {found.seen} {found.side} engines seen here".split())
    )
    names = {"here": here, "on": on, "other": OTHER_SIDE.get(on, "")}
    scales = workload and title == _ADD
    yield advised(
        engine,
        title.format_map(names),
        "do",
        f"{text.format_map(names)} {_BEYOND_GUIDE}",
        cost,
        commands=(command("kubectl", "scale", *workload, "--replicas=<replicas>"),) if scales else (),
    )


_ADD: Final = "Add {on} replicas"
_REPLICA: Final = "a replica needs GPUs, and minutes to start"
_OF_POOLS: Final = {
    OTHER_HAS_ROOM: (
        _ADD,
        "requests wait for {on}, while {here} could take more. Give the GPUs of one {other} replica to {on}, or add"
        " GPUs. Lower request limits would fill the other side",
        _REPLICA,
    ),
    OTHER_IS_FULL: (
        "Add decode replicas",
        "requests wait on {here}, and prefill holds the KV blocks of a finished prompt until decode has fetched them."
        " More prefill replicas would not help",
        _REPLICA,
    ),
    ALONE_FULL: (
        "Spread the requests over the pool",
        "requests wait here, while {here} could take more. Session affinity, routing or the balance of data-parallel"
        " ranks sends this one too many; replicas and KV memory do not help",
        "",
    ),
    ALONE_SLOW: (
        "Send the requests to the other engines",
        "{here} are not slow. Take this one out of the service, and check clocks, XID events and CPU of its node",
        "the others take its load",
    ),
    "decode, others unseen": (
        _ADD,
        "requests come with the KV blocks that prefill computed; a lower request limit here would leave them there. If"
        " prefill has spare capacity, give the GPUs of one prefill replica to decode",
        _REPLICA,
    ),
    "decode, blocks late": (
        "Check the transfers first",
        "more requests wait for KV blocks from prefill than run here, and those on their way hold their blocks already:"
        " neither replicas nor limits make them come. Compare with the transfers of the prefill servers and their logs",
        "",
    ),
    "prefill, others unseen": (
        "Check the decode pool first",
        "a prefill server holds the KV blocks of a finished prompt until decode has fetched them. If decode is full,"
        " add decode replicas; if it has spare capacity, add prefill replicas",
        "",
    ),
}
"""Title, text and cost by how the engine differs from others, or by its side where none is seen."""


# --- step 1 -----------------------------------------------------------------------------------------------


def _cost_of(caps: Caps) -> str:
    if caps.long_prompts is None or caps.long_outputs is None:
        return "requests above the caps are rejected. Share of requests above the caps: unknown"
    return (
        f"of the requests seen, at most {say(caps.long_prompts, 'ratio')} of prompts and"
        f" {say(caps.long_outputs, 'ratio')} of outputs exceed the caps and are rejected or cut short"
    )


def _cut_short(engine: PlanInput, caps: Caps) -> str:
    """The engine's own way to limit outputs, as a further sentence; "" if it has none."""
    flag = dialect(engine.engine.dialect).flag("override_generation_config")
    if not flag:
        return ""
    return (
        f". With {flag} '{{\"max_new_tokens\": {caps.output_tokens}}}', the engine cuts long outputs short instead of"
        " rejecting requests"
    )


def _edge(engine: PlanInput, caps: Caps) -> Action:
    if caps.frees_nothing:
        return advised(
            engine.engine,
            CAP,
            "not here",
            f"caps of {caps.input_tokens} prompt and {caps.output_tokens} output tokens would free nothing: at most"
            f" {say(UNSEEN, 'ratio')} of the requests seen exceed them, because all are about equally long",
        )
    lower = (
        caps.long_asked is not None and caps.long_outputs is not None and caps.long_asked > caps.long_outputs + ROUNDING
    )
    said = f"reject prompts above {caps.input_tokens} tokens (HTTP 413) and " + (
        f"reduce a larger max_tokens to {caps.output_tokens} ({say(caps.long_asked or 0.0, 'ratio')} of requests ask"
        " for more, too many to reject)"
        if lower
        else f"require max_tokens of at most {caps.output_tokens} (HTTP 400)"
    )
    capacity, together = engine.signals.kv.kv_capacity_tokens, must_fit_together(engine)
    if not caps.known:
        said += (
            ". No finished request was seen, so these caps are examples: set them to the p95 lengths in your gateway's"
            " log"
        )
    elif capacity and together:
        wanted = together * (caps.input_tokens + caps.output_tokens)
        said += (
            f". Then {together:.0f} requests at once need at most {say(wanted)} tokens; the KV capacity is"
            f" {say(capacity)}"
            if wanted <= capacity
            else f". {together:.0f} requests at once can still need {say(wanted)} tokens; the KV capacity is"
            f" {say(capacity)}"
        )
    p95 = [
        f"{kind} {say(round(found['0.95']))}"
        for kind, found in (("prompts", engine.prompts), ("outputs", engine.outputs), ("max_tokens", engine.asked))
        if "0.95" in found
    ]
    if p95:
        when = (
            "p95 over 5 minutes"
            if "0.95" in engine.signals.context.prompt_quantiles
            else "p95 since the server started"
        )
        said += f" ({when} in tokens: {', '.join(p95)})"
    length = engine.engine.limit("max_model_len").recommended
    flag = dialect(engine.engine.dialect).flag("max_model_len")
    if length is not None and flag:
        said += (
            f". In the engine, {flag} {length:.0f} caps prompt and output together, after a restart (longest request of"
            " the last hour plus a margin)"
        )
    return advised(
        engine.engine,
        CAP,
        "do",
        f"{said}. Token caps at the gateway take effect at once, need no restart, and shorten the queue for all other"
        " requests.",
        _cost_of(caps) + _cut_short(engine, caps),
        MEASURED["caps"],
    )


# --- steps 2 to 4 -----------------------------------------------------------------------------------------


def _called(engine: PlanInput, name: str) -> str:
    return dialect(engine.engine.dialect).called(name)


def _option(engine: PlanInput, name: str) -> str:
    """An argument's name on a command line, without leading dashes."""
    return dialect(engine.engine.dialect).flag(name).removeprefix("--") or name


def _now(engine: PlanInput, name: str) -> str:
    limit = engine.engine.limit(name)
    called = _called(engine, name)
    if limit.known is None:
        return f"current {called}: unknown"
    return f"current {called}: {value_text(limit.known)} ({limit_source(limit.source)})"


def _sequences(engine: PlanInput, t: Thresholds) -> Action:
    limit = engine.engine.limit("max_num_seqs")
    measured = measured_at_once(engine)
    fits = engine.signals.load.limits.get("kv_capacity")
    low, high = t["max_num_seqs_cut_min_ratio"], t["max_num_seqs_cut_max_ratio"]
    called, now = _called(engine, "max_num_seqs"), _now(engine, "max_num_seqs")
    title = f"Lower {called}"
    base = running_at_once(engine)
    if limit.recommended is None and base is not None and 0 < base <= 1:
        small = measured is None and fits is not None and fits <= 1
        why = "the KV cache holds only one request of this length" if small else "only one request is running"
        return advised(
            engine.engine,
            title,
            "not here",
            f"{now}. {called} cannot be lowered further, because {why}. Shorten requests or add KV memory",
        )
    if limit.recommended is None or (
        limit.known is not None and limit.recommended > limit.known
    ):  # a raise, for another verdict
        if base is None or base <= 1:
            why = "Too little is known to compute a value: give the limit with --args"
        else:
            why = "The value to set is computed only if the verdict is kv_pressure with high confidence"
        return advised(
            engine.engine,
            title,
            "if it stays",
            f"{now}. Set {called} {say(low, 'ratio')} to {say(high, 'ratio')} below the number of"
            f" running requests. {why}",
            "fewer requests run at once; the others wait",
        )
    base, fit = base or limit.recommended, requests_that_fit(engine.signals, t)
    said = f"{now}. Set {called} to {limit.recommended:.0f} (running now: {say(measured)}). " + (
        f"That is {say(low, 'ratio')} below it"
        if fit is None
        else f"At what each request held in the last five minutes, about {say(floor(fit))} fit with"
        f" {say(low, 'ratio')} of the KV cache to spare"
    )
    if fit is not None and "0.95" not in {
        **engine.signals.context.output_quantiles,
        **engine.signals.context.prompt_quantiles,
    }:
        said += "; no request has finished yet, so they may still grow, and fewer may fit"
    said += f'. The guide "Emergency Mitigation" cuts {called} by {say(low, "ratio")} to {say(high, "ratio")}'
    result = MEASURED["cut"]
    if limit.known is not None and limit.known * (1 - high) > base:
        said += f". Halving {called} from {value_text(limit.known)} would have no effect"
        result = f"{MEASURED['limit']}. On the test server, {result}"
    return advised(
        engine.engine,
        title,
        "if it stays" if engine.pool_grows else "do",
        said,
        "fewer requests run at once; the others wait in the queue. If requests become shorter later, a limit this low"
        " leaves the GPU underused",
        result,
        {"max_num_seqs": limit.recommended},
    )


def _batched_tokens(engine: PlanInput, t: Thresholds) -> Action:
    limit, least = engine.engine.limit("max_num_batched_tokens"), t["max_num_batched_tokens_usual"]
    title, now = f"Lower {_option(engine, 'max_num_batched_tokens')}", _now(engine, "max_num_batched_tokens")
    cost = "long prompts take more steps, so time to first token rises"
    value = limit.recommended
    if value is None or (limit.known is not None and value > limit.known):  # a raise, for another verdict
        small = limit.known is not None and limit.known <= least
        look_up = "look it up in the start-up log, then " if limit.known is None else ""
        return advised(
            engine.engine,
            title,
            "not here" if small else "if it stays",
            f"{now}; "
            + (
                f"not below {least:g}"
                if small
                else f"{look_up}halve it, but not below {least:g}"
                + ("" if limit.known is not None else ". kvpressure mitigate computes the new value if you give --args")
            ),
            cost,
        )
    now_set = limit.known or 2 * value
    much = "half" if 2 * value <= now_set + 1 else f"{now_set - value:.0f} less (not below that)"
    return advised(
        engine.engine,
        title,
        "do",
        f"{now}; set {value:.0f}, {much}. Fewer prompt tokens are computed at once, which lowers peak activation"
        " memory. A smaller token budget does not limit KV cache usage",
        cost,
        values={"max_num_batched_tokens": value},
    )


def _memory_share(engine: PlanInput, t: Thresholds) -> Action:
    limit = engine.engine.limit("gpu_memory_utilization")
    usual, lower = t["gpu_memory_utilization_recommended"], t["gpu_memory_utilization_long_context"]
    title = f"Lower {_option(engine, 'gpu_memory_utilization')} to {usual:g}, then {lower:g}"
    cost = _pool_cost(engine, limit.known, usual, lower)
    now = _now(engine, "gpu_memory_utilization")
    if engine.pool_grows:
        return advised(
            engine.engine,
            f"Raise {_option(engine, 'gpu_memory_utilization')}",
            "do",
            f"{now}; set {limit.recommended:g}: only {say(engine.signals.memory.device_used_ratio, 'ratio')} of GPU"
            " memory is in use, and the KV pool can have the rest",
            "allocation peaks and other programs on the GPU have less memory",
            values={"gpu_memory_utilization": limit.recommended or 0.0},
        )
    if limit.recommended is not None:
        return advised(
            engine.engine,
            title,
            "do",
            f"{now}; set {limit.recommended:g}: allocations fail on the GPU, which needs free memory outside the KV"
            " pool" + (f". If allocations still fail: {lower:g}" if limit.recommended > lower else ""),
            cost,
            MEASURED["pool"],
            {"gpu_memory_utilization": limit.recommended},
        )
    if engine.condition("gpu_out_of_memory"):
        chunk = _called(engine, "max_num_batched_tokens")
        if limit.known is None:
            return advised(
                engine.engine,
                title,
                "if it stays",
                f"{now}. Allocations fail on the GPU, which needs free memory outside the KV pool. Lower {chunk} first,"
                " which lowers peak activation memory",
                cost,
                MEASURED["pool"],
            )
        low = "Allocations fail although it is low already."
        return advised(
            engine.engine,
            title,
            "not here",
            f"{now}. {low} Check what else uses the GPU, and lower {chunk}, which lowers peak activation memory",
            cost,
            MEASURED["pool"],
        )
    return advised(
        engine.engine,
        title,
        "not here",
        f"{now}. A lower {_called(engine, 'gpu_memory_utilization')} helps only if GPU memory allocations fail"
        + (
            ". Failed allocations: unknown (no log read)"
            if engine.condition("gpu_out_of_memory") is None
            else ", and no failed allocation was found"
        )
        + ". A smaller KV pool would make KV pressure worse",
        cost,
        MEASURED["pool"],
    )


def _pool_cost(engine: PlanInput, share: float | None, usual: float, lower: float) -> str:
    """What the KV pool loses, in GiB and tokens where GPU and pool are known."""
    sizes, called = engine.gpu_bytes, _called(engine, "gpu_memory_utilization")
    pool, capacity = engine.signals.memory.kv_pool_bytes, engine.signals.kv.kv_capacity_tokens
    if share is None or share <= lower:
        return "the KV pool shrinks by the amount of freed GPU memory"
    lower_ones = [target for target in (usual, lower) if target < share]
    if not sizes or not pool:
        first, *rest = [(f"{target:g}", say(share - target, "ratio")) for target in lower_ones]
        taken = f"lowering {called} from {share:g} to {first[0]} takes {first[1]} of GPU memory from the KV pool"
        return taken + "".join(f"; lowering it to {target} takes {part}" for target, part in rest)
    told = []
    for target in lower_ones:
        left = pool - (share - target) * min(sizes)
        if left <= 0:
            told.append(f"with {called} {target:g}, no KV pool remains and the server does not start")
            continue
        tokens = f" ({say(round(capacity * left / pool))} of {say(capacity)} tokens)" if capacity else ""
        told.append(
            f"with {called} {target:g}, the KV pool shrinks from {pool / 2**30:.1f} to {left / 2**30:.1f} GiB{tokens}"
        )
    return "; ".join(told)


# --- beyond the guides --------------------------------------------------------------------------


def _beyond(engine: PlanInput, t: Thresholds) -> Iterator[Action]:
    if engine.engine.diagnosis.holds("preempting") or engine.engine.diagnosis.stage == "thrashing":
        yield _watermark(engine)
    if not engine.condition("gpu_out_of_memory"):
        yield _more_memory(engine, t)
    if (tier := mended_tier(engine.engine, t) or added_tier(engine.engine)) is not None:
        yield advised(engine.engine, f"{tier.title} {_BEYOND_GUIDE}", "if it stays", tier.text)
    spike = engine.signals.context.context_spike_ratio
    mixed = engine.signals.context.bimodal_prompts or (spike is not None and spike >= t["context_spike_ratio"])
    if mixed and not side_of(engine.engine):
        yield advised(
            engine.engine,
            f"Split long-context traffic off {_BEYOND_GUIDE}",
            "if it stays",
            "short and long requests share this KV cache. Route prompts above the cap to a separate deployment with a"
            f" small {_called(engine, 'max_num_seqs')}",
            "a second deployment, and a router that knows the prompt length",
        )


def _watermark(engine: PlanInput) -> Action:
    one = dialect(engine.engine.dialect)
    version, flag = parse_version(engine.engine.version), one.flag("watermark")
    first = one.flags_since.get("watermark", "")
    title = f"Set {f'{flag} {WATERMARK:g}' if flag else 'a watermark'} {_BEYOND_GUIDE}"
    lost = (
        f"requests are being {one.called('preempted')} and recomputed. A watermark reserves some KV cache for running"
        " requests"
    )
    measured = MEASURED["watermark"]
    cost = f"new requests leave the last {say(WATERMARK, 'ratio')} of the KV cache free, so fewer requests run at once"
    if not flag:
        return advised(engine.engine, title, "not here", f"{one.title} has no such setting", cost)
    if version is not None and version < (parse_version(first) or version):
        too_old = f"not supported by {one.title} {engine.engine.version} (added in {first})"
        return advised(engine.engine, title, "not here", too_old, cost)
    if version is None:
        lost += f". {flag} needs {one.title} {first} or later"
        return advised(engine.engine, title, "if it stays", lost, cost, measured)
    return advised(engine.engine, title, "do", lost, cost, measured, {"watermark": WATERMARK})


def _more_memory(engine: PlanInput, t: Thresholds) -> Action:
    share, flag = engine.engine.limit("gpu_memory_utilization").known, dialect(engine.engine.dialect).flag
    cost = "fp8 needs an accuracy test; tensor parallelism and replicas need more GPUs"
    raised = "Use "
    ways = [
        f"{flag('kv_cache_dtype')} fp8 (half the bytes per token, if model and GPU support it)",
        "more GPUs (tensor parallel)",
        "or more replicas",
    ]
    if share is not None and share < t["memory_critical_ratio"] and not engine.pool_grows:
        unknown = engine.condition("gpu_out_of_memory") is None
        failed = "failed allocations: unknown" if unknown else "no failed allocation was found"
        raised = f"Raise {flag('gpu_memory_utilization')} (now {share:g}; {failed}). Or use "
        cost += "; a higher share takes memory that allocation peaks may need"
    return advised(
        engine.engine,
        f"Add KV memory {_BEYOND_GUIDE}",
        "if it stays",
        f"KV memory is the bottleneck. {raised}" + ", ".join(ways),
        cost,
    )


# --- after the values -------------------------------------------------------------------------------------


def _roll_out(engine: PlanInput, workload: tuple[str, ...]) -> Action:
    return advised(
        engine.engine,
        "Apply and watch the rollout",
        "do",
        "set the arguments in the workload, and where Helm, Argo CD or Flux would set them back"
        if workload
        else "change the arguments where the server is started, then restart it",
        "every replica restarts and loses its prefix cache and running requests",
        commands=roll_out(engine.engine.key, workload),
    )


def _restart(engine: PlanInput, workload: tuple[str, ...]) -> Action:
    reasons = {
        "crash_loop": "crash loop",
        "host_oom_killed": "OOM kill",
        "allocator_fragmentation": "fragmented memory",
    }
    needed = any(engine.condition(name) for name in reasons)
    unseen = [words for name, words in reasons.items() if engine.condition(name) is None]
    absent = [words for name, words in reasons.items() if engine.condition(name) is False]
    found = [
        f"{said}: {', '.join(words)}"
        for said, words in (("Not found", absent), ("Could not be checked", unseen))
        if words
    ]
    return advised(
        engine.engine,
        "Controlled restart after the limits are lowered",
        "do" if needed else "not here",
        (
            "the server is in a crash loop, was OOM-killed, or its memory is fragmented; without lower limits the"
            " restart does not help for long"
            if needed
            else f"a restart is for crash loops, OOM kills and fragmented memory. {'. '.join(found)}"
        ),
        commands=(
            (command("kubectl", "rollout", "restart", *workload), rolled_out(workload))
            if workload
            else on_host(engine.engine.key, "restart")
        ),
    )


def _verify(engine: PlanInput) -> Action:
    token = engine.signals.latency.inter_token.get("0.95")
    now = (
        f"Now: {named('KV cache peak', say(engine.signals.kv.kv_used_ratio_max, 'ratio'))},"
        f" {named('requests waiting', say(engine.signals.load.waiting))},"
        f" {named('batch size p95', say(engine.signals.batch.batch_p95))},"
        f" {named('time per output token p95', say(token, 'seconds'))}"
    )
    return advised(
        engine.engine,
        "Verify",
        "do",
        "the engine has recovered when the KV cache has headroom, latency is stable, batch size grows, and timeouts"
        f" and 503s stop. {now}",
        commands=(command("kvpressure", "mitigate", "--verify", engine.address or "URL"),),
    )
