"""Reports of the plugin inside vLLM (``kvpressure_vllm``), from files under one directory.

Places of a file below ``--plugin.directory``:

* ``<namespace>_<pod>/worker-*.json``: a hostPath with ``subPathExpr: $(POD_NAMESPACE)_$(POD_NAME)``;
* ``<pod uid>/volumes/kubernetes.io~empty-dir/kvpressure/worker-*.json``: an emptyDir named ``kvpressure``, when the
  directory is the kubelet's ``pods`` directory;
* ``worker-*.json``: pods that share one directory; the file then names its pod.

API servers write ``frontend-*.json`` beside them. Whoever may write a file may write anything, so sizes and numbers
of files are bounded, per directory and in total. Directories of pods with a GPU or an engine are opened by name and
read first, so that no flood of others hides them; within each kind small reports come first and large ones share the
rest. Links are not followed, and the path overrides the content about the pod. A file that was not written recently,
or last before another process of its pod began, belongs to a process that has ended.
"""

from __future__ import annotations

import json
import os
import re
import stat
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, groupby, islice
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from kvpressure.files import below, read_file
from kvpressure.model import ceilings
from kvpressure.model.readings import AllocatorReading, StepStats
from kvpressure.sources.base import Reading, SourceError, isolated
from kvpressure.sources.places import Place, Precedence, admitted

if TYPE_CHECKING:
    from kvpressure.sources.kubernetes.discovery_state import SharedDiscovery

FORMAT: Final = 1  # supported format; unknown fields are ignored
FRESH_SECONDS: Final = 10.0
MAX_FILE_BYTES: Final = 256 * 1024  # of 8 engines with 1 000 batch sizes each
MAX_FILES: Final = 64  # in one directory: workers and API servers of one pod
"""Plugin files of one directory. Beyond: the rest is not read. Shown as: `source_errors_total{reason="too_large"}`."""
MAX_DIRECTORIES: Final = 256
MAX_LISTED: Final = 1024  # names read of one directory
"""Names listed in one plugin directory. Beyond: only directories of pods with a GPU or engine are seen.
Shown as: `source_errors_total{reason="too_large"}`.
"""
MAX_DIRECTORY_BYTES: Final = 1024 * 1024  # read of one directory
MAX_BYTES: Final = 4 * 1024 * 1024  # read of all directories together; eight busy engines write a tenth of it
"""Bytes of plugin files, all directories. Beyond: the largest directories lose theirs.
Shown as: `source_errors_total{reason="too_large"}`.
"""
MAX_ENTRIES: Final = 32_768  # counts of batch sizes, of all directories together; eight busy engines have 16 000
"""Batch sizes in plugin files, all directories. Beyond: the directory's step counts are left out.
Shown as: `source_errors_total{reason="too_large"}`.
"""
MAX_FILE_ENTRIES: Final = 16_384
MAX_NAME_CHARS: Final = 256  # of an engine
MAX_SIZES: Final = 8192
MAX_ENGINES: Final = 64
EMPTY_DIR: Final = "volumes/kubernetes.io~empty-dir/kvpressure"

NO_DIRECTORY: Final = "no_directory"  # the reasons of this source: a closed set
NO_PERMISSION: Final = "no_permission"
MALFORMED: Final = "malformed"
NEWER_FORMAT: Final = "newer_format"  # of a plugin that is newer than this exporter
TOO_LARGE: Final = "too_large"
_FILE_REASONS: Final[Mapping[type[Exception], str]] = {PermissionError: NO_PERMISSION, OSError: MALFORMED}

_NAME: Final = re.compile(r"(?:worker|frontend)-\d{1,10}\.json")
_FIGURES: Final = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes", "alloc_retries", "ooms")


class PluginSettings(Protocol):
    """Settings of this source."""

    @property
    def plugin_directory(self) -> Path | None:
        """Directory of the reports; None = not set."""
        ...

    @property
    def shared(self) -> SharedDiscovery:
        """Shared state with the pods of this node."""
        ...


class Malformed(ValueError):
    """An invalid report; ``reason`` is its error reason."""

    reason = MALFORMED


class NewerFormat(Malformed):
    """A report in a format newer than this exporter."""

    reason = NEWER_FORMAT


