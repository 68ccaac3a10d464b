"""Which GPU errors are hardware faults, and which a program's kernel causes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvpressure.model.frozen import frozen
from kvpressure.model.readings import GpuReading

LOST: Final = frozenset(
    {"lost", "gpu_not_found", "reset_required", "irq_issue", "insufficient_power", "corrupted_inforom"}
)
"""``GpuReading.error`` of a device that is gone, defective or needs a reset."""

OTHER_XID: Final = 0
"""In place of every number that is not in the driver's catalogue; counts as a hardware fault."""

RESET: Final = "reset"
CHECK: Final = "check"
APPLICATION: Final = "application"
"""Classes of driver events: the GPU fails until it is reset, may fail later, or is healthy (a program failed)."""


@frozen
class DriverEvent:
    """What a driver event means, its class, and what to do."""

    meaning: str
    kind: str
    action: str


NVIDIA_XIDS: Final[Mapping[int, DriverEvent]] = {
    13: DriverEvent("a kernel raised an exception", APPLICATION, "look for a known bug of the engine's version"),
    31: DriverEvent("a kernel accessed invalid memory", APPLICATION, "look for a known bug of the engine's version"),
    43: DriverEvent("the driver ended a kernel", APPLICATION, "look for a known bug of the engine's version"),
    45: DriverEvent("the driver cleaned up after a program ended", APPLICATION, "look for an earlier event"),
    48: DriverEvent("uncorrectable memory error", RESET, "drain the node and reset the GPU"),
    63: DriverEvent("memory row remapped", CHECK, "reset the GPU when the node is next drained"),
    64: DriverEvent("row remapping failed", RESET, "drain the node, reset the GPU, and replace it if this recurs"),
    68: DriverEvent("video decoder exception", APPLICATION, "look for a known bug of the program"),
    74: DriverEvent("NVLink error", RESET, "drain the node and reset all GPUs of the link"),
    79: DriverEvent("fallen off the bus", RESET, "drain and reboot the node; check power and seating if this recurs"),
    94: DriverEvent("contained memory error", CHECK, "restart the engine; reset the GPU when the node is next drained"),
    95: DriverEvent("uncontained memory error", RESET, "drain the node and reset the GPU"),
    109: DriverEvent("a kernel did not yield in time", APPLICATION, "look for a known bug of the engine's version"),
    119: DriverEvent("GSP firmware did not answer", RESET, "drain the node, reset the GPU, and update the driver"),
    120: DriverEvent("GSP firmware error", RESET, "drain the node, reset the GPU, and update the driver"),
}
"""Events with a known meaning, from NVIDIA's XID catalogue. Its device plugin ignores the same application faults."""

UNLISTED: Final = DriverEvent("see NVIDIA's XID catalogue", CHECK, "read the driver's lines in the node's kernel log")

OF_APPLICATIONS: Final[Mapping[str, frozenset[int]]] = {
    "nvidia": frozenset(code for code, event in NVIDIA_XIDS.items() if event.kind == APPLICATION)
}
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
