"""One action of a plan, what actions are made of (values, workload and commands of an engine), those about its KV tier,
those that keep what was computed, and those that end the failures that log and pod show: memory that ran out, a start
that failed, probes, transfers. And what an alert says, which ends with the first of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, log10
from types import MappingProxyType
from typing import Final, Literal

from kvpressure.advice.limits import PlanInput, peer_of, side
from kvpressure.advice.wording import no_events
from kvpressure.diagnosis.finding import PHASES, limit_source, parts_known
from kvpressure.diagnosis.logic import Grade
from kvpressure.engines.registry import default, dialect
from kvpressure.model.arguments import GIB, parse_version, value_text
from kvpressure.model.log_events import ALLOCATION_EVENTS, EVENTS
from kvpressure.model.readings import EngineKey
from kvpressure.model.reasons import TIMEOUT
from kvpressure.model.state import ACTIONABLE, CALM, Cause, Diagnosis, EngineState
from kvpressure.printable import MARKUP, PIPE, UNKNOWN, Asked, capital, command, named, say, visible
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.kv import MEASURED as NOW
from kvpressure.signals.window import TWICE


@dataclass(frozen=True, slots=True)
class Action:
    """One step. ``flags``: arguments of the engine as to be set, ``values`` the same by their names; ``commands``: for
    a shell; ``now`` False: it is named, and does not help at present.
    """

    title: str
    text: str
    flags: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    now: bool = True
    values: Mapping[str, float] = field(default_factory=dict)


Advice = Literal["do", "if it stays", "not here"]


def advised(
    engine: EngineState,
    title: str,
    advice: Advice,
    text: str,
    cost: str = "",
    measured: str = "",
    values: Mapping[str, float] = MappingProxyType({}),
    commands: tuple[str, ...] = (),
) -> Action:
    """A step of a plan for KV pressure. ``values``: arguments to set and ``commands``, both only for what to ``do``;
    ``cost``: what is lost; ``measured``: its effect on the overload of ``docs/reports/mitigations.md``.
    """
    titles: Mapping[Advice, str] = {
        "do": title,
        "if it stays": f"If KV pressure persists: {title[:1].lower()}{title[1:]}",
        "not here": f'Skip for now: "{title}"',
    }
    told = capital(text) + ("" if text.endswith(".") else ".") + (f" Cost: {cost}." if cost else "")
    if measured:
        told += f" Measured on a {default().title} test server: {measured}."
    if advice != "do":
        return Action(titles[advice], told, now=advice != "not here")
    flag = dialect(engine.dialect).flag
    flags = tuple(f"{flag(name)} {value_text(value)}" for name, value in values.items() if flag(name))
    return Action(title, told, flags, commands, values=dict(values))


def value_and_flag(engine: EngineState, name: str) -> tuple[str, str]:
    """(the argument with the value to set, "" when there is none; the value in force in words)."""
    limit = engine.limits.get(name)
    if limit is None:
        return "", "unknown"
    now = "unknown" if limit.known is None else f"{value_text(limit.known)} ({limit_source(limit.source)})"
    flag = dialect(engine.dialect).flag(name)
    return ("" if limit.recommended is None or not flag else f"{flag} {value_text(limit.recommended)}"), now


def is_pod(key: EngineKey) -> bool:
    """Whether an engine belongs to a pod; False for a server of a host, known by its unit, container or address."""
    return bool(key.pod) and ":" not in key.pod and (bool(key.namespace) or not key.pod.endswith(_UNIT))


_UNIT: Final = ".service"
_OF_UNIT: Final = {
    "status": ("systemctl", "status"),
    "log": ("journalctl", "--since", "-2h", "-u"),
    "restart": ("systemctl", "restart"),
}
_OF_CONTAINER: Final = {"status": ("inspect",), "log": ("logs", "--since", "2h"), "restart": ("restart",)}


def on_host(key: EngineKey, what: str, *more: str) -> tuple[str, ...]:
    """The command for the unit or container of a server of a host: its status, log or restart, and ``more`` words;
    none where that is unknown.
    """
    runtime, colon, name = key.pod.rpartition(":")
    if key.pod.endswith(_UNIT):
        return (command(*_OF_UNIT[what], key.pod, *more),)
    if colon and runtime.isalpha():
        return (command(runtime, *_OF_CONTAINER[what], name, *more),)
    return (command("ss", "-ltnp", f"sport = :{name}"),) if what == "status" else ()  # which process has the port


def stacks_of(engine: EngineState) -> str:
    """A shell script without single quotes that prints the Python stacks of the engine's processes, or what their
    threads wait in where these cannot be read. Processes are known by one argument: the title that they give themselves
    (``VLLM::EngineCore``), the server's module or its script; in a pod, workers without a title are the engine's, too.
    """
    name = dialect(engine.dialect).name
    of_engine = [f"^{name}::", f"^{name}[.]", f"/{name}$"]
    if is_pod(engine.key):
        of_engine += ["^ray::", "^--multiprocessing-fork$"]
    return (
        f'for f in $(grep -lisazE "{"|".join(of_engine)}" /proc/[0-9]*/cmdline); do p=${{f#/proc/}}; p=${{p%/cmdline}};'
        ' echo "== $p $(tr "\\0" " " <$f)"; py-spy dump --pid $p || grep -sE "^(Name|State|voluntary)|^[^:]*$"'
        " /proc/$p/task/*/status /proc/$p/task/*/wchan /proc/$p/task/*/stack; done 2>&1"
    )


def in_namespace(key: EngineKey) -> tuple[str, ...]:
    """The engine's namespace in words of kubectl."""
    return "-n", key.namespace or "<namespace>"


