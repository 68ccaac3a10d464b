"""Requests: lengths and shape, how they end, at which rate, how long they take against the engine's own baseline, and
objectives met.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Final

from kvpressure.model import readings
from kvpressure.model import readings as r
from kvpressure.model.frozen import frozen
from kvpressure.model.readings import EngineReading, Histogram
from kvpressure.model.signals import ContextSignals, LatencySignals, RequestSignals
from kvpressure.model.state import Objective
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.window import (
    FIVE_MINUTES,
    HALF_MINUTE,
    MINUTE,
    TWICE,
    EngineWindow,
    HistogramIncrease,
    Sample,
    histogram_increase,
)


@frozen
class Shape:
    """Mean prompt and output tokens over five minutes; ``arrivals_times_service`` is the concurrency that arrivals
    reach (arrival rate times service time, in requests).
    """

    prompt: float | None = None
    output: float | None = None
    arrivals_times_service: float | None = None

    @property
    def mean_context(self) -> float | None:
        """Prompt plus output tokens of a mean request; prompt alone when no output length is known."""
        if self.prompt is None:
            return None
        return self.prompt + (self.output or 0.0)


class LongestContext:
    """Longest context lengths in tokens within the window, found from one sample to the next.

    Exact when a single request finished (difference of the sums) or passed its prefill (its prompt tokens are counted
    in one lump at the first token, before it finishes). With several at once a lower bound: the lower bound of the
    highest bucket that grew, or their mean if that is larger.
    """

    __slots__ = ("_before", "_recent", "_window_seconds")

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._recent: deque[tuple[float, float]] = deque()
        self._before: Sample | None = None

    def observe(self, sample: Sample) -> None:
        """Take the newest sample."""
        before, self._before = self._before, sample
        while self._recent and self._recent[0][0] < sample.t - self._window_seconds:
            self._recent.popleft()
        if before is None or sample.t <= before.t:
            return
        lengths = [
            value
            for value in (_finished_context(before, sample), _prefilled_prompt(before, sample))
            if value is not None
        ]
        if lengths:
            longest = max(lengths)
            while self._recent and self._recent[-1][1] <= longest:
                self._recent.pop()
            self._recent.append((sample.t, longest))

    def maximum(self) -> float | None:
        """The longest of the window in tokens; ``None`` if nothing finished or passed prefill in it."""
        return self._recent[0][1] if self._recent else None


def _finished_context(before: Sample, after: Sample) -> float | None:
    prompt = _grown(before, after, r.REQUEST_PROMPT)
    output = _grown(before, after, r.REQUEST_OUTPUT)
    longest = _longest(prompt)
    if longest is None:
        return None
    if prompt is not None and output is not None and prompt.count == 1 and output.count == 1:
        return longest + (output.sum or 0.0)
    return longest


def _grown(before: Sample, after: Sample, name: str) -> HistogramIncrease | None:
    begin, end = before.histograms.get(name), after.histograms.get(name)
    if begin is None or end is None or begin.count == end.count:
        return None
    return histogram_increase(begin, end)


def _longest(increase: HistogramIncrease | None) -> float | None:
    if increase is None or not increase.count or increase.sum is None:
        return None
    if increase.count == 1:
        return increase.sum
    lower = 0.0
    for index, amount in enumerate(increase.increments):
        if amount > 0 and index > 0:
            lower = increase.bounds[index - 1]
    return max(lower, increase.sum / increase.count)


def _prefilled_prompt(before: Sample, after: Sample) -> float | None:
    begin, end = before.histograms.get(r.TTFT), after.histograms.get(r.TTFT)
    if begin is None or end is None or begin.count is None or end.count is None:
        return None
    number = end.count - begin.count
    tokens = after.counters.get(r.PROMPT_TOKENS, 0.0) - before.counters.get(r.PROMPT_TOKENS, 0.0)
    return tokens / number if number >= 1 and tokens > 0 else None


def shape(window: EngineWindow, t: Thresholds) -> Shape:
    """Mean request shape over five minutes; before a request finished, the prompt length comes from the token
    counter.
    """
    prompt = _mean(window, r.REQUEST_PROMPT)
    output = _mean(window, r.REQUEST_OUTPUT)
    started = window.observed(r.TTFT, FIVE_MINUTES)
    if prompt is None and started is not None and started[0].count:
        tokens = window.increase(r.PROMPT_TOKENS, FIVE_MINUTES)
        prompt = tokens[0] / started[0].count if tokens else None
    if prompt is None:
        prompt, output = _from_counters(window, output, t)
    service = window.observed(r.INFERENCE, FIVE_MINUTES)
    reach = None
    if service is not None and service[0].sum is not None:
        reach = service[0].sum / service[1]
    return Shape(prompt, output, reach)


def _from_counters(window: EngineWindow, output: float | None, t: Thresholds) -> tuple[float | None, float | None]:
    """Mean prompt and output tokens where the server publishes only counters (vLLM V0 names without histograms)."""
    samples = window.since(FIVE_MINUTES)
    begin, end = (samples[0].finished, samples[-1].finished) if samples else (None, None)
    done = 0.0 if begin is None or end is None else end - begin
    if done < t["values_min"]:
        return None, output
    prompt = window.increase(r.PROMPT_TOKENS, FIVE_MINUTES)
    generated = window.increase(r.GENERATION_TOKENS, FIVE_MINUTES)
    return (
        prompt[0] / done if prompt and prompt[0] > 0 else None,
        output if output is not None else (generated[0] / done if generated else None),
    )


def _mean(window: EngineWindow, name: str) -> float | None:
    found = window.observed(name, FIVE_MINUTES)
    return found[0].mean() if found else None


def context_signals(
    window: EngineWindow, longest: LongestContext, means: Shape, limit: float | None, t: Thresholds
) -> ContextSignals:
    """Context length and request shape over five minutes; ``limit`` is max_model_len in tokens."""
    maximum, mean = longest.maximum(), means.mean_context
    prompts = window.observed(r.REQUEST_PROMPT, FIVE_MINUTES)
    finished = prompts[0].count if prompts else None
    spike = None
    if maximum is not None and mean and (finished or 0) >= t["values_min"]:
        maximum = max(maximum, mean)
        spike = maximum / mean
    return ContextSignals(
        context_max_5m=maximum,
        context_mean=mean,
        context_spike_ratio=spike,
        prompt_mean=means.prompt,
        output_mean=means.output,
        context_limit=limit,
        prompt_quantiles=window.quantiles(r.REQUEST_PROMPT, FIVE_MINUTES),
        output_quantiles=window.quantiles(r.REQUEST_OUTPUT, FIVE_MINUTES),
        max_tokens_quantiles=window.quantiles(r.REQUEST_MAX_TOKENS, FIVE_MINUTES),
        stream_quantiles=window.quantiles(r.E2E, FIVE_MINUTES),
        bimodal_prompts=bimodal_prompts(prompts[0], t) if prompts else None,
    )


def bimodal_prompts(increase: HistogramIncrease, t: Thresholds) -> bool | None:
    """Whether short- and long-prompt requests share the server: two groups of buckets, far apart, each with a real
    share and with a valley between. ``None`` with too few requests.
    """
    total = increase.cumulative[-1] if increase.cumulative else 0.0
    if total < t["hump_min_requests"] or not increase.bounds:
        return None
    shares = [amount / total for amount in increase.increments]
    peaks = [
        i
        for i, share in enumerate(shares)
        if share > 0
        and share >= (shares[i - 1] if i else 0.0)
        and share >= (shares[i + 1] if i + 1 < len(shares) else 0.0)
    ]
    for left in peaks:
        for right in peaks:
            if right <= left + 1 or increase.bounds[right] < t["hump_min_distance_ratio"] * increase.bounds[left]:
                continue
            valley = min(range(left + 1, right), key=lambda i: shares[i])
            heights = min(shares[left], shares[right])
            smaller = min(sum(shares[: valley + 1]), sum(shares[valley + 1 :]))
            if shares[valley] <= t["most_ratio"] * heights and smaller >= t["hump_min_share_ratio"]:
                return True
    return False


_WAITS: Final = ("ttft", "queue")


@frozen
class Lost:
    """How requests that nobody has an answer of are counted: ``own_aborts``: aborts are the server's doing; ``alone``:
    the page's HTTP answers are all of this engine.
    """

    own_aborts: bool = False
    alone: bool = False

    def aborted(self, first: Sample, last: Sample) -> float:
        """Requests that the server aborted between two samples."""
        return last.counters.get(r.ABORTED, 0.0) - first.counters.get(r.ABORTED, 0.0) if self.own_aborts else 0.0

    def given_up(self, first: Sample, last: Sample) -> tuple[float, float] | None:
        """At least so many answers that clients did not wait for, of so many: the server ends an HTTP request when its
        client hangs up, and the engine counts no such request as finished. ``None`` if either is not counted.
        """
        before, after = first.finished, last.finished
        if not self.alone or before is None or after is None or r.HTTP_GENERATED not in last.page:
            return None
        answers = last.page[r.HTTP_GENERATED] - first.page.get(r.HTTP_GENERATED, 0.0)
        return max(0.0, answers - (after - before)), answers


def request_signals(
    window: EngineWindow, finished: float | None, latency: LatencySignals, lost: Lost, t: Thresholds
) -> RequestSignals:
    """Rates and the wait over five minutes, or since the first sample where that is less. ``finished``: of
    ``finished_per_second``.
    """
    return RequestSignals(
        requests_finished_per_second=finished,
        requests_failed_ratio=_failed_ratio(window, finished or 0.0, lost, t),
        given_up_ratio=_given_up_ratio(window, lost, t),
        refused_ratio=_refused_ratio(window, lost, t),
        wait_measured_seconds=_measured_wait(window, latency),
        wait_estimated_seconds=None if finished is None else _estimated_wait(window, finished, t),
        waited_before=_waited_before(window),
    )


def finished_per_second(window: EngineWindow) -> float | None:
    """Requests per second that finished, aborts and errors left out; ``None`` where they are not counted."""
    pair = window.pair(FIVE_MINUTES)
    if pair is None or pair[1].answered is None:
        return None
    first, last = pair
    return max(0.0, (last.answered or 0.0) - (first.answered or 0.0)) / (last.t - first.t)


def _given_up_ratio(window: EngineWindow, lost: Lost, t: Thresholds) -> float | None:
    """Share of the last minute's answers that clients did not wait for; ``None`` with too few."""
    pair = window.pair(MINUTE)
    found = None if pair is None else lost.given_up(*pair)
    return None if found is None or found[1] < t["latency_min_requests"] else found[0] / found[1]


