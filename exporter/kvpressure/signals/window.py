"""Windows of readings: the history that signals look back on, bounded in memory.

Counters and histograms are corrected for resets when they enter, so that a difference of any two samples is an
increase. Samples older than the newest are ignored; a clock that steps back far, or a process that was replaced,
begins a new window.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from kvpressure.readings import (
    FINISHED_PREFIX,
    HTTP_PREFIX,
    PROCESS_CPU_SECONDS,
    PROCESS_OPEN_FDS,
    RUNNING,
    SWAPPED,
    WAITING,
    Histogram,
)

MINUTE: Final = 60.0  # windows of the metrics, as they are published
HALF_MINUTE: Final = 30.0
FIVE_MINUTES: Final = 300.0
HOUR: Final = 3600.0

FINE_SECONDS: Final = 75.0  # every sample is kept this long
MID_SECONDS: Final = 320.0  # then one per MID_STEP
LONG_SECONDS: Final = 930.0  # then one per LONG_STEP
MID_STEP: Final = 5.0
LONG_STEP: Final = 15.0
STEP_BACK_SECONDS: Final = 60.0  # a clock that jumps back further than this begins a new window
MAX_NAMES: Final = 1024  # counters remembered beside those of the newest page, whose names may change with every page
SLOPE_POINTS: Final = 3  # a line through two points fits whatever they are
JITTER_SECONDS: Final = 0.3  # a sample this much outside a window still counts as its first

_EMPTY: Final[Mapping[str, float]] = {}


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of one engine, counters and histograms corrected for resets. ``finished`` counts finished requests
    of all reasons; ``None`` if the page does not. ``page`` holds what
    belongs to the whole page: CPU seconds and open descriptors of the API server, HTTP answers by status class.
    """

    t: float
    gauges: Mapping[str, float]
    counters: Mapping[str, float]
    histograms: Mapping[str, Histogram]
    page: Mapping[str, float] = field(default_factory=dict)
    finished: float | None = None
    waiting: float | None = field(init=False)
    """Requests that wait, those that vLLM V0 swapped to the host included; ``None`` if the page does not tell."""
    in_flight: float | None = field(init=False)
    """Requests running or waiting; ``None`` if the page lacks one of them."""
    arrived: float | None = field(init=False)
    """Requests that arrived so far, up to a constant: finished plus present. Aborted ones are not counted by vLLM."""

    def __post_init__(self) -> None:
        """Add up once what every tick asks of every sample in the window."""
        running, waiting = self.gauges.get(RUNNING), self.gauges.get(WAITING)
        waiting = None if waiting is None else waiting + self.gauges.get(SWAPPED, 0.0)
        present = None if running is None or waiting is None else running + waiting
        object.__setattr__(self, "waiting", waiting)
        object.__setattr__(self, "in_flight", present)
        object.__setattr__(self, "arrived", None if self.finished is None or present is None else self.finished + present)


@dataclass(frozen=True, slots=True)
class HistogramIncrease:
    """What was observed between two samples: increments per bucket (not cumulative), their sum and number."""

    bounds: tuple[float, ...]
    increments: tuple[float, ...]
    sum: float | None
    count: float | None

    def quantile(self, q: float) -> float | None:
        """The q-quantile by linear interpolation inside its bucket, as Prometheus does; values above the last
        finite bound are reported as that bound. ``None`` without observations or buckets.
        """
        total = sum(self.increments)
        if total <= 0 or not self.bounds:
            return None
        rank, seen, lower = q * total, 0.0, 0.0
        for bound, amount in zip(self.bounds, self.increments, strict=True):
            if amount > 0 and seen + amount >= rank:
                if bound == float("inf"):
                    return lower
                return lower + (bound - lower) * (rank - seen) / amount
            seen += amount
            if bound != float("inf"):
                lower = bound
        return lower

    def mean(self) -> float | None:
        """Mean of the observations; ``None`` without any."""
        if not self.count or self.sum is None or self.count <= 0:
            return None
        return self.sum / self.count


class _Correction:
    """Turns values that may fall back to 0 into values that never fall."""

    __slots__ = ("_last", "_offset")

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._offset: dict[str, float] = {}

    def apply(self, values: Mapping[str, float]) -> Mapping[str, float]:
        last, offset = self._last, self._offset
        for name, value in values.items():
            before = last.get(name)
            if before is not None and value < before:
                offset[name] = offset.get(name, 0.0) + before
        last.update(values)
        if len(last) > MAX_NAMES + len(values):
            self._last = dict(values)
            self._offset = offset = {name: kept for name, kept in offset.items() if name in values}
        if not offset:
            return values
        return {name: value + offset.get(name, 0.0) for name, value in values.items()}


