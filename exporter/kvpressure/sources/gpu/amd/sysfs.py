"""AMD GPUs as the kernel driver shows them in sysfs: no library, device node or privilege.

Units in the files: memory in bytes, busy in percent, power in microwatts. A file may exist and be unreadable, and an
unknown value is often 0; both are absent here. Source: ``Documentation/gpu/amdgpu`` of the kernel (driver-misc,
thermal).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpressure.model.readings import GpuProcess, GpuReading
from kvpressure.model.reasons import INTERNAL
from kvpressure.sources.gpu.amd import kfd
from kvpressure.sources.gpu.amd.files import LOST, NO_PERMISSION, PARTITIONS_UNSEEN, CountingFiles, names

VENDOR: Final = "amd"
NAMELESS: Final = "AMD GPU"
_PCI_VENDOR: Final = "0x1002"
_PCI_ADDRESS: Final = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_PCI_ID: Final = re.compile(r"0x([0-9a-f]{4})")
_CARD: Final = re.compile(r"card\d+")
_RENDER: Final = re.compile(r"renderD(\d+)")
_PARTITION: Final = re.compile(r"amdgpu_xcp[._](\d+)")
_UNIQUE_ID: Final = re.compile(r"(?:0x)?([0-9a-f]{1,16})")
_POWER: Final = ("power1_average", "power1_input")  # most parts have one of them
_MICRO: Final = 1e-6
_UNIFIED_FACTOR: Final = 1.5  # KFD counts this much more memory than VRAM if the GPU uses system memory
_SLACK: Final = 1.05
_WHOLE: Final = "SPX"  # the compute partition mode of a GPU that is not split


@dataclass(frozen=True, slots=True)
class Partition:
    """One compute partition. ``bus_id``: name of its device, as AMD's device plugin reports it to the kubelet: the
    PCI address for the first, ``amdgpu_xcp_7`` for others.
    """

    uuid: str
    bus_id: str
    minor: int
    gpu_id: int
    memory_bytes: int | None
    used_path: str


@dataclass(frozen=True, slots=True)
class SysfsDevice:
    """Rarely changing properties of one PCI device. ``uuid``: ``GPU-<unique_id>`` as ROCm writes it, else node and
    PCI address. ``minor``: its render node, unless that is a partition's. ``unified``: its VRAM is a carve-out of the
    system memory it uses. ``unseen_parts``: it has partitions whose KFD nodes are not shown. ``error``: why it could
    not be examined, so it cannot be read either.
    """

    bus_id: str
    path: str
    uuid: str
    name: str
    driver: str | None
    minor: int | None = None
    hwmon: str | None = None
    memory_bytes: int | None = None
    power_limit_watts: float | None = None
    gpu_id: int | None = None
    unified: bool = False
    partitions: tuple[Partition, ...] = ()
    unseen_parts: bool = False
    error: str | None = None


def devices(root: str, files: CountingFiles, node: str) -> tuple[dict[str, SysfsDevice], bool]:
    """(AMD GPUs under the sysfs ``root`` of ``node`` by PCI address, in that order; whether none was missed)."""
    drm = f"{root}/class/drm"
    missed = {name for name in names(drm) if _CARD.fullmatch(name) or _RENDER.fullmatch(name)}
    entries: dict[str, Path] = {}
    for name in sorted(missed):
        with files.isolated(f"device {name}"):
            with suppress(FileNotFoundError):  # it is on no bus
                entries[name] = Path(f"{drm}/{name}/device").resolve(strict=True)
            missed.remove(name)
    cards = {
        path.name: str(path)
        for name, path in entries.items()
        if _CARD.fullmatch(name) and _PCI_ADDRESS.fullmatch(path.name) and files.text(f"{path}/vendor") == _PCI_VENDOR
    }
    if not cards:
        return {}, not missed
    minors = {int(match[1]): path.name for name, path in entries.items() if (match := _RENDER.fullmatch(name))}
    topology = kfd.nodes(root, files)
    identities = _identities(cards, files, node)
    driver = None
    with files.isolated("the driver"):
        driver = _driver(root, files)
    found: dict[str, SysfsDevice] = {}
    for bus, path in sorted(cards.items()):
        found[bus] = SysfsDevice(bus, path, identities[bus], NAMELESS, driver, error=INTERNAL)
        with files.isolated(f"GPU {bus}"):
            found[bus] = _device(bus, path, identities[bus], driver, minors, topology, files)
    return found, not missed


def _identities(cards: Mapping[str, str], files: CountingFiles, node: str) -> dict[str, str]:
    """PCI address -> uuid. A unique id of two devices (virtual functions) identifies neither. The node's name is part
    of the uuid without one, because addresses are the same on similar nodes.
    """
    unique = {}
    for bus, path in cards.items():
        match = _UNIQUE_ID.fullmatch((files.text(f"{path}/unique_id") or "").lower())
        if match and int(match[1], 16):
            unique[bus] = f"GPU-{int(match[1], 16):016x}"
    seen = Counter(unique.values())
    return {bus: unique[bus] if seen[unique.get(bus, "")] == 1 else f"{node}/{bus}" for bus in cards}


def _driver(root: str, files: CountingFiles) -> str | None:
    """Version of the out-of-tree driver; else the kernel's."""
    if not Path(f"{root}/module/amdgpu").is_dir():
        return None
    return files.label(f"{root}/module/amdgpu/version") or f"kernel {os.uname().release}"


