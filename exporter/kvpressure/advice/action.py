"""One action of a plan, and what actions are made of: values, workload and commands of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvpressure.diagnosis.finding import limit_source
from kvpressure.engines.registry import dialect
from kvpressure.model.arguments import value_text
from kvpressure.model.readings import EngineKey
from kvpressure.model.state import EngineState
from kvpressure.printable import command


@dataclass(frozen=True, slots=True)
class Action:
    """One step. ``flags``: arguments of the engine as to be set; ``commands``: for a shell; ``now`` False: it is named,
    and does not help at present.
    """

    title: str
    text: str
    flags: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    now: bool = True


def value_and_flag(engine: EngineState, name: str) -> tuple[str, str]:
    """(the argument with the value to set, "" when there is none; the value in force in words)."""
    limit = engine.limits.get(name)
    if limit is None:
        return "", "unknown"
    now = "unknown" if limit.value is None else f"{value_text(limit.value)} ({limit_source(limit.source)})"
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