@dataclass(frozen=True, slots=True)
class PluginReport:
    """One file: its pod, kind and times (Unix seconds), and its content: a worker's figures, or the counts of each
    engine.
    """

    namespace: str
    pod: str
    kind: str
    started: float
    written: float
    body: Mapping[str, Any]


class PluginSource:
    """All fresh reports under the directory."""

    name = "plugin"

    def __init__(self, settings: PluginSettings) -> None:
        if settings.plugin_directory is None:
            raise SourceError(NO_DIRECTORY, "--plugin.directory is not set")
        self._root = settings.plugin_directory
        self._shared = settings.shared

    def read(self) -> Reading:
        """Read every file; unreadable ones are counted and skipped."""
        errors: Counter[str] = Counter()
        precedences = self._shared.precedences()

        def precedence(pod: Place | None) -> Precedence:
            """The shared directory stands for the pods in it."""
            return Precedence.HAS_GPU if pod is None else precedences.get(pod, Precedence.NOT_KNOWN)

        directories = [_listed(pod, path, errors) for pod, path in self._directories(precedences, errors)]
        named = {directory.pod for directory in directories}
        kept, left_out = admitted(
            ((directory.pod, file) for directory in directories for file in directory.files),
            MAX_BYTES,
            lambda entry: precedence(entry[0]),
            lambda entry: entry[0] or ("", ""),
            lambda entry: entry[1].size,
        )
        errors[TOO_LARGE] += len({pod for pod, _ in left_out})
        files: dict[Place | None, list[Path]] = defaultdict(list)
        for pod, file in kept:
            files[pod].append(file.path)
        allocator: list[AllocatorReading] = []
        steps: list[StepStats] = []
        entries = MAX_ENTRIES
        for _, pods in groupby(files, precedence):
            alike = list(pods)
            for others, pod in zip(range(len(alike), 0, -1), alike, strict=True):
                reports = _reports(self._root, files[pod], pod, errors)
                if pod is None:
                    reports = [report for report in reports if (report.namespace, report.pod) not in named]
                of_workers, of_engines = _readings_of_each_pod(reports, errors)
                counted = sum(len(stats.sizes) for stats in of_engines)
                if counted > entries // others:
                    errors[TOO_LARGE] += 1
                    of_engines, counted = [], 0
                entries -= counted
                allocator += of_workers
                steps += of_engines
        return Reading(
            allocator=tuple(allocator),
            steps=tuple(steps),
            errors={reason: count for reason, count in errors.items() if count},
        )

    def _directories(
        self, precedences: Mapping[Place, Precedence], errors: Counter[str]
    ) -> Iterator[tuple[Place | None, Path]]:
        """(pod named by the path or None, directory). Those of pods with a GPU or engine are opened by name, whether or
        not they are among the listed names.
        """
        listed = self._names(errors)
        yield None, self._root
        uids = {pod.uid: (pod.namespace, pod.name) for pod in self._shared.pods or ()}
        uid_of = {pod: uid for uid, pod in uids.items()}
        wanted = [pod for pod, precedence in precedences.items() if precedence <= Precedence.SERVES]
        names = [name for pod in wanted for name in ("_".join(pod), uid_of.get(pod)) if name]
        there = [name for name in names if _is_directory(below(self._root, name))]
        # neither namespaces nor pods have an underscore in their names
        pods = {
            name: uids[name] if name in uids else _of_name(name)
            for name in (*there, *sorted(listed))
            if name in uids or "_" in name
        }
        kept, left_out = admitted(
            pods,
            MAX_DIRECTORIES,
            lambda name: precedences.get(pods[name], Precedence.NOT_KNOWN),
            lambda name: pods[name],
        )
        if left_out:
            errors[TOO_LARGE] += 1
        for name in kept:
            yield pods[name], self._root / name / EMPTY_DIR if name in uids else self._root / name

    def _names(self, errors: Counter[str]) -> list[str]:
        """The directories among the root's first names. Raises ``SourceError`` if it is unreadable."""
        found: list[str] = []
        try:
            with os.scandir(self._root) as entries:
                for entry in islice(entries, MAX_LISTED):
                    with isolated(f"directory {entry.path}", errors, _FILE_REASONS):
                        found += [entry.name] if entry.is_dir(follow_symlinks=False) else []
            return found
        except PermissionError as error:
            raise SourceError(NO_PERMISSION, str(error)) from error
        except OSError as error:
            raise SourceError(NO_DIRECTORY, str(error)) from error

    def close(self) -> None:
        """Does nothing; no resource is held."""


