"""What the GPUs of this node answer, as a fixture for the stub driver of the tests (``tests/sources/gpu/nvml_stub``).

Fields are those of the stub's ``World``, ``Gpu`` and ``Mig``; None = not supported. UUIDs, bus addresses and pids are
left out or counted through, so that a fixture reports nothing about whose GPU it was. ``python -m lab.gpu.inventory``
prints it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import pynvml

T = TypeVar("T")

NOT_SUPPORTED: Final = 3
MEMORY: Final = ("memory_total", "memory_free")
GPM_PAUSE_SECONDS: Final = 0.5
GPM: Final = {
    "sm": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "tensor": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "dram": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
}


class Answers:
    """Asks one device; return codes other than "not supported" are kept by the function's name in C."""

    def __init__(self) -> None:
        self.codes: dict[str, int] = {}

    def __call__(self, symbol: str, function: Callable[..., T], *arguments: Any) -> T | None:
        """The answer, or None."""
        try:
            return function(*arguments)
        except pynvml.NVMLError as error:
            if error.value != NOT_SUPPORTED:
                self.codes[symbol] = error.value
            return None


def world() -> dict[str, Any]:
    """All GPUs."""
    pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return {"driver_version": pynvml.nvmlSystemGetDriverVersion(), "gpus": [gpu(handle) for handle in handles]}
    finally:
        pynvml.nvmlShutdown()


def gpu(handle: Any) -> dict[str, Any]:
    """One GPU and its instances."""
    ask = Answers()
    rates = ask("nvmlDeviceGetUtilizationRates", pynvml.nvmlDeviceGetUtilizationRates, handle)
    mode = ask("nvmlDeviceGetMigMode", pynvml.nvmlDeviceGetMigMode, handle)
    support = ask("nvmlGpmQueryDeviceSupport", pynvml.nvmlGpmQueryDeviceSupport, handle)
    found = {
        "name": ask("nvmlDeviceGetName", pynvml.nvmlDeviceGetName, handle),
        **_memory(ask, handle),
        "utilization": None if rates is None else int(rates.gpu),
        "memory_utilization": None if rates is None else int(rates.memory),
        "power_mw": ask("nvmlDeviceGetPowerUsage", pynvml.nvmlDeviceGetPowerUsage, handle),
        "power_limit_mw": ask("nvmlDeviceGetEnforcedPowerLimit", pynvml.nvmlDeviceGetEnforcedPowerLimit, handle),
        "clocks_reasons": ask(
            "nvmlDeviceGetCurrentClocksEventReasons", pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle
        ),
        **_processes(ask, handle),
        "mig": None if mode is None else int(mode[0]),
        "gpm": None if support is None else int(support.isSupportedDevice),
        "event_types": ask("nvmlDeviceGetSupportedEventTypes", pynvml.nvmlDeviceGetSupportedEventTypes, handle),
    }
    if found["mig"]:
        found["max_mig"] = ask("nvmlDeviceGetMaxMigDeviceCount", pynvml.nvmlDeviceGetMaxMigDeviceCount, handle)
        found["migs"] = [_instance(ask, handle, slot, bool(found["gpm"])) for slot in range(found["max_mig"] or 0)]
    elif found["gpm"]:
        found |= _activity(ask, "nvmlGpmSampleGet", lambda sample: pynvml.nvmlGpmSampleGet(handle, sample))
    return {**found, "codes": ask.codes}


def _instance(of: Answers, handle: Any, slot: int, gpm: bool) -> dict[str, Any] | None:
    instance = of("nvmlDeviceGetMigDeviceHandleByIndex", pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, slot)
    if instance is None:
        of.codes.pop("nvmlDeviceGetMigDeviceHandleByIndex", None)  # an empty slot; the stub reports it by itself
        return None
    ask = Answers()
    number = ask("nvmlDeviceGetGpuInstanceId", pynvml.nvmlDeviceGetGpuInstanceId, instance)
    found = {
        "uuid": f"MIG-{slot:08x}-0000-4000-8000-000000000000",
        "name": ask("nvmlDeviceGetName", pynvml.nvmlDeviceGetName, instance),
        "gi": number,
        **_memory(ask, instance),
        "processes": _processes(ask, instance)["processes"],
    }
    if gpm and number is not None:
        found |= _activity(
            ask, "nvmlGpmMigSampleGet", lambda sample: pynvml.nvmlGpmMigSampleGet(handle, number, sample)
        )
    return {**found, "codes": ask.codes}


def _memory(ask: Answers, handle: Any) -> dict[str, Any]:
    info = ask("nvmlDeviceGetMemoryInfo", pynvml.nvmlDeviceGetMemoryInfo, handle)
    return {name: None if info is None else int(getattr(info, name.partition("_")[2])) for name in MEMORY}


def _processes(ask: Answers, handle: Any) -> dict[str, Any]:
    def listed(symbol: str, function: Callable[..., Any], first: int) -> list[list[Any]] | None:
        found = ask(symbol, function, handle)
        return None if found is None else [[first + n, process.usedGpuMemory] for n, process in enumerate(found)]

    return {
        "processes": listed(
            "nvmlDeviceGetComputeRunningProcesses_v3", pynvml.nvmlDeviceGetComputeRunningProcesses_v3, 101
        ),
        "mps_processes": listed(
            "nvmlDeviceGetMPSComputeRunningProcesses_v3", pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v3, 501
        ),
    }


def _activity(ask: Answers, symbol: str, take: Callable[[Any], Any]) -> dict[str, Any]:
    """Percent of each metric between two samples half a second apart."""
    pair = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.version, request.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(GPM)
    request.sample1, request.sample2 = pair
    for place, metric in enumerate(GPM.values()):
        request.metrics[place].metricId = metric
    try:
        if (
            any(ask(symbol, _slowly, take, sample) is None for sample in pair)
            or ask("nvmlGpmMetricsGet", pynvml.nvmlGpmMetricsGet, request) is None
        ):
            return {}
        return {
            name: request.metrics[place].value if request.metrics[place].nvmlReturn == 0 else None
            for place, name in enumerate(GPM)
        }
    finally:
        for sample in pair:
            pynvml.nvmlGpmSampleFree(sample)


def _slowly(take: Callable[[Any], Any], sample: Any) -> Any:
    time.sleep(GPM_PAUSE_SECONDS)
    return take(sample)


if __name__ == "__main__":
    print(json.dumps({"gpu": world()}), flush=True)