def _refused_ratio(window: EngineWindow, lost: Lost, t: Thresholds) -> float | None:
    """Share of the requests that ended recently which the server aborted; ``None`` where that is not known."""
    pair = window.pair(t["recent_window_seconds"])
    if pair is None or not lost.own_aborts or pair[0].finished is None or pair[1].finished is None:
        return None
    ended = pair[1].finished - pair[0].finished
    return lost.aborted(*pair) / ended if ended >= t["latency_min_requests"] else 0.0


def _failed_ratio(window: EngineWindow, finished: float, lost: Lost, t: Thresholds) -> float | None:
    """Share of failed requests, 0-1. A counter is 0 before it appears. ``None`` below ``failed_min_per_second``."""
    pair = window.pair(FIVE_MINUTES)
    if pair is None:
        return None
    first, last = pair
    rises = {
        name: count - before.get(name, 0.0)
        for counts, before in ((last.counters, first.counters), (last.page, first.page))
        for name, count in counts.items()
        if name.startswith(readings.FAILURES)
    }
    given_up = (lost.given_up(first, last) or (0.0,))[0]
    if given_up and not any(window.waiting(FIVE_MINUTES)):  # they cancel at will
        given_up = 0.0
    thrown_away = lost.aborted(first, last) + given_up
    failed = (readings.count_failed(rises) + thrown_away) / (last.t - first.t)
    return failed / (failed + finished) if failed > 0 and failed >= t["failed_min_per_second"] else None