def of_pod(key: EngineKey) -> tuple[str, ...]:
    """The engine's pod in words of kubectl; no name in it can be taken for an option."""
    return *in_namespace(key), f"pod/{key.pod or '<pod>'}"


def workload(engine: EngineState) -> tuple[str, ...]:
    """The workload in words of kubectl; empty for a server on a bare host."""
    return (*in_namespace(engine.key), "deploy/<deployment>") if is_pod(engine.key) else ()


def container_limits(engine: EngineState, *limits: str) -> tuple[str, ...]:
    """The command that changes the limits of the container; empty for a server on a bare host."""
    where, container = workload(engine), engine.container or "<container>"
    return (command("kubectl", "set", "resources", *where, "-c", container, *limits),) if where else ()


# --- a KV tier in host memory ---------------------------------------------------------------------------------------

_REMEDIES: Final = {
    "tier_saturated": (
        "Store less in the KV tier, or use a faster one",
        "A larger tier does not help: copies hold it, or what lies behind it is slow. Store less: {less}",
    ),
    "tier_too_small": (
        "Make the KV tier larger, or store less in it",
        "To keep what is stored for {keeps}, the tier would have to be {times} as large: {larger}. If that is not"
        " possible, store less ({less}), or {off}",
    ),
    "tier_slow": ("Switch the KV tier off", "Computing the tokens again is faster: {off}"),
    "tier_unused": (
        "Switch the KV tier off, or find out why it is never asked",
        "Prompts may have no common beginning, or the engine cannot match what it stored (hybrid models). Until then"
        " {off}",
    ),
}


def mended_tier(engine: EngineState, t: Thresholds) -> Action | None:
    """What makes the engine's tier of use; ``None`` without such a finding."""
    turnover, keeps = engine.signals.tier.tier_turnover_seconds, t["context_window_seconds"]
    times = {"keeps": say(keeps, "seconds"), "times": say(keeps / turnover if turnover else None, "multiple")}
    for name, (title, text) in _REMEDIES.items():
        found = engine.diagnosis.beside.get(name)
        if found is not None and found.value:
            return Action(
                title, f"{capital(found.text)}. {text.format_map({**dialect(engine.dialect).tier_flags, **times})}."
            )
    return None


