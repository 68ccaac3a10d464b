"""From a process to its pod, by every form of cgroup path."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.model.readings import ContainerReading, GpuOwner, GpuProcess, GpuReading
from kvpressure.settings.settings import Settings
from kvpressure.sources.host.procfs import REASONS, ProcfsSource, pod_of_cgroup
from kvpressure.sources.kubernetes.pod import EngineContainer, Pod
from kvpressure.sources.scrape.targets import Target
from tests.helpers.failing import reason_of

UID = "0a1b2c3d-1111-2222-3333-444455556666"
UNDERSCORED = UID.replace("-", "_")
ID = "ab12" * 16
BURSTABLE = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDERSCORED}.slice"
Build = Callable[..., Settings]


@pytest.mark.parametrize(
    "text",
    [
        f"0::{BURSTABLE}/cri-containerd-{ID}.scope\n",
        f"0::{BURSTABLE}/crio-{ID}.scope\n",
        f"0::{BURSTABLE}/docker-{ID}.scope\n",
        f"0::/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope\n",
        f"0::/kubepods/besteffort/pod{UID}/{ID}\n",
        f"0::/kubepods/pod{UID}/crio-{ID}\n",
        f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-"
        f"pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope\n",
        f"0::/system.slice/containerd.service/kubepods-burstable-pod{UNDERSCORED}.slice:cri-containerd:{ID}\n",
        f"0::{BURSTABLE}/cri-containerd-{ID}.scope/init\n",
        f"0::/../../../kubepods-burstable.slice/kubepods-burstable-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope\n",
        f"12:memory:/kubepods/burstable/pod{UID}/{ID}\n11:cpu,cpuacct:/kubepods/burstable/pod{UID}/{ID}\n0::/\n",
        f"13:rdma:/\n12:cpu:{BURSTABLE}/cri-containerd-{ID}.scope\n",
    ],
)
def test_paths_of_containers(text: str) -> None:
    assert pod_of_cgroup(text) == (UID, ID)


def test_other_paths() -> None:
    assert pod_of_cgroup(f"0::/kubepods/burstable/pod{'ab' * 16}/{ID}\n") == ("ab" * 16, ID)
    for path in (BURSTABLE, f"/kubepods/pod{UID}/0{ID}", f"/kubepods/pod{UID}/{ID}0"):
        assert pod_of_cgroup(f"0::{path}\n") == (UID, "")
    slices = (
        "system.slice/kubelet.service",
        "user.slice/user-0.slice/session-1.scope",
        f"machine.slice/libpod-{ID}.scope",
    )
    names = (f"kubepods/xpod{UID}/{ID}", f"kubepods/pod{UID}0/{ID}", f"kubepods/pod{UID}.slices/{ID}")
    for text in ("", "podabc\n", *(f"0::/{path}\n" for path in ("", *slices, *names))):
        assert pod_of_cgroup(text) is None, text


@given(st.text(max_size=40), st.text(max_size=40))
def test_the_pod_is_found_whatever_other_lines_stand_around_it(before: str, after: str) -> None:
    line = f"12:cpu:{BURSTABLE}/cri-containerd-{ID}.scope"
    around = [part.replace("pod", "").replace("/", "") for part in (before, after)]
    assert pod_of_cgroup("\n".join((around[0], line, around[1]))) == (UID, ID)


def process(root: Path, pid: int, cgroup: str) -> None:
    (root / str(pid)).mkdir(parents=True)
    (root / str(pid) / "cgroup").write_text(cgroup)


PODS = (Pod("ns", "a", UID, "Running", frozenset({UID}), {ID: "vllm"}),)


def source(settings: Build, root: Path, *pids: int, pods: tuple[Pod, ...] | None = PODS) -> ProcfsSource:
    gpu = GpuReading("GPU-0", 0, "nvidia", processes=tuple(GpuProcess(pid, 5) for pid in pids))
    chosen = settings(host_proc=root)
    chosen.shared.pods, chosen.shared.gpus = pods, (gpu,)
    return ProcfsSource(chosen)


def test_owners_and_pods_of_processes(settings: Build, tmp_path: Path) -> None:
    process(tmp_path, 10, f"0::{BURSTABLE}/cri-containerd-{ID}.scope\n")
    process(tmp_path, 11, f"0::{BURSTABLE}/cri-containerd-{'cd34' * 16}.scope\n")
    process(tmp_path, 12, "0::/system.slice/dcgm.service\n")
    process(tmp_path, 13, f"0::/kubepods/pod{UID.replace('0a', 'ff')}/{ID}\n")
    reading = source(settings, tmp_path, 10, 11, 12, 13, 14).read()
    assert reading.owners == (GpuOwner("GPU-0", "ns", "a", ""), GpuOwner("GPU-0", "ns", "a", "vllm"))
    assert reading.process_pods == {10: ("ns", "a"), 11: ("ns", "a"), 12: ("", "")}
    assert reading.errors == {}


def test_the_arguments_of_an_engine_are_those_that_its_process_was_started_with(
    settings: Build, tmp_path: Path
) -> None:
    """The workers that have the GPU were started by the server, whose script the manifest hides."""
    lines = {
        "12": "VLLM::Worker_TP0",
        "11": "python3 /usr/bin/vllm serve m --max-num-seqs 48 --port 9000",
        "10": "bash /start.sh",
    }
    for pid, line in lines.items():
        process(tmp_path, int(pid), f"0::/kubepods/pod{UID}/{ID}\n")
        (tmp_path / pid / "cmdline").write_text(line.replace(" ", "\0") + "\0")
        (tmp_path / pid / "stat").write_text(f"{pid} (a ) b) S {int(pid) - 1 if pid != '10' else 1} 0")
    found = source(settings, tmp_path, 12)
    found.read()
    script = EngineContainer("vllm", ID, ContainerReading("ns", "a", "vllm"), (Target("10.0.0.5", assumed=True),))
    (target,) = script.with_process(found._shared.processes).targets
    assert (target.args, target.args_source, target.assumed) == (
        ("vllm", "serve", "--max-num-seqs=48", "--port=9000", "--model=m"),
        "process",
        False,
    )
    assert target.port == 8000, "as the pod says"
    assert script.with_process({}) is script


def test_static_pods_are_found_by_their_hash(settings: Build, tmp_path: Path) -> None:
    process(tmp_path, 10, f"0::/kubepods/pod{'ab' * 16}/{ID}\n")
    pods = (Pod("ns", "static", UID, "Running", frozenset({UID, "ab" * 16}), {ID: "vllm"}),)
    assert source(settings, tmp_path, 10, pods=pods).read().process_pods == {10: ("ns", "static")}


def test_a_uid_is_not_another_without_its_dashes(settings: Build, tmp_path: Path) -> None:
    process(tmp_path, 10, f"0::/kubepods/pod{UID}/{ID}\n")
    pods = (Pod("ns", "static", "u", "Running", frozenset({"u", UID.replace("-", "")})),)
    assert source(settings, tmp_path, 10, pods=pods).read().process_pods == {}


def test_reasons(settings: Build, tmp_path: Path) -> None:
    assert reason_of(source(settings, tmp_path / "missing", 1).read, REASONS) == "no_proc"
    assert reason_of(source(settings, tmp_path, 1, pods=None).read, REASONS) == "pods_unknown"
    (tmp_path / "7" / "cgroup").mkdir(parents=True)
    assert source(settings, tmp_path, 7).read().errors == {"unreadable": 1}


def own_namespace(directory: Path, pids: str, inode_of: str | None) -> None:
    """A ``self`` as a /proc shows it: pids from the outermost namespace inwards."""
    (directory / "self" / "ns").mkdir(parents=True)
    (directory / "self" / "status").write_text(f"Name:\tx\nNSpid:\t{pids}\n")
    if inode_of:
        (directory / "self" / "ns" / "pid").symlink_to(inode_of)


def test_the_proc_of_a_container_is_refused(settings: Build, tmp_path: Path) -> None:
    """A file of this directory stands for a pid namespace that is not the host's."""
    (tmp_path / "namespace").touch()
    own_namespace(tmp_path / "own", "1", str(tmp_path / "namespace"))
    assert reason_of(source(settings, tmp_path / "own", 1).read, REASONS) == "not_host_proc"
    own_namespace(tmp_path / "host", "4711\t1", str(tmp_path / "namespace"))
    process(tmp_path / "host", 10, f"0::/kubepods/pod{UID}/{ID}\n")
    assert source(settings, tmp_path / "host", 10).read().process_pods == {10: ("ns", "a")}


@pytest.mark.live
@pytest.mark.skipif(os.geteuid() != 0, reason="needs a mount namespace")
def test_a_real_proc_in_a_real_pid_namespace_is_refused_and_the_hosts_is_not() -> None:
    """The check on real kernels' files: unshare gives a pid namespace with a /proc of its own."""
    script = (
        "from pathlib import Path; from kvpressure.sources.host.procfs import _is_hosts; "
        "print(_is_hosts(Path('/proc')), _is_hosts(Path('/mnt')))"
    )
    inner = f'mount --bind /proc /mnt && mount -t proc proc /proc && exec {sys.executable} -c "{script}"'
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "sh", "-c", inner],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout.split() == ["False", "True"], done.stderr
