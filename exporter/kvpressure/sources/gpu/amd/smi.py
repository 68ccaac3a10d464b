"""Values of whole devices from AMD's library through the Python package ``amdsmi``, once it has passed checks.

The package binds every symbol of ``libamd_smi.so`` at import and reads C structures whose layout changed between
releases without new symbols, so a wrapper and a library of different ROCm releases may import fine and return
garbage. It is used only if (1) it imports, (2) both are of the same release, and (3) it sees the devices that sysfs
shows, with their memory. Process lists are never taken from it (their layout changed most).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, Final

from kvpressure.model import ceilings
from kvpressure.sources.base import CountedFailures
from kvpressure.sources.gpu.amd.files import BUSY, NO_PERMISSION

FAILED: Final = "amdsmi_failed"  # the library answers with errors

#: Releases of the library (its own numbers) that belong to a ROCm release. ROCm's own wrapper carries the library's
#: numbers; the distribution on PyPI carries ROCm's.
_LIBRARY_OF_ROCM: Final[Mapping[tuple[int, ...], frozenset[tuple[int, ...]]]] = {
    (6, 4): frozenset({(25, 3), (25, 4), (25, 5)}),
    (7, 0): frozenset({(26, 0)}),
    (7, 1): frozenset({(26, 1)}),
    (7, 2): frozenset({(26, 2)}),
}
_FIRST_LIBRARY_MAJOR: Final = 20  # library numbers begin with the year
_SENTINELS: Final = (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)  # "not available" of the C structures
_MEBIBYTE: Final = 1 << 20
_MICROWATTS_FROM: Final = 100_000  # no GPU takes 100 kW, none is capped below 0.1 W
_TOTALS_AGREE: Final = 0.02
_NORMAL_CODES: Final = frozenset({2, 3, 40, 52})  # not supported, not implemented, no data, file not found
_REASON_BY_CODE: Final = {10: NO_PERMISSION, 30: BUSY}


class SmiError(Exception):
    """The library cannot be used: it is missing, of another release than the package, contradicts sysfs or fails."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One device as the library reports it, in base units; None = not reported."""

    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    utilization_ratio: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None


