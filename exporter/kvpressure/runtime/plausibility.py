"""Plausibility of values from drivers, cgroups, the Kubernetes API and the plugin, for all sources.

A value that is negative, not finite or above its ceiling becomes absent here, where every reading enters, and is
counted as ``impossible``; names are made printable.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final, TypeVar

from kvpressure.model import ceilings
from kvpressure.printable import visible
from kvpressure.sources.base import Reading

IMPOSSIBLE: Final = "impossible"

_Fields = tuple[tuple[str, float], ...]
_GPU: Final[_Fields] = (
    ("memory_total_bytes", ceilings.BYTES),
    ("memory_used_bytes", ceilings.BYTES),
    ("utilization_ratio", ceilings.ACTIVITY),
    ("sm_activity_ratio", ceilings.ACTIVITY),
    ("tensor_activity_ratio", ceilings.ACTIVITY),
    ("dram_activity_ratio", ceilings.ACTIVITY),
    ("power_watts", ceilings.LEVEL),
    ("power_limit_watts", ceilings.LEVEL),
    ("minor", ceilings.IDENTIFIER),
    ("gpu_instance_id", ceilings.IDENTIFIER),
    ("gpu_instance_start", ceilings.IDENTIFIER),
)
_CONTAINER: Final[_Fields] = (
    ("restarts", ceilings.COUNT),
    ("cpu_usage_seconds", ceilings.SECONDS),
    ("cpu_limit_cores", ceilings.LEVEL),
    ("cpu_periods", ceilings.COUNT),
    ("cpu_throttled_periods", ceilings.COUNT),
    ("cpu_pressure_some_ratio", ceilings.ACTIVITY),
    ("memory_working_set_bytes", ceilings.BYTES),
    ("memory_limit_bytes", ceilings.BYTES),
)
_TERMINATION: Final[_Fields] = (("finished_at", ceilings.MOMENT - 1), ("exit_code", ceilings.IDENTIFIER))
_PROCESS: Final[_Fields] = (("used_bytes", ceilings.BYTES),)
_ALLOCATOR: Final[_Fields] = (
    ("allocated_bytes", ceilings.BYTES),
    ("reserved_bytes", ceilings.BYTES),
    ("inactive_split_bytes", ceilings.BYTES),
)

T = TypeVar("T")


def believed(reading: Reading) -> Reading:
    """``reading`` without impossible values, whose number is added to its errors."""
    refused = _Refused()
    gpus = _each(reading.gpus, refused.gpu)
    containers = _each(reading.containers, refused.container)
    allocator = _each(reading.allocator, lambda one: refused.cleaned(one, _ALLOCATOR))
    if not refused.count and (gpus, containers, allocator) == (reading.gpus, reading.containers, reading.allocator):
        return reading
    errors = {**reading.errors, IMPOSSIBLE: reading.errors.get(IMPOSSIBLE, 0) + refused.count}
    return replace(
        reading,
        gpus=gpus,
        containers=containers,
        allocator=allocator,
        errors=errors if refused.count else reading.errors,
    )


def _each(items: tuple[T, ...] | None, clean: Any) -> tuple[T, ...] | None:
    return None if items is None else tuple(map(clean, items))


def _made_visible(item: Any, names: Iterable[str]) -> dict[str, Any]:
    """The texts of ``item`` that have control characters, with these as escapes."""
    texts = {name: getattr(item, name) for name in names}
    return {name: visible(text) for name, text in texts.items() if text is not None and visible(text) != text}


class _Refused:
    """Counts impossible values."""

    def __init__(self) -> None:
        self.count = 0

    def cleaned(self, item: T, fields: Iterable[tuple[str, float]], **more: Any) -> T:
        """``item`` without values of ``fields`` above their ceilings or below 0 (a signed one: below minus
        that); the same object if there are none.
        """
        for name, most in fields:
            value = getattr(item, name)
            if value is not None and not (-most if name == "exit_code" else 0) <= value <= most:  # NaN too
                more[name] = None
                self.count += 1
        return replace(item, **more) if more else item  # type: ignore[type-var]  # readings are dataclasses all

    def gpu(self, gpu: Any) -> Any:
        """``gpu`` without impossible values."""
        more = _made_visible(gpu, ("name", "driver"))
        processes = tuple(self.cleaned(process, _PROCESS) for process in gpu.processes)
        if processes != gpu.processes:
            more["processes"] = processes
        known = {xid: count for xid, count in gpu.xid_errors.items() if 0 <= count <= ceilings.COUNT}
        if len(known) < len(gpu.xid_errors):
            self.count += len(gpu.xid_errors) - len(known)
            more["xid_errors"] = known
        return self.cleaned(gpu, _GPU, **more)

    def container(self, container: Any) -> Any:
        """``container`` and its last termination without impossible values."""
        more: dict[str, Any] = {}
        ended = container.last_termination
        if ended is not None:
            known = self.cleaned(ended, _TERMINATION, **_made_visible(ended, ("reason",)))
            if known is not ended:
                more["last_termination"] = known
        return self.cleaned(container, _CONTAINER, **more)
