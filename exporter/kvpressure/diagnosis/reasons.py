"""The numbers that support a verdict, one a row, as dashboards list them.

A row counts while the verdict is one of its verdicts and one of its facts has the given value, so that dashboards and
exporter agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kvpressure.diagnosis.numbers import PERCENT
from kvpressure.model.frozen import frozen
from kvpressure.model.signals import Signals
from kvpressure.signals.window import HALF_MINUTE, MINUTE

QUEUED: Final = ("kv_pressure", "concurrency_limited", "compute_bound", "host_bound")
NOT_THE_CACHE: Final = ("concurrency_limited", "compute_bound", "host_bound", "stalled")


@frozen
class Reason:
    """One row. ``number``: from the signals, ``None`` where unknown; ``words`` follow it, with thresholds in braces.
    ``facts``: alternatives, one of which must be ``holds``.
    """

    name: str
    verdicts: tuple[str, ...]
    facts: tuple[str, ...]
    number: Callable[[Signals], float | None]
    words: str
    holds: bool = True


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _tokens(s: Signals) -> float | None:
    """Prompt plus generated tokens per second, as far as known."""
    known = (s.throughput.prompt_tokens_per_second, s.throughput.generation_tokens_per_second)
    return sum(value for value in known if value is not None) if any(v is not None for v in known) else None


def _free_tokens(s: Signals) -> float | None:
    capacity, used = s.kv.kv_capacity_tokens, s.kv.kv_used_tokens
    return None if capacity is None or used is None else capacity - used


def _largest_ratio(s: Signals) -> float | None:
    return max(s.latency.baseline_ratios.values(), default=None)


REASONS: Final = (
    Reason(
        "throttled",
        ("host_bound",),
        ("cpu_throttled",),
        lambda s: _times(PERCENT, s.host.cpu_throttled_ratio),
        "% of CFS periods throttled (threshold {cpu_throttled_ratio})",
    ),
    Reason(
        "cpu",
        ("host_bound",),
        ("cpu_saturated", "cpu_contended"),
        lambda s: _times(PERCENT, s.host.cpu_used_ratio),
        "% of the CPU limit used (threshold {container_limit_ratio})",
    ),
    Reason(
        "outside",
        ("host_bound",),
        ("outside_engine_time",),
        lambda s: s.latency.outside_engine_seconds,
        "seconds of a request are spent outside the engine",
    ),
    Reason(
        "no_tokens",
        ("stalled",),
        ("no_progress",),
        _tokens,
        f"tokens a second in the last {HALF_MINUTE:g} s",
    ),
    Reason(
        "stuck",
        ("stalled",),
        ("no_progress",),
        lambda s: s.progress.seconds_without_progress,
        "seconds without progress (stalled after {stalled_seconds})",
    ),
    Reason("present", ("stalled",), ("work_present",), lambda s: s.load.in_flight, "requests in flight"),
    Reason(
        "prompts",
        ("compute_bound",),
        ("prefill_dominates",),
        lambda s: s.throughput.prompt_tokens_per_second,
        "prompt tokens a second (prefill dominates at {prefill_tokens_ratio} the output tokens)",
    ),
    Reason(
        "answers",
        ("compute_bound",),
        ("prefill_dominates",),
        lambda s: s.throughput.generation_tokens_per_second,
        "output tokens a second",
    ),
    Reason(
        "busy",
        ("compute_bound",),
        ("gpu_saturated",),
        lambda s: _times(PERCENT, s.compute.gpu_utilization_high),
        "% GPU utilization (saturated)",
    ),
    Reason(
        "limit",
        ("concurrency_limited",),
        ("running_at_limit",),
        lambda s: s.load.running,
        "running requests: max_num_seqs is reached",
    ),
    Reason(
        "step_tokens",
        ("concurrency_limited",),
        ("step_budget_used",),
        lambda s: s.batch.step_tokens,
        "tokens in a step: the token budget is used up",
    ),
    Reason(
        "kv",
        ("kv_pressure",),
        ("kv_full", "kv_near_full", "head_of_line_blocked"),
        lambda s: _times(PERCENT, s.kv.kv_used_ratio_max),
        "% peak KV cache usage (full at {kv_full_ratio})",
    ),
    Reason("waiting", QUEUED, ("queue_present", "queue_for_capacity"), lambda s: s.load.waiting, "waiting requests"),
    Reason(
        "preempted",
        ("kv_pressure",),
        ("preempting",),
        lambda s: _times(MINUTE, s.kv.preemption_rate),
        "preemptions in the last minute (threshold {preemptions_min})",
    ),
    Reason(
        "free_tokens",
        ("kv_pressure",),
        ("head_of_line_blocked",),
        _free_tokens,
        "free tokens of KV cache: too few for the next prompt",
    ),
    Reason(
        "latency",
        ("kv_pressure", "host_bound"),
        ("latency_multiplied",),
        _largest_ratio,
        "times the baseline of p95 latency (threshold {latency_multiplied_ratio})",
    ),
    Reason(
        "fits",
        ("concurrency_limited",),
        ("running_at_limit",),
        lambda s: s.load.limits.get("kv_capacity"),
        "requests of the current length would fit into the KV cache",
    ),
    Reason(
        "gpu_waits",
        ("host_bound", "stalled"),
        ("gpu_starved", "gpu_utilization_low", "gpu_idle"),
        lambda s: _times(PERCENT, s.compute.gpu_utilization_high),
        "% GPU utilization: the GPU waits (low below {signature_utilization_ratio})",
    ),
    Reason(
        "kv_not_full",
        NOT_THE_CACHE,
        ("kv_full",),
        lambda s: _times(PERCENT, s.kv.kv_used_ratio_max),
        "% peak KV cache usage: not the cause (full at {kv_full_ratio})",
        holds=False,
    ),
)
"""``tests/bundle/test_dashboards.py`` checks that the table of the verdict reads each row's fact."""

_BY_VERDICT: Final = {
    verdict: tuple(reason for reason in REASONS if verdict in reason.verdicts)
    for verdict in {name for reason in REASONS for name in reason.verdicts}
}


def numbers(verdict: str, facts: Mapping[str, bool | None], s: Signals) -> dict[str, float]:
    """The numbers behind ``verdict`` by row name, in the units of the row's words; unknown ones are absent."""
    found: dict[str, float] = {}
    for reason in _BY_VERDICT.get(verdict, ()):
        if any(facts[name] is reason.holds for name in reason.facts):
            value = reason.number(s)
            if value is not None:
                found[reason.name] = value
    return found
