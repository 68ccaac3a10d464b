"""One action of a plan, and what actions are made of: values, workload and commands of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvpressure.advice.triage import in_namespace, is_pod
from kvpressure.diagnosis.finding import limit_source
from kvpressure.engines.registry import dialect
from kvpressure.model.arguments import value_text
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


def workload(engine: EngineState) -> tuple[str, ...]:
    """The workload in words of kubectl; empty for a server on a bare host."""
    return (*in_namespace(engine.key), "deploy/<deployment>") if is_pod(engine.key) else ()


def container_limits(engine: EngineState, *limits: str) -> tuple[str, ...]:
    """The command that changes the limits of the container; empty for a server on a bare host."""
    where, container = workload(engine), engine.container or "<container>"
    return (command("kubectl", "set", "resources", *where, "-c", container, *limits),) if where else ()
