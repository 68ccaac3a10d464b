"""The protocol of sources, the result of one reading, and its failures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvpressure.model.isolation import FailureLog
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
from kvpressure.model.reasons import INTERNAL

FILE_REASONS: Final[Mapping[type[Exception], str]] = {PermissionError: "permission_denied", OSError: "unreadable"}
"""Reasons for ``isolated`` of a source that reads files."""

_failures: Final = FailureLog()


class SourceError(Exception):
    """A source could not read at all. ``reason``: one word of the source's closed set (it becomes a label).
    ``counts``: failures since the last read by reason, if not this one alone; a source with a thread of its own may
    fail often between two reads, or not at all.
    """

    def __init__(self, reason: str, detail: str = "", counts: Mapping[str, int] | None = None) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
        self.counts = {reason: 1} if counts is None else dict(counts)


class FatalSourceError(SourceError):
    """Only a new process can recover (e.g. after the driver library was replaced): the exporter exits non-zero."""


class BeyondSubject(Exception):
    """A failure that concerns more than the subject whose work raised it; ``isolated`` lets it pass."""


class NothingHere(SourceError):
    """Nothing of the source's kind exists on this node (e.g. no AMD GPU).

    Normal: neither success nor failure, so the source has no ``source_up`` and raises no alert; it still looks again.
    """


@dataclass(frozen=True, slots=True)
class Reading:
    """Result of one ``Source.read``. ``None`` = this source does not provide that kind.

    Partial failures are not exceptions: ``errors`` counts them by reason, and the rest is used. ``process_pods``:
    (namespace, pod) by host pid of processes on GPUs; ("", "") = in no pod. ``expected_gpus``: number of GPUs by
    vendor, unreadable ones included. ``pods``: uid by (namespace, pod) of every pod with an engine that exists.
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
    pods: Mapping[tuple[str, str], str] | None = None
    expected_gpus: dict[str, int] | None = None
    process_pods: dict[int, tuple[str, str]] | None = None
    errors: dict[str, int] = field(default_factory=dict)


@contextmanager
def isolated(
    subject: str, errors: MutableMapping[str, int], reasons: Mapping[type[Exception], str] | None = None
) -> Iterator[None]:
    """Run the work for one subject of a source (a pod, container, GPU, file, target or process), so that what it
    raises costs no other.

    A failure is counted in ``errors``: under the reason of a ``SourceError``, else under the first of ``reasons`` that
    fits, else as ``internal``, which is also logged, once by subject and type.
    """
    try:
        yield
    except BeyondSubject:
        raise
    except SourceError as error:
        errors[error.reason] = errors.get(error.reason, 0) + 1
    except Exception as error:
        reason = next((reason for raised, reason in (reasons or {}).items() if isinstance(error, raised)), INTERNAL)
        errors[reason] = errors.get(reason, 0) + 1
        if reason == INTERNAL:
            _failures.add(subject, "read", error)


class Source(Protocol):
    """A source; one worker thread drives it, and ``read`` may block up to its deadline.

    ``read`` raises ``SourceError`` when nothing could be read, ``FatalSourceError`` when a restart is needed. A
    ``read`` beyond its deadline is reported as ``timeout``; its data is still used when it comes, unless the read
    took more than twice the deadline.
    """

    name: str

    def read(self) -> Reading:
        """Read once, now."""
        ...

    def close(self) -> None:
        """Release all resources. Called once, possibly while ``read`` hangs in another thread."""
        ...
