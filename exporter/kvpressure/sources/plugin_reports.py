"""Reports of the plugin that runs inside vLLM (``kvpressure.vllm_plugin``), from files under one directory.

Where a file may lie, seen from ``--plugin.directory``:

* ``<namespace>_<pod>/worker-*.json``: a hostPath with ``subPathExpr: $(POD_NAMESPACE)_$(POD_NAME)``;
* ``<pod uid>/volumes/kubernetes.io~empty-dir/kvpressure/worker-*.json``: an emptyDir named ``kvpressure``, when the
  directory is the kubelet's ``pods`` directory;
* ``worker-*.json``: pods that share one directory; then the file itself says whose it is.

Whoever may write a file may write anything: sizes and numbers of files are bounded, links are not followed, and the
path says more about the pod than the content does. A file that was not written lately belongs to a process that has
ended, and so does one last written before another process of its pod began.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvpressure.readings import AllocatorReading, StepStats
from kvpressure.sources.base import Reading, SourceError

if TYPE_CHECKING:
    from kvpressure.sources.shared import Shared

FRESH_SECONDS: Final = 10.0
MAX_FILE_BYTES: Final = 256 * 1024  # of 8 engines with 1 000 batch sizes each
MAX_FILES: Final = 64  # in one directory: workers and API servers of one pod
MAX_DIRECTORIES: Final = 256
MAX_SIZES: Final = 8192
MAX_ENGINES: Final = 64
EMPTY_DIR: Final = "volumes/kubernetes.io~empty-dir/kvpressure"

NO_DIRECTORY: Final = "no_directory"  # the reasons of this source: a closed set
NO_PERMISSION: Final = "no_permission"
MALFORMED: Final = "malformed"
TOO_LARGE: Final = "too_large"

_NAME: Final = re.compile(r"(?:worker|frontend)-\d{1,10}\.json")
_FIGURES: Final = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes", "alloc_retries", "ooms")


class AllocatorSettings(Protocol):
    """What this source needs to be told."""

    @property
    def plugin_directory(self) -> Path | None:
        """Where the reports are."""
        ...

    @property
    def shared(self) -> Shared:
        """Where pod discovery leaves the pods of this node."""
        ...


class Malformed(ValueError):
    """A report that is not one."""


@dataclass(frozen=True, slots=True)
class Report:
    """One file: who wrote it when, and what it says (``body``)."""

    namespace: str
    pod: str
    kind: str
    started: float
    written: float
    body: Mapping[str, Any]


class AllocatorSource:
    """All fresh reports under the directory."""

    name = "allocator"

    def __init__(self, settings: AllocatorSettings) -> None:
        if settings.plugin_directory is None:
            raise SourceError(NO_DIRECTORY, "--plugin.directory is not set")
        self._root = settings.plugin_directory
        self._shared = settings.shared

    def read(self) -> Reading:
        """Read every file. Those that cannot be read cost themselves and are counted."""
        errors: Counter[str] = Counter()
        now = time()
        reports: list[Report] = []
        for pod, directory in self._directories():
            for path in _files(directory, errors):
                try:
                    report = read_report(path, pod)
                except SourceError as failure:
                    errors[failure.reason] += 1
                else:
                    if report is not None and abs(now - report.written) <= FRESH_SECONDS:
                        reports.append(report)
        allocator, steps = readings(reports, errors)
        return Reading(allocator=allocator, steps=steps, errors=dict(errors))

    def _directories(self) -> Iterator[tuple[tuple[str, str] | None, Path]]:
        """Directories to look into, each with the pod that its path names, if it does."""
        try:
            names = [
                entry.name
                for _, entry in zip(range(MAX_DIRECTORIES), os.scandir(self._root), strict=False)
                if entry.is_dir(follow_symlinks=False)
            ]
        except PermissionError as error:
            raise SourceError(NO_PERMISSION, str(error)) from error
        except OSError as error:
            raise SourceError(NO_DIRECTORY, str(error)) from error
        yield None, self._root
        uids = {pod.uid: (pod.namespace, pod.name) for pod in self._shared.pods or ()}
        for name in sorted(names):
            if name in uids:
                yield uids[name], self._root / name / EMPTY_DIR
            elif "_" in name:  # neither namespaces nor pods have one in their names
                namespace, pod = name.split("_", 1)
                yield (namespace, pod), self._root / name

    def close(self) -> None:
        """Nothing is held."""


def _files(directory: Path, errors: Counter[str]) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            found = [Path(entry.path) for entry in entries if _NAME.fullmatch(entry.name)]
    except PermissionError:
        errors[NO_PERMISSION] += 1
        return []
    except OSError:
        return []  # a pod without the volume
    if len(found) > MAX_FILES:
        errors[TOO_LARGE] += 1
    return sorted(found, key=lambda path: path.name)[:MAX_FILES]


def read_report(path: Path, pod: tuple[str, str] | None) -> Report | None:
    """One file; ``None`` if it has just gone. ``pod`` overrules what the file says about itself.

    Raises ``SourceError`` with a reason of this source.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise SourceError(NO_PERMISSION, path.name) from error
    except OSError as error:
        raise SourceError(MALFORMED, path.name) from error
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise SourceError(MALFORMED, f"{path.name} is no file")
        data = os.read(handle, MAX_FILE_BYTES + 1)
    finally:
        os.close(handle)
    if len(data) > MAX_FILE_BYTES:
        raise SourceError(TOO_LARGE, path.name)
    try:
        return parse(data, pod)
    except Malformed as error:
        raise SourceError(MALFORMED, path.name) from error