def added_tier(engine: EngineState) -> Action | None:
    """A tier of twice the KV pool (SGLang's own default); ``None`` where there is one, the server knows none, or it is
    half of a pair, whose blocks come and go over the network.
    """
    one, s = dialect(engine.dialect), engine.signals
    pool, paired = s.memory.kv_pool_bytes, side(s) != ""
    version, first = parse_version(engine.version), parse_version(one.flags_since.get("kv_offloading_size"))
    if s.tier.tier_configured or paired or not one.tier_flags or (version and first and version < first):
        return None
    gib = str(ceil(TWICE * pool * len(engine.gpus) / GIB)) if pool and engine.gpus else "GIB"
    unless = "" if s.tier.tier_configured is False else ", unless there is one"
    return Action(
        f"Add a KV tier in host memory{unless}",
        f"{one.tier_flags['add'].format(gib=gib)} keeps what the GPU evicts, twice as much as the KV pool holds."
        f" Prompts that come back, and {one.called('preempted')} requests, are then loaded, not computed again. No more"
        " requests run at once. Host memory must have room for it.",
    )


# --- where the cache has room, and what was computed does not stay in it ----------------------------------


def reuse_plan(engine: PlanInput, t: Thresholds) -> tuple[Action, ...]:
    """What to do where prompts are computed again after their KV blocks were evicted."""
    first = say(engine.signals.latency.ttft.get("0.95"), "seconds")
    return (
        _keep_more(engine, t),
        advised(
            engine.engine,
            "Send all requests of a session to one replica",
            "do",
            "a session that changes replicas is computed again on each. With routing by session or prefix, each further"
            " replica adds its whole KV cache",
            "load is spread less evenly",
        ),
        advised(
            engine.engine,
            "Verify",
            "do",
            "the prefix cache hit ratio reaches the predicted value, and users wait less for the first token"
            f" ({named('p95 now', first)})",
        ),
    )


def _keep_more(engine: PlanInput, t: Thresholds) -> Action:
    kv, memory, flag = engine.signals.kv, engine.signals.memory, dialect(engine.engine.dialect).flag
    share, ratios, wanted, capacity = (
        engine.engine.limit("gpu_memory_utilization"),
        kv.prefix_hit_ratio,
        kv.kv_working_set_tokens,
        kv.kv_capacity_tokens,
    )
    said = f"{named('Hit ratio now', say(ratios.get(NOW), 'ratio'))}, with more KV memory "
    more = [f"{factor} ×: {say(ratio, 'ratio')}" for factor, ratio in sorted(ratios.items()) if factor != NOW]
    missing = no_events(engine.signals.cache) or "too few blocks were evicted so far, or some come from a tier"
    said += f"(predicted) {', '.join(more)}" if more else f"unknown, because {missing}"
    tier = "a KV tier in host memory"
    if wanted and capacity:
        said += f". {say(wanted)} tokens ({say(wanted / capacity)} ×) give nearly all that 8 × would"
        if memory.kv_pool_bytes and wanted > capacity:
            size, hits = (wanted / capacity - 1) * memory.kv_pool_bytes, ratios.get(f"{wanted / capacity:g}")
            tier += f" of {say(size, 'bytes')} for each GPU (hit ratio {say(hits, 'ratio')})"
    # what mends a tier that there is comes before this step
    tiers = [] if engine.signals.tier.tier_configured else [tier]
    ways, values = [*tiers, "more GPUs (tensor parallel)", "or more replicas, with routing by session"], {}
    if flag("kv_cache_dtype"):
        ways.insert(0, f"{flag('kv_cache_dtype')} fp8 (2 × the tokens, if model and GPU support it)")
    if share.value is not None and (engine.pool_grows or share.value < t["memory_critical_ratio"]):
        values = {"gpu_memory_utilization": share.recommended} if engine.pool_grows and share.recommended else {}
        ways.insert(0, f"a higher {flag('gpu_memory_utilization')} (now {share.value:g})")
    return advised(
        engine.engine,
        "Add KV memory",
        "do",
        f"{said}. Ways: {', '.join(ways)}",
        "fp8 needs an accuracy test; a tier loads blocks instead of computing them; GPUs and replicas cost most",
        values=values,
    )