def _measured_wait(window: EngineWindow, latency: LatencySignals) -> float | None:
    """p95 of the wait for the first token or in the queue, in seconds, where it is slow and requests wait now.
    ``None`` where a baseline is known.
    """
    if not latency.slow_p95 or window.last is None or any(phase in latency.slow_ratios for phase in _WAITS):
        return None
    slow = [latency.slow_p95[phase] for phase in _WAITS if phase in latency.slow_p95]
    return max(slow, default=None) if (window.last.waiting or 0.0) >= 1 else None


def _estimated_wait(window: EngineWindow, finished: float, t: Thresholds) -> float | None:
    """Estimated wait in seconds where too few requests finish for quantiles: requests waiting, divided by the finish
    rate, which counts as at least one request in five minutes. ``None`` with less than five minutes of history.
    """
    if finished >= t["latency_min_finished_per_second"] or _first(window) is None:
        return None
    waiting = max(sample.waiting or 0.0 for sample in window.since(FIVE_MINUTES))
    return waiting / max(finished, 1.0 / FIVE_MINUTES) if waiting >= 1 else None


def _waited_before(window: EngineWindow) -> bool | None:
    """Whether requests already waited five minutes ago."""
    first = _first(window)
    return None if first is None or first.waiting is None else first.waiting >= 1


