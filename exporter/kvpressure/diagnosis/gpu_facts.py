"""GPU activity of one engine, by the best evidence available."""

from __future__ import annotations

from typing import Final

from kvpressure.model.signals import NO_ACTIVITY, PROFILING, ComputeSignals
from kvpressure.settings.thresholds import Thresholds

NO_GPU: Final = "no GPU mapped to this engine, or none readable"


class GpuFacts:
    """Starved, saturated, works (busy units), computes, low, idle: each true, false or ``None``; ``unseen``: no
    activity read; ``between``: it is unknown which of the pod's GPUs are this engine's.
    """

    __slots__ = ("between", "computes", "idle", "low", "saturated", "starved", "unseen", "works")

    def __init__(self, gpu: ComputeSignals, t: Thresholds) -> None:
        self.between = False
        self.unseen = gpu.activity_level == NO_ACTIVITY
        self.starved, self.saturated = _activity(gpu, t)
        self.works = _works(gpu, t)
        self.computes = _computes(gpu, t)
        used, low, high = gpu.gpu_utilization, gpu.gpu_utilization_low, gpu.gpu_utilization_high
        waiting = t["signature_utilization_ratio"]
        still = t["gpu_idle_ratio"]
        busy = t["compute_bound_utilization_ratio"]
        self.low = None if used is None else used < waiting
        self.idle = None if used is None else used <= still
        if gpu.gpus_shared and low is not None and high is not None:
            self.between = True
            self.low = _of_some(low < waiting, high < waiting)
            self.idle = _of_some(low <= still, high <= still)
            self.starved = _of_some(low < t["gpu_starved_ratio"], self.starved)
            self.saturated = _of_some(self.saturated or high >= busy, low >= busy)
        if gpu.gpus_of_others:  # this engine's activity is at most the GPU's, and may be 0
            self.starved, self.low, self.idle = self.starved or None, self.low or None, self.idle or None
            self.saturated, self.works = (False if said is False else None for said in (self.saturated, self.works))


def _of_some(any_gpu: bool | None, every_gpu: bool | None) -> bool | None:
    """A fact about one engine's GPUs where it is unknown which of the pod's these are."""
    if every_gpu:
        return True
    return None if any_gpu else any_gpu


def _at_least(value: float | None, level: float) -> bool:
    return value is not None and value >= level


def _activity(gpu: ComputeSignals, t: Thresholds) -> tuple[bool | None, bool | None]:
    """Starved and saturated: by profiling where available, else by all other evidence.

    Without profiling, only utilization (no kernel ran) proves a starved GPU: small models draw little power and do
    little work at their best, so high values disprove it and low ones mean nothing. Any one of them proves
    saturation; a small estimate alone does not disprove it.
    """
    if gpu.activity_level == PROFILING and gpu.tensor_activity is not None:
        busiest = max(gpu.tensor_activity, gpu.dram_activity or 0.0, gpu.sm_activity or 0.0)
        return (
            busiest < t["gpu_starved_ratio"],
            gpu.tensor_activity >= t["tensor_busy_ratio"] or _at_least(gpu.dram_activity, t["most_ratio"]),
        )
    used, power, work = gpu.gpu_utilization, gpu.power_ratio, gpu.estimated_peak_ratio
    busiest_gpu = _highest(gpu)
    starved = None if busiest_gpu is None else busiest_gpu < t["gpu_starved_ratio"]
    if used is None and (_at_least(power, t["power_starved_ratio"]) or _at_least(work, t["gpu_starved_ratio"])):
        starved = False
    saturated = None if used is None and power is None else False
    if (
        _at_least(used, t["compute_bound_utilization_ratio"])
        or _at_least(power, t["power_prefill_ratio"])
        or _at_least(work, t["most_ratio"])
    ):
        saturated = True
    return starved, saturated


def _works(gpu: ComputeSignals, t: Thresholds) -> bool | None:
    """Whether the GPU works hard: by busy units, power or vLLM's estimate. Utilization (a duty cycle) can only deny
    it.
    """
    if gpu.activity_level == PROFILING:
        parts = ((gpu.tensor_activity, "tensor_busy_ratio"), (gpu.dram_activity, "most_ratio"))
    else:
        parts = ((gpu.power_ratio, "power_prefill_ratio"), (gpu.estimated_peak_ratio, "most_ratio"))
    known = [value >= t[least] for value, least in parts if value is not None]
    return any(known) if known else _denied(gpu, min(t["tensor_busy_ratio"], t["most_ratio"]))


def _computes(gpu: ComputeSignals, t: Thresholds) -> bool | None:
    """Whether the GPU computes at its peak. Busy memory does not count: a larger batch reads the weights once for
    more requests.
    """
    if gpu.activity_level == PROFILING:
        return None if gpu.tensor_activity is None else gpu.tensor_activity >= t["tensor_busy_ratio"]
    if gpu.power_ratio is None:
        return _denied(gpu, t["tensor_busy_ratio"])
    return gpu.power_ratio >= t["power_prefill_ratio"]


def _denied(gpu: ComputeSignals, busy: float) -> bool | None:
    """False if kernels ran for too little of the time to keep any unit busy for the share ``busy`` of it, else
    unknown.
    """
    highest = _highest(gpu)
    return False if highest is not None and highest < busy else None


def _highest(gpu: ComputeSignals) -> float | None:
    return gpu.gpu_utilization if gpu.gpu_utilization_high is None else gpu.gpu_utilization_high
