"""Which errors of a GPU mean that the hardware is at fault, and which that a kernel is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvpressure.model.readings import GpuReading

LOST: Final = frozenset({"gpu_lost", "lost", "reset_required"})
"""``GpuReading.error`` of a device that is gone or will not work again by itself."""

OF_APPLICATIONS: Final[Mapping[str, frozenset[int]]] = {"nvidia": frozenset({13, 31, 43, 45, 68, 109})}
"""Driver events by vendor that a program causes on a sound GPU. What a vendor does not list counts as a fault."""

OF_KERNELS: Final[Mapping[str, frozenset[int]]] = {"nvidia": frozenset({13, 31, 43, 109})}
"""Those of them that end the program whose kernel caused them. 45 follows the end of any program, 68 is of video."""


def hardware_faults(gpu: GpuReading) -> dict[int, int]:
    """Driver events since start by code, without those that a program causes."""
    ignored = OF_APPLICATIONS.get(
        gpu.vendor or "nvidia", frozenset()
    )  # a reading without a vendor is an older recording's
    return {code: count for code, count in gpu.xid_errors.items() if code not in ignored}


def kernel_faults(gpu: GpuReading) -> dict[int, int]:
    """Driver events since start by code that end the program whose kernel caused them."""
    wanted = OF_KERNELS.get(gpu.vendor or "nvidia", frozenset())
    return {code: count for code, count in gpu.xid_errors.items() if code in wanted}
