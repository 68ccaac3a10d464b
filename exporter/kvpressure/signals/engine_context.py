"""Inputs of an engine's signals beside its own metrics, at one moment, grouped by who uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from kvpressure.engines.base import Features
from kvpressure.model.arguments import EngineArgs
from kvpressure.model.frozen import frozen
from kvpressure.model.readings import AllocatorReading, GpuReading
from kvpressure.signals.hardware import ContainerWindow, GpuWindow


@frozen
class GpuContext:
    """The engine's GPUs. ``others``: other pods use some of them too (time slicing, MPS). ``own_bytes``: memory of
    the pod's processes on each of ``windows``, in bytes; ``processes``: the same on every GPU that has some.
    ``faults``: recent hardware faults, None = no GPU is known; ``kernel_faults``: recent errors caused by a program's
    kernel.
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
    """From the container's log: ``facts`` of the start, counts of recent ``events``, and torch's numbers from the
    last out-of-memory error in bytes (``oom``). ``known``: a log was read.
    """

    facts: Mapping[str, float] = field(default_factory=dict)
    events: Mapping[str, int] = field(default_factory=dict)
    oom: Mapping[str, float] = field(default_factory=dict)
    known: bool = False


@frozen
class LimitContext:
    """Limits in force, the arguments they come from, and the server features these switch on."""

    max_num_seqs: float | None = None
    max_num_seqs_source: str | None = None
    max_num_batched_tokens: float | None = None
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
