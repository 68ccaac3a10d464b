"""GPU memory: use, required memory, components, growth while idle, and fragmentation by scope."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from kvpressure.model.frozen import frozen
from kvpressure.model.readings import AllocatorReading, GpuReading
from kvpressure.model.signals import KvSignals, MemorySignals
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.engine_context import EngineContext
from kvpressure.signals.window import HOUR, slope

IDLE_STEP_SECONDS: Final = 30.0
IDLE_POINTS: Final = 240
COMPONENT_EVENTS: Final = (
    ("weights", "weights_bytes"),
    ("graphs", "graphs_bytes"),
    ("activations", "activations_bytes"),
)


class DeviceMemory:
    """Follows the device memory of one engine while it is idle."""

    __slots__ = ("_idle", "_thresholds")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._idle: deque[tuple[float, float]] = deque(maxlen=IDLE_POINTS)

    def observe(self, t: float, used: float | None, idle: bool) -> None:
        """Take the used bytes; work ends the idle period."""
        if used is None:
            return
        if not idle:
            self._idle.clear()
        elif not self._idle or t - self._idle[-1][0] >= IDLE_STEP_SECONDS:
            self._idle.append((t, used))

    def forget(self) -> None:
        """Begin anew: the process or the set of counted bytes changed."""
        self._idle.clear()

    def idle_growth_per_hour(self) -> float | None:
        """Bytes per hour gained in the present idle period; ``None`` until it is long enough."""
        idle, t = self._idle, self._thresholds
        if len(idle) < t["trend_min_samples"] or idle[-1][0] - idle[0][0] < t["leak_min_idle_seconds"]:
            return None
        rise = slope(list(idle))
        return None if rise is None else rise * HOUR


@frozen
class Held:
    """Bytes in use on one GPU, and its total."""

    bytes: int
    total: int | None


def held(gpus: Sequence[GpuReading], own: Sequence[int | None] | None) -> list[Held]:
    """Bytes held on each GPU: all in use, or only ``own`` (the pod's processes) where other pods share the GPUs. GPUs
    where the driver reports neither are left out.
    """
    used = [gpu.memory_used_bytes for gpu in gpus] if own is None else own
    return [Held(size, gpu.memory_total_bytes) for size, gpu in zip(used, gpus, strict=False) if size is not None]


def demand_ratio(gpu: GpuReading, empty_pool_bytes: Sequence[float | None]) -> float | None:
    """Required share of device memory: used minus the empty parts of the KV pools on it. ``empty_pool_bytes`` has one
    entry per engine on the GPU; ``None`` if one of them is ``None``. Without an engine, all used memory is required.
    """
    if gpu.memory_used_bytes is None or not gpu.memory_total_bytes:
        return None
    known = [value for value in empty_pool_bytes if value is not None]
    if len(known) < len(empty_pool_bytes):
        return None
    return max(0.0, gpu.memory_used_bytes - sum(known)) / gpu.memory_total_bytes


def compute(
    kv: KvSignals,
    context: EngineContext,
    device: DeviceMemory,
    on_gpus: Sequence[Held] = (),
    *,
    demand: float | None = None,
    running: float | None = None,
    block_size: float | None = None,
) -> MemorySignals:
    """Memory of one engine in bytes; pool and components are per GPU. ``on_gpus``: what its GPUs hold, without other
    pods.
    """
    facts, allocator = context.log.facts, context.allocator
    ratios = [ratio for gpu in context.gpus.readings if (ratio := gpu.memory_used_ratio) is not None]
    most = max((gpu.bytes for gpu in on_gpus), default=None)
    pool = facts.get("pool_bytes")
    pool_used = None if pool is None or kv.kv_used_ratio is None else pool * kv.kv_used_ratio
    waste = None
    if pool and kv.kv_capacity_tokens and block_size and running is not None:
        waste = running * (block_size - 1) / 2 * pool / kv.kv_capacity_tokens
    worst = max(
        (a for a in allocator if a.reserved_bytes is not None and a.allocated_bytes is not None),
        key=lambda a: (a.reserved_bytes or 0) - (a.allocated_bytes or 0),
        default=None,
    )
    return MemorySignals(
        device_used_ratio=max(ratios, default=None),
        device_demand_ratio=demand,
        own_used_ratio=max((gpu.bytes / gpu.total for gpu in on_gpus if gpu.total), default=None),
        kv_pool_bytes=pool,
        kv_pool_used_bytes=pool_used,
        kv_block_waste_bytes=waste,
        allocator_reserved_bytes=worst.reserved_bytes if worst else None,
        allocator_allocated_bytes=worst.allocated_bytes if worst else None,
        allocator_inactive_split_bytes=worst.inactive_split_bytes if worst else None,
        allocator_failures=_failures(allocator),
        components=components(facts, outside_torch(context.gpus.processes, allocator), most),
        idle_growth_bytes_per_hour=device.idle_growth_per_hour(),
    )


def _failures(allocator: Sequence[AllocatorReading]) -> Mapping[str, float]:
    """Failed allocations of all ranks, by kind, where the plugin counts them."""
    counted = {"retry": [a.alloc_retries for a in allocator], "oom": [a.ooms for a in allocator]}
    known = {kind: [count for count in counts if count is not None] for kind, counts in counted.items()}
    return {kind: float(sum(counts)) for kind, counts in known.items() if counts}


def outside_torch(processes: Sequence[int], allocator: Sequence[AllocatorReading]) -> float | None:
    """Bytes that a worker holds outside torch's allocator (driver context, NCCL, libraries): the mean over GPUs with
    one worker each. ``None`` unless the driver reports memory per process and the plugin runs in every worker.
    """
    reserved = [rank.reserved_bytes for rank in allocator if rank.reserved_bytes is not None]
    if not processes or not len(processes) == len(allocator) == len(reserved):
        return None
    held = sum(processes) - sum(reserved)
    return held / len(processes) if held >= 0 else None


def components(facts: Mapping[str, float], context: float | None, used: float | None) -> Mapping[str, float]:
    """Device memory in bytes by component, as far as start-up lines, driver and plugin report it; ``other`` only when
    weights and pool are known.
    """
    found = {name: facts[key] for name, key in COMPONENT_EVENTS if key in facts}
    if "pool_bytes" in facts:
        found["kv_pool"] = facts["pool_bytes"]
    if context is not None:
        found["context"] = context
    if used is not None and {"weights", "kv_pool"} <= set(found):
        resident = sum(value for name, value in found.items() if name != "activations")
        if used >= resident:
            found["other"] = used - resident
    return found
