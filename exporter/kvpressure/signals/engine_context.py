"""What an engine's signals need besides its own metrics, at one moment, in parts by who uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from kvpressure.engines.base import Features
from kvpressure.model.arguments import EngineArgs
from kvpressure.model.frozen import frozen
from kvpressure.model.readings import AllocatorReading, GpuReading
from kvpressure.signals.compute import GpuWindow
from kvpressure.signals.host import ContainerWindow


@frozen
class GpuContext:
    """The engine's GPUs. ``others`` = other pods have some of them too: time slices, MPS. ``own_bytes``: of the pod's
    processes on each of ``windows``; ``processes``: the same on each GPU that has some. ``faults`` None = no GPU is
    known; ``kernel_faults`` are those of a program on them.
    """

    windows: Sequence[GpuWindow] = ()
    others: bool = False
    own_bytes: Sequence[int | None] = ()
    processes: Sequence[int] = ()
    faults: int | None = None
    kernel_faults: int = 0

    @property
    def readings(self) -> list[GpuReading]:
        """The newest reading of each."""
        return [window.last for window in self.windows if window.last is not None]


@frozen
class LogContext:
    """What the container's log reported: ``facts`` of its start, recent ``events``, figures of the last out-of-memory
    text. ``known`` = a log was seen.
    """

    facts: Mapping[str, float] = field(default_factory=dict)
    events: Mapping[str, int] = field(default_factory=dict)
    oom: Mapping[str, float] = field(default_factory=dict)
    known: bool = False


@frozen
class LimitContext:
    """Limits in force, the arguments they come from, and what these make of the server."""

    max_num_seqs: float | None = None
    max_num_seqs_source: str | None = None
    max_model_len: float | None = None
    args: EngineArgs = field(default_factory=EngineArgs)
    features: Features = field(default_factory=Features)


@frozen
class EngineContext:
    """Everything around one engine at ``now``."""

    now: float
    gpus: GpuContext = GpuContext()
    log: LogContext = LogContext()
    limits: LimitContext = LimitContext()
    container: ContainerWindow | None = None
    allocator: Sequence[AllocatorReading] = ()