def _first(window: EngineWindow) -> Sample | None:
    """The sample of five minutes ago; ``None`` where the window does not reach back so far."""
    if window.last is None or window.first_t is None or window.last.t - window.first_t < FIVE_MINUTES:
        return None
    return window.since(FIVE_MINUTES)[0]


PHASES: Final = (("ttft", r.TTFT), ("inter_token", r.INTER_TOKEN), ("e2e", r.E2E), ("queue", r.QUEUE))
FLOORS: Final = {
    "ttft": "ttft_floor_seconds",
    "inter_token": "inter_token_floor_seconds",
    "queue": "ttft_floor_seconds",
}
BASELINE_VALUES: Final = 240  # kept: two hours of calm half-minutes


class Baseline:
    """The engine's usual p95 latency: the median of the p95 of calm minutes.

    Only calm moments enter (no lasting queue, cache not near full), so that an incident does not move it. Unknown
    until there are ``baseline_min_values``.
    """

    __slots__ = ("_last_t", "_thresholds", "_values")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._values: dict[str, deque[float]] = {phase: deque(maxlen=BASELINE_VALUES) for phase, _ in PHASES}
        self._last_t = float("-inf")

    def learn(self, t: float, calm: bool, p95: Mapping[str, float]) -> None:
        """Take the last minute's p95 in seconds by phase if calm; at most once in half a minute."""
        if not calm or 0 <= t - self._last_t < HALF_MINUTE or not self._good(p95):
            return
        self._last_t = t
        for phase, value in p95.items():
            self._values[phase].append(value)

    def _good(self, p95: Mapping[str, float]) -> bool:
        """Whether no phase is both much slower than usual and above its alert threshold; else a slow incident without
        a queue would become the baseline it is measured against.
        """
        t = self._thresholds
        for phase, floor in FLOORS.items():
            usual, now = self.value(phase), p95.get(phase)
            if usual is not None and now is not None and now >= t["latency_rising_ratio"] * usual and now >= t[floor]:
                return False
        return True

    def value(self, phase: str) -> float | None:
        """The baseline p95 in seconds; ``None`` before there are enough values."""
        values, t = self._values[phase], self._thresholds
        if len(values) < t["baseline_min_values"]:
            return None
        return max(t["baseline_floor_seconds"], sorted(values)[(len(values) - 1) // 2])


def latency_signals(
    window: EngineWindow, baseline: Baseline, calm: bool, finished: float | None, t: Thresholds
) -> LatencySignals:
    """Latency over the last minute; ``calm``: it may enter the baseline. ``finished``: requests per second."""
    by_phase: dict[str, Mapping[str, float]] = {}
    enough: dict[str, float] = {}
    for phase, name in PHASES:
        found = window.observed(name, MINUTE)
        if found is None or not found[0].count:
            continue
        by_phase[phase] = window.quantiles(name, MINUTE)
        if found[0].count >= t["latency_min_requests"] and "0.95" in by_phase[phase]:
            enough[phase] = by_phase[phase]["0.95"]
    if window.last is not None:
        baseline.learn(window.last.t, calm, enough)
    ratios = {phase: p95 / base for phase, p95 in enough.items() if (base := baseline.value(phase)) is not None}
    slow = slow_phases(finished, {phase: found.get("0.95") for phase, found in by_phase.items()}, ratios, t)
    outside, share = outside_engine(window)
    if share is None:
        share = before_engine(window, t)
    return LatencySignals(
        ttft=by_phase.get("ttft", {}),
        inter_token=by_phase.get("inter_token", {}),
        e2e=by_phase.get("e2e", {}),
        queue=by_phase.get("queue", {}),
        baseline_ratios=ratios,
        slow_p95=slow,
        slow_ratios={phase: ratio for phase, ratio in ratios.items() if phase in slow},
        outside_engine_seconds=outside,
        outside_engine_share=share,
    )


def slow_phases(
    finished: float | None, p95: Mapping[str, float | None], ratios: Mapping[str, float], t: Thresholds
) -> dict[str, float]:
    """The p95 of each slow phase: at or above its floor, or a first token many times slower than usual. Empty where too
    few requests finish for a quantile.
    """
    if finished is None or finished < t["latency_min_finished_per_second"]:
        return {}
    floors = {phase: t[floor] for phase, floor in FLOORS.items()}
    if ratios.get("ttft", 0.0) >= t["latency_critical_ratio"]:
        floors["ttft"] = min(floors["ttft"], t["objective_ttft_seconds"])
    return {phase: now for phase, floor in floors.items() if (now := p95.get(phase)) is not None and now >= floor}


def outside_engine(window: EngineWindow) -> tuple[float | None, float | None]:
    """Mean seconds per finished request outside the engine (tokenizer, API server, network), and their share of the
    end-to-end time: e2e - queue - inference, whose sums are observed for the same requests.
    """
    parts = [window.observed(name, MINUTE) for name in (r.E2E, r.QUEUE, r.INFERENCE)]
    sums = [part[0].sum for part in parts if part is not None and part[0].sum is not None]
    count = parts[0][0].count if parts[0] is not None else None
    if len(sums) < len(parts) or not count or sums[0] <= 0:
        return None, None
    whole, queued, computed = sums
    outside = max(0.0, whole - queued - computed)
    return outside / count, outside / whole


def before_engine(window: EngineWindow, t: Thresholds) -> float | None:
    """Least share of the time to first token, over five minutes, that requests spent before they reached the engine.
    By Little's law the engine would otherwise have shown more in flight. ``None`` where it may have had all of them.
    """
    found, lately = window.observed(r.TTFT, FIVE_MINUTES), window.in_flight(MINUTE)
    if found is None or not found[0].count or not found[0].sum or not lately or window.first_t is None:
        return None
    waited, span = found[0].sum, found[1]
    reach = span + min(FIVE_MINUTES, TWICE * waited / found[0].count)  # what ended in the window began before it
    if waited / span <= sum(lately) / len(lately) or window.last is None or window.last.t - reach < window.first_t:
        return None
    inside = 0.0
    for before, after in pairwise(window.since(reach)):
        if before.in_flight is None or after.in_flight is None:
            return None
        inside += (after.t - before.t) * max(before.in_flight, after.in_flight)
    share = 1.0 - inside / waited
    several = (waited - inside) / span >= t["several_min"]
    return share if several and share >= t["outside_engine_share_ratio"] else None


_LATENCIES = {"ttft": r.TTFT, "inter_token": r.INTER_TOKEN, "e2e": r.E2E}


def objectives(reading: EngineReading, counters: Mapping[str, float], thresholds: Thresholds) -> tuple[Objective, ...]:
    """Every objective whose target is above 0 and that the engine's metrics can measure."""
    return tuple(_each(reading, counters, thresholds))


def _each(reading: EngineReading, counters: Mapping[str, float], t: Thresholds) -> Iterator[Objective]:
    for name, histogram in _LATENCIES.items():
        target = t[f"objective_{name}_ratio"]
        found = reading.histograms.get(histogram)
        if target > 0 and found is not None:
            yield from _latency(name, found, t[f"objective_{name}_seconds"], target)
    target = t["objective_availability_ratio"]
    if target > 0:
        good = readings.count_answered(counters)
        yield Objective("availability", good, good + readings.count_failed(counters), None, target)


def _latency(name: str, histogram: Histogram, objective: float, target: float) -> Iterator[Objective]:
    """Nothing where no bucket bound is at or below the objective."""
    known = [pair for pair in zip(histogram.bounds, histogram.counts, strict=False) if pair[0] <= objective]
    if known and histogram.counts:
        bound, good = known[-1]
        yield Objective(name, good, histogram.counts[-1], bound, target)
