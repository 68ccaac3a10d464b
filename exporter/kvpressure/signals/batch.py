"""Effective batch size, and whether it has collapsed against demand."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from typing import Final

from kvpressure.model import readings as r
from kvpressure.model.signals import BatchSignals, ThroughputSignals
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.plugin_steps import StepWindow
from kvpressure.signals.window import HALF_MINUTE, MINUTE, QUARTER_HOUR, QUARTER_MINUTE, EngineWindow, quantile

RUNNING_BOUNDS: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, float("inf"))
QUANTILES: Final = (0.5, 0.95, 0.99)


class RunningHistogram:
    """Histogram of requests running, one observation a scrape, since the exporter first saw the engine."""

    __slots__ = ("_counts", "total")

    def __init__(self) -> None:
        self._counts = [0] * len(RUNNING_BOUNDS)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one sample."""
        self._counts[bisect_left(RUNNING_BOUNDS, value)] += 1
        self.total += value

    def cumulative(self) -> Mapping[float, int]:
        """Cumulative counts by upper bound."""
        seen, result = 0, {}
        for bound, amount in zip(RUNNING_BOUNDS, self._counts, strict=True):
            seen += amount
            result[bound] = seen
        return result


class FastestStep:
    """Step times of the last fifteen minutes, one per quarter minute, each with its batch size."""

    __slots__ = ("_points", "_thresholds")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._points: deque[tuple[float, float, float]] = deque()

    def ratio(self, t: float, step: float | None, batch: float | None) -> float | None:
        """Step time now divided by the fastest comparable one of another quarter minute; ``None`` without one.
        Comparable: a batch at least half as large (``most_ratio``); a smaller one is scaled up in
        proportion to its requests, because no step takes longer than that.
        """
        points = self._points
        while points and not t - QUARTER_HOUR <= points[0][0] <= t:
            points.popleft()
        if step is None or not batch or step <= 0:
            return None
        smallest = self._thresholds["most_ratio"] * batch
        expected = [
            fast * max(1.0, batch / size) for at, fast, size in points if t - at >= QUARTER_MINUTE and size >= smallest
        ]
        if not points or t - points[-1][0] >= QUARTER_MINUTE:
            points.append((t, step, batch))
        return step / min(expected) if expected else None

    def peak_batch(self) -> float | None:
        """Batch size of the point with the most tokens/s; ``None`` without points."""
        return max(((size / fast, size) for _, fast, size in self._points), default=(0.0, None))[1]


def compute(
    window: EngineWindow,
    histogram: RunningHistogram,
    limit: float | None,
    t: Thresholds,
    steps: StepWindow | None = None,
    now: float = 0.0,
    fastest: FastestStep | None = None,
    preempting: bool = False,
    flow: ThroughputSignals | None = None,
) -> BatchSignals:
    """Batch size over the last minute (quantiles) and half minute (mean), and its collapse.

    With the plugin: of every step. Without: the mean by Little's law (rate of the sum of inter-token latencies, right
    with several API servers, data parallelism, speculative decoding and chunked prefill), the quantiles from samples
    of requests running. While requests are preempted, the mean is at most that of the samples: a preempted request's
    wait counts as one long gap between two of its tokens.
    """
    mean, step = _mean_and_step(window, HALF_MINUTE, preempting)
    ratio = None
    if fastest is not None and window.last is not None:
        # half a minute would hide for as long that steps became slow
        lately, slowness = _mean_and_step(window, QUARTER_MINUTE, preempting)
        ratio = fastest.ratio(window.last.t, slowness, lately)
    running = sorted(window.gauge_values(r.RUNNING, MINUTE))
    p50 = p95 = p99 = None
    if len(running) >= t["values_min"]:
        p50, p95, p99 = (quantile(running, q) for q in QUANTILES)
    if steps is not None and (exact := steps.quantiles(now, *QUANTILES)) is not None:
        p50, p95, p99 = exact
        counted = steps.mean(now, HALF_MINUTE)
        mean = mean if counted is None else counted
    return BatchSignals(
        batch_mean=mean,
        batch_p50=p50,
        batch_p95=p95,
        batch_p99=p99,
        step_seconds=step,
        step_tokens=None if flow is None else _step_tokens(window, flow, step),
        peak_batch=None if fastest is None else fastest.peak_batch(),
        step_ratio=ratio,
        batch_collapse_ratio=collapse(window, p95, limit),
        running_histogram=histogram.cumulative(),
        running_samples_sum=histogram.total,
    )


def _step_tokens(window: EngineWindow, flow: ThroughputSignals, step: float | None) -> float | None:
    """Tokens that a step computes, prompts and outputs together: their rate times the step time, at most what the
    engine books for a step. (It books a prompt whole, in the step of its first token, so its own mean is too high
    where prompts are computed in parts.) ``None`` for an engine that does not count its steps, because its prompts
    may be computed in steps of their own.
    """
    booked = window.observed(r.ITERATION_TOKENS, HALF_MINUTE)
    most = None if booked is None else booked[0].mean()
    computed, generated = flow.prompt_tokens_computed_per_second, flow.generation_tokens_per_second
    if most is None or step is None or computed is None or generated is None:
        return None
    return min(most, (computed + generated) * step)


def _mean_and_step(window: EngineWindow, seconds: float, preempting: bool) -> tuple[float | None, float | None]:
    """Mean batch and mean step time in seconds, ``None`` where no token came; while requests are preempted, a batch of
    at most the mean of its samples.
    """
    observed = window.observed(r.INTER_TOKEN, seconds)
    if observed is None:
        return None, None
    increase, span = observed
    mean = None if increase.sum is None or increase.count == 0 else increase.sum / span
    if preempting and mean is not None:
        sampled = window.gauge_values(r.RUNNING, seconds)
        mean = min(mean, sum(sampled) / len(sampled)) if sampled else None
    return mean, increase.mean()


def collapse(window: EngineWindow, p95: float | None, limit: float | None) -> float | None:
    """Missing share of the wanted batch, 0 to 1: 1 - p95 / wanted; ``None`` without demand. Wanted: mean of running
    plus waiting requests that are not deferred, at most the limit, so that a batch of one with one user is no
    collapse.
    """
    if p95 is None:
        return None
    demand = window.in_flight(MINUTE)
    wanted = (sum(demand) - sum(window.gauge_values(r.WAITING_DEFERRED, MINUTE))) / len(demand) if demand else 0.0
    if limit is not None:
        wanted = min(wanted, limit)
    if wanted <= 0:
        return None
    return min(1.0, max(0.0, 1.0 - p95 / wanted))
