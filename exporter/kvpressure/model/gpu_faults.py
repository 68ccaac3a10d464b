"""Which GPU errors are hardware faults, and which a program's kernel causes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvpressure.model.readings import GpuReading

LOST: Final = frozenset({"gpu_lost", "lost", "reset_required"})
"""``GpuReading.error`` of a device that is gone or needs a reset."""

OTHER_XID: Final = 0
"""In place of every number that is not in the driver's catalogue; counts as a hardware fault."""

OF_APPLICATIONS: Final[Mapping[str, frozenset[int]]] = {"nvidia": frozenset({13, 31, 43, 45, 68, 109})}
"""Driver events by vendor that a program causes on a healthy GPU; all others count as hardware faults."""

OF_KERNELS: Final[Mapping[str, frozenset[int]]] = {"nvidia": frozenset({13, 31, 43, 109})}
"""Those that end the program whose kernel caused them. XID 45 follows the end of any program, 68 concerns video."""


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
