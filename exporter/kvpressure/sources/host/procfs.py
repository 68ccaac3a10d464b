"""The source of the pods of GPU processes, by their cgroups in a read-only host ``/proc``.

The fallback where PodResources reports nothing (GPUs taken outside the scheduler, kubelet not to be used), and the
way to split a shared GPU. It also reads with which arguments a server was started. The pids are the host's, so
``/proc`` must be the host's too. NVIDIA drivers from 535.113.01 list only processes of the caller's pid namespace:
without ``hostPID`` they list none, and nothing is known here.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvpressure.engines.command import MAX_CHARACTERS
from kvpressure.files import read_file
from kvpressure.model.readings import GpuOwner
from kvpressure.sources.base import FILE_REASONS, Reading, Source, SourceError, SourceSettings, isolated
from kvpressure.sources.host.processes import line_of
from kvpressure.sources.kubernetes.command_lines import CommandLine
from kvpressure.sources.kubernetes.pod import UID, Pod, Process, leaders
from kvpressure.sources.kubernetes.podresources import of_engines

MAX_FILE_BYTES: Final = 65536

REASONS: Final = ("no_proc", "not_host_proc", "pods_unknown", "permission_denied", "unreadable")
"""Reasons of this source."""

# Not anchored: read from a container of its own the path begins with "/../..", and nesting puts names around it.
_CGROUP: Final = re.compile(
    rf"(?<=[/-])pod({UID})(?:\.slice)?(?=[/:\s])(?:[^\n]*?[/:-]([0-9a-f]{{64}})(?:\.scope)?(?=[/:\s]))?"
)
_INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC  # inode of the host's pid namespace, fixed in the kernel


def pod_of_cgroup(text: str) -> tuple[str, str] | None:
    """Pod uid (with dashes) and container id ("" if not in the path) from ``/proc/<pid>/cgroup``.

    Knows the systemd and cgroupfs drivers of containerd, CRI-O and Docker, cgroup v1 and v2, kind, static pods.
    """
    found = _CGROUP.search(text.replace("_", "-"))  # systemd's spelling of a uid
    return None if found is None else (found[1], found[2] or "")


class ProcfsSource(Source):
    """Pods of the processes on the GPUs."""

    name = "procfs"

    def __init__(self, settings: SourceSettings) -> None:
        self._shared = settings.shared
        self._root = settings.host_proc

    def read(self) -> Reading:
        """Owners of GPUs and pods of processes, from the processes that the drivers list. Raises ``SourceError``."""
        if not self._root.is_dir():
            raise SourceError("no_proc", f"{self._root} is not a directory")
        if not _is_hosts(self._root):
            raise SourceError("not_host_proc", f"{self._root} shows another pid namespace")
        pods = self._shared.pods
        if pods is None:
            raise SourceError("pods_unknown", "no pod has been listed yet")
        of_worker = leaders(pods)
        by_uid = {uid: pod for pod in pods for uid in pod.uids}
        errors: Counter[str] = Counter()
        claims: list[GpuOwner] = []
        process_pods: dict[int, tuple[str, str]] = {}
        processes: dict[str, Process] = {}
        for gpu in self._shared.gpus:
            for process in gpu.processes:
                with isolated(f"process {process.pid}", errors, FILE_REASONS):
                    found = self._pod_of(process.pid, by_uid)
                    if found is None:
                        continue
                    pod, container, container_id = found
                    if pod is None:
                        process_pods[process.pid] = ("", "")
                        continue
                    own = (pod.namespace, pod.name, container)
                    process_pods[process.pid] = of_worker.get(own[:2], own)[:2]  # a worker's is its leader's engine's
                    claims.append(GpuOwner(gpu.uuid, *own))
                    if container_id and container_id not in processes:
                        before = self._shared.processes.get(container_id)
                        if line := before or self._line(process.pid):
                            processes[container_id] = line
        self._shared.processes = processes
        return Reading(owners=tuple(of_engines(claims, pods)), process_pods=process_pods, errors=dict(errors))

    def _line(self, pid: int) -> Process | None:
        """The arguments and port of the server that a process belongs to: of the nearest in the line of those that
        started it whose command line certainly starts one.
        """
        with suppress(FileNotFoundError, ProcessLookupError):
            for one in line_of(self._root, pid):
                line = CommandLine(self._text(one, "cmdline").rstrip("\0").split("\0"), {}, MAX_CHARACTERS)
                if line.starts is not None and line.read(line.starts).certain:
                    return line.shown[0], line.read(line.starts).args.port
        return None

    def _text(self, pid: int, name: str) -> str:
        return read_file(self._root / str(pid) / name, MAX_FILE_BYTES).decode("utf-8", "replace")

    def _pod_of(self, pid: int, by_uid: dict[str, Pod]) -> tuple[Pod | None, str, str] | None:
        """(pod, container, container id) of a process; no pod for a process of the host; None if unknown."""
        try:
            text = self._text(pid, "cgroup")
        except FileNotFoundError:
            return None  # it has ended since the driver listed it
        names = pod_of_cgroup(text)
        if names is None:
            return None, "", ""
        uid, container_id = names
        pod = by_uid.get(uid)
        if pod is None:
            return None  # a pod that was not selected
        return pod, pod.containers.get(container_id, ""), container_id


def _is_hosts(root: Path) -> bool:
    """False only when ``root`` is certainly a container's /proc, whose pids are others.

    A process in a pid namespace of its own has several pids in the host's /proc. A single pid means that ``root``
    belongs to our own namespace, which must then be the initial one.
    """
    try:
        status = read_file(root / "self" / "status", MAX_FILE_BYTES).decode("ascii", "replace")
        own = (root / "self" / "ns" / "pid").stat().st_ino
    except OSError:
        return True
    pids = re.search(r"^NSpid:([\t\d ]+)$", status, re.MULTILINE)
    return pids is None or len(pids[1].split()) > 1 or own == _INITIAL_PID_NAMESPACE
