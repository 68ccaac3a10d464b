"""AMD GPUs from sysfs trees of real products' shape."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvpressure.model.readings import GpuProcess, GpuReading
from kvpressure.sources.base import SourceError
from kvpressure.sources.gpu.amd import files, sysfs
from kvpressure.sources.gpu.amd.source import PROCESS_SECONDS, RESCAN_SECONDS, AmdSource
from kvpressure.sources.kubernetes.device_ids import from_dra, from_plugin
from kvpressure.sources.vendors import OwnedDevice
from tests.sources.gpu.amd import trees
from tests.sources.gpu.amd.trees import GIB, Card, Tree

pytestmark = pytest.mark.slow


@dataclass
class Given:
    """The settings that the source looks at."""

    host_sys: Path
    node_name: str = "node"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def source(root: Path, clock: Clock | None = None) -> AmdSource:
    return AmdSource(Given(root), clock or Clock())


def read(root: Path) -> tuple[GpuReading, ...]:
    return source(root).read().gpus


def device_of(tree: Tree, bus: str) -> Path:
    return tree.root / "devices/pci0000:00" / bus


def test_order_follows_the_pci_address_not_the_card_number(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for bus in ("0000:c7:00.0", "0000:05:00.0", "0001:01:00.0"):
        tree.add(Card(bus, unique_id=None))
    assert [gpu.pci_bus_id for gpu in read(tmp_path)] == ["0000:05:00.0", "0000:c7:00.0", "0001:01:00.0"]


def test_other_vendors_and_connectors_are_left_alone(tmp_path: Path) -> None:
    tree = trees.mi300x(tmp_path, 1)
    tree.add(Card("0000:01:00.0", files={"vendor": "0x10de"}))
    (tmp_path / "class/drm/card0-DP-1").mkdir()
    assert [gpu.pci_bus_id for gpu in read(tmp_path)] == ["0000:05:00.0"]


@pytest.mark.parametrize("unique_id", ["0", "0000000000000000", "not hex", ""])
def test_a_useless_unique_id_identifies_nothing(tmp_path: Path, unique_id: str) -> None:
    tree = Tree(tmp_path)
    tree.add(Card("0000:05:00.0", files={"unique_id": unique_id}))
    assert read(tmp_path)[0].uuid == "node/0000:05:00.0"


def test_a_unique_id_that_two_devices_share_identifies_neither(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.add(Card("0000:05:00.0"))
    tree.add(Card("0000:05:02.0"))
    tree.add(Card("0000:27:00.0", unique_id="1"))
    assert [gpu.uuid for gpu in read(tmp_path)] == ["node/0000:05:00.0", "node/0000:05:02.0", "GPU-0000000000000001"]


# --- partitions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("xcp_name", ["amdgpu_xcp_{}", "amdgpu_xcp.{}"])
def test_partitions_have_memory_but_no_activity_and_no_power(tmp_path: Path, xcp_name: str) -> None:
    tree = Tree(tmp_path, xcp_name=xcp_name)
    tree.add(Card("0000:05:00.0", partitions=8, partition_used=tuple(range(1, 9)), used=40))
    tree.add(Card("0000:27:00.0", unique_id="27", partitions=8))
    readings = read(tmp_path)
    assert len(readings) == 18
    whole, first, *others = readings[:9]
    assert whole.utilization_ratio == 0.97
    assert whole.parent_uuid is None
    assert whole.minor is None  # its render node is the first partition's
    assert first.pci_bus_id == "0000:05:00.0"
    assert [part.pci_bus_id for part in others] == [xcp_name.format(n) for n in range(7)]
    assert [part.minor for part in (first, *others)] == list(range(128, 136))
    assert [part.uuid for part in (first, *others)] == [f"{whole.uuid}/xcp{n}" for n in range(8)]
    assert [part.memory_used_bytes for part in (first, *others)] == list(range(1, 9))
    for part in (first, *others):
        assert part.parent_uuid == whole.uuid
        assert part.index == whole.index
        assert part.memory_total_bytes == trees.MI300X_VRAM // 8
        assert part.utilization_ratio is None
        assert part.power_watts is None
    second = readings[9:]
    assert {part.parent_uuid for part in second[1:]} == {"GPU-0000000000000027"}
    assert {part.memory_used_bytes for part in second[1:]} == {None}


def test_memory_of_the_whole_device_is_not_taken_for_that_of_a_partition(tmp_path: Path) -> None:
    trees.mi300x_cpx(tmp_path, used=20 * GIB, partition_used=(20 * GIB,) * 8)
    whole, *parts = read(tmp_path)
    assert whole.memory_used_bytes == 20 * GIB
    assert {part.memory_used_bytes for part in parts} == {None}


def test_without_kfd_the_device_is_still_there_and_partitions_are_absent(tmp_path: Path) -> None:
    tree = Tree(tmp_path, kfd=False)
    tree.add(Card("0000:05:00.0", partitions=8))
    reading = source(tmp_path).read()
    (whole,) = reading.gpus or ()
    assert (whole.memory_used_bytes, whole.unseen_parts) == (100 * GIB, True)
    assert reading.errors == {"partitions_unseen": 1}
    for device_id in ("0000:05:00.0", "amdgpu_xcp_0", "amdgpu_xcp_6"):
        assert from_plugin(device_id, (whole,)) == OwnedDevice(whole.uuid, shared=True)
    assert [*from_dra("gpu.amd.com", "gpu-0-128", (whole,))] == [OwnedDevice(whole.uuid, shared=True)]
    assert from_plugin("amdgpu_xcp_0", (whole, replace(whole, uuid="other"))) is None


# --- processes ----------------------------------------------------------------------------------------------------


def test_processes_are_those_with_memory_on_the_device(tmp_path: Path) -> None:
    tree = trees.mi300x(tmp_path, 2)
    tree.process(4100, {128: 90 * GIB, 129: 0})
    tree.process(311, {128: 1 * GIB, 129: 80 * GIB})
    first, second = read(tmp_path)
    assert first.processes == (GpuProcess(311, GIB), GpuProcess(4100, 90 * GIB))
    assert second.processes == (GpuProcess(311, 80 * GIB),)


def test_processes_of_a_partition_stand_at_that_partition(tmp_path: Path) -> None:
    tree = trees.mi300x_cpx(tmp_path)
    tree.process(77, {130: GIB})
    whole, *parts = read(tmp_path)
    assert whole.processes == ()
    assert [part.processes for part in parts if part.processes] == [(GpuProcess(77, GIB),)]
    assert parts[2].processes


def test_an_ended_process_is_gone_after_its_refresh(tmp_path: Path) -> None:
    tree = trees.mi300x(tmp_path, 1)
    tree.process(5, {128: GIB})
    clock = Clock()
    amd = source(tmp_path, clock)
    amd.read()
    shutil.rmtree(tmp_path / "class/kfd/kfd/proc/5")
    clock.now += PROCESS_SECONDS
    assert (amd.read().gpus or ())[0].processes == ()


# --- what cannot be read is absent --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used", "errors"),
    [(0, {}), (trees.MI300X_VRAM + 1, {"invalid_data": 1})],
    ids=["none at all", "more"],
)
def test_memory_in_use_that_cannot_be_is_absent(tmp_path: Path, used: int, errors: dict[str, int]) -> None:
    trees.mi300x(tmp_path, 1, used=used, busy=0)
    reading = source(tmp_path).read()
    (gpu,) = reading.gpus
    assert (gpu.memory_used_bytes, gpu.memory_total_bytes) == (None, trees.MI300X_VRAM)
    assert (gpu.utilization_ratio, reading.errors) == (0.0, errors)


@pytest.mark.parametrize("text", ["655", "65535", "101", "-1", "N/A", "", "1e2", "٣", "9" * 30])
def test_impossible_utilization_is_absent(tmp_path: Path, text: str) -> None:
    trees.mi300x(tmp_path, 1, files={"gpu_busy_percent": text})
    reading = source(tmp_path).read()
    assert (reading.gpus or ())[0].utilization_ratio is None
    assert reading.errors == ({"invalid_data": 1} if text else {})


REFUSALS = {
    errno.EOPNOTSUPP: {},
    errno.EINVAL: {},
    errno.ENOENT: {},
    errno.EBUSY: {"busy": 1},
    errno.EPERM: {"no_permission": 1},
    errno.EACCES: {"no_permission": 1},
    errno.EIO: {"io_error": 1},
    errno.ENODEV: {"lost": 1},
}


@pytest.mark.parametrize(("code", "counted"), REFUSALS.items(), ids=[errno.errorcode[code] for code in REFUSALS])
@pytest.mark.parametrize("refused", ["gpu_busy_percent", "mem_info_vram_used", "power1_input"])
def test_a_file_that_exists_and_refuses_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, code: int, counted: dict[str, int]
) -> None:
    trees.mi300x(tmp_path, 1)
    real = files.read_file

    def refusing(path: str, most: int) -> bytes:
        if path.endswith(refused):
            raise OSError(code, os.strerror(code), path)
        return real(path, most)

    monkeypatch.setattr(files, "read_file", refusing)
    reading = source(tmp_path).read()
    (gpu,) = reading.gpus or ()
    values = {
        "gpu_busy_percent": gpu.utilization_ratio,
        "mem_info_vram_used": gpu.memory_used_bytes,
        "power1_input": gpu.power_watts,
    }
    assert values.pop(refused) is None
    assert None not in values.values()
    assert reading.errors == counted


def test_a_pipe_in_the_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    tree = trees.mi300x(tmp_path, 1)
    busy = device_of(tree, "0000:05:00.0") / "gpu_busy_percent"
    busy.unlink()
    os.mkfifo(busy)
    assert read(tmp_path)[0].utilization_ratio is None


@pytest.mark.attack("a loop among the links of sysfs", "that GPU alone is missing")
def test_a_loop_of_links_costs_its_card_alone(tmp_path: Path) -> None:
    tree = trees.mi300x(tmp_path, 2)
    for name in ("card9", "renderD199"):
        (tree.root / "class/drm" / name).mkdir()
        (tree.root / "class/drm" / name / "device").symlink_to("device")
    assert len(read(tmp_path)) == 2


def test_a_look_that_failed_is_repeated_at_the_next_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as one that saw no GPU for half a minute."""
    trees.mi300x(tmp_path, 1)
    found = source(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sysfs, "devices", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            found.read()
        with pytest.raises(ZeroDivisionError):
            found.read()
    assert len(found.read().gpus or ()) == 1


def test_unified_memory_is_not_judged_by_its_carve_out(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.add(Card("0000:c4:00.0", "0x1586", vram=512 << 20, used=400 << 20))
    tree.write("class/kfd/kfd/topology/nodes/1/mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {110 * GIB}")
    (gpu,) = read(tmp_path)
    assert gpu.memory_total_bytes is None
    assert gpu.memory_used_bytes is None
    assert gpu.utilization_ratio == 0.97


def test_system_memory_banks_do_not_make_a_card_unified(tmp_path: Path) -> None:
    tree = trees.mi300x(tmp_path, 1)
    tree.write("class/kfd/kfd/topology/nodes/1/mem_banks/1/properties", f"heap_type 0\nsize_in_bytes {900 * GIB}")
    assert read(tmp_path)[0].memory_total_bytes == trees.MI300X_VRAM


# --- devices come and go ------------------------------------------------------------------------------------------


def test_a_driver_that_is_loaded_later_is_found(tmp_path: Path) -> None:
    clock = Clock()
    amd = source(tmp_path, clock)
    with pytest.raises(SourceError, match="no_devices"):
        amd.read()
    Tree(tmp_path, kfd=False, driver=None)
    with pytest.raises(SourceError):
        source(tmp_path).read()
    trees.mi300x(tmp_path, 1)
    with pytest.raises(SourceError):  # not looked at each second
        amd.read()
    clock.now += RESCAN_SECONDS
    assert len(amd.read().gpus or ()) == 1


def test_a_lost_gpu_is_reported_and_the_others_keep_their_number(tmp_path: Path) -> None:
    tree = trees.mi300x(tmp_path, 3)
    clock = Clock()
    amd = source(tmp_path, clock)
    amd.read()
    lost = device_of(tree, "0000:27:00.0")
    away = tmp_path / "away"
    lost.rename(away)
    for _ in range(3):
        clock.now += 1
        first, second, third = amd.read().gpus or ()
        assert (first.error, second.error, third.error) == (None, "lost", None)
        assert (second.uuid, second.index, second.memory_used_bytes) == ("GPU-8f6c2a1d4e3b5a01", 1, None)
        assert third.index == 2
    assert amd.read().expected_gpus == {"amd": 3}
    away.rename(lost)
    clock.now += RESCAN_SECONDS
    assert [gpu.error for gpu in amd.read().gpus or ()] == [None, None, None]


@pytest.mark.parametrize(
    ("gone", "errors"),
    [(["class/drm/card0", "class/drm/renderD128"], ["lost", None]), (["devices"], ["lost", "lost"])],
    ids=["its driver was unbound", "all devices"],
)
def test_gpus_that_are_not_there_any_more_are_lost(tmp_path: Path, gone: list[str], errors: list[str | None]) -> None:
    trees.mi300x(tmp_path, 2)
    clock = Clock()
    amd = source(tmp_path, clock)
    amd.read()
    for name in gone:
        (tmp_path / name).rename(tmp_path / f"away-{Path(name).name}")
    clock.now += RESCAN_SECONDS
    assert [gpu.error for gpu in amd.read().gpus] == errors