# --- commands of a workload -----------------------------------------------------------------------------


def roll_out(key: EngineKey, workload: tuple[str, ...]) -> tuple[str, ...]:
    """Commands that change the arguments of a workload and watch; ``workload`` as in ``pressure_plan``."""
    return (command("kubectl", "edit", *workload), rolled_out(workload)) if workload else on_host(key, "restart")


def rolled_out(workload: tuple[str, ...]) -> str:
    """The command that shows how a change of the workload gets on."""
    if workload[-1].startswith(_ROLLED):
        return command("kubectl", "rollout", "status", *workload)
    return command("kubectl", "get", *workload, "-w")


_ROLLED: Final = ("deploy", "statefulset", "daemonset")
"""Workloads that kubectl rolls out; others are left to their controllers."""


_FITTING: Final = {
    "context_too_long": ("max_model_len", "fitting_tokens"),
    "too_few_blocks": ("max_num_seqs", "fitting_requests"),
}
_GPU_MEMORY: Final = {
    "load_oom": ("Give the model more GPU memory", "Use more GPUs (tensor parallel) or quantized weights."),
    "no_kv_blocks": ("Raise {gpu_memory_utilization}", "Or use more GPUs (tensor parallel) or quantized weights."),
    "memory_profiling_failed": ("End the other processes on the GPU", "Then start the engine again."),
}
_AT_RUN_TIME: Final = ("cuda_oom", "warmup_oom")
_HOST_MEMORY: Final = ("host_oom_killed", "host_memory_near_limit")


def start_failure(engine: EngineState) -> str:
    """The failed allocation that the log of an engine names; "" without one."""
    names = (*_FITTING, *sorted(ALLOCATION_EVENTS), "host_oom")
    return next((name for name in names if name in engine.signals.events), "")


def failures(engine: EngineState) -> Iterator[Action]:
    """What ends the failures that log and pod show, whatever the verdict."""
    failed, beside = start_failure(engine), engine.diagnosis.conditions
    why = f"The engine's log: {EVENTS[failed]}." if failed else ""
    if failed in _FITTING:
        yield _fitting(engine, failed, why)
    elif failed in _GPU_MEMORY:
        title, text = _GPU_MEMORY[failed]
        called = dialect(engine.dialect).called("gpu_memory_utilization")
        yield Action(title.format(gpu_memory_utilization=called), f"{why} {text}")
    elif failed in _AT_RUN_TIME:
        yield from _at_run_time(engine, why)
    host = next((name for name in _HOST_MEMORY if beside.get(name)), "")
    if failed == "host_oom" or host:
        yield _host_memory(engine, why or f"{capital(engine.diagnosis.beside[host].text)}.")
    elif beside.get("crash_loop") and engine.error == TIMEOUT:
        yield _probes(engine)


_OF_TRANSFERS: Final = {
    "answers_suspect": (
        "Raise kv_lease_duration, and relieve the decode servers",
        "They ended with HTTP 200. Until no more are counted, take the pair out of service, or let requests wait on"
        " decode for less than the lease (30 s by default, in kv_connector_extra_config).",
    ),
    "loads_stuck": (
        "Look at the {peer} servers: what they hold back",
        "One that is gone, has no slots or could not write tells nobody, and requests wait for minutes.",
    ),
    "transfer_failing": (
        "Check the network between both servers, and the log of the {peer} server",
        "A request whose load fails ends with an error, or its prompt is computed here (kv_load_failure_policy). On"
        " models with several kinds of KV cache it may get a wrong answer.",
    ),
    "transfer_slow": (
        "Find what slows the transfers between both servers: the network, or its other traffic",
        "Requests hold KV blocks here until theirs have come.",
    ),
    "lease_expired": (
        "Relieve the decode servers, which fetch too late, or raise the lease",
        "What was computed is thrown away. Clients that hang up between the two servers cause it, too.",
    ),
    "prefill_wasted": (
        "Find why the decode server computes prompts itself",
        "The prefill servers work for nothing. Failed loads that are recomputed need not be counted anywhere.",
    ),
}
_NONE_SUCCEEDED: Final = "Check how transfers are set up and built: none has succeeded"