class Smi(CountedFailures):
    """The opened library. ``expected``: PCI address -> bytes of device memory in sysfs, where known.

    Raises:
        SmiError: it is missing, or failed a check.
    """

    def __init__(self, expected: Mapping[str, int | None]) -> None:
        super().__init__()
        self._nameless = 0  # devices that the library sees and whose address it does not report
        self._module = _import()
        try:
            self._module.amdsmi_init()
        except Exception as error:
            raise SmiError(f"amdsmi_init: {_one_line(error)}") from error
        try:
            _check_release(self._module)
            self._handles = self._find(expected)
            self._check_devices(expected)
        except SmiError:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise SmiError(f"check: {_one_line(error)}") from error

    def figures(self) -> dict[str, Figures]:
        """Every device by PCI address. Raises ``SmiError`` when none reports a value."""
        found = {bus: self._read(bus, handle) for bus, handle in self._handles.items()}
        if all(figures == Figures() for figures in found.values()):
            raise SmiError("no device answers")
        return found

    def close(self) -> None:
        """Shut the library down. Never raises."""
        with contextlib.suppress(Exception):
            self._module.amdsmi_shut_down()

    def _find(self, expected: Mapping[str, int | None]) -> dict[str, Any]:
        """Handles of the expected devices; further partitions have addresses that sysfs does not know."""
        handles = self._module.amdsmi_get_processor_handles()
        addresses = [self._ask(methodcaller("amdsmi_get_gpu_device_bdf", handle)) for handle in handles]
        self._nameless = addresses.count(None)
        found = {str(address).lower(): handle for address, handle in zip(addresses, handles, strict=True)}
        return {bus: found[bus] for bus in expected if bus in found}

    def _check_devices(self, expected: Mapping[str, int | None]) -> None:
        missing = sorted(set(expected) - set(self._handles))
        if len(missing) > self._nameless:
            raise SmiError(f"the library does not see {missing[0]}")
        for bus, handle in self._handles.items():
            said, total = self._read(bus, handle).memory_total_bytes, expected[bus]
            if total and said and abs(said - total) > total * _TOTALS_AGREE:
                raise SmiError(f"{bus}: the library says {said} bytes of memory, sysfs {total}")

    def _read(self, bus: str, handle: Any) -> Figures:
        with self.isolated(f"GPU {bus}"):
            return self._figures(handle)
        return Figures()

    def _figures(self, handle: Any) -> Figures:
        total, used = self._memory(handle)
        activity = self._ask(lambda m: m.amdsmi_get_gpu_activity(handle)) or {}
        power = self._ask(lambda m: m.amdsmi_get_power_info(handle)) or {}
        cap = self._ask(lambda m: m.amdsmi_get_power_cap_info(handle)) or {}
        busy = number(activity.get("gfx_activity"))
        return Figures(
            memory_total_bytes=total,
            memory_used_bytes=used,
            utilization_ratio=busy / 100 if busy is not None and busy <= 100 else None,
            # MI300 and newer fill the first, older Instinct and Radeon the last; 7.0 added the one between
            power_watts=watts(power, "current_socket_power", "socket_power", "average_socket_power"),
            power_limit_watts=watts(cap, "power_cap") or watts(power, "power_limit"),
        )

    def _memory(self, handle: Any) -> tuple[int | None, int | None]:
        """(total, used) bytes: from the calls that count bytes, else from the one that counts MiB."""

        def bytes_of(function: str) -> float | None:
            return number(self._ask(lambda m: getattr(m, function)(handle, m.AmdSmiMemoryType.VRAM)))

        total, used = bytes_of("amdsmi_get_gpu_memory_total"), bytes_of("amdsmi_get_gpu_memory_usage")
        if not total or not used:
            usage = self._ask(lambda m: m.amdsmi_get_gpu_vram_usage(handle)) or {}
            total = total or (number(usage.get("vram_total")) or 0) * _MEBIBYTE
            used = used or (number(usage.get("vram_used")) or 0) * _MEBIBYTE
        if used and total and used > total:
            used = 0
        return int(total) or None, int(used) or None

    def _ask(self, call: Callable[[Any], Any]) -> Any:
        try:
            return call(self._module)
        except AttributeError:  # renamed or removed in this release
            return None
        except Exception as error:
            code = getattr(error, "err_code", None)
            if code not in _NORMAL_CODES:
                self._errors[_REASON_BY_CODE.get(code, FAILED) if isinstance(code, int) else FAILED] += 1
            return None


def number(value: object) -> float | None:
    """A value of the package as a number; None for ``N/A``, sentinels and negative numbers."""
    return None if value in _SENTINELS else ceilings.number(value, ceilings.BYTES)


def watts(values: Mapping[str, object], *names: str) -> float | None:
    """The first known value of ``names`` in watts (releases and hosts differ in watts and microwatts); 0 means
    unknown.
    """
    for name in names:
        value = number(values.get(name))
        if value:
            return value / 1e6 if value >= _MICROWATTS_FROM else value
    return None


def _import() -> Any:
    """The package; without its library it prints to standard output and raises ``KeyError``."""
    os.environ.setdefault("RSMI_MUTEX_THREAD_ONLY", "1")  # else a crashed user of /dev/shm/rocm_smi_* blocks init
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return importlib.import_module("amdsmi")
    except Exception as error:
        raise SmiError(f"import amdsmi: {_one_line(error)}") from error


def _check_release(module: Any) -> None:
    """Raise ``SmiError`` unless wrapper and library are of one release."""
    wrapper = tuple(int(part) for part in re.findall(r"\d+", str(module.__version__).split("+")[0])[:3])
    try:
        said = module.amdsmi_get_lib_version()
        library = tuple(int(said[part]) for part in ("year", "major", "minor", "release") if part in said)[:3]
    except Exception as error:
        raise SmiError(f"the library does not report its version: {_one_line(error)}") from error
    if wrapper and wrapper[0] < _FIRST_LIBRARY_MAJOR:
        fits = library[:2] in _LIBRARY_OF_ROCM.get(wrapper[:2], frozenset())
    else:
        fits = wrapper == library
    if not fits:
        raise SmiError(
            f"wrapper {'.'.join(map(str, wrapper))} does not belong to library {'.'.join(map(str, library))}"
        )


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