class _HistogramCorrection:
    """The same for whole histograms: a count that falls means all of it began anew.

    Counts come out packed, and one that has not changed comes out as the same object: they are most of what windows hold.
    """

    __slots__ = ("_kept", "_last", "_offset")

    def __init__(self) -> None:
        self._last: dict[str, Histogram] = {}
        self._offset: dict[str, Histogram] = {}
        self._kept: dict[str, Histogram] = {}

    def apply(self, values: Mapping[str, Histogram]) -> Mapping[str, Histogram]:
        reset = False
        for name, value in values.items():
            before = self._last.get(name)
            if before is None or value.count is None or before.count is None:
                continue
            if value.count < before.count or value.bounds != before.bounds:
                kept = self._offset.get(name)
                self._offset[name] = _add(before, kept) if value.bounds == before.bounds else Histogram()
                reset = True
        self._last = dict(values)
        if self._offset or reset:
            values = {name: _add(value, self._offset.get(name)) for name, value in values.items()}
        self._kept = {name: _packed(value, self._kept.get(name)) for name, value in values.items()}
        return self._kept


def _packed(value: Histogram, kept: Histogram | None) -> Histogram:
    """``value`` with its counts in a third of the memory; ``kept`` if that is the same."""
    packed = Histogram(value.bounds, array("d", value.counts), value.sum, value.count)
    return kept if packed == kept and kept is not None else packed


def _add(value: Histogram, offset: Histogram | None) -> Histogram:
    if offset is None or offset.count is None or offset.bounds != value.bounds:
        return value
    counts = tuple(a + b for a, b in zip(value.counts, offset.counts, strict=True))
    total = None if value.sum is None or offset.sum is None else value.sum + offset.sum
    count = None if value.count is None else value.count + offset.count
    return Histogram(value.bounds, counts, total, count)


_T = TypeVar("_T")


class History(Generic[_T]):
    """Timed items: all of the last minute, fewer of the last five, fewer still of the last fifteen."""

    __slots__ = ("_fine", "_long", "_mid")

    def __init__(self) -> None:
        self._fine: deque[tuple[float, _T]] = deque()
        self._mid: deque[tuple[float, _T]] = deque()
        self._long: deque[tuple[float, _T]] = deque()

    def __len__(self) -> int:
        return len(self._fine) + len(self._mid) + len(self._long)

    def clear(self) -> None:
        """Forget everything."""
        self._fine.clear()
        self._mid.clear()
        self._long.clear()

    def append(self, t: float, item: _T) -> None:
        """Add an item that is newer than all before, and thin what has grown old."""
        fine, mid, old = self._fine, self._mid, self._long
        fine.append((t, item))
        while fine[0][0] < t - FINE_SECONDS:
            entry = fine.popleft()
            if not mid or entry[0] - mid[-1][0] >= MID_STEP:
                mid.append(entry)
        while mid and mid[0][0] < t - MID_SECONDS:
            entry = mid.popleft()
            if not old or entry[0] - old[-1][0] >= LONG_STEP:
                old.append(entry)
        while old and old[0][0] < t - LONG_SECONDS:
            old.popleft()

    def since(self, start: float) -> list[_T]:
        """Items from ``start`` on, oldest first."""
        start -= JITTER_SECONDS
        if start >= self._fine[0][0] if self._fine else True:
            return [item for t, item in self._fine if t >= start]
        return [item for part in (self._long, self._mid, self._fine) for t, item in part if t >= start]

    def first_since(self, start: float) -> _T | None:
        """The oldest item from ``start`` on."""
        start -= JITTER_SECONDS
        for part in (self._long, self._mid, self._fine):
            if part and part[-1][0] >= start:
                for t, item in part:
                    if t >= start:
                        return item
        return None

    def last(self) -> _T | None:
        """The newest item."""
        return self._fine[-1][1] if self._fine else None

    def __iter__(self) -> Iterator[_T]:
        for part in (self._long, self._mid, self._fine):
            for _, item in part:
                yield item


