"""The source of log events: follows the logs of engine containers on this node, and of servers of a host.

Only lines that the engine's dialect recognises leave this source, with their event. A line older than
``RECENT_SECONDS`` when first seen (this process has just started) counts only if it states a fact that still holds,
such as the arguments.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpressure.engines import registry
from kvpressure.files import below, open_file
from kvpressure.model.log_events import FACT_EVENTS
from kvpressure.model.readings import LogLine
from kvpressure.sources.base import FILE_REASONS, Reading, SourceError, SourceSettings, isolated, needed
from kvpressure.sources.host.log_files import AppendedLog, ContainerLog, Entry
from kvpressure.sources.kubernetes.pod import Pod
from kvpressure.sources.places import admitted

REASONS: Final = (
    "no_log_directory",
    "permission_denied",
    "unreadable",
    "pods_unknown",
    "no_log",
    "skipped",
    "too_many_lines",
    "too_many_containers",
)
"""Reasons of this source. ``skipped`` counts logs written faster than they are read."""

READ_BYTES: Final = 1024 * 1024  # of all logs together, each read
CONTAINER_BYTES: Final = 256 * 1024  # of one log, each read
MAX_LINES: Final = 500  # recognised lines of one log that are passed on, each read
MAX_CONTAINERS: Final = 128
"""Containers whose logs are followed. Beyond: those of ended pods, then of pods without a GPU, are left out first.
Shown as: `source_errors_total{source="logs"}`.
"""
RECENT_SECONDS: Final = 600.0
MISSING_SECONDS: Final = 30.0

NO_FILE: Final = "it logs to no regular file (StandardOutput=append:FILE of a unit, Docker's json-file)"
TOO_MANY: Final = "the host has more servers than logs are followed"
SHARED: Final = "another server has the same name or logs to the same file"

Key = tuple[str, str, str, str]  # namespace, pod, uid, container
EngineKey = tuple[str, str, str]  # namespace, pod, container
FileId = tuple[int, int]  # device, inode


class LogsSource:
    """Recognised lines of the engines' logs."""

    name = "logs"

    def __init__(
        self,
        settings: SourceSettings,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._shared = settings.shared
        self._root = settings.host_pod_logs
        self._clock = clock
        self._logs: dict[Key, ContainerLog] = {}
        self._missing: dict[Key, float] = {}
        self._dialects: dict[Key, str] = {}  # the engine's name, as discovery knows it
        self._leaving: set[Key] = set()
        self._turn = 0

    def read(self) -> Reading:
        """Lines logged since the last read. Raises ``SourceError`` without a log directory or pods."""
        errors: Counter[str] = Counter()
        with needed(self._root, "no_log_directory"):
            next(self._root.iterdir(), None)
        pods = self._shared.pods
        if pods is None:
            raise SourceError("pods_unknown", "no pod has been listed yet")
        self._select(pods, errors)
        lines: list[LogLine] = []
        for key, log in self._in_turn():
            with isolated(_subject(key), errors, FILE_REASONS):
                lines += self._lines(key, log, errors)
        return Reading(logs=tuple(lines), errors=dict(errors))

    def close(self) -> None:
        """Close the files."""
        errors: Counter[str] = Counter()
        for key in list(self._logs):
            self._unfollow(key, errors)

    def _select(self, pods: Sequence[Pod], errors: Counter[str]) -> None:
        """Follow the logs of present engines, the best claims first, and of engines that have just gone once more."""
        there = {(pod.namespace, pod.name, pod.uid, engine.container): pod for pod in pods for engine in pod.engines}
        owning = self._shared.owning
        kept, left_out = admitted(there, MAX_CONTAINERS, lambda key: there[key].precedence(owning), lambda key: key[:2])
        wanted = {key: there[key] for key in kept}
        if left_out:
            errors["too_many_containers"] += len(left_out)
        gone = {key for key in self._logs if key not in wanted}
        self._dialects = {key: self._dialects.get(key, "") for key in gone} | {
            (pod.namespace, pod.name, pod.uid, engine.container): engine.dialect
            for pod in pods
            for engine in pod.engines
        }
        for key in gone & self._leaving:
            self._unfollow(key, errors)
        self._leaving = gone - self._leaving
        now = self._clock()
        self._missing = {key: due for key, due in self._missing.items() if key in wanted and now < due}
        for key, pod in wanted.items():
            if key in self._logs or key in self._missing:
                continue
            self._missing[key] = now + MISSING_SECONDS
            with isolated(_subject(key), errors, FILE_REASONS):
                directory = self._directory(pod, key[3])
                if directory is not None:
                    self._logs[key] = ContainerLog(directory)
                    del self._missing[key]
                elif pod.phase == "Running":
                    errors["no_log"] += 1

    def _unfollow(self, key: Key, errors: Counter[str]) -> None:
        with isolated(_subject(key), errors, FILE_REASONS):
            self._logs.pop(key).close()

    def _directory(self, pod: Pod, container: str) -> Path | None:
        for uid in sorted(pod.uids | {pod.uid}):
            directory = below(self._root, f"{pod.namespace}_{pod.name}_{uid}", container)
            if directory is not None and directory.is_dir():
                return directory
        return None

    def _in_turn(self) -> Iterator[tuple[Key, ContainerLog]]:
        """All logs, starting with another one at each read, because the budget may not reach the last ones."""
        items = list(self._logs.items())
        self._turn = (self._turn + 1) % max(1, len(items))
        yield from items[self._turn :] + items[: self._turn]

    def _lines(self, key: Key, log: ContainerLog, errors: Counter[str]) -> list[LogLine]:
        budget = min(CONTAINER_BYTES, max(CONTAINER_BYTES // 8, READ_BYTES // len(self._logs)))
        skipped = log.skipped
        entries, _ = log.read(budget)
        if log.skipped > skipped:
            errors["skipped"] += 1
        since = self._clock() - RECENT_SECONDS
        return _recognised((key[0], key[1], key[3]), self._dialects.get(key, ""), entries, (since, since), errors)


@dataclass(frozen=True, slots=True)
class ServerOutput:
    """Where a server of a host may log. ``files``: empty once it has ended, and what is open is read on."""

    engine: EngineKey
    dialect: str
    files: tuple[Path, ...] = ()


class ServerLogs:
    """Recognised lines of the files to which the servers of a host log."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._logs: dict[tuple[EngineKey, FileId], AppendedLog] = {}

    def read(
        self, outputs: Sequence[ServerOutput], errors: Counter[str]
    ) -> tuple[tuple[LogLine, ...], Mapping[EngineKey, str]]:
        """The lines logged since the last read, and what to say of an engine whose log is not read."""
        files, unread = _files(outputs[:MAX_CONTAINERS], errors)
        unread |= {output.engine: TOO_MANY for output in outputs[MAX_CONTAINERS:]}
        by_engine = {output.engine: output for output in outputs}
        present = {(engine, file): path for engine, own in files.items() for file, path in own.items()}
        for key in present.keys() - self._logs.keys():
            with isolated(f"log of {key[0][1]}", errors, FILE_REASONS):
                self._logs[key] = AppendedLog(present[key])
        lines: list[LogLine] = []
        since = self._clock() - RECENT_SECONDS
        for key, log in list(self._logs.items()):
            output = by_engine.get(key[0])
            with isolated(f"log of {key[0][1]}", errors, FILE_REASONS):
                entries, old = log.messages(READ_BYTES // len(self._logs))
                times = since, 0.0 if old else since
                lines += _recognised(key[0], output.dialect if output else "", entries, times, errors)
            if key not in present and not (output and not output.files):
                self._logs.pop(key).close()
        return tuple(lines), {engine: f"; its log is not read: {why}" for engine, why in unread.items()}

    def close(self) -> None:
        """Close the files."""
        while self._logs:
            self._logs.popitem()[1].close()


def _files(
    outputs: Sequence[ServerOutput], errors: Counter[str]
) -> tuple[dict[EngineKey, Mapping[FileId, Path]], dict[EngineKey, str]]:
    """The files of each engine, none that another logs to as well, and why there are none."""
    files: dict[EngineKey, Mapping[FileId, Path]] = {}
    unread: dict[EngineKey, str] = {}
    for output in outputs:
        with isolated(f"log of {output.engine[1]}", errors):
            try:
                files[output.engine] = _readable(output.files)
                if output.files and not files[output.engine]:
                    unread[output.engine] = NO_FILE
            except PermissionError as error:
                unread[output.engine] = f"{error.strerror}".lower()
    engines = Counter(output.engine for output in outputs)
    writers = Counter(file for own in files.values() for file in own)
    for engine, own in files.items():
        if engines[engine] > 1 or any(writers[file] > 1 for file in own):
            files[engine], unread[engine] = {}, SHARED
    return files, unread


def _readable(paths: Sequence[Path]) -> Mapping[FileId, Path]:
    """Those that are regular files. Raises ``PermissionError``."""
    found = {}
    for path in paths:
        try:
            with open_file(path) as file:
                status = os.fstat(file.fileno())
        except PermissionError:
            raise
        except OSError:
            continue  # a pipe, a socket, a terminal
        found[status.st_dev, status.st_ino] = path
    return found


def _recognised(
    engine: EngineKey, dialect: str, entries: Sequence[Entry], times: tuple[float, float], errors: Counter[str]
) -> list[LogLine]:
    """The lines that the dialect knows, that are not too old or state a fact. ``times``: the oldest that counts, and
    the one that lines without any have.
    """
    oldest, undated = times
    found = ((entry.time or undated, registry.recognise(entry.text, dialect)) for entry in entries)
    lines = [
        LogLine(*engine, *known)
        for time, known in found
        if known is not None and (known[1].event in FACT_EVENTS or time >= oldest)
    ]
    if len(lines) > MAX_LINES:
        errors["too_many_lines"] += len(lines) - MAX_LINES
    return lines[:MAX_LINES]


def _subject(key: Key) -> str:
    return f"container {key[0]}/{key[1]}/{key[3]}"
