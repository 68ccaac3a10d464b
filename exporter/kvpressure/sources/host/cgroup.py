"""The source of CPU and memory of engine containers: cgroup v2 under a read-only host ``/sys/fs/cgroup``."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvpressure.files import read_file
from kvpressure.model.readings import ContainerReading
from kvpressure.sources.base import FILE_REASONS, Reading, Source, SourceError, SourceSettings, isolated, needed
from kvpressure.sources.host.procfs import pod_of_cgroup
from kvpressure.sources.kubernetes.pod import EngineContainer, Pod

REASONS: Final = ("no_cgroup_tree", "not_cgroup_v2", "pods_unknown", "permission_denied", "unreadable", "no_cgroup")
"""Reasons of this source. ``no_cgroup`` counts containers without a directory."""

MISSING_SECONDS: Final = 30.0  # before a missing container is looked for again
MAX_FILE_BYTES: Final = 65536
MAX_DEPTH: Final = 8
MAX_DIRECTORIES: Final = 20_000

Key = tuple[str, str]  # uid of the pod, id of the container, which another pod may claim as well

# The slices that lead to pods: kubepods, its QoS levels, and what kind and some distributions put around them.
_LEADS: Final = re.compile(r"kubepods|kubelet|besteffort|burstable|guaranteed")


class CgroupSource(Source):
    """Readings of containers; fields without their file are None."""

    name = "cgroup"

    def __init__(
        self,
        settings: SourceSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shared = settings.shared
        self._root = settings.host_cgroup
        self._clock = clock
        self._found: dict[Key, Path] = {}  # -> its directory
        self._missing: dict[Key, float] = {}  # -> when to look again

    def read(self) -> Reading:
        """One reading per running engine container. Raises ``SourceError`` without a cgroup v2 tree."""
        self._check_root()
        pods = self._shared.pods
        if pods is None:
            raise SourceError("pods_unknown", "no pod has been listed yet")
        engines = [(pod, engine) for pod in pods for engine in pod.engines if engine.container_id]
        errors: Counter[str] = Counter()
        self._locate(engines, errors)
        readings = []
        for pod, engine in engines:
            directory = self._found.get((pod.uid, engine.container_id))
            if directory is not None:
                with isolated(f"container {pod.namespace}/{pod.name}/{engine.container}", errors, FILE_REASONS):
                    reading = self._read(pod, engine, directory)
                    if reading is not None:
                        readings.append(reading)
        return Reading(containers=tuple(readings), errors=dict(errors))

    def _check_root(self) -> None:
        with needed(self._root, "no_cgroup_tree"):
            names = {path.name for path in self._root.iterdir()}
        if "cgroup.controllers" not in names:
            raise SourceError("not_cgroup_v2", f"{self._root}/cgroup.controllers is missing")

    def _locate(self, engines: Sequence[tuple[Pod, EngineContainer]], errors: Counter[str]) -> None:
        """Fill ``_found`` for new containers, by one walk over the slices of pods."""
        wanted = {(pod.uid, engine.container_id): pod for pod, engine in engines}
        self._found = {key: path for key, path in self._found.items() if key in wanted}
        now = self._clock()
        self._missing = {key: due for key, due in self._missing.items() if key in wanted and now < due}
        lost = {key: pod for key, pod in wanted.items() if key not in self._found and key not in self._missing}
        if not lost:
            return
        uids = {uid: pod for pod in lost.values() for uid in pod.uids}
        for pod, directory in self._pod_directories(uids, errors):
            for path in _directories(directory, errors):
                _, name = pod_of_cgroup(f"/{directory.name}/{path.name}/") or ("", "")
                key = (pod.uid, name)
                if key in lost and "conmon" not in path.name:  # CRI-O's helper has the id in its name, too
                    self._found[key] = path
        for key in lost:
            if key not in self._found:
                errors["no_cgroup"] += 1
                self._missing[key] = now + MISSING_SECONDS

    def _pod_directories(self, uids: dict[str, Pod], errors: Counter[str]) -> Iterator[tuple[Pod, Path]]:
        """Directories of the pods, wherever the container runtime put them."""
        queue = [(self._root, 0)]
        for visited, (directory, depth) in enumerate(queue):
            if visited > MAX_DIRECTORIES:
                return
            for path in _directories(directory, errors):
                uid, _ = pod_of_cgroup(f"/{path.name}/") or ("", "")
                if uid in uids:
                    yield uids[uid], path
                elif depth < MAX_DEPTH and _LEADS.search(path.name) and "-pod" not in path.name:
                    queue.append((path, depth + 1))

    def _read(self, pod: Pod, engine: EngineContainer, directory: Path) -> ContainerReading | None:
        try:
            cpu = _table(read_file(directory / "cpu.stat", MAX_FILE_BYTES).decode("ascii", "replace"))
        except FileNotFoundError:
            del self._found[pod.uid, engine.container_id]  # ended since; a new one has another id
            return None
        usage = cpu.get("usage_usec")
        current = _number(directory / "memory.current")
        inactive = _table(_text(directory / "memory.stat")).get("inactive_file")
        return ContainerReading(
            pod.namespace,
            pod.name,
            engine.container,
            cpu_usage_seconds=None if usage is None else usage / 1e6,
            cpu_limit_cores=_cpu_limit(directory / "cpu.max"),
            cpu_periods=cpu.get("nr_periods"),
            cpu_throttled_periods=cpu.get("nr_throttled"),
            cpu_pressure_some_ratio=_pressure(directory / "cpu.pressure"),
            memory_working_set_bytes=None if current is None or inactive is None else max(0, current - inactive),
            memory_limit_bytes=_number(directory / "memory.max"),
        )


def _directories(directory: Path, errors: Counter[str]) -> list[Path]:
    found: list[Path] = []
    guarded = isolated(f"directory {directory}", errors, FILE_REASONS)
    with guarded, suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            with isolated(f"directory {entry.path}", errors, FILE_REASONS):
                found += [Path(entry.path)] if entry.is_dir(follow_symlinks=False) else []
    return found


def _text(path: Path) -> str:
    """The file's text; "" where kernel, controller or permission is missing."""
    try:
        return read_file(path, MAX_FILE_BYTES).decode("ascii", "replace")
    except OSError:
        return ""


def _table(text: str) -> dict[str, int]:
    """Lines of ``name number``."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal() and len(pair[1]) < 20}


def _number(path: Path) -> int | None:
    """A single number; None for ``max`` and anything else."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() and len(text) < 20 else None


def _cpu_limit(path: Path) -> float | None:
    """Cores from ``quota period``; None without a limit."""
    parts = _text(path).split()
    if len(parts) != 2 or not all(part.isdecimal() for part in parts) or int(parts[1]) == 0:
        return None
    return int(parts[0]) / int(parts[1])


def _pressure(path: Path) -> float | None:
    """Share of the last 10 seconds in which some task waited for the CPU, 0-1."""
    found = re.search(r"^some avg10=(\d{1,3}(?:\.\d{1,4})?)\b", _text(path), re.MULTILINE)
    return min(1.0, float(found[1]) / 100) if found else None