class EngineWindow:
    """History of one engine."""

    __slots__ = ("_counters", "_histograms", "_observed", "_page", "_since", "first_t", "history", "last", "samples_seen")

    def __init__(self) -> None:
        self.history: History[Sample] = History()
        self.last: Sample | None = None
        self.first_t: float | None = None
        self.samples_seen = 0
        self._counters = _Correction()
        self._histograms = _HistogramCorrection()
        self._page = _Correction()
        # Many signals ask for the same windows; answers hold until the next sample.
        self._since: dict[float, list[Sample]] = {}
        self._observed: dict[tuple[str, float], tuple[HistogramIncrease, float] | None] = {}

    def observe(self, t: float, gauges: Mapping[str, float], counters: Mapping[str, float],
                histograms: Mapping[str, Histogram], page: Mapping[str, float] = _EMPTY) -> bool:
        """Take a reading. False if it is not newer than the last one and was ignored."""
        if self.last is not None and t <= self.last.t:
            if t > self.last.t - STEP_BACK_SECONDS:
                return False
            self.history.clear()
            self.first_t = None
        rising = {name: value for name, value in page.items()
                  if name == PROCESS_CPU_SECONDS or name.startswith(HTTP_PREFIX)}
        of_page = dict(self._page.apply(rising))
        if PROCESS_OPEN_FDS in page:
            of_page[PROCESS_OPEN_FDS] = page[PROCESS_OPEN_FDS]
        corrected = self._counters.apply(counters)
        done = [value for name, value in corrected.items() if name.startswith(FINISHED_PREFIX)]
        sample = Sample(t, gauges, corrected, self._histograms.apply(histograms), of_page,
                        sum(done) if done else None)
        self.history.append(t, sample)
        self.last = sample
        self._since.clear()
        self._observed.clear()
        self.samples_seen += 1
        if self.first_t is None:
            self.first_t = t
        return True

    def since(self, seconds: float) -> list[Sample]:
        """Samples of the last ``seconds``, oldest first; empty before the first reading."""
        if self.last is None:
            return []
        if seconds not in self._since:
            self._since[seconds] = self.history.since(self.last.t - seconds)
        return self._since[seconds]

    def _pair(self, seconds: float) -> tuple[Sample, Sample] | None:
        last = self.last
        if last is None:
            return None
        first = self.history.first_since(last.t - seconds)
        return (first, last) if first is not None and first.t < last.t else None

    def increase(self, name: str, seconds: float) -> tuple[float, float] | None:
        """Increase of a counter over the window and the seconds it really spans; ``None`` with fewer than two
        samples that carry it.
        """
        pair = self._pair(seconds)
        if pair is None:
            return None
        first, last = pair
        end = last.counters.get(name)
        if end is None:
            return None
        begin = first.counters.get(name)
        if begin is None:
            first = next(sample for sample in self.since(seconds) if name in sample.counters)
            if first is last:
                return None
            begin = first.counters[name]
        return max(0.0, end - begin), last.t - first.t

    def rate(self, name: str, seconds: float) -> float | None:
        """Increase per second over the window."""
        found = self.increase(name, seconds)
        return found[0] / found[1] if found else None

    def observed(self, name: str, seconds: float) -> tuple[HistogramIncrease, float] | None:
        """What a histogram saw over the window, and the seconds spanned; ``None`` when it is not there twice."""
        if (name, seconds) not in self._observed:
            self._observed[name, seconds] = self._observe_histogram(name, seconds)
        return self._observed[name, seconds]

    def _observe_histogram(self, name: str, seconds: float) -> tuple[HistogramIncrease, float] | None:
        pair = self._pair(seconds)
        if pair is None:
            return None
        first, last = pair
        end, begin = last.histograms.get(name), first.histograms.get(name)
        if end is None or begin is None:
            return None
        return histogram_increase(begin, end), last.t - first.t

    def gauge_values(self, name: str, seconds: float) -> list[float]:
        """The gauge's values over the window, oldest first."""
        return [sample.gauges[name] for sample in self.since(seconds) if name in sample.gauges]

    def waiting(self, seconds: float) -> list[float]:
        """Requests waiting in the samples of the window, oldest first."""
        return [waiting for sample in self.since(seconds) if (waiting := sample.waiting) is not None]

    def gauge(self, name: str) -> float | None:
        """The gauge in the newest sample."""
        return self.last.gauges.get(name) if self.last else None


def histogram_increase(begin: Histogram, end: Histogram) -> HistogramIncrease:
    """Difference of two corrected histograms; without buckets if the bounds changed between them."""
    total = None if end.sum is None or begin.sum is None else max(0.0, end.sum - begin.sum)
    count = None if end.count is None or begin.count is None else max(0.0, end.count - begin.count)
    if end.bounds != begin.bounds or not end.bounds:
        return HistogramIncrease((), (), total, count)
    if end.counts is begin.counts or end.counts == begin.counts:
        return HistogramIncrease(end.bounds, (0.0,) * len(end.bounds), total, count)
    increments, before = [], 0.0
    for a, b in zip(begin.counts, end.counts, strict=True):
        cumulative = b - a
        increments.append(max(0.0, cumulative - before))
        before = max(before, cumulative)
    return HistogramIncrease(end.bounds, tuple(increments), total, count)


def quantile(ordered: Sequence[float], q: float) -> float:
    """Nearest-rank quantile of an ordered, non-empty sequence."""
    return ordered[min(len(ordered) - 1, max(0, _ceil(q * len(ordered)) - 1))]


def _ceil(value: float) -> int:
    whole = int(value)
    return whole if whole == value else whole + 1


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Least-squares slope of (time, value) points per second; ``None`` with fewer than three or no spread."""
    n = len(points)
    if n < SLOPE_POINTS:
        return None
    mean_t = sum(t for t, _ in points) / n
    mean_v = sum(v for _, v in points) / n
    spread = sum((t - mean_t) ** 2 for t, _ in points)
    if spread <= 0:
        return None
    return sum((t - mean_t) * (v - mean_v) for t, v in points) / spread
