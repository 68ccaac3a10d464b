"""What a node is made of here, and why there is none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from tests.api_server.cluster import API_SERVER, ETCD

KUBELET: Final = "KUBELET"
SCHEDULER: Final = "KUBE_SCHEDULER"
CONTROLLERS: Final = "KUBE_CONTROLLER_MANAGER"
PROGRAMS: Final = (API_SERVER, ETCD, KUBELET, SCHEDULER, CONTROLLERS)
ROOT: Final = "NODE_ROOT"
IMAGE: Final = "IMAGE"
"""Environment variables: programs, a folder with containerd, runc and the CNI plugins as a distribution installs them,
and the archive of the exporter's image that ``make image-test`` leaves.
"""
IN_ROOT: Final = ("usr/bin/containerd", "usr/sbin/runc", "usr/lib/cni/bridge", "usr/lib/cni/host-local")
CGROUPS: Final = Path("/sys/fs/cgroup")


def missing() -> str:
    """Why there is no node; empty when there can be one."""
    absent = [name for name in PROGRAMS if not os.access(os.environ.get(name, ""), os.X_OK)]
    root = Path(os.environ.get(ROOT, "/nonexistent"))
    absent += [] if all((root / path).exists() for path in IN_ROOT) else [ROOT]
    absent += [] if Path(os.environ.get(IMAGE, "")).is_file() else [IMAGE]
    if absent:
        return f"set {', '.join(absent)}"
    if os.geteuid() != 0:
        return "root is needed (namespaces, mounts, cgroups)"
    return "" if controllers() else f"no cgroup controllers below {CGROUPS}: cgroup v1, one mount for each, is needed"


def controllers() -> list[str]:
    """The controllers of cgroup v1 that are mounted each on its own."""
    needed = ("cpu", "cpuacct", "cpuset", "memory")
    if not all((CGROUPS / name / "cgroup.procs").exists() for name in needed):
        return []
    return sorted(
        path.name for path in CGROUPS.iterdir() if (path / "cgroup.procs").exists() and path.name != "unified"
    )
