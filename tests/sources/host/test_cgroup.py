"""CPU and memory of containers out of cgroup v2 trees of every layout, on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvpressure.model.readings import ContainerReading
from kvpressure.settings.settings import Settings
from kvpressure.sources.host import cgroup as cgroup_module
from kvpressure.sources.host.cgroup import MISSING_SECONDS, REASONS, CgroupSource
from kvpressure.sources.kubernetes.pod import Pod
from kvpressure.sources.kubernetes.podspec import Policy, read_pod
from tests.helpers.failing import reason_of
from tests.sources.kubernetes.objects import pod

Build = Callable[..., Settings]


def engine_pod(name: str = "a") -> Pod:
    return read_pod(pod(name), Policy())


A = engine_pod()
UID, ID = A.uid, A.engines[0].container_id
UNDERSCORED = UID.replace("-", "_")

FILES = {
    "cpu.stat": "usage_usec 5000000\nuser_usec 1\nnr_periods 100\nnr_throttled 25\nthrottled_usec 9\n",
    "cpu.max": "800000 100000\n",
    "cpu.pressure": "some avg10=12.50 avg60=1.00 avg300=0.00 total=5\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    "memory.current": "1000000\n",
    "memory.max": "2000000\n",
    "memory.stat": "anon 5\ninactive_file 400000\nfile 9\n",
}
READING = ContainerReading(
    "inference",
    "a",
    "vllm",
    cpu_usage_seconds=5.0,
    cpu_limit_cores=8.0,
    cpu_periods=100,
    cpu_throttled_periods=25,
    cpu_pressure_some_ratio=0.125,
    memory_working_set_bytes=600000,
    memory_limit_bytes=2000000,
)

LAYOUTS = [
    f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope",
    f"kubepods.slice/kubepods-pod{UNDERSCORED}.slice/crio-{ID}.scope",
    f"kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UNDERSCORED}.slice/docker-{ID}.scope",
    f"kubepods/burstable/pod{UID}/{ID}",
    f"kubepods/pod{UID}/crio-{ID}",
    f"kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod{UNDERSCORED}"
    f".slice/cri-containerd-{ID}.scope",
    f"kubelet/kubepods/burstable/pod{UID}/{ID}",
]


def container(root: Path, path: str, files: dict[str, str] | None = None) -> Path:
    directory = root / path
    directory.mkdir(parents=True)
    (root / "cgroup.controllers").write_text("cpu memory\n")
    for name, text in (FILES if files is None else files).items():
        (directory / name).write_text(text)
    return directory


def source(settings: Build, root: Path, *pods: Pod, clock: Callable[[], float] = lambda: 0.0) -> CgroupSource:
    chosen = settings(host_cgroup=root)
    chosen.shared.pods = pods
    return CgroupSource(chosen, clock)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(settings: Build, tmp_path: Path, layout: str) -> None:
    container(tmp_path, layout)
    (tmp_path / layout / "init").mkdir()
    container(tmp_path, "system.slice/kubelet.service", {})
    container(tmp_path, f"kubepods.slice/kubepods-podffffffff_0000_0000_0000_000000000000.slice/crio-{'0' * 64}.scope")
    reading = source(settings, tmp_path, A).read()
    assert reading.containers == (READING,)
    assert reading.errors == {}


@pytest.mark.parametrize("part", ["k", "pod", "slice", UID[:8], UNDERSCORED[:-1], f"{UID}0"])
def test_a_part_of_a_name_is_no_uid(settings: Build, tmp_path: Path, part: str) -> None:
    """One letter of ``kubepods.slice`` ended the walk for all pods."""
    container(tmp_path, LAYOUTS[0])
    b = engine_pod("b")
    assert source(settings, tmp_path, replace(b, uids=frozenset({b.uid, part})), A).read().containers == (READING,)


@pytest.mark.parametrize("name", ["{}0", "0{}", "{}.scope.d", "x{}", "cri-containerd-{}0.scope"])
def test_a_part_of_a_name_is_no_container(settings: Build, tmp_path: Path, name: str) -> None:
    container(tmp_path, f"kubepods/burstable/pod{UID}/{name.format(ID)}")
    assert source(settings, tmp_path, A).read().containers == ()


def test_a_container_is_looked_for_in_its_own_pod_alone(settings: Build, tmp_path: Path) -> None:
    b = engine_pod("b")
    container(tmp_path, f"kubepods/burstable/pod{b.uid}/{ID}")
    assert source(settings, tmp_path, A, b).read().containers == ()


def test_the_helper_of_cri_o_is_not_the_container(settings: Build, tmp_path: Path) -> None:
    base = f"kubepods.slice/kubepods-pod{UNDERSCORED}.slice"
    container(tmp_path, f"{base}/crio-conmon-{ID}.scope", {"cpu.stat": "usage_usec 1\n"})
    container(tmp_path, f"{base}/crio-{ID}.scope")
    assert source(settings, tmp_path, A).read().containers == (READING,)


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("cpu.max", "max 100000\n", "cpu_limit_cores", None),
        ("cpu.max", "50000 100000\n", "cpu_limit_cores", 0.5),
        ("cpu.max", "1 0\n", "cpu_limit_cores", None),
        ("cpu.max", "", "cpu_limit_cores", None),
        ("memory.max", "max\n", "memory_limit_bytes", None),
        ("memory.max", "9" * 30, "memory_limit_bytes", None),
        ("memory.stat", "anon 5\n", "memory_working_set_bytes", None),
        ("memory.stat", "inactive_file 9000000\n", "memory_working_set_bytes", 0),
        ("memory.current", "x", "memory_working_set_bytes", None),
        ("cpu.pressure", "", "cpu_pressure_some_ratio", None),
        ("cpu.pressure", "some avg10=100.00", "cpu_pressure_some_ratio", 1.0),
        ("cpu.stat", "usage_usec x\n", "cpu_usage_seconds", None),
        ("cpu.stat", "usage_usec 5\n", "cpu_periods", None),
        ("cpu.stat", "\xff\x00nr_periods " + "9" * 6000 + "\n", "cpu_periods", None),
    ],
)
def test_single_files_that_say_something_else(
    settings: Build, tmp_path: Path, name: str, text: str, field: str, value: object
) -> None:
    directory = container(tmp_path, LAYOUTS[0], {**FILES, name: text})
    if not text:
        (directory / name).unlink()
    readings = source(settings, tmp_path, A).read().containers
    assert getattr(readings[0], field) == value


def test_containers_come_and_go(settings: Build, tmp_path: Path) -> None:
    """A container that is not there is looked for again only after a while."""
    now = [0.0]
    found = source(settings, tmp_path, A, clock=lambda: now[0])
    (tmp_path / "cgroup.controllers").touch()
    assert found.read().errors == {"no_cgroup": 1}
    directory = container(tmp_path, LAYOUTS[0])
    assert found.read().containers == ()
    now[0] = MISSING_SECONDS
    assert found.read().containers == (READING,)
    for name in FILES:
        (directory / name).unlink()
    directory.rmdir()
    reading = found.read()
    assert (reading.containers, reading.errors) == ((), {})
    assert found.read().errors == {"no_cgroup": 1}


def test_only_new_containers_cost_a_walk(settings: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    container(tmp_path, LAYOUTS[0])
    walks: list[Path] = []
    plain = cgroup_module._directories
    monkeypatch.setattr(cgroup_module, "_directories", lambda d, e: walks.append(d) or plain(d, e))
    found = source(settings, tmp_path, A)
    found.read()
    count = len(walks)
    assert count > 0
    for _ in range(5):
        assert found.read().containers == (READING,)
    assert len(walks) == count


def test_reasons(settings: Build, tmp_path: Path) -> None:
    assert reason_of(source(settings, tmp_path / "missing").read, REASONS) == "no_cgroup_tree"
    assert reason_of(source(settings, tmp_path).read, REASONS) == "not_cgroup_v2"
    (tmp_path / "cgroup.controllers").touch()
    assert reason_of(CgroupSource(settings(host_cgroup=tmp_path)).read, REASONS) == "pods_unknown"
