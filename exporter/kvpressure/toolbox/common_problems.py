"""The guides' "common problems and solutions" as conditions, each with what shows it and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvpressure.signals.logevents import ALLOCATION_EVENTS
from kvpressure.thresholds import Thresholds
from kvpressure.toolbox.view import EngineView, mapping, number

FEW_REQUESTS: Final = 5.0  # guide "Finding the KV Cache Problem": "OOM crash with 5 concurrent requests"


@dataclass(frozen=True, slots=True)
class Problem:
    """``present`` None = it cannot be seen from here. ``evidence`` carries the numbers."""

    name: str
    title: str
    present: bool | None
    evidence: str
    cause: str
    action: str


def common_problems(engine: EngineView, events: Mapping[str, int] | None, t: Thresholds) -> list[Problem]:
    """All four. ``events`` are the counted log events, None when no log was read."""
    return [_grows(engine), _oom_with_few(engine, events, t), _fragmentation(engine), _baseline(engine)]


def log_events(engine: EngineView) -> dict[str, int] | None:
    """Log events of the engine's container in the document; None when its log was not read."""
    counted = [mapping(container.get("log_events")) for container in engine.containers() if "log_events" in container]
    flat = {
        name.removeprefix("log_events:"): value
        for name, value in mapping(engine.data.get("signals")).items()
        if name.startswith("log_events:")
    }
    merged: dict[str, int] = {}
    for source in (*counted, flat):
        for name, value in source.items():
            count = number(value)
            if count is not None:
                merged[name] = max(merged.get(name, 0), int(count))
    known = bool(merged) or engine.evidence("allocation_failure_logged") is not None
    return merged if known else None


def _grows(engine: EngineView) -> Problem:
    leak, held = engine.condition("memory_leak_idle"), engine.condition("kv_held_without_load")
    growth = engine.signal("idle_growth_bytes_per_hour")
    present = True if leak or held else None if leak is None and held is None else False
    text = (
        "KV blocks stay occupied while nothing runs"
        if held
        else f"idle memory grows {growth / 2**30:.2f} GiB an hour"
        if growth is not None
        else "the KV cache empties when nothing runs"
        if held is False
        else "needs an idle stretch and GPU memory (or KV usage)"
    )
    return Problem(
        "memory_grows_continuously",
        "memory grows while idle and is not released",
        present,
        text,
        "a leak or an unbounded cache",
        "update vLLM, check what holds blocks (KV connector, aborted requests); "
        "restart the worker to be free of it now",
    )


def _oom_with_few(engine: EngineView, events: Mapping[str, int] | None, t: Thresholds) -> Problem:
    failures = sum((events or {}).get(name, 0) for name in ALLOCATION_EVENTS)
    in_flight, longest = engine.signal("in_flight"), engine.signal("context_max_5m")
    few = in_flight is not None and in_flight <= FEW_REQUESTS
    spike = engine.signal("context_spike_ratio")
    long_context = spike is not None and spike >= t["context_spike_ratio"]
    present = None if events is None else failures > 0 and (few or long_context)
    text = (
        "no log was read"
        if events is None
        else f"{failures} allocation failures logged"
        + ("" if in_flight is None else f", {in_flight:.0f} requests in flight")
        + ("" if longest is None else f", longest context {longest:.0f} tokens")
    )
    length = engine.limit("max_model_len").recommended
    return Problem(
        "oom_with_few_requests",
        "out of memory with few requests",
        present,
        text,
        "long context was not accounted for",
        "lower max_num_seqs or max_model_len"
        + ("" if length is None else f" (to {length:.0f})")
        + "; check max_tokens in the requests",
    )


def _fragmentation(engine: EngineView) -> Problem:
    present = engine.condition("allocator_fragmentation")
    reserved, allocated = engine.signal("allocator_reserved_bytes"), engine.signal("allocator_allocated_bytes")
    text = "torch's allocator is not visible from outside: load the plugin in vLLM to see reserved and allocated"
    if reserved is not None and allocated is not None:
        text = f"reserved {reserved / 1e9:.1f} GB, allocated {allocated / 1e9:.1f} GB"
    elif engine.condition("gpu_out_of_memory"):
        text += f"; the log: {engine.evidence_text('gpu_out_of_memory')}"
    return Problem(
        "fragmentation",
        "memory is free, yet allocation fails",
        present,
        text,
        "fragmentation",
        "restart the worker; PYTORCH_ALLOC_CONF=expandable_segments:True if it comes back",
    )


def _baseline(engine: EngineView) -> Problem:
    used, limit = engine.signal("device_used_ratio"), engine.limit("gpu_memory_utilization").value
    text = "GPU memory was not seen"
    if used is not None:
        text = f"GPU memory {used:.0%}" + ("" if limit is None else f" with gpu_memory_utilization {limit:g}")
    return Problem(
        "baseline_too_high",
        "a fresh start uses more memory than expected",
        engine.condition("baseline_too_high"),
        text,
        "several model copies on the card, or cached data",
        "look for a second process on the GPU; verify the tensor-parallel configuration",
    )
