"""Token rates and whether they follow demand; a stall against gauges that merely froze; prefill that no gauge shows; KV
blocks on their way between servers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter
from typing import Final

from kvpressure.model import readings as r
from kvpressure.model.arguments import GIB
from kvpressure.model.signals import KvSignals, LoadSignals, ProgressSignals, ThroughputSignals, TransferSignals
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.window import (
    FIVE_MINUTES,
    HALF_MINUTE,
    MINUTE,
    QUARTER_HOUR,
    REACH_SECONDS,
    EngineWindow,
    Sample,
)

TREND_STEP_SECONDS: Final = 15.0


class Trend:
    """Generation throughput and demand of the last fifteen minutes, one point per quarter minute."""

    __slots__ = ("_points", "_thresholds")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._points: deque[tuple[float, float, float]] = deque()

    def observe(self, t: float, throughput: float | None, demand: float | None) -> None:
        """Take the last minute's throughput (tokens/s) and demand (requests in flight)."""
        points = self._points
        while points and points[0][0] < t - QUARTER_HOUR:
            points.popleft()
        if throughput is not None and demand is not None and (not points or t - points[-1][0] >= TREND_STEP_SECONDS):
            points.append((t, throughput, demand))

    def ratio(self, t: float, throughput: float | None, demand: float | None) -> float | None:
        """Throughput now divided by the best at no more than about the same demand (``trend_change_ratio``), at most
        1. ``None`` with less than two minutes of such history.
        """
        if throughput is None or demand is None:
            return None
        most = demand * (1 + self._thresholds["trend_change_ratio"])
        since = next((at for at, _, wanted in self._points if wanted <= most), t)
        if t - since < self._thresholds["trend_min_seconds"]:
            return None
        best = max(throughput, *[rate for _, rate, wanted in self._points if wanted <= most])
        return throughput / best if best > 0 else None

    def flat(self, t: float, throughput: float | None, demand: float | None) -> bool | None:
        """Whether throughput failed to follow demand: demand rose and throughput did not, or throughput fell while
        demand did not. ``None`` with less than two minutes of history.
        """
        if throughput is None or demand is None:
            return None
        known, change = self._thresholds, self._thresholds["trend_change_ratio"]
        earlier = [(rate, wanted) for at, rate, wanted in self._points if t - at >= known["trend_min_seconds"]]
        if not earlier:
            return None
        before = sum([rate for rate, _ in earlier]) / len(earlier)
        wanted = sum([demanded for _, demanded in earlier]) / len(earlier)
        if demand >= (1 + change) * wanted:
            return before > 0 and throughput <= (1 + known["most_ratio"] * change) * before
        fell = 1 - change
        return throughput < fell * before and demand >= fell * wanted


def throughput_signals(window: EngineWindow, trend: Trend) -> ThroughputSignals:
    """Rates over the last half minute, trend over fifteen minutes."""
    prompt, generation = window.rate(r.PROMPT_TOKENS, HALF_MINUTE), window.rate(r.GENERATION_TOKENS, HALF_MINUTE)
    if generation is None:
        generation = window.gauge(r.GENERATION_RATE)
    if prompt is None:
        prompt = window.gauge(r.PROMPT_RATE)
    running = window.gauge_values(r.RUNNING, HALF_MINUTE)
    mean_running = sum(running) / len(running) if running else None
    done = None
    if (pair := window.pair(HALF_MINUTE)) is not None:
        begin, end = (sample.finished for sample in pair)
        done = None if begin is None or end is None else max(0.0, end - begin) / (pair[1].t - pair[0].t)
    minute = window.rate(r.GENERATION_TOKENS, MINUTE)
    demand = _mean_demand(window)
    ratio = flat = None
    if window.last is not None:
        ratio, flat = trend.ratio(window.last.t, minute, demand), trend.flat(window.last.t, minute, demand)
        trend.observe(window.last.t, minute, demand)
    return ThroughputSignals(
        prompt_tokens_per_second=prompt,
        prompt_tokens_computed_per_second=_computed(window, prompt),
        generation_tokens_per_second=generation,
        finished_per_second=done,
        generation_tokens_per_running=None if generation is None or not mean_running else generation / mean_running,
        throughput_trend_ratio=ratio,
        throughput_flat=flat,
        step_output_tokens=step_output(window),
        speculates=None
        if window.last is None
        else r.DRAFTS in window.last.counters or bool(window.gauge(r.STEP_OUTPUT)),
    )