class _ReportFile(NamedTuple):
    path: Path
    size: int  # in bytes


@dataclass(frozen=True, slots=True)
class _Directory:
    """Files of one directory. ``pod``: named by the path, None = not."""

    pod: Place | None
    files: tuple[_ReportFile, ...]


def _of_name(name: str) -> Place:
    namespace, _, pod = name.partition("_")
    return namespace, pod


def _listed(pod: Place | None, directory: Path, errors: Counter[str]) -> _Directory:
    """The reports among a directory's first names; no more are listed, because there may be millions."""
    found: list[_ReportFile] = []
    guarded = isolated(f"directory {directory}", errors, _FILE_REASONS)
    with guarded, suppress(FileNotFoundError), os.scandir(directory) as entries:  # not found: a pod without the volume
        for seen, entry in enumerate(entries):
            if seen == MAX_LISTED:
                errors[TOO_LARGE] += 1
                break
            if _NAME.fullmatch(entry.name):
                with isolated(f"file {entry.path}", errors, _FILE_REASONS):
                    found.append(_ReportFile(Path(entry.path), _size(entry)))
    found.sort(key=lambda file: file.path.name)
    ends = list(accumulate(file.size for file in found[:MAX_FILES]))
    files = found[: bisect_right(ends, MAX_DIRECTORY_BYTES)]
    if len(files) < len(found):
        errors[TOO_LARGE] += 1
    return _Directory(pod, tuple(files))


def _is_directory(path: Path | None) -> bool:
    """Whether it is a directory and not a link to one."""
    try:
        return path is not None and stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return min(entry.stat(follow_symlinks=False).st_size, MAX_FILE_BYTES + 1)
    except OSError:
        return 0


def _reports(root: Path, paths: Iterable[Path], pod: Place | None, errors: Counter[str]) -> list[PluginReport]:
    """The fresh reports among the files of one directory."""
    now = time()
    reports: list[PluginReport] = []
    for path in paths:
        with isolated(f"file {path}", errors):
            report = read_report(root, path, pod)
            if report is not None and abs(now - report.written) <= FRESH_SECONDS:
                reports.append(report)
    return reports


def read_report(root: Path, path: Path, pod: tuple[str, str] | None) -> PluginReport | None:
    """One file below ``root``; ``None`` if it has just disappeared. ``pod`` overrides the file's own.

    Raises ``SourceError`` with a reason of this source.
    """
    try:
        data = read_file(path, MAX_FILE_BYTES + 1, root=root)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise SourceError(NO_PERMISSION, path.name) from error
    except OSError as error:
        raise SourceError(MALFORMED, path.name) from error
    if len(data) > MAX_FILE_BYTES:
        raise SourceError(TOO_LARGE, path.name)
    try:
        return parse(data, pod)
    except Malformed as error:
        raise SourceError(error.reason, path.name) from error


def parse(data: bytes, pod: tuple[str, str] | None = None) -> PluginReport:
    """The report in ``data``. Raises ``Malformed``."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Malformed from error
    if not isinstance(body, dict):
        raise Malformed
    written_in = body.get("kvpressure")
    if isinstance(written_in, int) and written_in > FORMAT:
        raise NewerFormat
    if written_in != FORMAT or body.get("kind") not in ("worker", "frontend"):
        raise Malformed
    namespace, name = pod or (body.get("namespace"), body.get("pod"))
    if not isinstance(namespace, str) or not isinstance(name, str):
        raise Malformed
    kept = _worker(body) if body["kind"] == "worker" else _frontend(body)
    return PluginReport(
        namespace, name, body["kind"], _seconds(body.get("started")), _seconds(body.get("written")), kept
    )


def _worker(body: Mapping[str, Any]) -> dict[str, int]:
    """Rank and memory, checked; other fields are dropped."""
    figures = {name: _count(body[name], ceilings.BYTES) for name in _FIGURES if body.get(name) is not None}
    return {"rank": _count(body.get("rank"), ceilings.IDENTIFIER), **figures}


def _frontend(body: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The counts of each engine, checked."""
    found = body.get("engines")
    if not isinstance(found, dict) or len(found) > MAX_ENGINES:
        raise Malformed
    engines = {name: _counts(counts) for name, counts in found.items() if len(name) <= MAX_NAME_CHARS}
    if sum(len(counts["batch"]) + len(counts["running"]) for counts in engines.values()) > MAX_FILE_ENTRIES:
        raise Malformed
    return engines