def of_transfers(engine: EngineState) -> Iterator[Action]:
    """What mends the exchange of KV blocks between this server and its peers, the most urgent first; each names the
    side to act on.
    """
    s, key = engine.signals, engine.key
    peer = peer_of(engine)
    words = "-iE", "kv|nixl|mooncake|transfer|disagg"
    look = (
        (command("kubectl", "logs", *of_pod(key), "--since=30m", PIPE, "grep", *words),)
        if is_pod(key)
        else on_host(key, "log")
    )
    for name, (title, text) in _OF_TRANSFERS.items():
        if engine.diagnosis.holds(name):
            if name == "transfer_failing" and s.transfers.transfers_failed_ratio == 1:
                title = _NONE_SUCCEEDED
            sentence = capital(engine.diagnosis.evidence[name].text)
            yield Action(title.format(peer=peer), f"{sentence}. {text}", commands=look)


def _fitting(engine: EngineState, failed: str, why: str) -> Action:
    """The limit to lower so that the engine starts, with the numbers of its own log."""
    one, oom = dialect(engine.dialect), engine.signals.oom
    needed = (
        f" {say(oom['needed_bytes'], 'bytes')} of KV cache are needed, {say(oom['available_bytes'], 'bytes')} are"
        " available."
        if {"needed_bytes", "available_bytes"} <= oom.keys()
        else ""
    )
    limit, number = _FITTING[failed]
    value, flag = oom.get(number), one.flag(limit)
    flags = (f"{flag} {value:.0f}",) if value and flag else ()
    return Action(f"Lower {one.called(limit)}", f"{why}{needed} What fits: {say(value)}.", flags)


def _at_run_time(engine: EngineState, why: str) -> Iterator[Action]:
    """What leaves more GPU memory outside the KV pool, and keeps it in one piece."""
    called, oom = dialect(engine.dialect).called, engine.signals.oom
    flag, now = value_and_flag(engine, "gpu_memory_utilization")
    chunk = called("max_num_batched_tokens")
    yield Action(
        f"Lower {called('gpu_memory_utilization') if flag else chunk}",
        f"{why} Allocations need free GPU memory outside the KV pool. {named('Current value', now)}. Look for other"
        f" processes on the GPU first; a lower {chunk} lowers peak activation memory.",
        (flag,) if flag else (),
    )
    asked, free = oom.get("requested_bytes"), oom.get("reserved_unallocated_bytes")
    if asked is None or free is None or free >= asked:
        yield Action(
            "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            f"{named('Reserved by PyTorch but unallocated', say(free, 'bytes'))},"
            f" {named('last tried to allocate', say(asked, 'bytes'))}. Helps if memory is fragmented: GPU memory grew"
            " while requests of varying length ran. On Ascend the variable is PYTORCH_NPU_ALLOC_CONF.",
        )


def _host_memory(engine: EngineState, why: str) -> Action:
    return Action(
        "Give the container or node more memory",
        f"{why} Or lower what the host holds: swap space, KV offloaded to the CPU, cached media. Ray ends a worker when"
        " the node's memory passes RAY_memory_usage_threshold. GPU limits do not help.",
        commands=container_limits(engine, "--limits=memory=<size>"),
    )


def _probes(engine: EngineState) -> Action:
    host = engine.signals.host
    return Action(
        "Give the probes more time: raise timeoutSeconds and failureThreshold",
        "The container restarts, and its metrics time out. The same process answers /health, so probes with the default"
        " timeout of 1 s fail under load, and the kubelet ends the container. Confirm with the pod's events."
        f" {named('Last termination', host.last_termination_reason or UNKNOWN)},"
        f" {named('exit code', say(host.last_exit_code))}.",
        commands=roll_out(engine.key, workload(engine)),
    )


