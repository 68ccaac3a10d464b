"""What an exporter that is not root is refused, each with its reason. In a child, as uid 65532."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvpressure.sources.kubernetes.podspec import Policy, read_pod
from tests.sources.host.podlogs import PodLog
from tests.sources.kubernetes.kubelet import FakeKubelet
from tests.sources.kubernetes.objects import pod

pytestmark = pytest.mark.live

AS_NOBODY = """
import json, os, sys
from pathlib import Path
from kvpressure.model.readings import GpuProcess, GpuReading
from kvpressure.settings.settings import Settings
from kvpressure.sources.base import SourceError
from kvpressure.sources.host.cgroup import CgroupSource
from kvpressure.sources.host.container_logs import LogsSource
from kvpressure.sources.kubernetes.podresources import PodResourcesSource
from kvpressure.sources.kubernetes.podspec import Policy, read_pod
from kvpressure.sources.host.procfs import ProcfsSource

root = Path(sys.argv[1])
pods = (read_pod(json.loads(sys.argv[2]), Policy()),)
settings = Settings(
    host_proc=root / "proc",
    host_cgroup=root / "cgroup",
    host_pod_logs=root / "pods",
    kubelet_socket=root / "kubelet.sock",
)
gpu = GpuReading("GPU-0", 0, "nvidia", processes=(GpuProcess(7),))
PodResourcesSource(settings).read()  # what is imported on first use may lie where another user may not look
os.setgid(65532)
os.setuid(65532)
settings.shared.pods, settings.shared.gpus = pods, (gpu,)
for source in (CgroupSource(settings), LogsSource(settings), ProcfsSource(settings), PodResourcesSource(settings)):
    try:
        print(source.name, *sorted(source.read().errors))
    except SourceError as error:
        print(source.name, "failed", error.reason)
"""


DENIED = "podresources failed permission_denied"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize(
    ("closed", "expected"),
    [
        (
            "top",
            ["cgroup failed permission_denied", "logs failed permission_denied", "procfs permission_denied", DENIED],
        ),
        ("files", ["cgroup permission_denied", "logs permission_denied", "procfs permission_denied", DENIED]),
        ("nothing", ["cgroup", "logs", "procfs", "podresources"]),
    ],
)
def test_refusals(closed: str, expected: list[str]) -> None:
    found = read_pod(pod("a"), Policy())
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        root.chmod(0o755)
        container = root / "cgroup" / "kubepods" / f"pod{found.uid}" / found.engines[0].container_id
        (root / "proc" / "7").mkdir(parents=True)
        container.mkdir(parents=True)
        files = [PodLog(root / "pods", found).path, container / "cpu.stat", root / "proc" / "7" / "cgroup"]
        for file in (*files, root / "cgroup" / "cgroup.controllers"):
            file.write_text("")
        for file in files if closed == "files" else ():
            file.chmod(0o000)
        for name in ("cgroup", "pods", "proc/7") if closed == "top" else ():
            (root / name).chmod(0o000)
        with FakeKubelet(root / "kubelet.sock") as kubelet:
            kubelet.socket.chmod(0o777 if closed == "nothing" else 0o755)  # 0755 and root's, as the kubelet's is
            asked = [sys.executable, "-c", AS_NOBODY, directory, json.dumps(pod("a"))]
            done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
            assert done.stdout.splitlines() == expected, done.stderr