def parse(data: bytes, pod: tuple[str, str] | None = None) -> Report:
    """The report in ``data``. Raises ``Malformed``."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Malformed from error
    if not isinstance(body, dict) or body.get("kvpressure") != 1 or body.get("kind") not in ("worker", "frontend"):
        raise Malformed
    namespace, name = pod or (body.get("namespace"), body.get("pod"))
    if not isinstance(namespace, str) or not isinstance(name, str):
        raise Malformed
    return Report(namespace, name, body["kind"], _seconds(body.get("started")), _seconds(body.get("written")), body)


def readings(
    reports: Iterable[Report],
    errors: Counter[str],
) -> tuple[tuple[AllocatorReading, ...], tuple[StepStats, ...]]:
    """What the reports say, those of earlier runs left out."""
    groups: dict[tuple[str, str, str], list[Report]] = defaultdict(list)
    for report in reports:
        groups[report.namespace, report.pod, report.kind].append(report)
    allocator: list[AllocatorReading] = []
    steps: list[StepStats] = []
    for (_, _, kind), group in groups.items():
        newest = max(report.started for report in group)
        alive = [report for report in group if report.written >= newest]
        try:
            if kind == "worker":
                allocator += [_allocator(report) for report in alive]
            else:
                steps += _steps(alive)
        except Malformed:
            errors[MALFORMED] += 1
    return tuple(allocator), tuple(steps)


def _allocator(report: Report) -> AllocatorReading:
    figures = {name: _count(report.body[name]) for name in _FIGURES if report.body.get(name) is not None}
    return AllocatorReading(report.namespace, report.pod, _count(report.body.get("rank")), **figures)


def _steps(reports: list[Report]) -> list[StepStats]:
    """The engines of one pod over all its API servers."""
    engines: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for report in reports:
        found = report.body.get("engines")
        if not isinstance(found, dict) or len(found) > MAX_ENGINES:
            raise Malformed
        for engine, counts in found.items():
            if not isinstance(counts, dict):
                raise Malformed
            engines[engine].append(counts)
    started, written = max(r.started for r in reports), min(r.written for r in reports)
    return [
        _engine(StepStats(reports[0].namespace, reports[0].pod, engine, started, written, 0, 0), parts)
        for engine, parts in engines.items()
    ]


def _engine(known: StepStats, parts: list[Mapping[str, Any]]) -> StepStats:
    exact = len(parts) == 1
    sizes: Counter[int] = Counter()
    for part in parts:
        sizes.update(_sizes(part.get("batch" if exact else "running")))
    maxima = [_ratio(part["kv_max"]) for part in parts if part.get("kv_max") is not None]
    return StepStats(
        known.namespace,
        known.pod,
        known.engine,
        known.started,
        known.written,
        steps=sum(sizes.values()) if exact else sum(_count(part.get("steps")) for part in parts),
        decoded=sum(_count(part.get("decoded")) for part in parts),
        exact=exact,
        preemptions=sum(_count(part.get("preemptions")) for part in parts),
        kv_max=max(maxima, default=None),
        sizes=dict(sizes),
    )


def _sizes(value: object) -> dict[int, int]:
    if not isinstance(value, dict) or len(value) > MAX_SIZES:
        raise Malformed
    try:
        return {_count(int(size)): _count(count) for size, count in value.items()}
    except ValueError as error:
        raise Malformed from error


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise Malformed
    return value


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise Malformed
    return float(value)


def _ratio(value: object) -> float:
    number = _seconds(value)
    if not 0.0 <= number <= 1.0:
        raise Malformed
    return number
