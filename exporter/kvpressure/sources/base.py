"""The protocol every source follows, and the registry that gives each its flag, interval and deadline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kvpressure.readings import (
    AllocatorReading,
    ContainerReading,
    EnginePage,
    GpuOwner,
    GpuReading,
    LogLine,
    NodeCondition,
    StepStats,
)

if TYPE_CHECKING:
    from kvpressure.settings import Settings


class SourceError(Exception):
    """A source could not read at all. ``reason`` is one word of the source's closed set (it becomes a label)."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class FatalSourceError(SourceError):
    """Only a new process can recover (e.g. the driver library was replaced): the exporter exits non-zero."""


class NothingHere(SourceError):
    """There is nothing of the source's kind on this node (e.g. no AMD GPU).

    Normal: neither a success nor a failure, so the source has no ``source_up`` and nobody is alarmed; it is looked for
    again all the same.
    """


@dataclass(frozen=True, slots=True)
class Reading:
    """What one call of ``Source.read`` brought. ``None`` = this source does not provide that kind.

    Partial failures are not exceptions: they are counted in ``errors`` (reason -> how many), and the rest counts.
    ``process_pods``: (namespace, pod) by host pid of the processes on GPUs; ("", "") = of no pod.
    ``expected_gpus`` is how many GPUs there should be by vendor, those that could not be read included.
    """

    gpus: tuple[GpuReading, ...] | None = None
    pages: tuple[EnginePage, ...] | None = None
    containers: tuple[ContainerReading, ...] | None = None
    owners: tuple[GpuOwner, ...] | None = None
    logs: tuple[LogLine, ...] | None = None
    allocator: tuple[AllocatorReading, ...] | None = None
    steps: tuple[StepStats, ...] | None = None
    node_conditions: tuple[NodeCondition, ...] | None = None
    targets: tuple[str, ...] | None = None
    expected_gpus: dict[str, int] | None = None
    process_pods: dict[int, tuple[str, str]] | None = None
    errors: dict[str, int] = field(default_factory=dict)


class Source(Protocol):
    """A source is driven by one worker thread of its own; ``read`` may block up to its deadline.

    ``read`` raises ``SourceError`` when nothing could be read, ``FatalSourceError`` when a restart is needed.
    A ``read`` that outlives its deadline is reported as ``timeout``; its data, when it comes, is used only if
    it is the newest.
    """

    name: str

    def read(self) -> Reading:
        """Read once, now."""
        ...

    def close(self) -> None:
        """Release what is held. Called once, possibly while ``read`` hangs in another thread."""
        ...


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """An entry of the registry.

    ``factory`` imports what it needs when called, so that a disabled source costs nothing. ``default`` says
    whether the source is on without a flag; ``hold_seconds`` how long its last reading stays part of snapshots
    between two reads (0 = only the tick it arrived in).
    """

    name: str
    help: str
    factory: Callable[[Settings], Source]
    default: bool = True
    interval_seconds: float = 1.0
    deadline_seconds: float = 5.0
    hold_seconds: float = 0.0


_REGISTRY: dict[str, SourceSpec] = {}


def register(spec: SourceSpec) -> SourceSpec:
    """Add a source; its name becomes ``--collector.<name>`` and the ``source`` label. Names are unique."""
    if spec.name in _REGISTRY:
        raise ValueError(f"source {spec.name!r} registered twice")
    _REGISTRY[spec.name] = spec
    return spec


def registry() -> dict[str, SourceSpec]:
    """All sources by name, the built-in ones loaded."""
    import kvpressure.sources.builtin  # noqa: F401  (registers them)

    return dict(_REGISTRY)


def lazy(module: str, attribute: str) -> Callable[[Any], Source]:
    """A factory that imports ``module`` only when the source is switched on."""

    def build(settings: Any) -> Source:
        import importlib

        source: Source = getattr(importlib.import_module(module), attribute)(settings)
        return source

    return build
