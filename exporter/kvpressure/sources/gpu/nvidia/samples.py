"""Utilization as the mean of the driver's own samples since the last reading.

The driver samples several times a second into a ring buffer; a single query returns one of these samples.
"""

from __future__ import annotations

from typing import Any, Final

import pynvml

from kvpressure.sources.gpu.nvidia import fields
from kvpressure.sources.gpu.nvidia.query import DeviceQuery

_UNION_FIELD: Final = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}


def value_of(kind: int, sample: Any) -> Any:
    """Value of one sample; None for a type newer than the binding."""
    return getattr(sample.sampleValue, _UNION_FIELD.get(kind, ""), None)


class UtilizationSamples:
    """Where in one GPU's ring buffer the last reading ended."""

    def __init__(self) -> None:
        self._since_us = 0

    def mean(self, ask: DeviceQuery, handle: Any) -> float | None:
        """Mean utilization, 0-1; None when the driver has no newer samples, keeps none, or on the first call, because
        the ring may hold old ones.
        """
        answer = ask(
            "samples", pynvml.nvmlDeviceGetSamples, handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, self._since_us
        )
        if answer is None:
            return None
        kind, samples = answer
        if not samples or value_of(kind, samples[0]) is None:  # no news, or nothing that could be read
            return None
        since = self._since_us
        self._since_us = max(since, *(int(sample.timeStamp) for sample in samples))
        if not since:
            return None
        ratios = [fields.percent(ask, value_of(kind, sample)) for sample in samples]
        known = [ratio for ratio in ratios if ratio is not None]
        return sum(known) / len(known) if known else None
