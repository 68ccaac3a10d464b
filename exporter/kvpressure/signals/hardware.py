"""What GPU and host do: activity and the memory-high-compute-low score, peak rates by GPU model, CPU and container;
and what stands around an engine.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Final

from kvpressure.engines.base import Features, Tier
from kvpressure.model import ceilings
from kvpressure.model import readings as r
from kvpressure.model.arguments import EngineArgs
from kvpressure.model.frozen import frozen
from kvpressure.model.readings import AllocatorReading, ContainerReading, GpuReading
from kvpressure.model.signals import (
    ESTIMATED,
    NO_ACTIVITY,
    POWER,
    PROFILING,
    UTILIZATION,
    ComputeSignals,
    HostSignals,
    KvSignals,
    LoadSignals,
)
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.window import (
    JITTER_SECONDS,
    MINUTE,
    QUARTER_MINUTE,
    STEP_BACK_SECONDS,
    TWICE,
    EngineWindow,
    Items,
)


@frozen
class GpuContext:
    """The engine's GPUs. ``others``: other pods use some of them too (time slicing, MPS). ``own_bytes``: memory of
    the pod's processes on each of ``windows``, in bytes; ``processes``: the same on every GPU that has some.
    ``faults``: recent hardware faults, None = no GPU is known; ``kernel_faults``: recent errors caused by a program's
    kernel.
    """

    windows: Sequence[GpuWindow] = ()
    others: bool = False
    own_bytes: Sequence[int | None] = ()
    processes: Sequence[int] = ()
    faults: int | None = None
    kernel_faults: int = 0

    @property
    def readings(self) -> list[GpuReading]:
        """The newest reading of each."""
        return [window.last for window in self.windows if window.last is not None]


@frozen
class LogContext:
    """From the container's log: ``facts`` of the start, counts of recent ``events``, and torch's numbers from the
    last out-of-memory error in bytes (``oom``). ``known``: a log was read. ``told``: whether the last
    request of the kind told the server to stand still, ``None`` = there was none, and when that was.
    """

    facts: Mapping[str, float] = field(default_factory=dict)
    events: Mapping[str, int] = field(default_factory=dict)
    oom: Mapping[str, float] = field(default_factory=dict)
    known: bool = False
    told: tuple[bool | None, float] = None, 0.0


@frozen
class LimitContext:
    """Limits in force, the arguments they come from, and the server features and the KV tier these switch on."""

    max_num_seqs: float | None = None
    max_num_seqs_source: str | None = None
    max_num_batched_tokens: float | None = None
    max_model_len: float | None = None
    args: EngineArgs = field(default_factory=EngineArgs)
    features: Features = field(default_factory=Features)
    tier: Tier = Tier()


@frozen
class EngineContext:
    """Everything around one engine at ``now``."""

    now: float
    gpus: GpuContext = GpuContext()
    log: LogContext = LogContext()
    limits: LimitContext = LimitContext()
    container: ContainerWindow | None = None
    allocator: Sequence[AllocatorReading] = ()


class GpuWindow:
    """The last 15 s of one GPU."""

    __slots__ = ("_readings", "last", "last_t")

    def __init__(self) -> None:
        self._readings: Items[GpuReading] = Items()
        self.last: GpuReading | None = None
        self.last_t = float("-inf")

    def observe(self, t: float, reading: GpuReading) -> None:
        """Take a reading. One that is not newer than all before is ignored, unless the clock stepped back far."""
        if t < self.last_t - STEP_BACK_SECONDS:
            self._readings = Items()
        elif t <= self.last_t:
            return
        self.last, self.last_t = reading, t
        self._readings.append(t, reading)
        self._readings.drop_before(t - QUARTER_MINUTE - JITTER_SECONDS)

    def mean(self, value: Callable[[GpuReading], float | None]) -> float | None:
        """Mean of a field over the last 15 s; ``None`` without a reading of it."""
        found = [v for reading in self._readings.items if (v := value(reading)) is not None]
        return sum(found) / len(found) if found else None


def _power_ratio(gpu: GpuReading) -> float | None:
    if gpu.power_watts is None or not gpu.power_limit_watts:
        return None
    ratio = gpu.power_watts / gpu.power_limit_watts
    return ratio if ceilings.is_finite(ratio) else None


def _mean_over(gpus: Sequence[GpuWindow], value: Callable[[GpuReading], float | None]) -> float | None:
    means = [mean for gpu in gpus if (mean := gpu.mean(value)) is not None]
    return sum(means) / len(means) if means else None


def _peak_ratio(gpus: Sequence[GpuWindow], flops: float | None, size: float | None) -> float | None:
    """Estimated work per GPU divided by the data sheet's peak, 0 to 1: the larger share of FLOPs and bytes. ``None``
    without an estimate or with a GPU of unknown peak.
    """
    peaks = [peak(gpu.last) if gpu.last is not None else None for gpu in gpus]
    if not flops or not size or not peaks:
        return None
    ratios = [max(flops / found.flops, size / found.bytes) for found in peaks if found is not None]
    return min(1.0, min(ratios)) if len(ratios) == len(peaks) else None


def ramp(value: float, low: float, high: float) -> float:
    """0 at ``low`` and below, 1 at ``high`` and above, linear between."""
    if high <= low:
        return 1.0 if value >= high else 0.0
    return min(1.0, max(0.0, (value - low) / (high - low)))


def compute_low(level: str, activity: ComputeSignals, t: Thresholds) -> float | None:
    """How low compute is, 0 to 1, by the given level of evidence; ``None`` where that level has no reading.

    * profiling: 1 - tensor activity / DRAM activity, weighted by how busy DRAM is (if both are low, the host is the
      cause);
    * power: decode draws 0.4-0.7 of the limit, prefill 0.9-1.0, a starved GPU less than 0.35;
    * estimated_flops: FLOPs per byte of vLLM's own estimate; decode is far below the roofline's knee. 0 when both are
      a small share of the GPU's peak (the host again);
    * utilization_weak: utilization around the documented 0.60. Weak, because it is a duty cycle.
    """
    if level == PROFILING and activity.tensor_activity is not None and activity.dram_activity is not None:
        busy = ramp(activity.dram_activity, t["most_ratio"] / TWICE, t["most_ratio"])
        return busy * (1.0 - min(1.0, activity.tensor_activity / activity.dram_activity)) if busy > 0 else 0.0
    if level == POWER and activity.power_ratio is not None:
        if activity.power_ratio < t["power_starved_ratio"]:
            return 0.0
        return 1.0 - ramp(activity.power_ratio, t["power_decode_ratio"], t["power_prefill_ratio"])
    if level == ESTIMATED and activity.estimated_flops_per_second and activity.estimated_bytes_per_second:
        if activity.estimated_peak_ratio is not None and activity.estimated_peak_ratio < t["gpu_starved_ratio"]:
            return 0.0
        intensity = activity.estimated_flops_per_second / activity.estimated_bytes_per_second
        return 1.0 - ramp(intensity, t["roofline_decode_flops_per_byte"], t["roofline_knee_flops_per_byte"])
    if level == UTILIZATION and activity.gpu_utilization is not None:
        return 1.0 - ramp(
            activity.gpu_utilization, t["signature_utilization_ratio"], t["compute_bound_utilization_ratio"]
        )
    return None


def _level(activity: ComputeSignals) -> str:
    if activity.tensor_activity is not None and activity.dram_activity is not None:
        return PROFILING
    if activity.power_ratio is not None:
        return POWER
    if activity.estimated_flops_per_second and activity.estimated_bytes_per_second:
        return ESTIMATED
    return UTILIZATION if activity.gpu_utilization is not None else NO_ACTIVITY


def working(gpus: Sequence[GpuWindow], t: Thresholds) -> Sequence[GpuWindow]:
    """The GPUs above idle utilization, or all if none is: a pod may hold more than its engine uses, and data-parallel
    ranks work by turns.
    """
    return [gpu for gpu in gpus if (used := gpu.mean(_utilization)) is None or used > t["gpu_idle_ratio"]] or gpus


def _utilization(gpu: GpuReading) -> float | None:
    return gpu.utilization_ratio


@frozen
class SharedGpus:
    """``within_pod``: some of the GPUs may not be this engine's. ``with_others``: other pods use some of them too."""

    within_pod: bool = False
    with_others: bool = False


