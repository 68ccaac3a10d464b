"""Prefill that no gauge shows: all blocks are allocated at once, or gauges do not move during a whole step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kvpressure.model import readings as r
from kvpressure.model.readings import Histogram
from kvpressure.signals.window import Sample


def admitted_last(samples: Sequence[Sample]) -> bool:
    """Whether the last change was an admission: more requests run, or blocks were taken without an output token."""
    for after, before in pairwise(reversed(samples)):
        ran, runs = before.gauges.get(r.RUNNING, 0.0), after.gauges.get(r.RUNNING, 0.0)
        held, holds = before.gauges.get(r.KV_USAGE, 0.0), after.gauges.get(r.KV_USAGE, 0.0)
        if (ran, held, before.waiting) == (runs, holds, after.waiting):
            continue
        silent = after.counters.get(r.GENERATION_TOKENS, 0.0) <= before.counters.get(r.GENERATION_TOKENS, 0.0)
        return runs > ran or (holds > held and silent)
    return False


def usual_seconds(sample: Sample | None) -> float | None:
    """Mean prefill time in seconds since the process started: from its own histogram, else time to first token minus
    queue time. ``None`` before the first token, and where requests wait but no histogram of the queue exists.
    """
    if sample is None:
        return None
    prefill, first, queue = (_mean(sample.histograms.get(name)) for name in (r.PREFILL, r.TTFT, r.QUEUE))
    if prefill is not None or first is None:
        return prefill
    if queue is None:
        return None if sample.waiting else first
    return max(0.0, first - queue)


def _mean(histogram: Histogram | None) -> float | None:
    if histogram is None or not histogram.count or histogram.sum is None:
        return None
    return histogram.sum / histogram.count
