"""The source of the pods of GPU processes, by their cgroups in a read-only host ``/proc``.

The fallback where PodResources reports nothing (GPUs taken outside the scheduler, kubelet not to be used), and the
way to split a shared GPU. The pids are the host's, so ``/proc`` must be the host's too. NVIDIA drivers from
535.113.01 list only processes of the caller's pid namespace: without ``hostPID`` they list none, and nothing is known
here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kvpressure.files import read_file
from kvpressure.model.readings import GpuOwner, GpuReading
from kvpressure.sources.base import FILE_REASONS, Reading, SourceError, SourceSettings, isolated
from kvpressure.sources.kubernetes.pod import UID, Pod, leaders
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


class ProcfsSource:
    """Pods of the processes on the GPUs. ``gpus`` and ``pods`` are called at every read."""

    name = "procfs"

    def __init__(
        self,
        settings: SourceSettings,
        gpus: Callable[[], Sequence[GpuReading]] | None = None,
        pods: Callable[[], Sequence[Pod] | None] | None = None,
    ) -> None:
        shared = settings.shared
        self._root = settings.host_proc
        self._gpus = gpus or (lambda: shared.gpus)
        self._pods = pods or (lambda: shared.pods)

    def read(self) -> Reading:
        """Owners of GPUs and pods of processes, from the processes that the drivers list. Raises ``SourceError``."""
        if not self._root.is_dir():
            raise SourceError("no_proc", f"{self._root} is not a directory")
        if not _is_hosts(self._root):
            raise SourceError("not_host_proc", f"{self._root} shows another pid namespace")
        pods = self._pods()
        if pods is None:
            raise SourceError("pods_unknown", "no pod has been listed yet")
        of_worker = leaders(pods)
        by_uid = {uid: pod for pod in pods for uid in pod.uids}
        errors: Counter[str] = Counter()
        claims: list[GpuOwner] = []
        process_pods: dict[int, tuple[str, str]] = {}
        for gpu in self._gpus():
            for process in gpu.processes:
                with isolated(f"process {process.pid}", errors, FILE_REASONS):
                    found = self._pod_of(process.pid, by_uid)
                    if found is None:
                        continue
                    pod, container = found
                    if pod is None:
                        process_pods[process.pid] = ("", "")
                        continue
                    own = (pod.namespace, pod.name, container)
                    process_pods[process.pid] = of_worker.get(own[:2], own)[:2]  # a worker's is its leader's engine's
                    claims.append(GpuOwner(gpu.uuid, *own))
        return Reading(owners=tuple(of_engines(claims, pods)), process_pods=process_pods, errors=dict(errors))

    def close(self) -> None:
        """Does nothing; no resource is held."""

    def _pod_of(self, pid: int, by_uid: dict[str, Pod]) -> tuple[Pod | None, str] | None:
        """(pod, container) of a process; no pod for a process of the host; None if unknown."""
        try:
            text = read_file(self._root / str(pid) / "cgroup", MAX_FILE_BYTES).decode("utf-8", "replace")
        except FileNotFoundError:
            return None  # it has ended since the driver listed it
        names = pod_of_cgroup(text)
        if names is None:
            return None, ""
        uid, container_id = names
        pod = by_uid.get(uid)
        if pod is None:
            return None  # a pod that was not selected
        return pod, pod.containers.get(container_id, "")


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
