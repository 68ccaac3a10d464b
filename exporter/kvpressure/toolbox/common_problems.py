"""The guides' "common problems and solutions" as conditions, each with evidence and remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvpressure.diagnosis.conditions import NAMES
from kvpressure.diagnosis.findings import about
from kvpressure.model.state import Found
from kvpressure.settings.thresholds import Thresholds
from kvpressure.toolbox.engine_view import EngineView


@dataclass(frozen=True, slots=True)
class Problem:
    """``rows``: the findings that it shows in, the first that holds before the others."""

    title: str
    rows: tuple[str, ...]
    cause: str
    action: str


PROBLEMS: Final = {
    "memory_grows_continuously": Problem(
        "memory grows while the engine is idle",
        ("memory_leak_idle", "kv_held_without_load"),
        "a leak or an unbounded cache",
        "update vLLM, check what holds blocks (KV connector, aborted requests); "
        "a restart of the worker releases it now",
    ),
    "oom_with_few_requests": Problem(
        "out of memory with few requests",
        ("oom_with_few_requests",),
        "the limits do not account for long contexts",
        "lower max_num_seqs or max_model_len; check max_tokens in the requests",
    ),
    "fragmentation": Problem(
        "memory is free, yet allocation fails",
        ("allocator_fragmentation",),
        "fragmentation",
        "restart the worker; PYTORCH_ALLOC_CONF=expandable_segments:True if it comes back",
    ),
    "baseline_too_high": Problem(
        "GPU memory is higher than expected after a start",
        ("baseline_too_high",),
        "several model copies on the GPU, or cached data",
        "look for a second process on the GPU; verify the tensor-parallel configuration",
    ),
}


def common_problems(engine: EngineView, events: Mapping[str, int] | None, t: Thresholds) -> list[Found]:
    """Whether each of ``PROBLEMS`` is there. ``events``: counted log events, None when no log was read."""
    signals = replace(engine.engine.signals, events=events or {}, events_known=events is not None)
    found = about(signals, t)  # with the pod's log, which the exporter may not have read
    conditions = {name: row for name in NAMES if (row := engine.diagnosis.beside.get(name)) is not None}
    return [_seen(name, problem, lambda row: conditions.get(row) or found[row]) for name, problem in PROBLEMS.items()]


def _seen(name: str, problem: Problem, known: Callable[[str], Found]) -> Found:
    rows = [known(row) for row in problem.rows]
    shown = next((row for row in rows if row.value), rows[0])
    return Found(name, shown.value, shown.text)


def log_events(engine: EngineView) -> Mapping[str, int] | None:
    """What an exporter read in the engine's log of late; None when it did not."""
    known = engine.engine.signals.events_known or engine.diagnosis.holds("allocation_failure_logged") is not None
    return engine.engine.signals.events if known else None