def step_output(window: EngineWindow) -> float | None:
    """Output tokens of a request's step over the last minute; ``None`` without speculative decoding."""
    drafts = _risen(window, r.DRAFTS, MINUTE)
    if drafts:
        return 1.0 + _risen(window, r.DRAFTS_ACCEPTED, MINUTE) / drafts
    return (window.gauge(r.STEP_OUTPUT) if window.gauge(r.RUNNING) else None) or None


def _risen(window: EngineWindow, name: str, seconds: float) -> float:
    """Increase of a counter over the window; 0 where it is not there."""
    found = window.increase(name, seconds)
    return found[0] if found else 0.0


def transfer_pace(window: EngineWindow, t: Thresholds) -> tuple[float | None, float | None]:
    """Mean seconds of the last minute's transfers, and for each GiB, for each prompt token where bytes are not counted;
    ``None`` where too few ended on this side.
    """
    done, seconds, moved = (
        _risen(window, name, MINUTE) for name in (r.TRANSFERS, r.TRANSFER_SECONDS, r.TRANSFER_BYTES)
    )
    if done < t["latency_min_requests"] or not seconds:
        return None, None
    size = moved / GIB or _risen(window, r.PROMPT_TOKENS, MINUTE)
    return seconds / done, seconds / size if size else None


def transfer_signals(
    window: EngineWindow,
    stuck: float | None,
    load: LoadSignals,
    cache: KvSignals,
    ranks: int,
    paces: Sequence[float | None],
) -> TransferSignals:
    """Transfers now; without a peer only what is loaded from a tier. ``stuck``: of ``Progress.loads_stuck``; ``paces``:
    of ``transfer_pace``, and the usual one for its size. One request counts once in each of ``ranks``.
    """
    loads, to_start = window.gauge(r.LOADS), window.gauge(r.LOADS_TO_START)
    if not load.has_peer:
        return TransferSignals(loads=loads, loads_to_start=to_start)
    held, (seconds, pace, usual) = window.gauge(r.LOADS_KV), paces
    if not held and loads and cache.kv_used_ratio is not None:  # each request holds about as much; 0 on a side that
        # does not report it
        held = cache.kv_used_ratio * loads / max(1.0, loads + (load.running or 0.0))
    prompts = _risen(window, r.PROMPT_TOKENS, FIVE_MINUTES)
    counters = window.last.counters if window.last else {}
    return TransferSignals(
        loads=loads,
        loads_to_start=to_start,
        loads_stuck_seconds=stuck,
        loads_kv_ratio=held,
        transfer_seconds=seconds,
        transfer_slowdown=pace / usual if pace is not None and usual else None,
        transfers_failed_ratio=_failed_transfers(window),
        leases_expired_ratio=_expired(window, counters, load, ranks),
        read_after_expiry=_read_after_expiry(window, counters, load),
        prompts_computed_ratio=_risen(window, r.PROMPT_TOKENS_COMPUTED, FIVE_MINUTES) / prompts
        if prompts and r.PROMPT_TOKENS_COMPUTED in counters
        else None,
    )


def _first_tokens(window: EngineWindow) -> float:
    found = window.observed(r.TTFT, FIVE_MINUTES)
    return (found[0].count or 0.0) if found else 0.0


def _failed_transfers(window: EngineWindow) -> float | None:
    """Share of failed transfers over five minutes; ``None`` where this side records none. A side that records failures
    alone has as many others as requests with a first token.
    """
    failed, done = _risen(window, r.TRANSFERS_FAILED, FIVE_MINUTES), _risen(window, r.TRANSFERS, FIVE_MINUTES)
    return failed / (failed + max(done, _first_tokens(window))) if failed or done else None


def _expired(window: EngineWindow, counters: Mapping[str, float], load: LoadSignals, ranks: int) -> float | None:
    """Share of the prompts of five minutes whose blocks were freed before the peer had them; ``None`` on the other
    side, whose counter stays 0.
    """
    if not counters.get(r.LEASES_EXPIRED) and (r.LEASES_EXPIRED not in counters or load.kv_role != "kv_producer"):
        return None
    expired = _risen(window, r.LEASES_EXPIRED, FIVE_MINUTES) / ranks
    return expired / max(expired, _first_tokens(window), 1.0)


def _read_after_expiry(window: EngineWindow, counters: Mapping[str, float], load: LoadSignals) -> float | None:
    """Reads in five minutes of blocks that were freed before; ``None`` where the other side may count them."""
    if counters.get(r.READ_AFTER_EXPIRY):
        return _risen(window, r.READ_AFTER_EXPIRY, FIVE_MINUTES)
    return 0.0 if counters.get(r.LEASES_EXPIRED) == 0 and load.kv_role == "kv_producer" else None