@frozen
class Pressing:
    """Inputs of the score beside GPU activity: KV cache, load, and the largest share of required memory of one GPU."""

    kv: KvSignals
    load: LoadSignals
    memory_demand: float | None = None


def compute_signals(
    window: EngineWindow,
    gpus: Sequence[GpuWindow],
    shared: SharedGpus,
    pressing: Pressing,
    t: Thresholds,
) -> ComputeSignals:
    """GPU activity, the three factors of the score and their product; the score is absent where a factor is unknown."""
    utilizations = [mean for gpu in gpus if (mean := gpu.mean(_utilization)) is not None]
    gpus = working(gpus, t)
    read = window.rate(r.ESTIMATED_READ_BYTES, QUARTER_MINUTE)
    written = window.rate(r.ESTIMATED_WRITE_BYTES, QUARTER_MINUTE)
    flops = window.rate(r.ESTIMATED_FLOPS, QUARTER_MINUTE) or None
    moved = None if read is None else (read + (written or 0.0)) or None
    activity = ComputeSignals(
        gpu_utilization=_mean_over(gpus, _utilization),
        gpus_shared=shared.within_pod,
        gpus_of_others=shared.with_others,
        gpu_utilization_low=min(utilizations, default=None),
        gpu_utilization_high=max(utilizations, default=None),
        sm_activity=_mean_over(gpus, lambda g: g.sm_activity_ratio),
        tensor_activity=_mean_over(gpus, lambda g: g.tensor_activity_ratio),
        dram_activity=_mean_over(gpus, lambda g: g.dram_activity_ratio),
        power_ratio=_mean_over(gpus, _power_ratio),
        estimated_flops_per_second=flops,
        estimated_bytes_per_second=moved,
        estimated_peak_ratio=_peak_ratio(gpus, flops, moved),
    )
    level = _level(activity)
    low = compute_low(level, activity, t)
    memory = memory_factor(pressing.kv, pressing.memory_demand, t)
    wanted = demand_factor(pressing.kv, pressing.load)
    score = None if low is None or memory is None or wanted is None else low * memory * wanted
    return replace(
        activity,
        activity_level=level,
        score_compute_factor=low,
        memory_high_compute_low_score=score,
    )


