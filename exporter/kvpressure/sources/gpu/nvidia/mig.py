"""MIG instances of one GPU.

Memory and processes are per instance; utilization, power and clocks exist only for the whole GPU. Handles end with
their instance, which may be destroyed and recreated at any time, so instances are listed again at every slow reading,
and at once when one stops answering.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pynvml

from kvpressure.model.readings import GpuProcess, GpuReading
from kvpressure.sources.gpu.nvidia import codes, fields
from kvpressure.sources.gpu.nvidia.gpm import Activity
from kvpressure.sources.gpu.nvidia.query import DeviceQuery, Queries

MOST_INSTANCES: Final = 64

ReadActivity = Callable[[DeviceQuery, str, int], Activity]
"""Reads GPM of the device named by a UUID; the number is its GPU instance."""


@dataclass
class _Instance:
    identity: GpuReading
    handle: Any
    had_memory: bool = False
    processes: tuple[GpuProcess, ...] = field(default=())


class Mig:
    """The instances of one GPU that has MIG enabled."""

    def __init__(self, queries: Queries) -> None:
        self._queries = queries
        self._instances: dict[str, _Instance] = {}
        self._slots: dict[int, _Instance] = {}  # the same, by NVML's number

    @property
    def identities(self) -> tuple[GpuReading, ...]:
        """The instances found last."""
        return tuple(instance.identity for instance in self._instances.values())

    def read(self, parent: GpuReading, handle: Any, slow: bool, activity: ReadActivity | None) -> list[GpuReading]:
        """Readings of all instances. ``slow``: list the instances again, and read rarely read values."""
        if slow:
            self._walk(parent, handle)
        readings = [self._guarded(instance, slow, activity) for instance in self._instances.values()]
        if not slow and any(
            reading.memory_total_bytes is None and self._instances[reading.uuid].had_memory for reading in readings
        ):
            return self.read(parent, handle, True, activity)
        for reading in readings:
            self._instances[reading.uuid].had_memory = reading.memory_total_bytes is not None
        return readings

    def _walk(self, parent: GpuReading, handle: Any) -> None:
        ask = DeviceQuery(self._queries, parent.uuid)
        count = ask("mig_count", pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
        slots: dict[int, _Instance] = {}
        for slot in range(min(count, MOST_INSTANCES)):
            instance = self._slots.get(slot)  # stays if the slot cannot be examined
            with self._queries.isolated(f"GPU {parent.uuid}, MIG slot {slot}"):
                instance = self._examine(slot, parent, handle, instance)
            if instance is not None:
                slots[slot] = instance
        found = {instance.identity.uuid: instance for instance in slots.values()}
        for uuid in self._instances.keys() - found.keys():
            self._queries.forget(uuid)
        self._instances, self._slots = found, slots

    def _examine(self, slot: int, parent: GpuReading, handle: Any, before: _Instance | None) -> _Instance | None:
        """The instance in a slot; None for an empty one, of which there may be some in the middle, too."""
        found = self._queries.ask(
            parent.uuid, f"mig_handle_{slot}", pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot
        )
        if found.value is None:
            return None if found.reason in codes.NORMAL else before
        uuid = self._queries.ask(parent.uuid, f"mig_uuid_{slot}", pynvml.nvmlDeviceGetUUID, found.value)
        if not uuid.value:
            return None if uuid.reason in codes.NORMAL else before
        return self._known(uuid.value, parent, handle, found.value)

    def _known(self, uuid: str, parent: GpuReading, whole: Any, handle: Any) -> _Instance:
        instance = self._instances.get(uuid)
        if instance is None:
            ask = DeviceQuery(self._queries, uuid)
            number = ask("gpu_instance", pynvml.nvmlDeviceGetGpuInstanceId, handle)
            identity = replace(
                parent,
                uuid=uuid,
                parent_uuid=parent.uuid,
                name=ask("name", pynvml.nvmlDeviceGetName, handle) or parent.name,
                gpu_instance_id=number,
                gpu_instance_start=None if number is None else ask("placement", _first_slice, whole, number),
            )
            return _Instance(identity, handle)
        instance.handle = handle
        instance.identity = replace(instance.identity, index=parent.index, driver=parent.driver)
        return instance

    def _guarded(self, instance: _Instance, slow: bool, activity: ReadActivity | None) -> GpuReading:
        with self._queries.isolated(f"MIG instance {instance.identity.uuid}"):
            return self._read_one(instance, slow, activity)
        return replace(instance.identity, error=codes.INTERNAL)

    def _read_one(self, instance: _Instance, slow: bool, activity: ReadActivity | None) -> GpuReading:
        ask = DeviceQuery(self._queries, instance.identity.uuid)
        total, used = fields.memory(ask, instance.handle)
        if slow:
            instance.processes = fields.processes(ask, instance.handle)
        active = Activity()
        if activity is not None and instance.identity.gpu_instance_id is not None:
            active = activity(ask, instance.identity.uuid, instance.identity.gpu_instance_id)
        error = ask.why_silent()
        if error is not None:
            return replace(instance.identity, error=error)
        return replace(
            instance.identity,
            memory_total_bytes=total,
            memory_used_bytes=used,
            sm_activity_ratio=active.sm,
            tensor_activity_ratio=active.tensor,
            dram_activity_ratio=active.dram,
            processes=instance.processes,
        )


def _first_slice(gpu: Any, instance: int) -> int:
    placement: int = pynvml.nvmlGpuInstanceGetInfo(pynvml.nvmlDeviceGetGpuInstanceById(gpu, instance)).placement.start
    return placement