def _counts(counts: object) -> dict[str, Any]:
    if not isinstance(counts, dict):
        raise Malformed
    known: dict[str, Any] = {name: _count(counts.get(name)) for name in ("steps", "decoded", "preemptions")}
    known["kv_max"] = None if counts.get("kv_max") is None else _ratio(counts["kv_max"])
    return {**known, **{name: _sizes(counts.get(name)) for name in ("batch", "running")}}


def _readings_of_each_pod(
    reports: Iterable[PluginReport], errors: Counter[str]
) -> tuple[list[AllocatorReading], list[StepStats]]:
    pods: dict[tuple[str, str], list[PluginReport]] = defaultdict(list)
    for report in reports:
        pods[report.namespace, report.pod].append(report)
    allocator: list[AllocatorReading] = []
    steps: list[StepStats] = []
    for (namespace, pod), own in pods.items():
        with isolated(f"pod {namespace}/{pod}", errors):
            of_workers, of_engines = readings(own)
            allocator += of_workers
            steps += of_engines
    return allocator, steps


def readings(reports: Iterable[PluginReport]) -> tuple[tuple[AllocatorReading, ...], tuple[StepStats, ...]]:
    """The reports as readings, without those of earlier processes."""
    groups: dict[tuple[str, str, str], list[PluginReport]] = defaultdict(list)
    for report in reports:
        groups[report.namespace, report.pod, report.kind].append(report)
    allocator: list[AllocatorReading] = []
    steps: list[StepStats] = []
    for (_, _, kind), group in groups.items():
        newest = max(report.started for report in group)
        alive = [report for report in group if report.written >= newest]
        if kind == "worker":
            allocator += [_allocator(report) for report in alive]
        elif alive:  # empty if the newest claims to be written before it began
            steps += _steps(alive)
    return tuple(allocator), tuple(steps)


def _allocator(report: PluginReport) -> AllocatorReading:
    return AllocatorReading(report.namespace, report.pod, **report.body)


def _steps(reports: list[PluginReport]) -> list[StepStats]:
    """The engines of one pod, summed over its API servers."""
    engines: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for report in reports:
        for engine, counts in report.body.items():
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
        sizes.update(part["batch" if exact else "running"])
    return StepStats(
        known.namespace,
        known.pod,
        known.engine,
        known.started,
        known.written,
        steps=sum(sizes.values()) if exact else sum(part["steps"] for part in parts),
        decoded=sum(part["decoded"] for part in parts),
        exact=exact,
        preemptions=sum(part["preemptions"] for part in parts),
        kv_max=max((part["kv_max"] for part in parts if part["kv_max"] is not None), default=None),
        sizes=dict(sizes),
    )


def _sizes(value: object) -> dict[int, int]:
    if not isinstance(value, dict) or len(value) > MAX_SIZES:
        raise Malformed
    try:
        return {_count(int(size), ceilings.BATCH): _count(count) for size, count in value.items()}
    except ValueError as error:
        raise Malformed from error


def _count(value: object, most: float = ceilings.COUNT) -> int:
    known = ceilings.whole(value, most) if isinstance(value, int) else None
    if known is None:
        raise Malformed
    return known


def _seconds(value: object) -> float:
    return _believed(value, ceilings.MOMENT)


def _ratio(value: object) -> float:
    return _believed(value, ceilings.RATIO)


def _believed(value: object, most: float) -> float:
    known = ceilings.number(value, most)
    if known is None:
        raise Malformed
    return known
