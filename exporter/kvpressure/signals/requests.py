"""Requests: lengths and shape, how they end, at which rate, how long they take against the engine's own baseline, and
objectives met.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from kvpressure.model import readings as r
from kvpressure.model.frozen import frozen
from kvpressure.model.readings import EngineReading
from kvpressure.model.signals import ContextSignals, LatencySignals, RequestSignals, Signals, Slow, later
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
    quantiles_of,
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
        lengths = _finished_context(before, sample), _prefilled_prompt(before, sample)
        longest = max((length for length in lengths if length is not None), default=None)
        if longest is not None:
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
    begin, end = before.histogram(name), after.histogram(name)
    if begin is None or end is None or begin.count == end.count:
        return None
    return histogram_increase(begin, end)


def _longest(increase: HistogramIncrease | None) -> float | None:
    if increase is None or not increase.count or increase.sum is None:
        return None
    if increase.count == 1:
        return increase.sum
    highest = max((index for index, amount in enumerate(increase.increments) if amount > 0), default=0)
    return max(increase.bounds[highest - 1] if highest else 0.0, increase.sum / increase.count)


def _prefilled_prompt(before: Sample, after: Sample) -> float | None:
    begin, end = before.histogram(r.TTFT), after.histogram(r.TTFT)
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
    return Shape(prompt, output, None if service is None or service[0].sum is None else service[0].sum / service[1])


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


def _mean(window: EngineWindow, name: str, seconds: float = FIVE_MINUTES) -> float | None:
    found = window.observed(name, seconds)
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
        output_quantiles=later(quantiles_of, window.observed(r.REQUEST_OUTPUT, FIVE_MINUTES)),
        max_tokens_quantiles=later(quantiles_of, window.observed(r.REQUEST_MAX_TOKENS, FIVE_MINUTES)),
        stream_quantiles=later(quantiles_of, window.observed(r.E2E, FIVE_MINUTES)),
        bimodal_prompts=later(bimodal_prompts, prompts[0], t) if prompts else None,
    )


def bimodal_prompts(increase: HistogramIncrease, t: Thresholds) -> bool | None:
    """Whether short- and long-prompt requests share the server: two groups of buckets, far apart, each with a real
    share and with a valley between. ``None`` with too few requests.
    """
    total = increase.counts[-1] if increase.counts else 0.0
    if total < t["hump_min_requests"] or not increase.bounds:
        return None
    shares = [amount / total for amount in increase.increments]
    before, after = (0.0, *shares), (*shares[1:], 0.0)
    peaks = [i for i, share in enumerate(shares) if 0 < share == max(before[i], share, after[i])]
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
    window: EngineWindow,
    lost: Lost,
    endings: Ended | None,
    usual: float | None,
    t: Thresholds,
) -> RequestSignals:
    """Rates and the wait over five minutes, or since the first sample where that is less. ``endings``: of ``ended``;
    ``usual``: share of requests that clients abandon.
    """
    finished = None if endings is None or endings.answered is None else endings.answered / endings.seconds
    failed, more = _failed_ratio(endings, t), _abandoned_more(endings, usual, t)
    return RequestSignals(
        requests_finished_per_second=finished,
        failed_ratio=failed,
        abandoned_more_ratio=more,
        requests_lost_ratio=None if failed is None and more is None else (failed or 0.0) + (more or 0.0),
        abandoned_usual_ratio=usual,
        given_up_ratio=_given_up_ratio(window, lost, t),
        refused_ratio=_refused_ratio(window, lost, t),
        wait_estimated_seconds=None if finished is None else _estimated_wait(window, finished, t),
        waited_before=_waited_before(window),
    )


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


@frozen
class Ended:
    """How requests ended over five minutes, as numbers of requests. ``answered``: aborts and errors left out, ``None``
    where they are not counted; ``failed``: without the server's answer; ``abandoned``: their clients did not wait for
    it, as far as the server counts that.
    """

    seconds: float
    answered: float | None
    failed: float
    abandoned: float
    queued: bool

    def share(self, number: float) -> float:
        """Share (0-1) of all that ended."""
        total = (self.answered or 0.0) + self.failed + self.abandoned
        return number / total if total > 0 else 0.0


_LOSSES: Final = (*r.FAILURES, r.ABORTED)  # how the names of what is counted there begin


def ended(window: EngineWindow, lost: Lost) -> Ended | None:
    """How requests ended; ``None`` before the second sample. A counter is 0 before it appears."""
    pair = window.pair(FIVE_MINUTES)
    if pair is None:
        return None
    first, last = pair
    rises = {
        name: count - before.get(name, 0.0)
        for counts, before in ((last.counters, first.counters), (last.page, first.page))
        for name, count in counts.items()
        if name.startswith(_LOSSES)
    }
    aborted = 0.0 if lost.own_aborts else rises.get(r.ABORTED, 0.0)
    return Ended(
        last.t - first.t,
        None if last.answered is None else max(0.0, last.answered - (first.answered or 0.0)),
        r.count_failed(rises) + lost.aborted(first, last),
        aborted + (lost.given_up(first, last) or (0.0,))[0],
        any(sample.waiting for sample in reversed(window.since(FIVE_MINUTES))),
    )


def abandoned_ratio(found: Ended | None, t: Thresholds) -> float | None:
    """Share of the requests that clients abandoned; ``None`` with too few that ended."""
    if found is None or (found.answered or 0.0) + found.abandoned < t["latency_min_requests"]:
        return None
    return found.share(found.abandoned)


def _failed_ratio(found: Ended | None, t: Thresholds) -> float | None:
    """Share of failed requests, 0-1; ``None`` below ``failed_min_per_second``."""
    if found is None or found.failed < t["failed_min_per_second"] * found.seconds or not found.failed:
        return None
    return found.share(found.failed)


def _abandoned_more(found: Ended | None, usual: float | None, t: Thresholds) -> float | None:
    """By how much the share of abandoned requests is above the usual one, where that is much. Without a usual share
    they count only while requests wait, because clients may cancel at will.
    """
    share = abandoned_ratio(found, t)
    if found is None or share is None or (usual is None and not found.queued):
        return None
    more = share - (usual or 0.0)
    return more if more >= t["rejected_critical_ratio"] else None


def _estimated_wait(window: EngineWindow, finished: float, t: Thresholds) -> float | None:
    """Estimated wait in seconds where too few requests finish for quantiles: requests waiting, divided by the finish
    rate; where none finishes, the five minutes that are known. ``None`` with less history.
    """
    if finished >= t["latency_min_finished_per_second"] or _first(window) is None:
        return None
    waiting = max(sample.waiting or 0.0 for sample in window.since(FIVE_MINUTES))
    if waiting < 1:
        return None
    return waiting / finished if finished > 0 else FIVE_MINUTES


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
    "ttft": "objective_ttft_seconds",
    "inter_token": "inter_token_floor_seconds",
    "queue": "ttft_floor_seconds",
    "e2e": "ttft_floor_seconds",
}
"""Below these thresholds no latency raises an alert, however far above its baseline."""
_CRITICAL: Final = {
    "ttft": "ttft_floor_seconds",
    "inter_token": "inter_token_floor_seconds",
    "queue": "ttft_floor_seconds",
}
"""From these on, latency may wake somebody."""
BASELINE_VALUES: Final = 240  # kept: two hours of calm half-minutes
_FIRST, _TOKEN = "first token", "token"  # what whole answers are made of, as means
ABANDONED: Final = "abandoned"  # share of the requests
TRANSFER: Final = "transfer"  # seconds for a GB
ACCEPTED: Final = "accepted"  # draft tokens in a request's step


@frozen
class WholeAnswers:
    """Means of the answers that finished in the last minute: seconds, seconds to the first token, output tokens."""

    seconds: float
    first: float
    tokens: float

    @property
    def parts(self) -> dict[str, float]:
        """Seconds to the first token, and for each token."""
        return {_FIRST: self.first, _TOKEN: max(0.0, self.seconds - self.first) / self.tokens}


def _whole_answers(window: EngineWindow) -> WholeAnswers | None:
    seconds, first, tokens = (_mean(window, name, MINUTE) for name in (r.E2E, r.TTFT, r.REQUEST_OUTPUT))
    return None if seconds is None or first is None or not tokens else WholeAnswers(seconds, first, tokens)


class Baseline:
    """The engine's usual p95 latency: the median of the p95 of calm minutes. That of whole answers is what answers of
    the same length usually take.

    Only calm moments enter (no lasting queue, cache not near full), so that an incident does not move it. Unknown
    until there are ``baseline_min_values``.
    """

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._values: dict[str, deque[float]] = {}
        self._usual: dict[str, float] = {}  # of those with enough values
        self._last_t = float("-inf")

    def learn(
        self,
        t: float,
        calm: bool,
        p95: Mapping[str, float],
        whole: WholeAnswers | None = None,
        beside: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Take the last minute's p95 in seconds by phase, and what is known ``beside`` it (``ABANDONED``, ``TRANSFER``,
        ``ACCEPTED``), if calm; at most once in half a minute.
        """
        if not calm or 0 <= t - self._last_t < HALF_MINUTE or self._harms(p95, whole, beside.get(ABANDONED)):
            return
        self._last_t = t
        learnt = {**p95, **(whole.parts if whole is not None and "e2e" in p95 else {})}
        learnt.update((name, value) for name, value in beside.items() if not self.worse(name, value))
        for name, value in learnt.items():
            values = self._values.setdefault(name, deque(maxlen=BASELINE_VALUES))
            values.append(value)
            if len(values) >= self._thresholds["baseline_min_values"]:
                middle = sorted(values)[(len(values) - 1) // 2]
                self._usual[name] = max(self._thresholds["baseline_floor_seconds"], middle)

    def worse(self, name: str, value: float) -> bool | None:
        """Whether transfers are much slower than usual, or accepted drafts much fewer; ``None`` without a usual
        value. ``_harms`` judges the others.
        """
        usual, most = self.value(name), self._thresholds["latency_rising_ratio"]
        if usual is None or name == ABANDONED:
            return None
        return value >= most * usual if name == TRANSFER else value * most <= usual

    def _harms(self, p95: Mapping[str, float], whole: WholeAnswers | None, abandoned: float | None) -> bool:
        """Whether a phase is much slower than usual and above the lowest threshold that can raise an alert, or far more
        requests are abandoned; else an incident without a queue would become the baseline it is measured against.
        """
        t = self._thresholds
        usual, given_up = self.usual(p95, whole), self.value(ABANDONED)
        if abandoned is not None and given_up is not None and abandoned - given_up >= t["rejected_critical_ratio"]:
            return True
        return any(
            p95[phase] >= t["latency_rising_ratio"] * usual[phase] and p95[phase] >= t[FLOORS[phase]] for phase in usual
        )

    def usual(self, p95: Mapping[str, float], whole: WholeAnswers | None) -> dict[str, float]:
        """The usual seconds of each of these phases, where they are known."""
        found = {phase: usual for phase in p95 if phase != "e2e" and (usual := self.value(phase)) is not None}
        first, token = self.value(_FIRST), self.value(_TOKEN)
        if whole is not None and "e2e" in p95 and first is not None and token is not None:
            found["e2e"] = p95["e2e"] * (first + whole.tokens * token) / whole.seconds
        return found

    def value(self, name: str) -> float | None:
        """The usual seconds; ``None`` before there are enough values."""
        return self._usual.get(name)


def latency_signals(
    window: EngineWindow, baseline: Baseline, calm: bool, beside: Mapping[str, float], t: Thresholds
) -> LatencySignals:
    """Latency over the last minute; ``calm``: it may enter the baseline, with what is known ``beside`` it."""
    by_phase: dict[str, Mapping[str, float]] = {}
    enough: dict[str, float] = {}
    for phase, name in PHASES:
        found = window.observed(name, MINUTE)
        if found is None or not found[0].count:
            continue
        by_phase[phase] = window.quantiles(name, MINUTE)
        if found[0].count >= t["latency_min_requests"] and "0.95" in by_phase[phase]:
            enough[phase] = by_phase[phase]["0.95"]
    whole = _whole_answers(window)
    if window.last is not None:
        baseline.learn(window.last.t, calm, enough, whole, beside)
    usual = baseline.usual(enough, whole)
    outside, share = outside_engine(window)
    if share is None:
        share = before_engine(window, t)
    return LatencySignals(
        **by_phase,
        usual=usual,
        baseline_ratios={phase: enough[phase] / seconds for phase, seconds in usual.items()},
        outside_engine_seconds=outside,
        outside_engine_share=share,
    )


def slow_phases(s: Signals, t: Thresholds) -> list[Slow]:
    """The phases that are slow by their p95; none where too few requests finish for one. The queue is part of the first
    token, and counts only where that is not measured.
    """
    finished, latency = s.requests.requests_finished_per_second, s.latency
    if finished is None or finished < t["latency_min_finished_per_second"]:
        return []
    p95 = {phase: found["0.95"] for phase in FLOORS if "0.95" in (found := getattr(latency, phase))}
    if "ttft" in p95:
        p95.pop("queue", None)
    found = (_slow(Slow(phase, now, latency.usual.get(phase)), s, t) for phase, now in p95.items())
    return [slow for slow in found if slow is not None]


def _slow(one: Slow, s: Signals, t: Thresholds) -> Slow | None:
    """The phase, if it is slow, and whether badly. Without a baseline the first token and the time between tokens are
    slow from their floor on; badly, where several requests wait long.
    """
    if one.usual is None:
        floor = _CRITICAL.get(one.phase)
        if floor is None or one.seconds < t[floor]:
            return None
        long = one.phase != "inter_token" and bool(s.load.waiting) and one.seconds >= t["wait_page_seconds"]
        return Slow(one.phase, one.seconds, None, long and _several(s, t))
    if one.seconds < t[FLOORS[one.phase]] or one.multiple < t["latency_multiplied_ratio"]:
        return None
    floor = _CRITICAL.get(one.phase)
    badly = floor is not None and one.seconds >= t[floor] and one.multiple >= t["latency_critical_ratio"]
    return Slow(one.phase, one.seconds, one.usual, badly)


def slow_queue(s: Signals, t: Thresholds) -> Slow | None:
    """The estimated time in the queue, if that is long."""
    wait = s.requests.wait_estimated_seconds
    if wait is None or wait < t["wait_page_seconds"] or not s.load.in_flight:
        return None
    return Slow("queue", wait, badly=_several(s, t))


def _several(s: Signals, t: Thresholds) -> bool:
    return (s.load.in_flight or 0.0) >= t["batch_collapse_min_requests"]


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


def objectives(reading: EngineReading, counters: Mapping[str, float], t: Thresholds) -> Iterator[Objective]:
    """Every objective whose target is above 0 and that the engine's metrics can measure: no latency where each bucket
    of its histogram ends above the objective.
    """
    for name, histogram in PHASES[:-1]:
        target, most = t[f"objective_{name}_ratio"], t[f"objective_{name}_seconds"]
        found = reading.histograms.get(histogram)
        if target > 0 and found is not None:
            met = [pair for pair in zip(found.bounds, found.counts, strict=False) if pair[0] <= most]
            for bound, good in met[-1:]:
                yield Objective(name, good, found.counts[-1], bound, target)
    target = t["objective_availability_ratio"]
    if target > 0:
        good = r.count_answered(counters)
        yield Objective("availability", good, good + r.count_failed(counters), None, target)
