"""Windows of readings: the history that signals look back on, bounded in memory.

Counters and histograms are corrected for resets when they enter, so that a difference of any two samples is an
increase. A sample that is not newer than the last is ignored; a clock that steps back far begins a new window.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from itertools import accumulate, chain
from math import ceil, inf
from operator import add, attrgetter, lt, mul, sub
from struct import Struct, error
from typing import Any, Final, Generic, NamedTuple, TypeVar

from kvpressure.model import readings as r
from kvpressure.model.frozen import frozen
from kvpressure.model.readings import Histogram

MINUTE: Final = 60.0  # windows of the metrics, as they are published
HALF_MINUTE: Final = 30.0
QUARTER_MINUTE: Final = 15.0
FIVE_MINUTES: Final = 300.0
QUARTER_HOUR: Final = 900.0
HOUR: Final = 3600.0

TWICE: Final = 2.0  # the mean of values spread evenly is in their middle
FINE_SECONDS: Final = 75.0  # every sample is kept this long
MID_SECONDS: Final = 320.0  # then one per MID_STEP
LONG_SECONDS: Final = 930.0  # then one per LONG_STEP
MID_STEP: Final = 5.0
LONG_STEP: Final = 15.0
# A clock that jumps back further than this begins a new window: nothing else is new until it has caught up
STEP_BACK_SECONDS: Final = 2.0
REACH_SECONDS: Final = FIVE_MINUTES  # a window between two samples reaches back to the one before, if that is not older
MAX_NAMES: Final = 1024  # counters remembered beside those of the newest page, whose names may change with every page
SLOPE_POINTS: Final = 3  # a line through two points fits whatever they are
JITTER_SECONDS: Final = 0.3  # a sample this much outside a window still counts as its first

_T = TypeVar("_T")
Bounds = tuple[float, ...]
_EMPTY: Final[Mapping[str, float]] = {}
_NAMES: Final = ("0.5", "0.95", "0.99")
_RANKS: Final = tuple(map(float, _NAMES))


class Packed(Mapping[str, _T]):
    """A mapping that shares the table of its names, because samples are most of what the process holds."""

    __slots__ = ("_places", "_values")

    def __init__(self, names: Iterable[str], values: Sequence[_T]) -> None:
        self._places = _places(tuple(names))
        self._values = values

    def __getitem__(self, name: str) -> _T:
        return self._values[self._places[name]]

    def get(self, name: str, default: Any = None) -> Any:
        """The value or ``default``; the inherited method raises and catches, which takes longer."""
        place = self._places.get(name)
        return default if place is None else self._values[place]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@lru_cache
def _places(names: tuple[str, ...]) -> Mapping[str, int]:
    return {name: place for place, name in enumerate(names)}


def _packed(values: Mapping[str, float]) -> Mapping[str, float]:
    return Packed(values, array("d", values.values())) if values else _EMPTY


def _packed_histogram(value: Histogram) -> bytes | Histogram:
    """Sum and counts in a third of the memory, if the counts are whole and the last is that of all observations."""
    counts = [*map(int, value.counts)]
    if not counts or counts != [*value.counts] or counts[-1] != value.count or value.sum is None:
        return value
    small, large = _forms(len(counts))
    try:
        return small.pack(value.sum, *counts)
    except error:  # too large for four bytes
        return large.pack(value.sum, *counts)


@lru_cache
def _forms(buckets: int) -> tuple[Struct, Struct]:
    return Struct(f"=d{buckets}I"), Struct(f"=d{buckets}Q")


@frozen
class Sample:
    """One reading of one engine, counters and histograms corrected for resets. ``finished`` counts finished requests
    of all reasons, ``answered`` those without abort and error; ``None`` if not published. ``page`` holds values of
    the whole endpoint: CPU seconds and open descriptors of the API server, HTTP answers by status class.
    """

    t: float
    gauges: Mapping[str, float]
    counters: Mapping[str, float]
    histograms: Mapping[str, bytes | Histogram]
    page: Mapping[str, float] = field(default_factory=dict)
    finished: float | None = None
    answered: float | None = None
    waiting: float | None = field(init=False)
    """Requests waiting, including those that vLLM V0 swapped to the host; ``None`` if not published."""
    in_flight: float | None = field(init=False)
    """Requests running or waiting; ``None`` if one of them is not published."""
    requests: tuple[float, float, float] | None = field(init=False)
    """Requests running, waiting and finished; ``None`` if one of them is not published."""
    bounds: Mapping[str, Bounds] = field(default_factory=dict, init=False)
    """Of histograms that are packed."""

    def histogram(self, name: str) -> Histogram | None:
        """The histogram; ``None`` if it is not published."""
        packed = self.histograms.get(name)
        if not isinstance(packed, bytes):
            return packed
        bounds = self.bounds[name]
        small, large = _forms(len(bounds))
        total, *counts = (small if len(packed) == small.size else large).unpack(packed)
        return Histogram(bounds, counts, total, float(counts[-1]))

    def __post_init__(self) -> None:
        """Compute once what every tick reads from every sample."""
        running, waiting = self.gauges.get(r.RUNNING), self.gauges.get(r.WAITING)
        waiting = None if waiting is None else waiting + self.gauges.get(r.SWAPPED, 0.0)
        present = requests = None
        if running is not None and waiting is not None:
            present = running + waiting
            requests = None if self.finished is None else (running, waiting, self.finished)
        object.__setattr__(self, "waiting", waiting)
        object.__setattr__(self, "in_flight", present)
        object.__setattr__(self, "requests", requests)


@frozen
class HistogramIncrease(Histogram):
    """Observations between two samples."""

    _named: Mapping[str, float] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def named(self) -> Mapping[str, float]:
        """Quantiles by name, computed once."""
        named = self._named
        if named is None:
            named = dict(zip(_NAMES, self.quantiles(_RANKS), strict=False))
            object.__setattr__(self, "_named", named)
        return named

    @property
    def increments(self) -> tuple[float, ...]:
        """Observations in each bucket alone."""
        return tuple(map(sub, self.counts, (0.0, *self.counts[:-1])))

    def quantiles(self, ranks: Sequence[float]) -> list[float]:
        """Quantiles by linear interpolation inside their buckets; a value above the last finite bound is reported as
        that bound. Empty without observations or buckets.

        Prometheus spreads observations over the whole bucket. Here they take the part of it that agrees with the
        counted sum, and no value exceeds what that sum allows.
        """
        counts = self.counts
        if not counts or counts[-1] <= 0:
            return []
        used = self._used_of_a_bucket()
        return [self._at(q * counts[-1], used) for q in ranks]

    def _at(self, rank: float, used: float) -> float:
        counts = self.counts
        index = bisect_left(counts, rank)
        seen, lower = (counts[index - 1], self.bounds[index - 1]) if index else (0.0, 0.0)
        bound = self.bounds[index]
        if bound == inf:
            return lower
        inside = (rank - seen) / (counts[index] - seen)
        part = used * inside if used <= 1.0 else 1.0 - (TWICE - used) * (1.0 - inside)
        value, above = lower + (bound - lower) * part, counts[-1] - ceil(rank) + 1.0
        if not self.sum or self.sum < 0 or value * above <= self.sum:
            return value
        return min(value, max(lower, (self.sum - self._least(ceil(rank) - 1.0)) / max(1.0, above)))

    def _used_of_a_bucket(self) -> float:
        """Twice the mean position of observations in their buckets, 0 to 2; 1 = evenly spread, also where the sum is
        unusable.
        """
        counts, bounds = self.counts, self.bounds
        if not self.sum or self.sum < 0 or (bounds[-1] == inf and counts[:-1][-1:] != counts[-1:]):
            return 1.0
        finite = len(bounds) - (bounds[-1] == inf)  # nothing fell into the one without an end
        lower, grown = (0.0, *bounds[: finite - 1]), self.increments[:finite]
        least = sum(map(mul, grown, lower))
        width = sum(map(mul, grown, map(sub, bounds, lower)))
        return min(TWICE, max(0.0, TWICE * (self.sum - least) / width)) if width > 0 else 1.0

    def _least(self, amount: float) -> float:
        """Smallest possible sum of the ``amount`` smallest observations."""
        least = lower = before = 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            least += (min(count, amount) - min(before, amount)) * lower
            lower, before = bound, count
        return least


class _Correction(Generic[_T]):
    """Turns values that may fall back to 0 into values that never fall. An unchanged one comes out as the same object.
    ``fell``: whether a value shows a reset after another; ``plus``: a value and what was counted before.
    """

    __slots__ = ("_corrected", "_fell", "_last", "_offset", "_plus")

    def __init__(self, fell: Callable[[_T, _T], bool], plus: Callable[[_T, _T], _T]) -> None:
        self._fell, self._plus = fell, plus
        self._last: dict[str, _T] = {}
        self._offset: dict[str, _T] = {}
        self._corrected: dict[str, _T] = {}  # the last ones, of those with an offset

    def apply(self, values: Mapping[str, _T]) -> Mapping[str, _T]:
        last, offset = self._last, self._offset
        for name, value in values.items():
            before = last.get(name)
            if before is value:
                continue
            last[name] = value
            if before is not None and self._fell(value, before):
                offset[name] = self._plus(before, offset[name]) if name in offset else before
            if name in offset:
                self._corrected[name] = self._plus(value, offset[name])
        if len(last) > MAX_NAMES + len(values):
            for kept in (last, offset, self._corrected):
                for name in kept.keys() - values.keys():
                    del kept[name]
        return {**values, **{name: self._corrected[name] for name in offset if name in values}} if offset else values


def _began_anew(value: Histogram, before: Histogram) -> bool:
    """Whether all of a histogram was reset."""
    if value.count is None or before.count is None:
        return False
    return value.count < before.count or value.bounds != before.bounds


def _add(value: Histogram, offset: Histogram) -> Histogram:
    return value.plus(offset) if offset.count is not None and offset.bounds == value.bounds else value


class _Packing:
    """Packs samples older than the two newest, which are read most: a histogram that has not changed is the same
    object as before, because histograms are most of what windows hold.
    """

    __slots__ = ("_bounds", "_packed")

    def __init__(self) -> None:
        self._packed: dict[str, tuple[Histogram, bytes | Histogram]] = {}
        self._bounds: Mapping[str, Bounds] = {}

    def pack(self, sample: Sample) -> None:
        given = [(name, value) for name, value in sample.histograms.items() if isinstance(value, Histogram)]
        for name, value in given:
            if name not in self._packed or self._packed[name][0] is not value:
                self._packed[name] = value, _packed_histogram(value)
        bounds = {name: value.bounds for name, value in given}
        if bounds != self._bounds:
            self._bounds = bounds
        histograms = Packed(bounds, tuple([self._packed[name][1] for name in bounds]))
        for name, packed in (
            ("histograms", histograms),
            ("bounds", self._bounds),
            ("counters", _packed(sample.counters)),
            ("page", _packed(sample.page)),
        ):
            object.__setattr__(sample, name, packed)


class Items(Generic[_T]):
    """Items by time, oldest first, in lists, so that a window is a slice."""

    __slots__ = ("items", "times")

    def __init__(self) -> None:
        self.times: list[float] = []
        self.items: list[_T] = []

    def append(self, t: float, item: _T) -> None:
        """Add an item newer than all before."""
        self.times.append(t)
        self.items.append(item)

    def pop_first(self) -> tuple[float, _T]:
        """Take the oldest one out, with its time."""
        return self.times.pop(0), self.items.pop(0)

    def drop_before(self, start: float) -> None:
        """Forget those older than ``start``."""
        while self.times and self.times[0] < start:
            self.pop_first()

    def since(self, start: float) -> list[_T]:
        """Those from ``start`` on."""
        return self.items[bisect_left(self.times, start) :]


class History(Generic[_T]):
    """Timed items: all of the last 75 s, one per 5 s for five minutes, one per 15 s for fifteen minutes."""

    __slots__ = ("_fine", "_long", "_mid")

    def __init__(self) -> None:
        self._fine: Items[_T] = Items()
        self._mid: Items[_T] = Items()
        self._long: Items[_T] = Items()

    def append(self, t: float, item: _T) -> None:
        """Add an item newer than all before, and thin out the old ones."""
        fine, mid, old = self._fine, self._mid, self._long
        times, items = fine.times, fine.items  # every engine has several of these, so it costs fewer calls here
        times.append(t)
        items.append(item)
        while times[0] < t - FINE_SECONDS:
            at, leaving = times.pop(0), items.pop(0)
            if not mid.times or at - mid.times[-1] >= MID_STEP:
                mid.append(at, leaving)
        while mid.times and mid.times[0] < t - MID_SECONDS:
            at, leaving = mid.pop_first()
            if not old.times or at - old.times[-1] >= LONG_STEP:
                old.append(at, leaving)
        while old.times and old.times[0] < t - LONG_SECONDS:
            old.pop_first()

    def since(self, start: float) -> list[_T]:
        """Items from ``start`` on, oldest first."""
        start -= JITTER_SECONDS
        if not self._fine.times or start >= self._fine.times[0]:
            return self._fine.since(start)
        return [*self._long.since(start), *self._mid.since(start), *self._fine.items]

    def __iter__(self) -> Iterator[_T]:
        return chain(self._long.items, self._mid.items, self._fine.items)


class _Column(History[_T]):
    """One value of all samples that have it, so that a window of it is a slice."""

    __slots__ = ("_of",)

    def __init__(self, of: Callable[[Sample], _T | None]) -> None:
        super().__init__()
        self._of = of

    def take(self, sample: Sample) -> None:
        value = self._of(sample)
        if value is not None:
            self.append(sample.t, value)


class Fall(NamedTuple):
    """Two samples between which fewer requests ran although none finished: the sample before, how many fewer ran, how
    many more waited.
    """

    before: Sample
    fell: float
    rose: float


def _fall(before: Sample, after: Sample) -> Fall | None:
    if before.requests is None or after.requests is None:
        return None
    (ran, waited, done), (runs, waits, finished) = before.requests, after.requests
    return Fall(before, ran - runs, waits - waited) if runs < ran and finished == done else None


class EngineWindow:
    """History of one engine's samples."""

    def __init__(self) -> None:
        self._begin()
        self.samples_seen = 0
        self._counters = _Correction[float](lt, add)
        self._histograms = _Correction(_began_anew, _add)
        self._packing = _Packing()
        self._before: Sample | None = None  # the last one
        self._page = _Correction[float](lt, add)
        # Many signals ask for the same windows; answers hold until the next sample.
        self._since: dict[float, list[Sample]] = {}
        self._pairs: dict[float, tuple[Sample, Sample] | None] = {}
        self._observed: dict[tuple[str, float], tuple[HistogramIncrease, float] | None] = {}
        # They hold as long as both ends are the same: a histogram that has not changed is the same object.
        self._increases: dict[tuple[str, float], tuple[object, HistogramIncrease]] = {}

    def _begin(self) -> None:
        self.history: History[Sample] = History()
        self._columns: dict[str, _Column[Any]] = {}
        self._falls: Items[Fall] = Items()
        self.last: Sample | None = None
        self.first_t: float | None = None

    def observe(
        self,
        t: float,
        gauges: Mapping[str, float],
        counters: Mapping[str, float],
        histograms: Mapping[str, Histogram],
        page: Mapping[str, float] = _EMPTY,
    ) -> bool:
        """Take a reading. False if it is not newer than the last one and was ignored."""
        if self.last is not None and t <= self.last.t:
            if t > self.last.t - STEP_BACK_SECONDS:
                return False
            self._begin()
        rising = {
            name: value
            for name, value in page.items()
            if name == r.PROCESS_CPU_SECONDS or name.startswith(r.HTTP_PREFIX)
        }
        of_page = dict(self._page.apply(rising))
        if r.PROCESS_OPEN_FDS in page:
            of_page[r.PROCESS_OPEN_FDS] = page[r.PROCESS_OPEN_FDS]
        corrected = self._counters.apply(counters)
        done = {name: value for name, value in corrected.items() if name.startswith(r.FINISHED_PREFIX)}
        ended = (sum(done.values()), r.count_answered(done)) if done else (None, None)
        if self._before is not None:
            self._packing.pack(self._before)
        self._before = self.last
        sample = Sample(t, gauges, corrected, self._histograms.apply(histograms), of_page, *ended)
        self.history.append(t, sample)
        for column in self._columns.values():
            column.take(sample)
        if self.last is not None and (fall := _fall(self.last, sample)) is not None:
            self._falls.append(self.last.t, fall)
        self._falls.drop_before(t - FINE_SECONDS)
        self.last = sample
        for answers in (self._since, self._pairs, self._observed):
            answers.clear()
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

    def pair(self, seconds: float) -> tuple[Sample, Sample] | None:
        """The oldest and the newest sample of the last ``seconds``; ``None`` while there are not two."""
        if seconds not in self._pairs:
            samples = self._reaching(seconds)
            self._pairs[seconds] = (samples[0], samples[-1]) if len(samples) > 1 else None
        return self._pairs[seconds]

    def _reaching(self, seconds: float) -> list[Sample]:
        """The samples of the window; if it has only one, the sample before it too."""
        samples = self.since(seconds)
        return samples if len(samples) != 1 else [*self.since(REACH_SECONDS)[:-1][-1:], *samples]

    def rise(self, seconds: float, value: Callable[[Sample], float | None]) -> tuple[float, float] | None:
        """Increase of a value between the oldest and the newest sample of the window that have it, and the seconds
        between them; ``None`` while there are not two.
        """
        samples = self._reaching(seconds)
        first, last = _first(samples, value), _first(reversed(samples), value)
        return (last[1] - first[1], last[0] - first[0]) if first and last and first[0] < last[0] else None

    def increase(self, name: str, seconds: float, clock: str | None = None) -> tuple[float, float] | None:
        """Increase of a counter over the window, and the seconds it really spans; ``None`` with fewer than two
        samples that have it. ``clock``: a counter of the seconds in which it could rise; ``None`` = in all.
        """
        pair = self.pair(seconds)
        if pair is None:
            return None
        first, last = pair
        end = last.counters.get(name)
        if end is None:
            return None
        begin = first.counters.get(name)
        if begin is None:
            first = next(sample for sample in self._reaching(seconds) if name in sample.counters)
            if first is last:
                return None
            begin = first.counters[name]
        spanned = last.t - first.t if clock is None else last.counters.get(clock, 0.0) - first.counters.get(clock, 0.0)
        return max(0.0, end - begin), spanned

    def increase_within(self, name: str, seconds: float) -> tuple[float, float] | None:
        """The same, but ``None`` where it would span more than the window, so that a gap's counts are not taken for
        recent ones.
        """
        return self.increase(name, seconds) if len(self.since(seconds)) > 1 else None

    def rate(self, name: str, seconds: float, clock: str | None = None) -> float | None:
        """Increase of a counter per second over the window; ``None`` as in ``increase``, and where no second counts."""
        found = self.increase(name, seconds, clock)
        return found[0] / found[1] if found and found[1] > 0 else None

    def observed(self, name: str, seconds: float) -> tuple[HistogramIncrease, float] | None:
        """What a histogram observed over the window, and the seconds spanned; ``None`` when it is not in both
        samples.
        """
        if (name, seconds) not in self._observed:
            self._observed[name, seconds] = self._observe_histogram(name, seconds)
        return self._observed[name, seconds]

    def _observe_histogram(self, name: str, seconds: float) -> tuple[HistogramIncrease, float] | None:
        pair = self.pair(seconds)
        if pair is None:
            return None
        first, last = pair
        ends = first.bounds.get(name), first.histograms.get(name), last.histograms.get(name)
        known_ends, increase = self._increases.get((name, seconds), (None, None))
        if increase is None or known_ends != ends:
            begin, end = first.histogram(name), last.histogram(name)
            if begin is None or end is None:
                return None
            increase = histogram_increase(begin, end)
            self._increases[name, seconds] = (ends, increase)
        return increase, last.t - first.t

    def quantiles(self, name: str, seconds: float) -> Mapping[str, float]:
        """Quantiles of a histogram over the window by name ("0.5", "0.95", "0.99"); empty without observations."""
        return quantiles_of(self.observed(name, seconds))

    def gauge_values(self, name: str, seconds: float) -> list[float]:
        """The gauge's values over the window, oldest first."""
        return self.values(name, seconds, lambda sample: sample.gauges.get(name))

    def waiting(self, seconds: float) -> list[float]:
        """Requests waiting in the samples of the window, oldest first."""
        return self.values(".waiting", seconds, attrgetter("waiting"))

    def in_flight(self, seconds: float) -> list[float]:
        """Requests running or waiting in the samples of the window, oldest first."""
        return self.values(".in_flight", seconds, attrgetter("in_flight"))

    def falls_of_minute(self) -> list[Fall]:
        """Where in the last minute requests stopped running without having finished, oldest first."""
        return [] if self.last is None else self._falls.since(self.last.t - MINUTE - JITTER_SECONDS)

    def values(self, name: str, seconds: float, of: Callable[[Sample], _T | None]) -> list[_T]:
        """What ``of`` finds in the samples of the window, oldest first, kept by ``name``: in each sample once."""
        column = self._columns.get(name)
        if column is None:
            column = self._columns[name] = _Column(of)
            for sample in self.history:
                column.take(sample)
        return [] if self.last is None else column.since(self.last.t - seconds)

    def gauge(self, name: str) -> float | None:
        """The gauge in the newest sample; ``None`` if it is missing."""
        return self.last.gauges.get(name) if self.last else None


