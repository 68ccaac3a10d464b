"""Reports of the plugin inside vLLM on vLLM's own metrics endpoint, used with ``PROMETHEUS_MULTIPROC_DIR``.

``kvpressure_vllm.registry_gauges`` writes them. Without the plugin, reading costs one search.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Final

from kvpressure.model import ceilings
from kvpressure.model.readings import AllocatorReading, PageText, StepStats
from kvpressure.sources.scrape.layout import MAX_ENGINES

MAX_RANKS: Final = 1024  # GPUs of one server
FRESH_SECONDS: Final = 15.0  # maximum age of a worker's figures and of the last scrape

_LINE: Final = re.compile(rb"^kvpressure:(\w+)(?:\{([^}\n]*)\})? (\S+)\r?$", re.M)
_LABEL: Final = re.compile(rb'(?<!\w)(\w++)="([^"\\\n]*)"')
_FIGURES: Final = ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")

_Worker = tuple[int, str]
"""Rank and process: replicas in one server may each count their ranks from 0."""


@dataclass(frozen=True, slots=True)
class PluginMetrics:
    """Reports of one scrape and its time (Unix seconds). ``bad_lines``: lines that no plugin writes."""

    time: float
    allocator: tuple[AllocatorReading, ...]
    steps: tuple[StepStats, ...]
    bad_lines: int = 0


@dataclass
class _Engine:
    sums: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, dict[int, int]] = field(default_factory=lambda: {"batch": {}, "running": {}})
    kv_max: float | None = None


@dataclass
class _Samples:
    workers: dict[_Worker, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    written: dict[_Worker, float] = field(default_factory=dict)
    engines: dict[str, _Engine] = field(default_factory=lambda: defaultdict(_Engine))
    frontends: float = 0.0

    def take(self, name: str, labels: dict[str, str], value: str) -> None:
        """Add one sample. Raises ``ValueError`` or ``KeyError`` for one that the plugin does not write."""
        if len(self.engines) > MAX_ENGINES or len(self.workers) > MAX_RANKS or len(self.written) > MAX_RANKS:
            raise ValueError("no server has so many")
        if name == "allocator" and labels["figure"] in _FIGURES:
            self.workers[_worker(labels)][labels["figure"]] = _whole(value, ceilings.BYTES)
        elif name == "written_seconds":
            self.written[_worker(labels)] = _number(value, ceilings.MOMENT)
        elif name == "engine_steps_total":
            self.engines[labels["engine"]].sizes[labels["count"]][_whole(labels["size"], ceilings.BATCH)] = _whole(
                value, ceilings.COUNT
            )
        elif name == "engine_sums_total":
            self.engines[labels["engine"]].sums[labels["sum"]] = _whole(value, ceilings.COUNT)
        elif name == "engine_kv_max":
            self.engines[labels["engine"]].kv_max = _number(value, ceilings.RATIO) or None  # 0: no step lately
        elif name == "frontends":
            self.frontends = _number(value, ceilings.COUNT)


def read_plugin_metrics(text: PageText, namespace: str, pod: str, now: float) -> PluginMetrics | None:
    """The plugin's reports in this text; ``None`` without any. Invalid lines are counted."""
    if b"\nkvpressure:" not in text:
        return None
    found, bad_lines = _Samples(), 0
    for line in _LINE.finditer(text):
        labels = {name.decode(): value.decode(errors="replace") for name, value in _LABEL.findall(line[2] or b"")}
        try:
            found.take(line[1].decode(), labels, line[3].decode())
        except (ValueError, KeyError):
            bad_lines += 1
    allocator = tuple(
        AllocatorReading(namespace, pod, rank, **figures)
        for (rank, process), figures in found.workers.items()
        if abs(now - found.written.get((rank, process), 0.0)) <= FRESH_SECONDS
    )
    exact = found.frontends == 1.0
    steps = tuple(
        _steps(StepStats(namespace, pod, name, 0.0, now, 0, 0, exact), engine) for name, engine in found.engines.items()
    )
    return PluginMetrics(now, allocator, steps, bad_lines)


def _steps(known: StepStats, engine: _Engine) -> StepStats:
    sizes = engine.sizes["batch" if known.exact else "running"]
    return replace(
        known,
        steps=sum(sizes.values()) if known.exact else engine.sums.get("steps", 0),
        decoded=engine.sums.get("decoded", 0),
        kv_max=engine.kv_max,
        sizes=sizes,
    )


def _worker(labels: dict[str, str]) -> _Worker:
    return _whole(labels["rank"], ceilings.IDENTIFIER), labels.get("pid", "")


def _number(value: str, most: float) -> float:
    known = ceilings.number_in(value, most)
    if known is None:
        raise ValueError("no plugin writes that")
    return known


def _whole(value: str, most: float) -> int:
    known = ceilings.whole(ceilings.number_in(value, most), most)
    if known is None:
        raise ValueError("no plugin writes that")
    return known