def _device(
    bus: str,
    path: str,
    uuid: str,
    driver: str | None,
    minors: Mapping[int, str],
    topology: Sequence[kfd.KfdNode],
    files: CountingFiles,
) -> SysfsDevice:
    own = next((minor for minor, name in minors.items() if name == bus), None)
    nodes = [
        node
        for node in topology
        if minors.get(node.minor) == bus
        or (bus.startswith(f"{node.address}.") and _PARTITION.fullmatch(minors.get(node.minor, "")))
    ]
    memory = files.number(f"{path}/mem_info_vram_total")
    unified = len(nodes) == 1 and bool(memory) and (nodes[0].memory_bytes or 0) > (memory or 0) * _UNIFIED_FACTOR
    hwmon = next((f"{path}/hwmon/{name}" for name in sorted(names(f"{path}/hwmon")) if name.startswith("hwmon")), None)
    cap = files.number(f"{hwmon}/power1_cap") if hwmon else None
    unseen = len(nodes) < 2 and (files.text(f"{path}/current_compute_partition") or _WHOLE) != _WHOLE
    if unseen:
        files.reject(PARTITIONS_UNSEEN)
    return SysfsDevice(
        bus_id=bus,
        path=path,
        uuid=uuid,
        name=_name(path, files),
        driver=driver,
        minor=own if len(nodes) < 2 else None,
        hwmon=hwmon,
        memory_bytes=memory or None,
        power_limit_watts=cap * _MICRO if cap else None,
        gpu_id=nodes[0].gpu_id if len(nodes) == 1 else None,
        unified=unified,
        partitions=_partitions(uuid, nodes, minors) if len(nodes) > 1 else (),
        unseen_parts=unseen,
    )


def _name(path: str, files: CountingFiles) -> str:
    """Product name (of server GPUs), else the PCI ids."""
    product = files.label(f"{path}/product_name")
    device = _PCI_ID.fullmatch(files.text(f"{path}/device") or "")
    return product or (f"{NAMELESS} 1002:{device[1]}" if device else NAMELESS)


def _partitions(uuid: str, nodes: Sequence[kfd.KfdNode], minors: Mapping[int, str]) -> tuple[Partition, ...]:
    return tuple(
        Partition(f"{uuid}/xcp{number}", minors[node.minor], node.minor, node.gpu_id, node.memory_bytes, node.used_path)
        for number, node in enumerate(nodes)
    )