@dataclass(frozen=True, slots=True)
class Harm:
    """What an alert reads of a finding while it holds: ``name``, ``level``, the number users feel (``value``, in
    ``unit``; ``None`` = the finding alone), and what the alert says: ``head``, which the number follows, and ``more``,
    of both without the parts between commas that have an unknown number. ``otherwise``: what to do first where the
    verdict asks for nothing; ``first``: what to do first whatever it asks for.
    """

    name: str
    level: str
    head: str
    more: str = ""
    value: Callable[[EngineState], float | None] | None = None
    unit: str = ""
    otherwise: str = "compare with the other engines of the pool, and look in front of them: gateway, network, clients"
    first: str = ""


_HARMS: Final[Mapping[str, Harm]] = {
    "slow": Harm(
        "slow",
        "warning",
        "{phase} of {who} at p95, {usual}",
        "",
        lambda e: getattr(e.diagnosis.slow, "seconds", None),
        "seconds",
    ),
    "losing_requests": Harm(
        "losing_requests",
        "warning",
        "Requests of {who} that end without an answer",
        "Most of them {lost}, usual share of abandoned ones: {usual_abandoned}",
        lambda e: e.signals.requests.requests_lost_ratio,
        "ratio",
        "read the server's log ({log}), and the gateway's for its time limit",
    ),
    "stuck": Harm(
        "stuck",
        "critical",
        "{who} answers nothing, {in_flight} requests in flight",
        "No token has come and no request has finished. Health checks may still pass",
        lambda e: e.signals.progress.seconds_without_progress,
        "seconds",
        "save the stacks and the log ({log}), then restart the engine",
    ),
    "answers_suspect": Harm(
        "answers_suspect",
        "critical",
        "Answers of {who} may be wrong: KV blocks were read after they were freed",
        "Another server read KV blocks whose lease had expired, so they may have held another prompt. These requests"
        " end with HTTP 200, and neither latency nor errors show it",
        lambda e: e.signals.transfers.read_after_expiry,
        first="take the pair out of service until its decode side fetches in time",
    ),
    "kv_pressure": Harm("kv_pressure", "warning", "KV cache of {who} is full, {kv_used}"),
    "reuse_lost": Harm(
        "reuse_lost",
        "warning",
        "{who} computes prompts again that it had cached, hit ratio {hit_ratio}",
        "Users wait for prefill of prompts whose KV blocks were evicted before they came back, {repeated} of the"
        " prefill is repeated, hit ratio with twice the KV memory: {hit_ratio_twice}",
    ),
    "host_bound": Harm(
        "host_bound",
        "warning",
        "GPU of {who} waits for the CPU, {throttled} of the CPU periods throttled",
        "The KV cache is not the cause, even if GPU memory is high and GPU utilization low",
    ),
    "kv_transfers_failing": Harm(
        "kv_transfers_failing",
        "warning",
        "KV blocks do not get through between {who} and its peer, {transfers_failed} of the transfers fail",
        "Transfers fail or stand still, prompts are thrown away before the other side has them, or the decode side"
        " computes them itself. Each fault is counted on one of the two servers: look at both",
    ),
}
HARMS: Final = {
    **_HARMS,
    **{f"{name}_badly": replace(_HARMS[name], level="critical") for name in ("slow", "losing_requests")},
}
"""Findings that are published once more while they hold: rules then read the few series of engines that are in trouble,
and find in them what to say.
"""
_NAME_LIMIT: Final = 128
_SAID_LIMIT: Final = 1000  # bytes; managed Prometheus services take labels of 1 023


def _about(value: float | None, unit: str = "", digits: int = 1) -> str:
    """A number in few digits, so that a label with it rarely changes, nor comes and goes its "about"; "" if unknown."""
    if value is None:
        return ""
    exact = value == int(value) and value < 10**digits
    return f"{'' if exact else 'about '}{say(float(f'{value:.{digits}g}'), unit)}"


def _at_least(count: float | None) -> str:
    """The power of ten below a count, which rarely changes while a queue grows; "" if it is unknown."""
    if count is None or count < 1:
        return "" if count is None else "no"
    return f"at least {10 ** int(log10(count))}" if count >= 10 else "some"