def quantiles_of(found: tuple[HistogramIncrease, float] | None) -> Mapping[str, float]:
    """The quantiles by name of what was ``observed``; empty without observations."""
    return found[0].named if found and found[0].count else _EMPTY


def _first(samples: Iterable[Sample], value: Callable[[Sample], float | None]) -> tuple[float, float] | None:
    """(time, value) of the first sample that has the value."""
    return next(((sample.t, found) for sample in samples if (found := value(sample)) is not None), None)


def histogram_increase(begin: Histogram, end: Histogram) -> HistogramIncrease:
    """Difference of two corrected histograms; without buckets if the bounds changed between them."""
    total = None if end.sum is None or begin.sum is None else max(0.0, end.sum - begin.sum)
    count = None if end.count is None or begin.count is None else max(0.0, end.count - begin.count)
    if end.bounds != begin.bounds or not end.bounds:
        return HistogramIncrease((), (), total, count)
    grown = list(map(sub, end.counts, begin.counts))
    if grown[0] < 0.0 or sorted(grown) != grown:  # it never falls, whatever the page says
        grown = list(accumulate(grown, max, initial=0.0))[1:]
    return HistogramIncrease(end.bounds, tuple(grown), total, count)


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Least-squares slope of (time, value) points per second; ``None`` with fewer than three or no spread."""
    n = len(points)
    if n < SLOPE_POINTS:
        return None
    times, values = zip(*points, strict=True)
    mean_t, mean_v = sum(times) / n, sum(values) / n
    apart = [t - mean_t for t in times]
    spread = sum(map(mul, apart, apart))
    return sum(map(mul, apart, [v - mean_v for v in values])) / spread if spread > 0 else None