def memory_factor(kv: KvSignals, demand: float | None, t: Thresholds) -> float | None:
    """Memory pressure, 0 to 1: the larger of peak KV usage and required memory, between the documented 0.85 and 0.90.
    Device memory in use never counts, because an engine that preallocates keeps it high.
    """
    levels = [level for level in (kv.kv_used_ratio_max, demand) if level is not None]
    if not levels:
        return None
    return max(ramp(level, t["signature_memory_ratio"], t["signature_memory_full_ratio"]) for level in levels)


def demand_factor(kv: KvSignals, load: LoadSignals) -> float | None:
    """Demand, 0 to 1: 0 with nothing in flight, 1 with a queue or preemptions, else requests in flight divided by the
    limit.
    """
    if load.in_flight is None:
        return None
    if load.in_flight <= 0:
        return 0.0
    if (load.waiting or 0.0) > 0 or (kv.preemption_rate or 0.0) > 0:
        return 1.0
    return None if load.concurrency_ratio is None else min(1.0, load.concurrency_ratio)


@frozen
class Peak:
    """Peaks from the vendor's data sheet: dense 16-bit FLOP/s and bytes/s of device memory."""

    flops: float
    bytes: float


#: The first pattern found in the name holds. Dense BF16 without sparsity; of a GPU with two dies, one die, which is
#: what drivers show as a device. Where a name covers several products the strongest stands here, so that a share of the
#: peak is rather too small than too large.
_PEAKS: Final[tuple[tuple[re.Pattern[str], Peak], ...]] = tuple(
    (re.compile(name), Peak(flops, size))
    for name, flops, size in (
        (r"\bG?B200\b", 2.5e15, 8.0e12),
        (r"\bH200\b|\bGH200\b", 0.99e15, 4.9e12),
        (r"\bH100 NVL\b", 0.835e15, 3.9e12),
        (r"\bH100 PCIe\b", 0.756e15, 2.0e12),
        (r"\bH100\b", 0.99e15, 3.35e12),
        (r"\bA100\b", 0.312e15, 2.04e12),
        (r"\bL40S?\b", 0.362e15, 0.864e12),
        (r"\bL4\b", 0.121e15, 0.3e12),
        (r"\bA10\b", 0.125e15, 0.6e12),
        (r"\bMI325X\b", 1.307e15, 6.0e12),
        (r"\bMI300X\b", 1.307e15, 5.3e12),
        (r"\bMI250X?\b", 0.192e15, 1.6e12),
        (r"\bMI210\b", 0.181e15, 1.6e12),
    )
)


def peak(gpu: GpuReading) -> Peak | None:
    """The GPU's peaks; None for unknown GPUs and for instances and partitions, which have only a share of a GPU."""
    if gpu.name is None or gpu.parent_uuid is not None:
        return None
    return next((found for pattern, found in _PEAKS if pattern.search(gpu.name)), None)


MAX_RESTARTS_KEPT: Final = 64
MILLICORE: Final = 0.001  # Kubernetes knows no smaller CPU limit


