"""The compute side of the driver, ``/sys/class/kfd/kfd``: partitions and memory of processes.

A KFD node is a GPU, or one partition of it (CPX, DPX, ...). The kernel shows a node's files only to processes whose
device cgroup admits that GPU's render node, so an unprivileged container may see none; partitions and processes are
then absent, everything from ``sysfs`` is not.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from kvpressure.model.readings import GpuProcess
from kvpressure.sources.gpu.amd.files import CountingFiles, names

_FRAME_BUFFER_HEAPS: Final = (1, 2)  # public and private device memory; others are system memory
_MAX_PROCESSES: Final = 1024


@dataclass(frozen=True, slots=True)
class KfdNode:
    """One GPU or partition. ``address``: PCI address without the function (``0000:19:00``), whose bits hold the
    partition.
    """

    gpu_id: int
    address: str
    minor: int
    used_path: str
    memory_bytes: int | None


def nodes(root: str, files: CountingFiles) -> tuple[KfdNode, ...]:
    """GPU nodes of the topology under the sysfs ``root``, ordered by render node."""
    top = f"{root}/class/kfd/kfd/topology/nodes"
    found: list[KfdNode] = []
    for name in names(top):
        with files.isolated(f"KFD node {name}"):
            node = _node(f"{top}/{name}", files)
            found += () if node is None else (node,)
    return tuple(sorted(found, key=lambda node: node.minor))


def _node(path: str, files: CountingFiles) -> KfdNode | None:
    gpu_id = files.number(f"{path}/gpu_id")
    if not gpu_id:  # 0 = a CPU
        return None
    properties = _properties(f"{path}/properties", files)
    location, minor = properties.get("location_id"), properties.get("drm_render_minor")
    if location is None or minor is None:
        return None
    address = f"{properties.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"
    return KfdNode(gpu_id, address, minor, f"{path}/mem_banks/0/used_memory", _memory(path, files))


def _properties(path: str, files: CountingFiles) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in (files.text(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if value.isascii() and value.isdigit() and len(value) <= 20:
            found[name] = int(value)
    return found


def _memory(path: str, files: CountingFiles) -> int | None:
    total = 0
    for bank in names(f"{path}/mem_banks"):
        properties = _properties(f"{path}/mem_banks/{bank}/properties", files)
        if properties.get("heap_type") in _FRAME_BUFFER_HEAPS:
            total += properties.get("size_in_bytes", 0)
    return total or None


def processes(root: str, gpu_ids: Collection[int], files: CountingFiles) -> dict[int, tuple[GpuProcess, ...]]:
    """Processes with device memory, by KFD gpu_id; pids are the host's.

    KFD lists a process under every GPU that it could open; one without memory there does not use that GPU.
    """
    top = f"{root}/class/kfd/kfd/proc"
    wanted = {f"vram_{gpu_id}": gpu_id for gpu_id in gpu_ids}
    found: dict[int, list[GpuProcess]] = {}
    pids = sorted(int(name) for name in names(top) if name.isascii() and name.isdigit())
    for pid in pids[:_MAX_PROCESSES]:
        directory = f"{top}/{pid}"
        with files.isolated(f"process {pid}"):
            for name in names(directory):
                gpu_id = wanted.get(name)
                used = files.number(f"{directory}/{name}") if gpu_id is not None else None
                if gpu_id is not None and used:
                    found.setdefault(gpu_id, []).append(GpuProcess(pid, used))
    return {gpu_id: tuple(listed) for gpu_id, listed in found.items()}