def _computed(window: EngineWindow, prompt: float | None) -> float | None:
    """Prompt tokens/s that were computed: as counted, else all minus the prefix cache's hits; all where neither is
    published.
    """
    computed = window.rate(r.PROMPT_TOKENS_COMPUTED, HALF_MINUTE)
    if computed is not None or prompt is None:
        return computed
    queries, hits = window.increase(r.PREFIX_QUERIES, HALF_MINUTE), window.increase(r.PREFIX_HITS, HALF_MINUTE)
    if queries is None or hits is None or queries[0] <= 0:
        return prompt
    return prompt * (1.0 - min(1.0, hits[0] / queries[0]))


def _mean_demand(window: EngineWindow) -> float | None:
    values = window.in_flight(MINUTE)
    return sum(values) / len(values) if values else None


_USEFUL: Final = (r.PROMPT_TOKENS, r.PROMPT_TOKENS_COMPUTED, r.GENERATION_TOKENS)
_LEVELS: Final = (r.RUNNING, r.WAITING, r.SWAPPED, r.KV_USAGE)


class Rest:
    """The API server's open descriptors without any client, and how long several clients have been connected beyond
    them while gauges show nothing in flight: vLLM counts a request when a step ends, and closes a connection without a
    request after seconds.

    The lowest level seen is that of rest once load has raised it by a connection for most of its requests; until then
    clients may have been connected all the time. A level that stays higher for longer than a step takes (a pool of a
    gateway, a file that was opened) begins this anew.
    """

    __slots__ = ("_connected_since", "_known", "_lowest", "_raised", "_thresholds", "above")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._lowest: float | None = None
        self._raised: tuple[float, float] | None = None  # descriptors and requests in flight of the last loaded sample
        self._known = False
        self._connected_since: float | None = None
        self.above: float | None = None  # connections now; None = the level of rest is unknown

    def observe(self, sample: Sample, progressed: bool) -> None:
        """Take the newest sample."""
        now, t = sample.page.get(r.PROCESS_OPEN_FDS), self._thresholds
        if now is None:
            self.above = self._connected_since = None
            return
        self._lowest = now if self._lowest is None else min(self._lowest, now)
        if sample.in_flight:
            self._raised = now, sample.in_flight
        if self._raised is not None:
            self._known = self._known or self._raised[0] - self._lowest >= t["most_ratio"] * self._raised[1]
        self.above = now - self._lowest if self._known else None
        if (self.above or 0.0) < t["several_min"] or sample.in_flight or progressed:
            self._connected_since = None
        elif self._connected_since is None:
            self._connected_since = sample.t
        elif sample.t - self._connected_since > t["prefill_patience_seconds"]:  # longer than a step: what is rest?
            self._lowest, self._raised, self._known, self.above, self._connected_since = now, None, False, None, None

    def connected_seconds(self, now: float) -> float | None:
        """Seconds that several clients have been connected though nothing is in flight; ``None`` where unknown."""
        if self.above is None:
            return None
        return 0.0 if self._connected_since is None else now - self._connected_since


