"""NVML's return codes: the reason for each, and how far its failure reaches.

Codes are handled as numbers: ``NVMLError`` objects are unhashable and must not be compared with ``==``.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from kvpressure.model import reasons

NOT_INITIALIZED: Final = "uninitialized"
DRIVER_MISSING: Final = "driver_missing"
LIBRARY_MISSING: Final = "library_missing"
LIBRARY_MISMATCH: Final = "library_mismatch"
LOST: Final = "lost"
RESET_REQUIRED: Final = "reset_required"
NO_PERMISSION: Final = "no_permission"
NOT_FOUND: Final = "not_found"
NOT_SUPPORTED: Final = "not_supported"
OLD_DRIVER: Final = "old_driver"  # the symbol, or this version of its structure, is newer than the driver
BLOCKED: Final = "blocked"  # refused by the operating system (a device cgroup)
GPU_NOT_FOUND: Final = "gpu_not_found"
TIMEOUT: Final = "timeout"  # reported by NVML, or a call did not return
INVALID_DATA: Final = "invalid_data"  # an impossible answer
UNKNOWN: Final = "unknown"
INTERNAL: Final = reasons.INTERNAL
NO_DEVICES: Final = "no_devices"  # a node without NVIDIA GPUs: normal

REASON_BY_CODE: Final = MappingProxyType(
    {
        0: NOT_FOUND,  # raised as an error by some wrappers of the binding for "nothing there"
        1: NOT_INITIALIZED,
        2: "invalid_argument",
        3: NOT_SUPPORTED,
        4: NO_PERMISSION,
        6: NOT_FOUND,
        7: "insufficient_size",  # a list grew between asking its length and reading it
        8: "insufficient_power",
        9: DRIVER_MISSING,
        10: TIMEOUT,
        11: "irq_issue",
        12: LIBRARY_MISSING,
        13: OLD_DRIVER,
        14: "corrupted_inforom",
        15: LOST,
        16: RESET_REQUIRED,
        17: BLOCKED,
        18: LIBRARY_MISMATCH,
        19: "in_use",
        20: "out_of_memory",
        21: NOT_FOUND,  # NO_DATA
        23: "out_of_memory",  # INSUFFICIENT_RESOURCES
        25: OLD_DRIVER,
        26: NOT_SUPPORTED,  # DEPRECATED
        27: "not_ready",
        28: GPU_NOT_FOUND,
    }
)

REASONS: Final = frozenset(REASON_BY_CODE.values()) | {INVALID_DATA, UNKNOWN, NO_DEVICES, INTERNAL}
"""Every value of ``SourceError.reason``, ``GpuReading.error`` and keys of ``Reading.errors``."""

LIBRARY_DOWN: Final = frozenset({NOT_INITIALIZED, DRIVER_MISSING, LIBRARY_MISMATCH})
"""No call can succeed before the library is reopened (after a mismatch: in a new process)."""

NO_DRIVER: Final = frozenset({DRIVER_MISSING, LIBRARY_MISSING})
"""Reasons on a node without NVIDIA driver, missing or not needed."""

DEVICE_DOWN: Final = frozenset({LOST, RESET_REQUIRED, GPU_NOT_FOUND})
"""No call for this GPU can succeed before the library is reopened."""

NORMAL: Final = frozenset({NOT_SUPPORTED, OLD_DRIVER, NOT_FOUND})
"""Answers of a healthy driver: the value does not exist. Not counted as errors."""

LASTING: Final = frozenset({NOT_SUPPORTED, OLD_DRIVER, NO_PERMISSION})
"""Asking again soon would give the same answer."""

NEEDS_NEW_CONTAINER: Final = frozenset({UNKNOWN, BLOCKED})
"""When every GPU answers so for long, the container has lost its devices (e.g. after a reload of the host's systemd)
and only a new one gets them back.
"""


def reason_of(code: int) -> str:
    """The reason for a return code; ``unknown`` for codes without one."""
    return REASON_BY_CODE.get(code, UNKNOWN)
