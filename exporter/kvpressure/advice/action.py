"""One action of a plan, what actions are made of (values, workload and commands of an engine), and those about its KV
tier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from types import MappingProxyType
from typing import Final, Literal

from kvpressure.advice.limits import side
from kvpressure.diagnosis.finding import limit_source
from kvpressure.engines.registry import default, dialect
from kvpressure.model.arguments import GIB, parse_version, value_text
from kvpressure.model.readings import EngineKey
from kvpressure.model.state import EngineState
from kvpressure.printable import capital, command, say
from kvpressure.settings.thresholds import Thresholds
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
