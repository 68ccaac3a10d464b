"""The guides' "common problems and solutions" as conditions, each with evidence and remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvpressure.advice.wording import bytes_text
from kvpressure.model.log_events import ALLOCATION_EVENTS
from kvpressure.settings.thresholds import Thresholds
from kvpressure.toolbox.engine_view import EngineView

FEW_REQUESTS: Final = 5.0  # guide "Finding the KV Cache Problem": "OOM crash with 5 concurrent requests"


@dataclass(frozen=True, slots=True)
class CommonProblem:
    """``present`` None = unknown. ``evidence`` has the numbers."""

    name: str
    title: str
    present: bool | None
    evidence: str
    cause: str
    action: str


def common_problems(engine: EngineView, events: Mapping[str, int] | None, t: Thresholds) -> list[CommonProblem]:
    """All four problems. ``events``: counted log events, None when no log was read."""
    return [_grows(engine), _oom_with_few(engine, events, t), _fragmentation(engine), _baseline(engine)]


def log_events(engine: EngineView) -> dict[str, int] | None:
    """Log events of the engine's container; None when its log was not read."""
    counted = [container.log_events for container in engine.containers]
    merged: dict[str, int] = {}
    for source in (*counted, engine.signals.events if engine.engine.up else {}):
        for name, count in source.items():
            merged[name] = max(merged.get(name, 0), count)
    known = bool(merged) or engine.plan_input.evidence("allocation_failure_logged") is not None
    return merged if known else None


def _grows(engine: EngineView) -> CommonProblem:
    leak, held = (engine.beside(name) for name in ("memory_leak_idle", "kv_held_without_load"))
    shown = held if held.value and not leak.value else leak
    return CommonProblem(
        "memory_grows_continuously",
        "memory grows while the engine is idle",
        shown.value,
        shown.text,
        "a leak or an unbounded cache",
        "update vLLM, check what holds blocks (KV connector, aborted requests); "
        "a restart of the worker releases it now",
    )


def _oom_with_few(engine: EngineView, events: Mapping[str, int] | None, t: Thresholds) -> CommonProblem:
    failures = sum((events or {}).get(name, 0) for name in ALLOCATION_EVENTS)
    in_flight, longest = engine.signals.load.in_flight, engine.signals.context.context_max_5m
    few = in_flight is not None and in_flight <= FEW_REQUESTS
    spike = engine.signals.context.context_spike_ratio
    long_context = spike is not None and spike >= t["context_spike_ratio"]
    present = None if events is None else failures > 0 and (few or long_context)
    text = (
        "log not read"
        if events is None
        else f"{failures} allocation failures logged"
        + ("" if in_flight is None else f", {in_flight:.0f} requests in flight")
        + ("" if longest is None else f", longest context {longest:.0f} tokens")
    )
    length = engine.engine.limit("max_model_len").recommended
    return CommonProblem(
        "oom_with_few_requests",
        "out of memory with few requests",
        present,
        text,
        "the limits do not account for long contexts",
        "lower max_num_seqs or max_model_len"
        + ("" if length is None else f" (to {length:.0f})")
        + "; check max_tokens in the requests",
    )


def _fragmentation(engine: EngineView) -> CommonProblem:
    present = engine.condition("allocator_fragmentation")
    memory = engine.signals.memory
    reserved, allocated = memory.allocator_reserved_bytes, memory.allocator_allocated_bytes
    text = "unknown: torch's allocator is visible only with the plugin inside vLLM"
    if reserved is not None and allocated is not None:
        text = f"reserved {bytes_text(reserved)}, allocated {bytes_text(allocated)}"
    elif engine.condition("gpu_out_of_memory"):
        logged = engine.diagnosis.evidence.get("gpu_out_of_memory")
        text += f"; the log: {logged.text if logged else ''}"
    return CommonProblem(
        "fragmentation",
        "memory is free, yet allocation fails",
        present,
        text,
        "fragmentation",
        "restart the worker; PYTORCH_ALLOC_CONF=expandable_segments:True if it comes back",
    )


def _baseline(engine: EngineView) -> CommonProblem:
    used, limit = engine.signals.memory.device_used_ratio, engine.engine.limit("gpu_memory_utilization").value
    text = "GPU memory unknown"
    if used is not None:
        text = f"GPU memory {used:.0%}" + ("" if limit is None else f" with gpu_memory_utilization {limit:g}")
    return CommonProblem(
        "baseline_too_high",
        "GPU memory is higher than expected after a start",
        engine.condition("baseline_too_high"),
        text,
        "several model copies on the GPU, or cached data",
        "look for a second process on the GPU; verify the tensor-parallel configuration",
    )
