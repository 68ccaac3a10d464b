"""SM, tensor and DRAM activity by GPM (Hopper and newer): the difference of two samples of hardware counters.

The previous sample is kept between readings, which saves a wait. In containers permission may come and go (seen to
vanish after minutes): the values are then absent and asked for again later.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import pynvml

from kvpressure.sources.gpu.nvidia import codes, fields
from kvpressure.sources.gpu.nvidia.query import DeviceQuery, Queries

SHORTEST_SPAN_SECONDS: Final = 0.1  # NVML wants samples further apart than this
ROUNDED_UP_TO: Final = 101.0  # a quotient of counters may end a little above 100 %

_METRICS: Final = (
    pynvml.NVML_GPM_METRIC_SM_UTIL,
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
)


class Activity(NamedTuple):
    """Ratios 0-1 over the time since the previous reading."""

    sm: float | None = None
    tensor: float | None = None
    dram: float | None = None


class Gpm:
    """GPM of one GPU and its MIG instances; to be released before the library is closed."""

    def __init__(self, queries: Queries, clock: Callable[[], float]) -> None:
        self._queries = queries
        self._clock = clock
        self._request = pynvml.c_nvmlGpmMetricsGet_t()
        self._request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(_METRICS)
        for place, metric in enumerate(_METRICS):
            self._request.metrics[place].metricId = metric
        self._trails: dict[str, _Trail] = {}

    def read(self, handle: Any, ask: DeviceQuery, uuid: str, instance: int | None = None) -> Activity:
        """Activity of the GPU ``handle``, or of its MIG instance ``instance``; ``uuid`` is that of the one read."""
        trail = self._trails.get(uuid)
        if trail is None:
            support = ask("gpm_support", pynvml.nvmlGpmQueryDeviceSupport, handle)
            if support is None:
                return Activity()
            trail = self._trails[uuid] = _Trail(supported=bool(support.isSupportedDevice))
        if not trail.supported:
            return Activity()
        now = self._clock()
        if trail.taken is not None and now - trail.taken < SHORTEST_SPAN_SECONDS:
            return Activity()
        trail.advance(ask, now, handle, instance)
        return Activity() if trail.pair is None else self._difference(ask, *trail.pair)

    def keep_only(self, uuids: set[str]) -> None:
        """Free the samples of MIG instances that are gone."""
        for uuid in self._trails.keys() - uuids:
            self._trails.pop(uuid).release()

    def release(self) -> None:
        """Free all samples."""
        self.keep_only(set())

    def _difference(self, ask: DeviceQuery, older: Any, newer: Any) -> Activity:
        self._request.sample1, self._request.sample2 = older, newer
        if ask("gpm_metrics", pynvml.nvmlGpmMetricsGet, self._request) is None:
            return Activity()
        return Activity(*(self._value(ask, self._request.metrics[place]) for place in range(len(_METRICS))))

    def _value(self, ask: DeviceQuery, metric: Any) -> float | None:
        if metric.nvmlReturn == pynvml.NVML_SUCCESS:
            value = float(metric.value)
            return fields.percent(ask, min(value, 100.0) if value <= ROUNDED_UP_TO else value)
        reason = codes.reason_of(metric.nvmlReturn)
        if reason not in codes.NORMAL:
            self._queries.count(reason)
        return None


class _Trail:
    """The last two samples of one device, in two alternating buffers."""

    def __init__(self, supported: bool) -> None:
        self.supported = supported
        self.taken: float | None = None
        self._buffers: list[Any] = []  # the newest last
        self._filled = 0

    @property
    def pair(self) -> tuple[Any, Any] | None:
        """(older, newer) sample; None before there are two."""
        return (self._buffers[0], self._buffers[1]) if self._filled == 2 else None

    def advance(self, ask: DeviceQuery, now: float, handle: Any, instance: int | None) -> None:
        """Take a sample. After a failure the next difference needs two new ones."""
        fresh = self._buffers.pop(0) if len(self._buffers) == 2 else ask("gpm_alloc", pynvml.nvmlGpmSampleAlloc)
        if fresh is None:
            return
        self._buffers.append(fresh)
        self._filled = min(2, self._filled + 1) if self._take(ask, handle, instance, fresh) else 0
        self.taken = now

    def release(self) -> None:
        """Free the buffers."""
        for buffer in self._buffers:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlGpmSampleFree(buffer)
        self._buffers.clear()
        self._filled = 0

    @staticmethod
    def _take(ask: DeviceQuery, handle: Any, instance: int | None, buffer: Any) -> bool:
        if instance is None:
            taken = ask("gpm_sample", pynvml.nvmlGpmSampleGet, handle, buffer)
        else:
            taken = ask("gpm_sample", pynvml.nvmlGpmMigSampleGet, handle, instance, buffer)
        return taken is not None