class Progress:
    """Follows one engine sample by sample.

    Progress is tokens, finished requests or steps with output. Gauges that change (a prefill fills the cache before
    its first token) are movement, not progress. Preemptions are neither: a livelock preempts without end.
    """

    __slots__ = (
        "_before",
        "_busy_fds",
        "_busy_waiting",
        "_thresholds",
        "loads_stuck",
        "progressed_at",
        "rest",
        "seconds_still",
        "seconds_without",
        "told",
        "usual_silence_seconds",
    )

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._before: Sample | None = None
        self.seconds_without = 0.0  # observed, with requests in flight and no progress
        self.seconds_still = 0.0  # of these, without any gauge that moved
        self.usual_silence_seconds: float | None = None
        """Longest time without progress, with requests in flight, that ended with progress; at most
        ``prefill_patience_seconds``. ``None`` before there was one.
        """
        self._busy_fds: float | None = None  # open descriptors of the API server when something last came out
        self._busy_waiting: float | None = None  # requests that waited then
        self.loads_stuck: float | None = 0.0
        """Observed seconds with requests that wait for KV blocks of another server, and without one that got them or
        failed; ``None`` where neither is counted.
        """
        self.progressed_at: float | None = None  # time of the last sample with progress
        self.begin_process()

    def begin_process(self) -> None:
        """Forget what a restart of the server ends: its level of rest, and whether it was told to stand still."""
        self.rest = Rest(self._thresholds)
        self.told: tuple[bool | None, float] = None, 0.0  # as ``LogContext.told``, by the requests that it counts

    def observe(self, sample: Sample) -> None:
        """Take the newest sample."""
        before, self._before = self._before, sample
        self._follow_pauses(before.page if before is not None else {}, sample)
        progressed = before is None or _progressed(before, sample)
        self.rest.observe(sample, progressed)
        if before is not None and progressed:
            self.progressed_at = sample.t
        if progressed:
            if self.seconds_without >= self._thresholds["no_progress_seconds"]:
                ended = min(self.seconds_without, self._thresholds["prefill_patience_seconds"])
                self.usual_silence_seconds = max(self.usual_silence_seconds or 0.0, ended)
            self._busy_fds, self._busy_waiting = sample.page.get(r.PROCESS_OPEN_FDS), sample.waiting
        if before is None:
            return
        step = min(sample.t - before.t, self._thresholds["recent_window_seconds"])
        self.loads_stuck = _loads_stuck(before, sample, (self.loads_stuck or 0.0) + step)
        if not work_present(sample) or not work_present(before):
            self.seconds_without = self.seconds_still = 0.0
            return
        self.seconds_without = 0.0 if progressed else self.seconds_without + step
        still = self.seconds_without > 0 and _same_levels(before, sample)
        self.seconds_still = self.seconds_still + step if still else 0.0

    def _follow_pauses(self, earlier: Mapping[str, float], sample: Sample) -> None:
        """Where both were asked for since the last sample, or before the first, each pause has its end: as many of both
        leave things as they were. Of more ends than pauses nobody knows which came last. A count that is gone was of
        another process.
        """
        pauses, resumes = (
            sample.page.get(name, 0.0) - earlier.get(name, 0.0) for name in (r.HTTP_PAUSE, r.HTTP_RESUME)
        )
        if resumes > pauses > 0 or min(pauses, resumes) < 0:
            self.told = None, 0.0
        elif pauses > 0 or resumes > 0:
            self.told = pauses > resumes or (pauses == resumes and bool(self.told[0])), sample.t

    def connections_dropped(self, in_flight: float) -> bool | None:
        """Whether most clients disconnected since the last output, by the file descriptors that the API server
        closed. ``None`` if several API servers share the endpoint, or too few requests are in flight.
        """
        now, t = self._before.page.get(r.PROCESS_OPEN_FDS) if self._before else None, self._thresholds
        if now is None or self._busy_fds is None or in_flight < 1:
            return None
        return self._busy_fds - now >= t["most_ratio"] * in_flight

    def clients_came(self) -> bool | None:
        """Whether clients connected since the last output: more requests wait, or the API server has several more
        descriptors open. ``None`` if descriptors are unknown and the queue did not grow.
        """
        last = self._before
        if last is None:
            return None
        if self._busy_waiting is not None and (last.waiting or 0.0) > self._busy_waiting:
            return True
        now = last.page.get(r.PROCESS_OPEN_FDS)
        if now is None or self._busy_fds is None:
            return None
        return now - self._busy_fds >= self._thresholds["several_min"]


def work_present(sample: Sample) -> bool | None:
    """Whether requests run or wait, by the gauges; ``None`` if one gauge is missing and the other is 0."""
    known = (sample.gauges.get(r.RUNNING), sample.waiting)
    if any(known):
        return True
    return None if None in known else False


def _progressed(before: Sample, after: Sample) -> bool:
    if any(after.counters.get(name, 0.0) > before.counters.get(name, 0.0) for name in _USEFUL):
        return True
    if (after.finished or 0.0) > (before.finished or 0.0):
        return True
    # the latter where tokens are counted only when their request ends
    return any(_count(after, name) > _count(before, name) for name in (r.ITERATION_TOKENS, r.INTER_TOKEN))


def _loading(sample: Sample) -> float:
    """Requests that wait for KV blocks from elsewhere; all deferred ones where they are not told apart."""
    gauges = sample.gauges
    if r.LOADS not in gauges:
        return gauges.get(r.WAITING_DEFERRED, 0.0)
    return gauges[r.LOADS] + gauges.get(r.LOADS_TO_START, 0.0)


def _loads_stuck(before: Sample, after: Sample, seconds: float) -> float | None:
    """``seconds`` if requests wait to be loaded and none was: by the transfers that this side records, or by a prompt
    with a first token. ``None`` where neither is counted.
    """
    if not (_loading(before) and _loading(after)):
        return 0.0
    known = [name for name in _ENDED_LOADS if name in after.counters]
    if not known and r.TTFT not in after.histograms:
        return None
    rose = any(after.counters[name] > before.counters.get(name, 0.0) for name in known)
    return 0.0 if rose or _count(after, r.TTFT) > _count(before, r.TTFT) else seconds


