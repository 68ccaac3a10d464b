"""The driver's readings of the GPU under a simulated engine.

Utilization is the share of time with a resident kernel, so it stays high under KV pressure; DRAM against tensor
activity and power distinguish decode from prefill. Levels follow measurements of real GPUs: decode at a full cache
0.4-0.7 of the power limit with DRAM high and tensor low, prefill near the limit with tensor high, a starved or hung
engine low in all.
"""

from __future__ import annotations

from typing import Final

from kvpressure.model.readings import GpuReading
from lab.demo.activity import IDLE_WATTS, Totals
from lab.demo.model import GPU_MEMORY_BYTES, GPU_NAME, GPU_POWER_LIMIT_WATTS, OUTSIDE_VLLM_BYTES
from lab.demo.simulator import SimulatedEngine

_EMPTY_GPU_BYTES: Final = 530_000_000
_SM_WHILE_RESIDENT: Final = 0.9  # share of SMs with a warp while a kernel runs
_TENSOR_PER_FLOP: Final = 1.3  # tensor pipes are busy longer than peak rate needs for the same FLOPs
_MINIMUM_WINDOW: Final = 0.2  # seconds; NVML averages over 1/6 to 1 s


class SimulatedGpu:
    """One GPU. ``read`` returns averages since the last read, as a driver does."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.uuid = f"GPU-de300000-0000-4000-8000-{index:012d}"
        self._engine: SimulatedEngine | None = None
        self._time = 0.0
        self._totals = Totals()
        self._shares = Totals()

    def read(self, engine: SimulatedEngine | None, now: float) -> GpuReading:
        """The GPU at ``now`` under ``engine`` (``None`` = the process is gone)."""
        self._sample(engine, now)
        shares = self._shares
        used = _EMPTY_GPU_BYTES
        if engine is not None:
            used = round(engine.config.gpu_memory_utilization * GPU_MEMORY_BYTES) + OUTSIDE_VLLM_BYTES
        idle = max(0.0, 1 - shares.step_seconds)
        return GpuReading(
            uuid=self.uuid,
            index=self.index,
            vendor="nvidia",
            name=GPU_NAME,
            driver="580.95.05",
            memory_total_bytes=GPU_MEMORY_BYTES,
            memory_used_bytes=used,
            utilization_ratio=_share(shares.kernel_seconds),
            sm_activity_ratio=_share(shares.kernel_seconds * _SM_WHILE_RESIDENT),
            tensor_activity_ratio=_share(shares.tensor_seconds * _TENSOR_PER_FLOP),
            dram_activity_ratio=_share(shares.dram_seconds),
            power_watts=min(GPU_POWER_LIMIT_WATTS, shares.joules + idle * IDLE_WATTS),
            power_limit_watts=GPU_POWER_LIMIT_WATTS,
        )

    def _sample(self, engine: SimulatedEngine | None, now: float) -> None:
        """Update the averages; within the driver's sampling time, the old ones stay."""
        elapsed = now - self._time
        if engine is None:
            self._engine, self._totals, self._shares, self._time = None, Totals(), Totals(), now
            return
        if engine is not self._engine:
            self._engine, self._totals = engine, Totals()
        elif elapsed < _MINIMUM_WINDOW:
            return
        totals = engine.work_until(now)
        self._shares = totals.since(self._totals).divided(elapsed) if self._time else Totals()
        self._totals, self._time = totals, now


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))
