"""Worker side: torch's caching allocator, once a second.

``torch.cuda.memory_stats`` reads counters on the host, without the device or the driver. It is called only in a
process that already uses the device, so that it creates no context.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from kvpressure_vllm import registry_gauges
from kvpressure_vllm.report import guarded, repeat

#: our name -> key of ``torch.cuda.memory_stats``
KEYS: Final = (
    ("allocated_bytes", "allocated_bytes.all.current"),
    ("reserved_bytes", "reserved_bytes.all.current"),
    ("inactive_split_bytes", "inactive_split_bytes.all.current"),
)


def sample(torch: Any) -> dict[str, int] | None:
    """The allocator's figures in bytes with the process's ``rank``; ``None`` while the device is not
    initialised.

    This thread has no "current device", so the device is the one on which the process has reserved most.
    """
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    devices: list[tuple[int, int, Mapping[str, int]]] = []
    for index in range(cuda.device_count()):
        stats = cuda.memory_stats(index)
        devices.append((stats.get("reserved_bytes.all.current", 0), index, stats))
    reserved, index, stats = max(devices, key=lambda item: item[0], default=(0, 0, {}))
    if not reserved:
        return None
    return {"rank": _rank(torch, index), **{name: int(stats[key]) for name, key in KEYS if key in stats}}


def _rank(torch: Any, device: int) -> int:
    """Rank among the workers; without a process group, the device's number."""
    group = getattr(torch, "distributed", None)
    if group is not None and group.is_available() and group.is_initialized():
        return int(group.get_rank())
    return device


def follow() -> None:
    """Body of the thread: report repeatedly."""

    @guarded
    def report() -> None:
        torch = sys.modules.get("torch")  # never imported from here
        figures = sample(torch) if torch is not None else None
        if figures is not None:
            registry_gauges.show_allocator(figures)

    repeat(report)