_ENDED_LOADS: Final = (r.PROMPT_TOKENS, r.PROMPT_TOKENS_COMPUTED, r.TRANSFERS, r.TRANSFERS_FAILED)


def _count(sample: Sample, name: str) -> float:
    histogram = sample.histogram(name)
    return histogram.count or 0.0 if histogram is not None else 0.0


def _same_levels(before: Sample, after: Sample) -> bool:
    return all(before.gauges.get(name) == after.gauges.get(name) for name in _LEVELS)


def http_moved(window: EngineWindow, seconds: float) -> bool | None:
    """Whether the API server answered a request in the window; ``None`` if it does not count answers."""
    rise = window.rise(seconds, _http)
    return None if rise is None else rise[0] > 0


def _http(sample: Sample) -> float | None:
    """Answers to requests of the engine where paths tell them from probes and lists of models, else all answers."""
    if r.HTTP_GENERATED in sample.page:
        return sample.page[r.HTTP_GENERATED]
    answers = [value for name, value in sample.page.items() if name.startswith(r.HTTP_PREFIX)]
    return sum(answers) if answers else None


def progress_signals(
    window: EngineWindow,
    progress: Progress,
    beside: ProgressSignals,
    t: Thresholds,
) -> ProgressSignals:
    """Progress of one engine now; ``beside``: what its samples do not show, with the mean prefill time."""
    last = window.last
    if last is None:
        return ProgressSignals(pages_failing=beside.pages_failing, page_error=beside.page_error)
    work = work_present(last)
    known = any(name in last.counters for name in _USEFUL)
    seconds = t["recent_window_seconds"]
    return replace(
        beside,
        work_present=work,
        progressing=None if not known or not work else progress.seconds_without == 0.0,
        seconds_without_progress=progress.seconds_without if known and work else None,
        seconds_still=progress.seconds_still if known and work else None,
        connections_dropped=progress.connections_dropped((last.gauges.get(r.RUNNING) or 0.0) + (last.waiting or 0.0))
        if work
        else None,
        clients_came=progress.clients_came() if work else None,
        at_rest=None if progress.rest.above is None else progress.rest.above == 0,
        connected_seconds=progress.rest.connected_seconds(last.t),
        asleep=None if r.ASLEEP not in last.gauges else last.gauges[r.ASLEEP] > 0,
        http_moved=http_moved(window, progress.seconds_still),
        tokens_flow=_flow(window, seconds),
        tokens_recently=_moved_recently(window, t["lately_seconds"]),
        finished_flow=_finished_flow(window, seconds),
        queries_recently=_moved_recently(window, t["lately_seconds"], (r.PREFIX_QUERIES,)),
        queries_flow=_rose(window, r.PREFIX_QUERIES, seconds),
        prefill_usual_seconds=max(
            (usual for usual in (beside.prefill_usual_seconds, progress.usual_silence_seconds) if usual is not None),
            default=None,
        ),
    )


def _flow(window: EngineWindow, seconds: float) -> bool | None:
    increases = [window.increase(name, seconds) for name in _USEFUL]
    if any(found is not None and found[0] > 0 for found in increases):
        return True
    if any(found is not None for found in increases):
        return False
    rate = window.gauge(r.GENERATION_RATE)
    return None if rate is None else rate > 0


def _moved_recently(window: EngineWindow, seconds: float, names: Sequence[str] = _USEFUL) -> bool | None:
    """Whether one of the counters (by default: of tokens) rose in the last ``seconds``; ``None`` without counters."""
    last, samples = window.last, window.since(REACH_SECONDS)
    place = 0 if last is None else bisect_right(samples, last.t - seconds, key=attrgetter("t"))
    earlier = samples[place - 1].counters if place else {}
    if last is None or not any(name in earlier for name in names):
        return None
    return any(last.counters.get(name, 0.0) > earlier.get(name, 0.0) for name in names)


def _rose(window: EngineWindow, name: str, seconds: float) -> bool | None:
    found = window.increase(name, seconds)
    return None if found is None else found[0] > 0


def _finished_flow(window: EngineWindow, seconds: float) -> bool | None:
    rise = window.rise(seconds, lambda sample: sample.finished)
    return None if rise is None else rise[0] > 0


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
    prefill, first, queue = (
        None if (one := sample.histogram(name)) is None else one.mean() for name in (r.PREFILL, r.TTFT, r.QUEUE)
    )
    if prefill is not None or first is None:
        return prefill
    if queue is None:
        return None if sample.waiting else first
    return max(0.0, first - queue)
