"""The published state: what one tick concluded. Built once, swapped by one assignment, only rendered after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvpressure.readings import (
    ContainerReading,
    EngineKey,
    EngineReading,
    GpuOwner,
    GpuReading,
    NodeCondition,
    SourceHealth,
)
from kvpressure.signals.model import Signals

VERDICTS: Final = (
    "idle",
    "healthy",
    "kv_pressure",
    "concurrency_limited",
    "compute_bound",
    "host_bound",
    "stalled",
    "unknown",
)
STAGES: Final = ("building", "saturated", "thrashing", "failing")
CONDITIONS: Final = (
    "memory_leak_idle",
    "kv_held_without_load",
    "allocator_fragmentation",
    "baseline_too_high",
    "host_memory_near_limit",
    "host_oom_killed",
    "gpu_out_of_memory",
    "crash_loop",
    "gpu_fault",
    "metrics_frozen",
    "documented_signature",
)
SIGNATURE_CONDITIONS: Final = (
    "gpu_memory_high",
    "gpu_utilization_low",
    "batch_collapsed",
    "latency_rising",
    "throughput_flat",
)
LIMITS: Final = ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "max_model_len")


@dataclass(frozen=True, slots=True)
class Evidence:
    """One named piece of evidence: true, false or not known, and a sentence with the numbers."""

    name: str
    value: bool | None
    text: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The answer for one engine.

    ``supporting`` and ``opposing`` are the sentences for and against the verdict, ``missing`` what could not be
    seen. ``since`` = when the verdict began to stand.
    """

    verdict: str
    confidence: float
    stage: str | None
    since: float
    evidence: Mapping[str, Evidence] = field(default_factory=dict)
    supporting: tuple[str, ...] = ()
    opposing: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    conditions: Mapping[str, bool | None] = field(default_factory=dict)
    documented_signature: Mapping[str, bool | None] = field(default_factory=dict)
    documented_signature_met: bool | None = None
    signature_note: str = ""  # why signature and verdict differ, in words; empty when they agree


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit of an engine: value in force, whether it was set (None = not seen), where it was read, what to set."""

    name: str
    value: float | None = None
    explicit: bool | None = None
    source: str | None = None
    recommended: float | None = None


@dataclass(frozen=True, slots=True)
class EngineState:
    """One engine as published. ``up`` False keeps identity while values are absent."""

    key: EngineKey
    target: str
    container: str
    gpus: tuple[str, ...]
    up: bool
    error: str | None
    version: str | None
    flavour: str | None
    reading: EngineReading | None
    counters: Mapping[str, float]  # as on the page, never decreasing while the exporter runs
    signals: Signals
    diagnosis: Diagnosis
    limits: Mapping[str, Limit] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ContainerState:
    """A container with what the windows say about it; ratios over the last minute."""

    reading: ContainerReading
    cpu_throttled_ratio: float | None = None
    cpu_used_ratio: float | None = None
    memory_used_ratio: float | None = None
    log_events: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TargetState:
    """Scrape health of one target. ``cut`` counts what the last page has and a limit left out, by limit."""

    target: str
    up: bool
    duration_seconds: float | None
    bad_lines: int
    errors: Mapping[str, int] = field(default_factory=dict)
    cut: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GpuState:
    """A GPU as last read (readings of slower sources are held for their interval, never longer).

    ``process_bytes``: device memory of its processes by owning (namespace, pod); ("", "") = no pod owns them.
    """

    reading: GpuReading
    demand_ratio: float | None = None
    process_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecorderHealth:
    """How the flight recorder is doing. ``up`` None = nothing was to be written yet; ``reason`` and ``errors`` by reason as
    in ``recording.recorder.REASONS``; ``dropped`` counts ticks that were not kept.
    """

    up: bool | None = None
    reason: str | None = None
    last_success: float | None = None
    errors: Mapping[str, int] = field(default_factory=dict)
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """Everything that ``/metrics``, the page and the JSON show."""

    time: float
    engines: tuple[EngineState, ...] = ()
    gpus: tuple[GpuState, ...] = ()
    owners: tuple[GpuOwner, ...] = ()
    containers: tuple[ContainerState, ...] = ()
    targets: tuple[TargetState, ...] = ()
    node_conditions: tuple[NodeCondition, ...] = ()
    health: Mapping[str, SourceHealth] = field(default_factory=dict)
    expected_gpus: Mapping[str, int] = field(default_factory=dict)
    ticks: int = 0
    lag_seconds: float = 0.0
    recorder: RecorderHealth | None = None  # None = no flight recorder is kept
