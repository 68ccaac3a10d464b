"""Reads single values of a GPU or a MIG instance; None = unknown. Base units, ratios 0-1."""

from __future__ import annotations

from typing import Any, Final

import pynvml

from kvpressure.model.readings import GpuProcess
from kvpressure.sources.gpu.nvidia.query import DeviceQuery

NOT_AVAILABLE: Final = 0xFFFFFFFF  # NVML's "no value" in 32 bits

THROTTLE_REASONS: Final = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
"""Clock-event bits that mean "slower than wanted"; idle, application clocks, sync boost and display are no fault."""


def memory(ask: DeviceQuery, handle: Any) -> tuple[int, int] | tuple[None, None]:
    """(total, used) bytes of device memory, what the driver reserves included."""
    info = ask("memory", pynvml.nvmlDeviceGetMemoryInfo, handle)
    if info is None or info.total == 0:  # unified-memory GPUs have none of their own
        return None, None
    total, free = int(info.total), int(info.free)
    if free > total:
        ask.invalid()
        return None, None
    return total, total - free


def utilization(ask: DeviceQuery, handle: Any) -> float | None:
    """Share of the driver's last sample period in which some kernel ran."""
    rates = ask("utilization", pynvml.nvmlDeviceGetUtilizationRates, handle)
    return None if rates is None else percent(ask, rates.gpu)


def percent(ask: DeviceQuery, value: float) -> float | None:
    """0-100 as a ratio; None when out of range (NaN included)."""
    if 0 <= value <= 100:
        return float(value) / 100
    ask.invalid()
    return None


def power(ask: DeviceQuery, handle: Any) -> float | None:
    """Watts drawn now."""
    return _watts(ask("power", pynvml.nvmlDeviceGetPowerUsage, handle))


def power_limit(ask: DeviceQuery, handle: Any) -> float | None:
    """Watts that the GPU may draw under all limits."""
    return _watts(ask("power_limit", pynvml.nvmlDeviceGetEnforcedPowerLimit, handle))


def _watts(milliwatts: int | None) -> float | None:
    # A working GPU draws some power and has a limit above 0: 0 means "no sensor".
    return None if not milliwatts or milliwatts == NOT_AVAILABLE else milliwatts / 1000


def throttle_reasons(ask: DeviceQuery, handle: Any) -> tuple[str, ...] | None:
    """Why clocks are reduced, as in ``THROTTLE_REASONS``; empty = they are not."""
    bits = ask("clocks_event", pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    return None if bits is None else tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)


def processes(ask: DeviceQuery, handle: Any) -> tuple[GpuProcess, ...]:
    """Compute processes with host pids, MPS clients included; empty also when the driver does not report them."""
    with ask.isolated("processes"):
        return _processes(ask, handle)
    return ()


def _processes(ask: DeviceQuery, handle: Any) -> tuple[GpuProcess, ...]:
    found = ask("processes", pynvml.nvmlDeviceGetComputeRunningProcesses_v3, handle)
    clients = ask("mps_processes", pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v3, handle)
    # Both lists may contain a process, and a pid may occur once per instance; memory is per instance.
    by_instance = {}
    for process in (*(found or ()), *(clients or ())):
        # A compute process always holds its context's memory: 0 is "not told" as much as the explicit value.
        used = process.usedGpuMemory or None
        key = (process.pid, process.gpuInstanceId, process.computeInstanceId)
        if used is not None or key not in by_instance:
            by_instance[key] = GpuProcess(int(process.pid), None if used is None else int(used))
    return tuple(by_instance.values())
