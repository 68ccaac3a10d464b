"""Requests in flight against their limit, the effective batch size and whether it has collapsed, and every engine step
as the plugin counts it.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import takewhile
from math import ceil
from operator import attrgetter
from typing import Any, Final

from kvpressure.model import readings as r
from kvpressure.model.frozen import frozen
from kvpressure.model.readings import StepStats
from kvpressure.model.signals import BatchSignals, KvSignals, LoadSignals, ThroughputSignals, later
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.kv import MEASURED, full_from
from kvpressure.signals.window import (
    FIVE_MINUTES,
    HALF_MINUTE,
    MINUTE,
    QUARTER_HOUR,
    QUARTER_MINUTE,
    TWICE,
    EngineWindow,
    Sample,
)

BURST_SECONDS: Final = 10.0  # of arrival_burst_ratio, as it is published


@frozen
class SequenceLimit:
    """``max_num_seqs`` as configured, and where it was read: args, log or default."""

    value: float | None = None
    source: str | None = None


def queued(window: EngineWindow) -> list[Sample]:
    """Samples of the last half minute since which requests have waited without a break, newest first."""
    known = (s for s in reversed(window.since(HALF_MINUTE)) if r.RUNNING in s.gauges)
    return list(takewhile(attrgetter("waiting"), known))


def maximum(samples: Sequence[Sample], full: float, t: Thresholds) -> float | None:
    """Running requests at their highest, where their number came back to it in most samples while requests waited and
    KV cache was free: some limit binds. A small number may do so by chance, but not while many times as many wait (in
    the mean: a queue that drains does not move the limit). ``None`` if it moved, or KV usage reached ``full``.
    """
    if max(s.gauges.get(r.KV_USAGE, 0.0) for s in samples) >= full:
        return None
    top, queue = max(s.gauges[r.RUNNING] for s in samples), sum(s.waiting or 0.0 for s in samples) / len(samples)
    enough = top >= t["plateau_min_requests"] or queue * t["calm_queue_ratio"] >= top > 0
    level = reaching(top, t)
    reached = sum(1 for s in samples if s.gauges[r.RUNNING] >= level)
    return top if enough and reached >= t["most_ratio"] * len(samples) else None


def at_limit(window: EngineWindow, limit: float | None, t: Thresholds) -> bool | None:
    """Whether ``running`` was at the limit in most of the recent samples; ``None`` without a limit."""
    running = window.gauge_values(r.RUNNING, t["recent_window_seconds"])
    if limit is None or not running:
        return None
    reached = reaching(limit, t)
    return sum(1 for value in running if value >= reached) >= t["most_ratio"] * len(running)


def reaching(limit: float, t: Thresholds) -> float:
    """Number of running requests that counts as at the limit."""
    level = limit * t["at_limit_ratio"]
    return min(level, limit - 1) if limit > t["at_limit_small_requests"] else level


def held_per_request(seen: Sequence[tuple[float, float]], by_length: float | None) -> float | None:
    """Share of the KV cache that a running request holds in the mean of these samples (usage, requests running).

    It is the larger of two: usage per running request, which a full cache keeps too small, because it preempts
    requests before they have grown; and half-grown requests of the mean lengths, without prompt tokens that the prefix
    cache had, which several requests may share. ``None`` where nothing runs, or usage and lengths are unknown.
    """
    return max((share for share in (_per_request(seen), by_length) if share), default=None)


def held_at_peak(seen: Sequence[tuple[float, float]], t: Thresholds) -> float | None:
    """The same where usage was highest."""
    high = t["at_limit_ratio"] * max(seen, default=(0.0, 0.0))[0]
    return _per_request([one for one in seen if one[0] >= high])


def _per_request(seen: Sequence[tuple[float, float]]) -> float | None:
    """Usage of the cache by running requests."""
    used, running = map(sum, zip(*seen, strict=True)) if seen else (0.0, 0.0)
    return used / running if used and running else None


def _by_length(window: EngineWindow, cache: KvSignals, block_size: float | None) -> float | None:
    """What half-grown requests of the mean lengths hold; ``None`` without histograms of lengths, because counters of
    tokens include requests that have not finished.
    """
    prompts, outputs = (window.observed(name, FIVE_MINUTES) for name in (r.REQUEST_PROMPT, r.REQUEST_OUTPUT))
    prompt, output = (None if found is None else found[0].mean() for found in (prompts, outputs))
    if prompt is None or not cache.kv_capacity_tokens:
        return None
    own = (1.0 - cache.prefix_hit_ratio.get(MEASURED, 0.0)) * prompt
    return (own + ((output or 0.0) + (block_size or 0.0)) / TWICE) / cache.kv_capacity_tokens


def load_signals(
    window: EngineWindow,
    configured: SequenceLimit,
    cache: KvSignals,
    mean_context: float | None,
    t: Thresholds,
    block_size: float | None = None,
    **stated: Any,
) -> LoadSignals:
    """Requests in flight against each known limit. ``stated``: signals that arguments and page state."""
    running, waiting = window.gauge(r.RUNNING), window.last.waiting if window.last else None
    behind = queued(window)
    judged = len(behind) >= t["trend_min_samples"] and behind[0].t - behind[-1].t >= t["plateau_min_seconds"]
    full = full_from("kv_near_full_ratio", cache.kv_watermark_ratio, t)
    level = maximum(behind, full, t) if judged else None
    limits: dict[str, float] = {}
    if configured.value is not None and configured.source is not None:
        limits[configured.source] = configured.value
    if level is not None and (
        configured.value is None or (configured.source == "default" and level < configured.value)
    ):
        limits["observed"] = level
    if cache.kv_capacity_tokens is not None and mean_context:
        limits["kv_capacity"] = max(1.0, cache.kv_capacity_tokens / mean_context, _fits_as_seen(window, t))
    sequence_limit = limits.get("observed", configured.value)
    in_flight = window.last.in_flight if window.last else None
    smallest = min(limits.values(), default=None)
    held = [] if cache.kv_recorded is False else window.values(".held", FIVE_MINUTES, _held)
    return LoadSignals(
        running=running,
        waiting=waiting,
        running_plateau=level is not None if judged or (running is not None and not behind) else None,
        waiting_capacity=window.gauge(r.WAITING_CAPACITY),
        waiting_deferred=window.gauge(r.WAITING_DEFERRED),
        in_flight=in_flight,
        limits=limits,
        max_num_seqs=sequence_limit,
        max_num_seqs_source="observed" if "observed" in limits else configured.source,
        concurrency_ratio=None if in_flight is None or not smallest else in_flight / smallest,
        running_at_limit=at_limit(window, sequence_limit, t),
        running_at_limit_now=None
        if running is None or sequence_limit is None
        else running >= reaching(sequence_limit, t),
        kv_share_held=later(held_per_request, held, _by_length(window, cache, block_size)),
        kv_share_at_peak=later(held_at_peak, held, t),
        running_most=max(window.gauge_values(r.RUNNING, HALF_MINUTE), default=None),
        arrival_burst_ratio=later(burst_ratio, window.values(".arrived", FIVE_MINUTES, _arrived), t),
        **stated,
    )


def _held(sample: Sample) -> tuple[float, float] | None:
    """KV usage and requests running."""
    used = sample.gauges.get(r.KV_USAGE)
    return None if used is None else (used, sample.gauges.get(r.RUNNING) or 0.0)


def _arrived(sample: Sample) -> tuple[float, float] | None:
    """When, and how many requests had arrived by then, up to a constant. vLLM does not count aborted ones."""
    return None if sample.requests is None else (sample.t, sum(sample.requests))


def _fits_as_seen(window: EngineWindow, t: Thresholds) -> float:
    """Requests that would fill the cache at the recent usage per request, which shared prefixes and half-grown
    requests make smaller than their lengths suggest. 0 where nothing runs or usage is unknown.
    """
    peak = max(window.gauge_values(r.KV_USAGE, t["kv_recent_seconds"]), default=0.0)
    most = max(window.gauge_values(r.RUNNING, t["kv_recent_seconds"]), default=0.0)
    return most / peak if peak > 0 else 0.0


def burst_ratio(known: Sequence[tuple[float, float]], t: Thresholds) -> float | None:
    """Arrival rate in the busiest 10 s (or the shortest longer span between samples) divided by the mean of all.
    ``None`` with too little history or without arrivals. ``known``: as of ``EngineWindow.arrivals``.
    """
    if len(known) < t["trend_min_samples"] or known[-1][0] - known[0][0] < MINUTE:
        return None
    (begin, before), (end, in_all) = known[0], known[-1]
    mean, first = (in_all - before) / (end - begin), begin + BURST_SECONDS
    if mean <= 0:
        return None
    busiest, older = 0.0, iter(known[1:])
    following = next(older)
    for now, so_far in known:
        if now < first:
            continue
        while following[0] <= now - BURST_SECONDS:
            (begin, before), following = following, next(older)
        if so_far - before > busiest * (now - begin):
            busiest = (so_far - before) / (now - begin)
    return busiest / mean if busiest > 0 else None


QUANTILES: Final = (0.5, 0.95, 0.99)


class FastestStep:
    """Step times of the last fifteen minutes, one per quarter minute, each with its batch size."""

    __slots__ = ("_points", "_present", "_thresholds")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._points: deque[tuple[float, float, float]] = deque()
        self._present: tuple[tuple[float, float, float], ...] = ()

    def ratio(self, t: float, step: float | None, batch: float | None) -> float | None:
        """Step time now divided by the fastest comparable one of another quarter minute; ``None`` without one.
        Comparable: a batch at least half as large (``most_ratio``); a smaller one is scaled up in
        proportion to its requests, because no step takes longer than that.
        """
        points = self._points
        while points and not t - QUARTER_HOUR <= points[0][0] <= t:
            points.popleft()
        if step is None or not batch or step <= 0:
            self._present = ()
            return None
        self._present = ((t, step, batch),)
        smallest = self._thresholds["most_ratio"] * batch
        expected = [
            fast if size >= batch else fast * (batch / size)
            for at, fast, size in points
            if size >= smallest and t - at >= QUARTER_MINUTE
        ]
        if not points or t - points[-1][0] >= QUARTER_MINUTE:
            points.append((t, step, batch))
        return step / min(expected) if expected else None

    def peak_batch(self) -> float | None:
        """Smallest batch of the points with the most tokens/s, or nearly as many; ``None`` without points."""
        points = [(size / fast, size) for _, fast, size in (*self._points, *self._present)]
        nearly = self._thresholds["at_limit_ratio"] * max(points, default=(0.0, 0.0))[0]
        return min([size for speed, size in points if speed >= nearly], default=None)


def quantile(ordered: Sequence[float], q: float) -> float:
    """Nearest-rank quantile of an ordered, non-empty sequence."""
    return ordered[min(len(ordered) - 1, max(0, ceil(q * len(ordered)) - 1))]


def batch_signals(
    window: EngineWindow,
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


MAX_REPORTS: Final = 256
# (size, count) pairs of all reports together; an engine makes at most 200 steps a second
MAX_ENTRIES: Final = 8_192
"""Batch sizes and counts kept in one engine's step window. Beyond: the oldest reports go; none is older than a minute.
Shown as: shorter window.
"""


@frozen
class _Increase:
    t: float
    steps: int
    decoded: int
    sizes: array[int]  # size and steps in turn: a hundred bytes less an entry than in a mapping
    kv_max: float | None


class StepWindow:
    """The plugin's counts over the last minute; keeps increases, which are smaller than the counts."""

    __slots__ = ("_entries", "_increases", "_last", "_thresholds")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._last: StepStats | None = None
        self._increases: deque[_Increase] = deque()
        self._entries = 0

    def observe(self, stats: StepStats) -> None:
        """Take a report. A known one is skipped; a new process, or a count that fell, starts the window anew."""
        before, self._last = self._last, stats
        if before is None or (stats.started, stats.exact) != (before.started, before.exact) or _shrunk(before, stats):
            self._increases.clear()
            self._entries = 0
            return
        if stats.written <= before.written:
            self._last = before
            return
        sizes = array("Q")
        for size, count in stats.sizes.items():
            if more := count - before.sizes.get(size, 0):
                sizes.extend((size, more))
        self._keep(
            _Increase(stats.written, stats.steps - before.steps, stats.decoded - before.decoded, sizes, stats.kv_max)
        )

    def _keep(self, newest: _Increase) -> None:
        """Add an increase; drop those older than a minute, and the oldest beyond the limits."""
        self._increases.append(newest)
        self._entries += len(newest.sizes)
        while len(self._increases) > 1 and (
            self._increases[0].t <= newest.t - MINUTE
            or len(self._increases) > MAX_REPORTS
            or self._entries > MAX_ENTRIES
        ):
            self._entries -= len(self._increases.popleft().sizes)

    def quantiles(self, now: float, *ranks: float) -> list[float] | None:
        """Batch sizes at these ranks (nearest rank) over the steps of the last minute; ``None`` without steps."""
        sizes: Counter[int] = Counter()
        for increase in self._since(now, MINUTE):
            for size, steps in zip(increase.sizes[::2], increase.sizes[1::2], strict=True):
                sizes[size] += steps
        total = sum(sizes.values())
        return [_at_rank(sizes, max(1, -int(-rank * total // 1))) for rank in ranks] if total else None

    def mean(self, now: float, seconds: float) -> float | None:
        """Mean batch of the steps of the last ``seconds``; ``None`` without steps."""
        increases = self._since(now, seconds)
        steps = sum(increase.steps for increase in increases)
        return sum(increase.decoded for increase in increases) / steps if steps else None

    def kv_max(self, now: float, seconds: float) -> float | None:
        """Largest KV usage (0-1) of any step of the last ``seconds``; ``None`` without steps."""
        return max((i.kv_max for i in self._since(now, seconds) if i.kv_max is not None), default=None)

    def _since(self, now: float, seconds: float) -> list[_Increase]:
        if self._last is None or now - self._last.written > self._thresholds["stale_page_seconds"]:
            return []
        return [increase for increase in self._increases if increase.t > now - seconds]


def _shrunk(before: StepStats, after: StepStats) -> bool:
    """Whether a count fell: an API server was replaced, or its report is missing."""
    return (
        after.steps < before.steps
        or after.decoded < before.decoded
        or any(after.sizes.get(size, 0) < count for size, count in before.sizes.items())
    )


def _at_rank(sizes: Mapping[int, int], rank: int) -> float:
    seen = 0
    for size in sorted(sizes):
        seen += sizes[size]
        if seen >= rank:
            break
    return float(size)