def read(
    device: SysfsDevice, index: int, held: Mapping[int, tuple[GpuProcess, ...]], files: CountingFiles
) -> list[GpuReading]:
    """The device now, followed by its partitions. ``held``: processes by KFD gpu_id.

    Activity and power exist for the whole device only, so partitions have none.
    """
    if device.error is not None or not Path(device.path).is_dir():
        return [unreadable(device, index, device.error or LOST)]
    used = None if device.unified else _used(device, files)
    busy = files.number(f"{device.path}/gpu_busy_percent")
    if busy is not None and busy > 100:
        files.reject()
        busy = None
    power = (
        next((value for value in (files.number(f"{device.hwmon}/{name}") for name in _POWER) if value), None)
        if device.hwmon
        else None
    )
    whole = GpuReading(
        uuid=device.uuid,
        index=index,
        vendor=VENDOR,
        name=device.name,
        driver=device.driver,
        pci_bus_id=device.bus_id,
        minor=device.minor,
        memory_total_bytes=None if device.unified else device.memory_bytes,
        memory_used_bytes=used,
        unseen_parts=device.unseen_parts,
        utilization_ratio=busy / 100 if busy is not None else None,
        power_watts=power * _MICRO if power is not None else None,
        power_limit_watts=device.power_limit_watts,
        processes=held.get(device.gpu_id, ()) if device.gpu_id is not None else (),
        error=_refusal(device) if used is None and busy is None and power is None else None,
    )
    return [whole, *_read_partitions(device, whole, held, files)]


def unreadable(device: SysfsDevice, index: int, error: str) -> GpuReading:
    """The reading of a device of which nothing can be read, because of ``error``."""
    return GpuReading(
        uuid=device.uuid,
        index=index,
        vendor=VENDOR,
        name=device.name,
        driver=device.driver,
        pci_bus_id=device.bus_id,
        minor=device.minor,
        error=error,
    )


def _used(device: SysfsDevice, files: CountingFiles) -> int | None:
    """Device memory in use, in bytes. Never 0: the driver itself holds some, and a virtual function that cannot know
    the value reports 0.
    """
    used = files.number(f"{device.path}/mem_info_vram_used")
    if used and device.memory_bytes and used > device.memory_bytes:
        files.reject()
        return None
    return used or None


def _refusal(device: SysfsDevice) -> str | None:
    """``no_permission`` if that is why a device reports nothing, else None."""
    probe = f"{device.path}/mem_info_vram_used"
    return NO_PERMISSION if os.access(probe, os.F_OK) and not os.access(probe, os.R_OK) else None


def _read_partitions(
    device: SysfsDevice, whole: GpuReading, held: Mapping[int, tuple[GpuProcess, ...]], files: CountingFiles
) -> list[GpuReading]:
    used = _partition_memory(device, whole.memory_used_bytes, files)
    return [
        GpuReading(
            uuid=part.uuid,
            index=whole.index,
            vendor=VENDOR,
            name=device.name,
            driver=device.driver,
            pci_bus_id=part.bus_id,
            minor=part.minor,
            parent_uuid=device.uuid,
            memory_total_bytes=part.memory_bytes,
            memory_used_bytes=used[part.gpu_id],
            processes=held.get(part.gpu_id, ()),
        )
        for part in device.partitions
    ]


def _partition_memory(device: SysfsDevice, whole: int | None, files: CountingFiles) -> dict[int, int | None]:
    """Bytes in use by KFD gpu_id. Some drivers report the whole device's value for every partition, so values are
    used only if their sum fits it.
    """
    used = {part.gpu_id: files.number(part.used_path) or None for part in device.partitions}
    total = sum(value or 0 for value in used.values())
    if whole is None or total > whole * _SLACK:
        return dict.fromkeys(used)
    return used