class ContainerWindow:
    """The last minute of one container."""

    __slots__ = ("_readings", "_restarts", "first_t", "last", "last_t")

    def __init__(self) -> None:
        self._readings: Items[tuple[float, ContainerReading]] = Items()
        self.last: ContainerReading | None = None
        self.first_t = self.last_t = float("-inf")
        self._restarts: deque[float] = deque(maxlen=MAX_RESTARTS_KEPT)

    def observe(self, t: float, reading: ContainerReading) -> None:
        """Take a reading. One that is not newer than all before is ignored, unless the clock stepped back far."""
        if t < self.last_t - STEP_BACK_SECONDS:
            self._readings = Items()
            self._restarts.clear()
        elif t <= self.last_t:
            return
        if t < self.last_t or self.last is None:
            self.first_t = t
        before, self.last, self.last_t = self.last, reading, t
        self._readings.drop_before(t - MINUTE - JITTER_SECONDS)
        if reading == before:
            return  # the same one, held until its source reads again: no second point of anything
        if before is not None and before.restarts is not None and reading.restarts is not None:
            for _ in range(min(MAX_RESTARTS_KEPT, max(0, reading.restarts - before.restarts))):
                self._restarts.append(t)
        self._readings.append(t, (t, reading))

    def restarts_since(self, start: float) -> int:
        """Restarts seen since ``start`` (Unix seconds)."""
        return sum(1 for t in self._restarts if t >= start)

    def cpu_used_ratio(self) -> float | None:
        """CPU time per second over the last minute, divided by the limit; ``None`` without a limit or a second
        reading.
        """
        pair = self._pair("cpu_usage_seconds")
        limit = self.last.cpu_limit_cores if self.last else None
        if pair is None or limit is None or limit < MILLICORE:
            return None
        (begin, first), (end, last) = pair
        used = (last.cpu_usage_seconds or 0.0) - (first.cpu_usage_seconds or 0.0)
        return used / (end - begin) / limit if used >= 0 else None

    def throttled_ratio(self) -> float | None:
        """Share of CFS periods throttled over the last minute; ``None`` without elapsed periods."""
        pair = self._pair("cpu_periods")
        if pair is None:
            return None
        (_, first), (_, last) = pair
        periods = (last.cpu_periods or 0) - (first.cpu_periods or 0)
        throttled = (last.cpu_throttled_periods or 0) - (first.cpu_throttled_periods or 0)
        return min(1.0, throttled / periods) if periods > 0 and throttled >= 0 else None

    def memory_used_ratio(self) -> float | None:
        """Working set divided by the memory limit; ``None`` without either."""
        reading = self.last
        if reading is None or reading.memory_working_set_bytes is None or not reading.memory_limit_bytes:
            return None
        return reading.memory_working_set_bytes / reading.memory_limit_bytes

    def _pair(self, name: str) -> tuple[tuple[float, ContainerReading], tuple[float, ContainerReading]] | None:
        entries = self._readings.items
        first = next((entry for entry in entries if getattr(entry[1], name) is not None), None)
        last = next((entry for entry in reversed(entries) if getattr(entry[1], name) is not None), None)
        return None if first is None or last is None or first is last else (first, last)


def host_signals(window: EngineWindow, container: ContainerWindow | None, now: float, t: Thresholds) -> HostSignals:
    """CPU, memory and restarts of the engine's container; ``now`` in Unix seconds."""
    api_cpu = None
    if (rise := window.rise(MINUTE, lambda sample: sample.page.get(r.PROCESS_CPU_SECONDS))) is not None:
        api_cpu = max(0.0, rise[0]) / rise[1]
    if container is None or container.last is None:
        return HostSignals(api_cpu_cores=api_cpu)
    ended = container.last.last_termination
    ago = None if ended is None or ended.finished_at is None else abs(now - ended.finished_at)
    recent, all_known = _restarts(container, ago, now, t["crash_loop_window_seconds"])
    return HostSignals(
        api_cpu_cores=api_cpu,
        cpu_used_ratio=container.cpu_used_ratio(),
        cpu_throttled_ratio=container.throttled_ratio(),
        cpu_pressure_ratio=container.last.cpu_pressure_some_ratio,
        memory_used_ratio=container.memory_used_ratio(),
        restarts=None if container.last.restarts is None else float(container.last.restarts),
        restarts_recent=recent,
        restarts_all_known=all_known,
        terminated_seconds_ago=ago,
        last_termination_reason=ended.reason if ended else None,
        last_exit_code=None if ended is None or ended.exit_code is None else float(ended.exit_code),
    )


def _restarts(
    container: ContainerWindow, ended_ago: float | None, now: float, window: float
) -> tuple[float | None, bool]:
    """Restarts in the last ``window`` seconds, and whether that is all of them. From before the first reading only
    the last termination is known: if it is older than the window there were none since, if younger at least one.
    """
    total = container.last.restarts if container.last else None
    if total is None:
        return None, False
    seen = container.restarts_since(now - window)
    if total == 0 or now - container.first_t >= window or (ended_ago is not None and ended_ago > window):
        return float(seen), True
    least = max(seen, 0 if ended_ago is None else 1)
    return float(least) if least else None, False
