"""The protocol every source follows, what one reading brings, and how it fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvpressure.model.readings import (
    AllocatorReading,
    ContainerReading,
    Discovered,
    GpuOwner,
    GpuReading,
    LogLine,
    NodeCondition,
    Scrape,
    StepStats,
)


class SourceError(Exception):
    """A source could not read at all. ``reason`` is one word of the source's closed set (it becomes a label).

    ``counts`` is what failed since the last read, by reason, where that is not this once: a source that asks in a
    thread of its own may fail often between two reads, or not at all.
    """

    def __init__(self, reason: str, detail: str = "", counts: Mapping[str, int] | None = None) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
        self.counts = {reason: 1} if counts is None else dict(counts)


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
    pages: tuple[Scrape, ...] | None = None
    containers: tuple[ContainerReading, ...] | None = None
    owners: tuple[GpuOwner, ...] | None = None
    logs: tuple[LogLine, ...] | None = None
    allocator: tuple[AllocatorReading, ...] | None = None
    steps: tuple[StepStats, ...] | None = None
    node_conditions: tuple[NodeCondition, ...] | None = None
    discovered: tuple[Discovered, ...] | None = None
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
