"""Sentences of the conditions beside the verdict, with their numbers and thresholds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kvpressure.advice.wording import UNKNOWN, bytes_text, counted, number_text, percent_text, seconds_text
from kvpressure.diagnosis import conditions, oom
from kvpressure.diagnosis.conditions import baseline_limit
from kvpressure.diagnosis.numbers import minutes
from kvpressure.model.state import EngineState, Found
from kvpressure.printable import Asked
from kvpressure.settings.thresholds import Thresholds

OWN_LINE: Final = "documented_signature"  # shown with its five parts elsewhere


def standings(engine: EngineState, t: Thresholds) -> tuple[Found, ...]:
    """Every condition of ``engine`` except the documented signature, which is shown apart."""
    return tuple(standing(name, engine, t) for name in engine.diagnosis.conditions if name != OWN_LINE)


def standing(name: str, engine: EngineState, t: Thresholds) -> Found:
    """One condition of ``engine``; unknown where its diagnosis has none of this name."""
    value = engine.diagnosis.conditions.get(name)
    return Found(name, value, _text(name, value, engine, t))


def _text(name: str, value: bool | None, engine: EngineState, t: Thresholds) -> str:
    declared = conditions.of(name)
    form = declared.unknown if value is None else declared.true if value else declared.false
    return form.format_map(Asked(lambda name: _NUMBERS[name](engine, t)))


def _fragmented(engine: EngineState, _t: Thresholds) -> str:
    memory = engine.signals.memory
    both = (memory.allocator_reserved_bytes, memory.allocator_allocated_bytes)
    return bytes_text(None if both[0] is None or both[1] is None else both[0] - both[1])


def _utilization(engine: EngineState) -> float | None:
    limit = engine.limits.get("gpu_memory_utilization")
    return limit.value if limit is not None else None


def _device(engine: EngineState, _t: Thresholds) -> str:
    memory = engine.signals.memory
    return percent_text(memory.device_used_ratio if memory.own_used_ratio is None else memory.own_used_ratio)


def _device_now(engine: EngineState, t: Thresholds) -> str:
    used = _device(engine, t)
    return "" if used == UNKNOWN else f": {used} used"


def _held_now(engine: EngineState, _t: Thresholds) -> str:
    """KV usage and requests in flight, as far as known."""
    used, in_flight = engine.signals.kv.kv_used_ratio, engine.signals.load.in_flight
    parts = [] if used is None else [f"KV cache {percent_text(used)} used"]
    parts += [] if in_flight is None else [f"{counted(in_flight, 'request')} in flight"]
    return f" ({', '.join(parts)})" if parts else ""


def _movement(engine: EngineState, t: Thresholds) -> str:
    """Whether gauges and counters move, where they are not frozen."""
    progress = engine.signals.progress
    if progress.work_present is False:
        return "unchanged gauges and counters are normal: no requests are in flight"
    if progress.seconds_still:
        frozen = seconds_text(t["no_progress_seconds"])
        return f"no gauge or counter has moved for {seconds_text(progress.seconds_still)} (frozen at {frozen})"
    return "gauges or counters are moving"


def _baseline_from(engine: EngineState, t: Thresholds) -> str:
    configured = _utilization(engine)
    return percent_text(None if configured is None else baseline_limit(configured, t))


def _ended(engine: EngineState, _t: Thresholds) -> str:
    host = engine.signals.host
    code = "" if host.last_exit_code is None else f", exit code {number_text(host.last_exit_code)}"
    return f"{host.last_termination_reason}{code}" if host.last_termination_reason else "none seen"


_NUMBERS: Final[Mapping[str, Callable[[EngineState, Thresholds], str]]] = {
    "leak": lambda e, _t: bytes_text(e.signals.memory.idle_growth_bytes_per_hour),
    "leak_from": lambda _e, t: bytes_text(t["memory_leak_bytes_per_hour"]),
    "kv": lambda e, _t: percent_text(e.signals.kv.kv_used_ratio),
    "in_flight": lambda e, _t: counted(e.signals.load.in_flight, "request"),
    "held_from": lambda _e, t: percent_text(t["kv_held_ratio"]),
    "held_stretches": lambda _e, t: number_text(t["kv_held_stretches"]),
    "held_seconds": lambda _e, t: seconds_text(t["kv_held_seconds"]),
    "to_full": lambda e, _t: number_text(e.signals.kv.kv_seconds_to_full),
    "to_full_from": lambda _e, t: number_text(t["kv_seconds_to_full_warning"]),
    "hits": lambda e, _t: percent_text(e.signals.kv.prefix_hit_ratio_recent),
    "usual_hits": lambda e, _t: percent_text(e.signals.kv.prefix_hit_ratio_usual),
    "fragmented": _fragmented,
    "fragmented_from": lambda _e, t: bytes_text(t["fragmentation_warning_bytes"]),
    "split_from": lambda _e, t: percent_text(t["fragmented_split_ratio"]),
    "split": lambda e, _t: bytes_text(e.signals.memory.allocator_inactive_split_bytes),
    "device": _device,
    "device_now": _device_now,
    "held_now": _held_now,
    "utilization": lambda e, _t: percent_text(_utilization(e)),
    "baseline_from": _baseline_from,
    "host_memory": lambda e, _t: percent_text(e.signals.host.memory_used_ratio),
    "host_memory_from": lambda _e, t: percent_text(t["host_memory_limit_ratio"]),
    "ended": _ended,
    "restarts": lambda e, _t: f"{counted(e.signals.host.restarts_recent, 'restart')} in half an hour",
    "loop_from": lambda _e, t: number_text(t["crash_loop_restarts"]),
    "oom_times": lambda e, _t: oom.times(e.signals),
    "log_window": lambda _e, t: minutes(t["log_window_seconds"]),
    "faults": lambda e, _t: number_text(e.signals.gpu_faults or e.signals.kernel_faults),
    "movement": _movement,
    "still": lambda e, _t: seconds_text(e.signals.progress.seconds_still),
    "still_from": lambda _e, t: seconds_text(t["no_progress_seconds"]),
}
