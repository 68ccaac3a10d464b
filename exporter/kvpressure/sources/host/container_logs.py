"""The source of log events: follows the logs of engine containers on this node.

Only lines that the engine's dialect recognises leave this source, with their event. A line older than
``RECENT_SECONDS`` when first seen (this process has just started) counts only if it states a fact that still holds,
such as the arguments.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from kvpressure.engines import registry
from kvpressure.files import below
from kvpressure.model.log_events import FACT_EVENTS
from kvpressure.model.readings import LogLine
from kvpressure.sources.base import FILE_REASONS, Reading, SourceError, SourceSettings, isolated
from kvpressure.sources.host.log_files import ContainerLog, Entry
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

Key = tuple[str, str, str, str]  # namespace, pod, uid, container


class LogsSource:
    """Recognised lines of the engines' logs. ``pods`` is called at every read."""

    name = "logs"

    def __init__(
        self,
        settings: SourceSettings,
        pods: Callable[[], Sequence[Pod] | None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._shared = shared = settings.shared
        self._root = settings.host_pod_logs
        self._pods = pods or (lambda: shared.pods)
        self._clock = clock
        self._logs: dict[Key, ContainerLog] = {}
        self._missing: dict[Key, float] = {}
        self._dialects: dict[Key, str] = {}  # the engine's name, as discovery knows it
        self._leaving: set[Key] = set()
        self._turn = 0

    def read(self) -> Reading:
        """Lines logged since the last read. Raises ``SourceError`` without a log directory or pods."""
        errors: Counter[str] = Counter()
        self._check_root()
        pods = self._pods()
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

    def _check_root(self) -> None:
        try:
            next(self._root.iterdir(), None)
        except PermissionError as error:
            raise SourceError("permission_denied", str(self._root)) from error
        except OSError as error:
            raise SourceError("no_log_directory", f"{self._root}: {error.strerror}") from error

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

    def _lines(self, key: Key, log: ContainerLog, errors: Counter[str]) -> Iterator[LogLine]:
        budget = min(CONTAINER_BYTES, max(CONTAINER_BYTES // 8, READ_BYTES // len(self._logs)))
        skipped = log.skipped
        entries, _ = log.read(budget)
        if log.skipped > skipped:
            errors["skipped"] += 1
        count = 0
        for line in self._recognised(key, entries):
            count += 1
            if count <= MAX_LINES:
                yield line
        if count > MAX_LINES:
            errors["too_many_lines"] += count - MAX_LINES

    def _recognised(self, key: Key, entries: Sequence[Entry]) -> Iterator[LogLine]:
        since = self._clock() - RECENT_SECONDS
        engine = self._dialects.get(key, "")
        for entry in entries:
            found = registry.recognise(entry.text, engine)
            if found is None:
                continue
            message, event = found
            if event.event in FACT_EVENTS or (entry.time or since) >= since:
                yield LogLine(key[0], key[1], key[3], message, event)


def _subject(key: Key) -> str:
    return f"container {key[0]}/{key[1]}/{key[3]}"