def _name(text: str) -> str:
    """A name from outside as part of a sentence: it leaves room for the others, and does not end this one."""
    return visible(text[:_NAME_LIMIT]).replace(". ", "._")


_SAID: Final[Mapping[str, Callable[[EngineState], str]]] = MappingProxyType(
    {
        "who": lambda e: (
            f"{_name(e.key.model_name)} ({'/'.join(map(_name, filter(None, (e.key.namespace, e.key.pod))))})"
        ),
        "rank": lambda e: _name(e.key.engine),
        "phase": lambda e: capital(PHASES[e.diagnosis.slow.phase]) if e.diagnosis.slow else "Latency",
        "usual": lambda e: (
            "usual value not known yet"
            if e.diagnosis.slow is None or e.diagnosis.slow.usual is None
            else f"usually {_about(e.diagnosis.slow.usual, 'seconds', 2)}"
        ),
        "lost": lambda e: (
            "fail"
            if (e.signals.requests.failed_ratio or 0.0) >= (e.signals.requests.abandoned_more_ratio or 0.0)
            else "are abandoned by their clients"
        ),
        "log": lambda e: (
            command("kubectl", *in_namespace(e.key), "logs", e.key.pod, "--since=15m")
            if e.key.namespace
            else "journalctl or docker logs"
        ),
        "in_flight": lambda e: _at_least(e.signals.load.in_flight),
        "waiting": lambda e: _at_least(e.signals.load.waiting),
        "usual_abandoned": lambda e: _about(e.signals.requests.abandoned_usual_ratio, "ratio"),
        "kv_used": lambda e: _about(e.signals.kv.kv_used_ratio_max, "ratio"),
        "hit_ratio": lambda e: _about(e.signals.kv.prefix_hit_ratio.get(NOW), "ratio"),
        "hit_ratio_twice": lambda e: _about(e.signals.kv.prefix_hit_ratio.get("2"), "ratio"),
        "repeated": lambda e: _about(e.signals.kv.prefill_repeated_ratio, "ratio"),
        "throttled": lambda e: _about(e.signals.host.cpu_throttled_ratio, "ratio"),
        "transfers_failed": lambda e: _about(e.signals.transfers.transfers_failed_ratio, "ratio"),
    }
)
"""What an alert says of an engine, in words that change rarely, because they are a label."""


def _cause(found: Diagnosis, cause: str) -> str:
    if found.verdict in CALM:
        return f"none seen in the engine, whose verdict is {found.verdict}"
    if found.verdict == UNKNOWN:
        return f"unknown ({cause})"
    sure = Grade[found.grade.upper()] >= Grade.LIKELY
    before, after = ("", " certain") if sure else ("not certain; most likely ", "")
    return f"{before}{cause} ({say(found.confidence, 'ratio')}{after})"


def told(engine: EngineState, harm: Harm, cause: Cause) -> str:
    """What an alert about this harm says: what users feel, where, requests, why, what to do first, what to type. The
    first sentence is the summary. What is too long for a label ends before the last one.
    """
    values = Asked(lambda name: _SAID[name](engine))
    key, asks = engine.key, engine.diagnosis.verdict in ACTIONABLE or bool(harm.first)
    pod = () if re.search(MARKUP, key.pod) else ("--pod", key.pod)  # with other signs it would name another
    where = (*(("-n", key.namespace) if key.namespace else ()), *pod)
    sentences = (
        parts_known(harm.head, values),
        parts_known(harm.more, values),
        parts_known("Engine {rank}, {waiting} requests waiting", values),
        "Cause: " + _cause(engine.diagnosis, cause.cause),
        "First action: " + (harm.first or cause.action or harm.otherwise.format_map(values)),
    )
    text = re.sub(MARKUP, r"_\1", ". ".join(filter(None, sentences)))
    run = re.sub(MARKUP, r"_\1", ". Run: " + command("kvpressure", "mitigate" if asks else "diagnose", *where))
    return text.encode()[: _SAID_LIMIT - len(run.encode())].decode(errors="ignore") + run
