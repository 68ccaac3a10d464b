"""The protocol of sources, the result of one reading, and its failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from kvpressure.model.isolation import FailureLog
from kvpressure.model.readings import (
    AllocatorReading,
    CacheReading,
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

if TYPE_CHECKING:
    from kvpressure.sources.catalog import CollectorSettings
    from kvpressure.sources.kubernetes.discovery_state import SharedDiscovery
    from kvpressure.sources.scrape.targets import Target

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
    caches: tuple[CacheReading, ...] | None = None
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
    except Exception as error:
        reason = error.reason if isinstance(error, SourceError) else reason_of(error, reasons or {}, INTERNAL)
        errors[reason] = errors.get(reason, 0) + 1
        if reason == INTERNAL:
            _failures.add(subject, "read", error)


@contextmanager
def needed(place: Path, missing: str) -> Iterator[None]:
    """Look at a place without which a source reads nothing. Raises ``SourceError``: ``missing`` where it is not there,
    ``permission_denied`` where it must not be looked at.
    """
    try:
        yield
    except OSError as error:
        reason = "permission_denied" if isinstance(error, PermissionError) else missing
        raise SourceError(reason, f"{place}: {error.strerror}") from error


class CountedFailures:
    """Work in parts, whose failures are counted by reason until they are taken."""

    def __init__(self) -> None:
        self._errors: Counter[str] = Counter()

    def isolated(self, subject: str) -> AbstractContextManager[None]:
        """``isolated``, counted here."""
        return isolated(subject, self._errors)

    def take_errors(self) -> dict[str, int]:
        """Failures by reason since the last call."""
        errors, self._errors = dict(self._errors), Counter()
        return errors


def reason_of(error: Exception, reasons: Mapping[type[Exception], str], otherwise: str) -> str:
    """The reason of the first type that ``error`` is of."""
    return next((reason for kind, reason in reasons.items() if isinstance(error, kind)), otherwise)


class SourceSettings(Protocol):
    """What sources read of the settings, which are a layer above; described where they are set. ``shared``: what the
    sources of this process share. ``keep_exposition``: keep the raw text of pages, for a recorder.
    """

    @property
    def shared(self) -> SharedDiscovery:
        """Written and read by sources."""

    @property
    def collectors(self) -> Mapping[str, CollectorSettings]:
        """Interval and deadline of each source."""

    @property
    def keep_exposition(self) -> bool:
        """For a recorder."""

    @property
    def node_name(self) -> str:
        """Name of the node."""

    @property
    def host_sys(self) -> Path:
        """The host's ``/sys``."""

    @property
    def host_proc(self) -> Path:
        """The host's ``/proc``."""

    @property
    def host_cgroup(self) -> Path:
        """The host's cgroup v2 hierarchy."""

    @property
    def host_pod_logs(self) -> Path:
        """The host's ``/var/log/pods``."""

    @property
    def engine_targets(self) -> tuple[Target, ...]:
        """Targets from the command line."""

    @property
    def engine_pace(self) -> str:
        """``fixed`` or ``adaptive``: calm targets are scraped less often."""

    @property
    def engine_timeout_seconds(self) -> float:
        """Total deadline of one fetch."""

    @property
    def engine_max_targets(self) -> int:
        """Maximum number of targets."""

    @property
    def kube_api_url(self) -> str | None:
        """None = the cluster of this process."""

    @property
    def kube_token_file(self) -> Path:
        """Of the service account."""

    @property
    def kube_ca_file(self) -> Path:
        """Certificates of the API server."""

    @property
    def kube_selector(self) -> str | None:
        """Label selector of pods."""

    @property
    def kube_namespaces(self) -> tuple[str, ...]:
        """Namespaces to watch; none = all."""

    @property
    def kube_engine_tls(self) -> str:
        """``verify`` or ``insecure``."""

    @property
    def kubelet_socket(self) -> Path:
        """Of PodResources."""

    @property
    def kubelet_resources(self) -> tuple[str, ...]:
        """Prefixes of GPU resources."""


class Source(Protocol):
    """A source; one worker thread drives it, and ``read`` may block up to its deadline.

    ``read`` raises ``SourceError`` when nothing could be read, ``FatalSourceError`` when a restart is needed. A
    ``read`` beyond its deadline is reported as ``timeout``; its data is still used when it comes, unless the read
    took more than twice the deadline.
    """

    name: str

    def read(self) -> Reading:
        """Read once, now."""

    def close(self) -> None:
        """Release all resources, if any. Called once, possibly while ``read`` hangs in another thread."""
        return
