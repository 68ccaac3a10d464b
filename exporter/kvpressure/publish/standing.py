"""The conditions beside the verdict in words: each with its number and the threshold it is judged by, true or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvpressure.diagnosis import oom
from kvpressure.diagnosis.conditions import baseline_limit
from kvpressure.publish.wording import bytes_text, gigabytes_text, number_text, percent_text, seconds_text
from kvpressure.state import EngineState
from kvpressure.thresholds import Thresholds


@dataclass(frozen=True, slots=True)
class Standing:
    """A condition: true, false or not known, and a sentence with the numbers; empty where it is not known."""

    name: str
    value: bool | None
    text: str


def standings(engine: EngineState, t: Thresholds) -> tuple[Standing, ...]:
    """Every condition of ``engine`` but the documented signature, which has a line of its own."""
    return tuple(
        Standing(name, value, "" if value is None else _TEXTS[name](engine, t))
        for name, value in engine.diagnosis.conditions.items()
        if name in _TEXTS
    )


def _leak(engine: EngineState, t: Thresholds) -> str:
    growth = engine.signals.memory.idle_growth_bytes_per_hour
    return f"device memory grows by {bytes_text(growth)} an hour while idle (a leak from {bytes_text(t['memory_leak_bytes_per_hour'])})"


def _held(engine: EngineState, t: Thresholds) -> str:
    s = engine.signals
    return (
        f"KV cache used {percent_text(s.kv.kv_used_ratio)} with {number_text(s.load.in_flight)} requests in flight (held from "
        f"{percent_text(t['kv_held_ratio'])} in {number_text(t['kv_held_stretches'])} idle stretches of {seconds_text(t['kv_held_seconds'])})"
    )


def _fragmentation(engine: EngineState, t: Thresholds) -> str:
    memory = engine.signals.memory
    both = (memory.allocator_reserved_bytes, memory.allocator_allocated_bytes)
    difference = None if both[0] is None or both[1] is None else both[0] - both[1]
    return (
        f"{gigabytes_text(difference)} reserved and not allocated (fragmented from {gigabytes_text(t['fragmentation_warning_bytes'])}, of which "
        f"{percent_text(t['fragmented_split_ratio'])} split; split now {gigabytes_text(memory.allocator_inactive_split_bytes)})"
    )


def _baseline(engine: EngineState, t: Thresholds) -> str:
    limit = engine.limits.get("gpu_memory_utilization")
    configured = limit.value if limit is not None else None
    most = None if configured is None else baseline_limit(configured, t)
    memory = engine.signals.memory
    used = memory.device_used_ratio if memory.own_used_ratio is None else memory.own_used_ratio
    return (
        f"device memory used {percent_text(used)}, gpu_memory_utilization is "
        f"{percent_text(configured)} (too high above {percent_text(most)})"
    )


def _near_limit(engine: EngineState, t: Thresholds) -> str:
    return (
        f"container memory used {percent_text(engine.signals.host.memory_used_ratio)} of its limit (near from "
        f"{percent_text(t['host_memory_limit_ratio'])})"
    )


def _restarts(engine: EngineState) -> str:
    return f"{number_text(engine.signals.host.restarts_recent)} restarts in half an hour"


def _killed(engine: EngineState, t: Thresholds) -> str:
    del t
    host = engine.signals.host
    code = "" if host.last_exit_code is None else f", exit code {number_text(host.last_exit_code)}"
    ended = (
        f"ended last: {host.last_termination_reason}{code}"
        if host.last_termination_reason
        else "has not ended, as far as known"
    )
    return f"the container {ended}; {_restarts(engine)}"


def _out_of_memory(engine: EngineState, t: Thresholds) -> str:
    return oom.evidence(engine.signals, t).text


def _crash_loop(engine: EngineState, t: Thresholds) -> str:
    return f"{_restarts(engine)} (a loop from {number_text(t['crash_loop_restarts'])})"


def _fault(engine: EngineState, t: Thresholds) -> str:
    del t
    return f"{number_text(engine.signals.gpu_faults)} XID events or lost GPUs lately (any counts)"


def _frozen(engine: EngineState, t: Thresholds) -> str:
    still = engine.signals.progress.seconds_still
    stood = (
        "no standstill of the gauges" if still is None else f"no gauge or counter has moved for {seconds_text(still)}"
    )
    return f"{stood} (looked at from {seconds_text(t['no_progress_seconds'])})"


_TEXTS: Final[dict[str, Callable[[EngineState, Thresholds], str]]] = {
    "memory_leak_idle": _leak,
    "kv_held_without_load": _held,
    "allocator_fragmentation": _fragmentation,
    "baseline_too_high": _baseline,
    "host_memory_near_limit": _near_limit,
    "host_oom_killed": _killed,
    "gpu_out_of_memory": _out_of_memory,
    "crash_loop": _crash_loop,
    "gpu_fault": _fault,
    "metrics_frozen": _frozen,
}
