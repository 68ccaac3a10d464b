"""Other series of a server's pod in a Prometheus: restarts (kube-state-metrics), CPU (cAdvisor), GPUs
(dcgm-exporter), and all of it from kvpressure's own exporter. All are optional.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvpressure.model import ceilings
from kvpressure.model.readings import ContainerReading, GpuReading, Termination
from kvpressure.parsed import items, mapping

AGE_SECONDS: Final = 120.0  # a sample older than this says nothing about now
MAX_GPUS: Final = 16

_OURS: Final = "kvpressure's exporter"
_POD_SERIES: Final = {
    "kube_pod_container_status_restarts_total": ("restarts", "restarts (kube-state-metrics)"),
    "kube_pod_container_status_ready": ("ready", "restarts (kube-state-metrics)"),
    "kube_pod_container_status_last_terminated_reason": ("reason", "restarts (kube-state-metrics)"),
    "kube_pod_container_status_last_terminated_exitcode": ("exit_code", "restarts (kube-state-metrics)"),
    "container_cpu_usage_seconds_total": ("cpu_usage_seconds", "CPU (cAdvisor)"),
    "container_cpu_cfs_periods_total": ("cpu_periods", "CPU (cAdvisor)"),
    "container_cpu_cfs_throttled_periods_total": ("cpu_throttled_periods", "CPU (cAdvisor)"),
    "container_memory_working_set_bytes": ("memory_working_set_bytes", "CPU (cAdvisor)"),
    "kvpressure_container_restarts_total": ("restarts", f"restarts ({_OURS})"),
    "kvpressure_container_ready": ("ready", f"restarts ({_OURS})"),
    "kvpressure_container_last_termination_info": ("ended", f"restarts ({_OURS})"),
}
_GPU_SERIES: Final = {
    "DCGM_FI_DEV_GPU_UTIL": ("utilization_percent", "GPU (DCGM's exporter)"),
    "DCGM_FI_DEV_FB_USED": ("used_mib", "GPU (DCGM's exporter)"),
    "DCGM_FI_DEV_FB_FREE": ("free_mib", "GPU (DCGM's exporter)"),
    "kvpressure_gpu_utilization_ratio": ("utilization_ratio", f"GPU ({_OURS})"),
    "kvpressure_gpu_memory_used_bytes": ("memory_used_bytes", f"GPU ({_OURS})"),
    "kvpressure_gpu_memory_total_bytes": ("memory_total_bytes", f"GPU ({_OURS})"),
}
_OWNER: Final = "kvpressure_gpu_pod_info"

Ask = Callable[[str, Mapping[str, str], float, float], Sequence[Mapping[str, Any]]]
"""Series whose names match, with these labels, over the stretch from the third to the fourth argument."""


@dataclass(slots=True)
class _FieldSeries:
    """One series of one field; ``words``: its labels, where these are the content (reason, exit code)."""

    words: str
    times: list[float]
    values: list[float]

    def at(self, t: float) -> float | None:
        """The newest recent value at ``t``; None without one."""
        index = bisect_right(self.times, t) - 1
        return self.values[index] if index >= 0 and t - self.times[index] <= AGE_SECONDS else None


def _pairs(values: object) -> Iterator[tuple[float, float]]:
    """(time, value) of every finite sample."""
    for pair in items(values):
        if len(items(pair)) == 2:
            t = ceilings.number(pair[0], ceilings.MOMENT)
            value = ceilings.number_in(str(pair[1]), ceilings.WORK, -ceilings.WORK)
            if t is not None and value is not None:
                yield t, value


@dataclass(slots=True)
class PodSeries:
    """One pod. ``seen``: what was found, in words."""

    namespace: str
    pod: str
    container: str
    seen: set[str] = field(default_factory=set)
    _fields: dict[str, list[_FieldSeries]] = field(default_factory=dict)
    _gpus: dict[str, dict[str, _FieldSeries]] = field(default_factory=dict)

    def load(self, ask: Ask, begin: float, end: float) -> None:
        """Load the series from ``begin`` (a little before, for the first moments) to ``end``."""
        self._fields, self._gpus = {}, {}
        if not (self.namespace and self.pod):
            return
        begin -= AGE_SECONDS
        owners: set[str] = set()
        names = "|".join((*_POD_SERIES, _OWNER, *(name for name in _GPU_SERIES if name.startswith("DCGM"))))
        for prefix in ("", "exported_"):  # as kept, or as renamed where the scrape does not honour labels
            for row in ask(names, {f"{prefix}namespace": self.namespace, f"{prefix}pod": self.pod}, begin, end):
                metric = mapping(row.get("metric"))
                if metric.get("__name__") == _OWNER:
                    owners.add(str(metric.get("uuid")))
                else:
                    self._keep(metric, row, prefix)
        if owners:
            ours = "|".join(name for name in _GPU_SERIES if name.startswith("kvpressure"))
            uuids = "|".join(sorted(uuid for uuid in owners if uuid.replace("-", "").isalnum()))
            for row in ask(ours, {"uuid=~": uuids}, begin, end):
                self._keep(mapping(row.get("metric")), row, "")

    def _keep(self, metric: Mapping[str, Any], row: Mapping[str, Any], prefix: str) -> None:
        name = str(metric.get("__name__"))
        pairs = list(_pairs(row.get("values")))
        series = _FieldSeries("", [t for t, _ in pairs], [value for _, value in pairs])
        if name in _GPU_SERIES:
            kind, source = _GPU_SERIES[name]
            uuid = str(metric.get("UUID") or metric.get("uuid") or metric.get("gpu") or "")
            if uuid in self._gpus or len(self._gpus) < MAX_GPUS:
                self._gpus.setdefault(uuid, {})[kind] = series
                self.seen.add(source)
            return
        container = str(metric.get(f"{prefix}container") or "")
        if name not in _POD_SERIES or not container or (self.container and container != self.container):
            return
        kind, source = _POD_SERIES[name]
        series.words = f"{metric.get('reason') or ''}/{metric.get('exit_code') or ''}"
        self._fields.setdefault(kind, []).append(series)
        self.seen.add(source)

    # --- as readings --------------------------------------------------------------------------------------

    def containers(self, t: float) -> tuple[ContainerReading, ...]:
        """The container at ``t``; empty if nothing is known."""
        values = {kind: value for kind in self._fields if (value := self._value(kind, t)) is not None}
        if not values:
            return ()
        whole = {kind: int(value) for kind, value in values.items()}
        return (
            ContainerReading(
                self.namespace,
                self.pod,
                self.container,
                restarts=whole.get("restarts"),
                ready=bool(values["ready"]) if "ready" in values else None,
                last_termination=self._ended(t),
                cpu_usage_seconds=values.get("cpu_usage_seconds"),
                cpu_periods=whole.get("cpu_periods"),
                cpu_throttled_periods=whole.get("cpu_throttled_periods"),
                memory_working_set_bytes=whole.get("memory_working_set_bytes"),
            ),
        )

    def _value(self, kind: str, t: float) -> float | None:
        known = [value for series in self._fields.get(kind, ()) if (value := series.at(t)) is not None]
        return max(known, default=None)

    def _ended(self, t: float) -> Termination | None:
        for series in self._fields.get("ended", ()):
            if series.at(t):
                reason, _, said = series.words.partition("/")
                return Termination(reason or None, int(said) if said.isdecimal() else None, None)
        reasons = [series.words.partition("/")[0] for series in self._fields.get("reason", ()) if series.at(t)]
        code = self._value("exit_code", t)
        return (
            Termination(reasons[0] if reasons else None, None if code is None else int(code), None)
            if reasons or code is not None
            else None
        )

    def gpus(self, t: float) -> tuple[GpuReading, ...]:
        """The pod's GPUs at ``t``."""
        return tuple(self._read_gpus(t))

    def _read_gpus(self, t: float) -> Iterator[GpuReading]:
        for index, (uuid, kinds) in enumerate(sorted(self._gpus.items())):
            at = {kind: value for kind, series in kinds.items() if (value := series.at(t)) is not None}
            used, total = at.get("memory_used_bytes"), at.get("memory_total_bytes")
            if "used_mib" in at:
                used = at["used_mib"] * 2**20
                total = (
                    used + at["free_mib"] * 2**20 if "free_mib" in at else None
                )  # the driver's own reservation is in neither
            busy = at.get("utilization_ratio", at["utilization_percent"] / 100 if "utilization_percent" in at else None)
            if at:
                yield GpuReading(
                    uuid,
                    index,
                    "nvidia" if "used_mib" in at or "utilization_percent" in at else "scraped",
                    memory_used_bytes=None if used is None else int(used),
                    memory_total_bytes=None if total is None else int(total),
                    utilization_ratio=busy,
                )
