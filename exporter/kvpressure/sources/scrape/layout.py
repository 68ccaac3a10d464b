"""The layout of a page: which line is which sample of which engine; and memory limits over the scrapes of all
targets, so that hostile ones cost no more than honest ones.

Anybody who may start a pod decides what its endpoint returns, so each bound on one scrape has a bound on all of them:
16 scrapes of the maximum size would otherwise take 16 times its memory at once. Lines are read in the classic text
format and OpenMetrics: timestamps, exemplars, quoted names (``{"vllm:x",a="b"} 1``).
"""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

from kvpressure.engines.base import PAGE_ITSELF, EngineDialect, Family, SampleName, owner_of
from kvpressure.engines.registry import dialect
from kvpressure.model import ceilings
from kvpressure.model.readings import EngineReading, Histogram
from kvpressure.model.reasons import CROWDED
from kvpressure.printable import visible
from kvpressure.sources.base import SourceError

MAX_ENGINES: Final = 64  # of all targets of a node together, and of one page; 8 GPUs have 56 MIG instances
"""Engines of the node. Beyond: each target keeps its fair part, those of pods with a GPU first.
Shown as: `page_cut{reason="engines"}`.
"""
SMALL_PAGE_BYTES: Final = 128 * 1024  # pages up to this size wait for nobody; that of one engine has 60 KiB
LARGE_PAGES_BYTES: Final = 5 * 1024 * 1024  # of larger pages in memory at the same time: the largest, as it grows
"""Scrapes above 128 KiB in memory at once. Beyond: the scrape waits, then fails.
Shown as: `target_errors_total{reason="crowded"}`.
"""
REMEMBERED_BYTES: Final = (
    14 * 1024 * 1024
)  # of all scanners together; a page of 64 engines needs 11, with names of 100 characters 13 (each scan of more is a slow one)  # noqa: E501
"""Lines and series remembered for fast parsing, all targets. Beyond: forgotten and parsed again; results stay the same.
Shown as: process CPU.
"""
SCANS: Final = 2  # pages taken apart at the same time: one thread runs at a time, each holds what it has begun
"""Scrapes parsed at once. Beyond: the scrape waits. Shown as: `target_scrape_seconds`."""
LAYOUT_BYTES: Final = (
    2 * 1024 * 1024
)  # of the series of one page while it is taken apart, at least; 8 engines have 1 MiB
"""Series of one target while it is parsed, at least. Beyond: further series are left out if others use the rest.
Shown as: `page_cut{reason="series"}`.
"""
REMEMBERED_EACH: Final = 256 * 1024  # what every scanner may have of it at least


class FairShare:
    """An amount that several users share; each may have an equal part, and what the others leave unused. Users with a
    worse ``precedence`` (a higher number) share what those before them leave.

    ``each``: minimum for every user, however many there are; ``kept``: reserved for each user below it. With both
    equal, the first cannot take all before the others get their minimum. Thread-safe.
    """

    def __init__(self, total: int, each: int = 1, kept: int = 0) -> None:
        self._total = total
        self._each = each
        self._kept = kept
        self._used: dict[object, int] = {}
        self._precedence: dict[object, int] = {}
        self._lock = threading.Lock()

    def join(self, user: object, precedence: int = 0) -> None:
        """Add ``user``, or change its precedence."""
        with self._lock:
            self._used.setdefault(user, 0)
            self._precedence[user] = precedence

    def leave(self, user: object) -> None:
        """Remove ``user``."""
        with self._lock:
            self._used.pop(user, None)
            self._precedence.pop(user, None)

    def use(self, user: object, amount: int) -> None:
        """Set the amount that ``user`` has; ignored for one that has left."""
        with self._lock:
            if user in self._used:
                self._used[user] = amount

    def allowed(self, user: object) -> int:
        """Maximum amount for ``user`` now."""
        with self._lock:
            own = self._precedence.get(user, 0)
            used = {other: max(amount, self._kept) for other, amount in self._used.items() if other is not user}
            before = sum(amount for other, amount in used.items() if self._precedence[other] < own)
            alike = [amount for other, amount in used.items() if self._precedence[other] == own]
            room = self._total - before
            return max(self._each, room // (1 + len(alike)), room - sum(alike))


class Reservation:
    """Memory reserved for one large response; nothing at first."""

    def __init__(self, pool: MemoryPool) -> None:
        self._pool = pool
        self.taken = 0

    def grow(self, amount: int, timeout: float) -> None:
        """Reserve ``amount`` more bytes. Raises ``SourceError("crowded")`` if they are not free within ``timeout``
        seconds.
        """
        if not self._pool.take(amount, timeout):
            raise SourceError(CROWDED, f"no memory left for a response of {amount} bytes")
        self.taken += amount


class MemoryPool:
    """Memory for the large responses of all targets; small ones need none."""

    def __init__(self, total: int = LARGE_PAGES_BYTES) -> None:
        self._free = total
        self._changed = threading.Condition()

    @contextmanager
    def lease(self) -> Iterator[Reservation]:
        """A reservation for one response, released at the end."""
        lease = Reservation(self)
        try:
            yield lease
        finally:
            self._give(lease.taken)

    def take(self, amount: int, timeout: float) -> bool:
        """Take ``amount`` bytes when they are free; False if not within ``timeout`` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free >= amount, timeout):
                return False
            self._free -= amount
            return True

    def _give(self, amount: int) -> None:
        with self._changed:
            self._free += amount
            self._changed.notify_all()


class ScrapeLimits:
    """Limits that all targets of one source share. ``scanning`` is held while a large page is parsed, ``scans`` for
    any. ``give_way``: called before that; may wait for what is more urgent.
    """

    def __init__(self, give_way: Callable[[], object] = int) -> None:
        self.give_way = give_way
        self.memory = MemoryPool()
        self.scanning = threading.Lock()
        self.scans = threading.Semaphore(SCANS)
        self.engines = FairShare(MAX_ENGINES)
        self.remembered = FairShare(REMEMBERED_BYTES, REMEMBERED_EACH, REMEMBERED_EACH)
        self._layouts: WeakValueDictionary[object, Layout] = WeakValueDictionary()

    def layout(self, series: list[Series | None], lines: dict[str, Series | None]) -> Layout:
        """The layout of these series, which targets with the same lines share; ``lines``: kept with a new one."""
        layout = self._layouts.get(key := tuple(series))
        if layout is None:
            layout = self._layouts[key] = Layout(series, lines)
        return layout


MAX_LINE_CHARS: Final = 16_384  # cache_config_info, the longest wanted line, has about 1 300
MAX_LABELS: Final = 128  # cache_config_info has 38
MAX_LABEL_CHARS: Final = 1_024  # served model names may be paths

_TEXT: Final = r'[^"\\]*+(?:\\.[^"\\]*+)*+'
_NAME: Final = re.compile(rf'[ \t]*+(?:([a-zA-Z_:][a-zA-Z0-9_:]*+)|\{{[ \t]*+"({_TEXT})"[ \t]*+(?:,|(?=\}})))')
_LABEL: Final = re.compile(
    rf'[ \t]*+(?:([a-zA-Z_][a-zA-Z0-9_]*+)|"({_TEXT})")[ \t]*+=[ \t]*+"({_TEXT})"[ \t]*+(?:,|(?=\}}))'
)
_LABELS: Final = re.compile(rf"(?:{_LABEL.pattern})*+[ \t]*+\}}")
_SAMPLE: Final = re.compile(
    rf'[ \t]*+((?:[a-zA-Z_:][a-zA-Z0-9_:]*+)?+(?:[ \t]*+\{{(?:[^"}}]++|"{_TEXT}")*+\}})?+)'  # name and labels
    r"(?:(?<=\})[ \t]*+|[ \t]++)([^ \t]++)"  # value
    r"(?:[ \t]++(-?[0-9]++(?:\.[0-9]*+)?+(?:[eE][+-]?+[0-9]++)?+))?+"  # timestamp
    r"[ \t\r]*+(?:# \{.*)?+\Z"  # exemplar
)
_MILLISECONDS: Final = 1e11
_ESCAPE: Final = re.compile(r"\\(.)")
_ESCAPED: Final = {"n": "\n", "\\": "\\", '"': '"'}


class BadLine(ValueError):
    """A line that cannot be parsed; only that line is lost."""


def name_of(line: str) -> str:
    """The metric name of a line; "" without one. A dot, which only quoted names may have, is read as an underscore."""
    match = _NAME.match(line[:MAX_LINE_CHARS])
    return "" if match is None else match[1] or _unescape(match[2]).replace(".", "_")


def sample_of(line: str) -> tuple[str, str, float | None]:
    """(name and labels as written, text of the value, Unix time of the line or ``None``); an exemplar may follow.

    Raises ``BadLine``. The classic format has milliseconds, OpenMetrics seconds; in seconds, ``_MILLISECONDS`` is the
    year 5138.
    """
    match = _SAMPLE.match(line) if len(line) <= MAX_LINE_CHARS else None
    if match is None:
        raise BadLine("too long, labels that do not end, no value, or something after it")
    head, number, stamp = match.groups()
    time = None if stamp is None else float(stamp)
    return head, number, time / 1000 if time is not None and abs(time) >= _MILLISECONDS else time


def labels_of(head: str) -> dict[str, str]:
    """Labels of a series, from its name and labels as written.

    Raises ``BadLine`` for broken syntax, a repeated label, too many labels or too long a value.
    """
    name = _NAME.match(head)
    start = name.end() if name is not None and name[2] is not None else head.find("{") + 1  # its brace is open already
    if not start:
        return {}
    pairs = _LABEL.findall(head, start)
    labels = {name or _unescape(quoted).replace(".", "_"): _unescape(value) for name, quoted, value in pairs}
    if _LABELS.fullmatch(head, start) is None or len(labels) < len(pairs) or len(pairs) > MAX_LABELS:
        raise BadLine("broken labels, one twice, or too many")
    if len(head) > MAX_LABEL_CHARS and any(len(value) > MAX_LABEL_CHARS for *_, value in pairs):
        raise BadLine("label too long")
    return labels


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[0]), text) if "\\" in text else text


MAX_OWNERS: Final = 8 * MAX_ENGINES  # engines, models, servers and configurations, before the first engines are chosen
MAX_BUCKETS: Final = 64  # of one histogram; the longest known has 23
MAX_VALUES: Final = 32  # of a label that makes a name, of one engine; there are five reasons for a request to end
MAX_SERIES: Final = 32_768  # 64 engines need about 17 000
"""Series of one page. Beyond: further series are left out. Shown as: `page_cut{reason="series"}`."""
MAX_NAME_CHARS: Final = 256  # of a model or an engine; it stands in each of their series
"""Model or engine name, characters. Beyond: its lines are left out. Shown as: `page_bad_lines`."""

Values = Sequence[float | None]
Fields = tuple[dict[str, float], dict[str, float], dict[str, Histogram]]  # gauges, counters, histograms
ConfigLabels = tuple[tuple[str, str], ...]
_NOTHING: Final[Fields] = {}, {}, {}


class SeriesOwner(NamedTuple):
    """Whose a value is. ``scope``: page, model (of series without an engine), server, engine or config."""

    scope: str
    dialect: str
    model: str
    replica: str
    origin: str
    engine: str


_PAGE: Final = SeriesOwner("page", "", "", "", "", "")


class ValueKey(NamedTuple):
    """Which value of its owner a series has.

    ``part``: of a histogram (of a bucket its bound), or the labels of a configuration. ``copy``: hash of what
    distinguishes series that are joined to one value: handlers, processes, kinds of sleep, summed names. vLLM 0.9.2 to
    0.11 lacked a multi-process mode for the KV gauge and publishes it once per process, with a ``pid``.
    """

    owner: SeriesOwner
    kind: str
    canonical: str
    age: int
    part: str | float | ConfigLabels
    copy: int


class Series(NamedTuple):
    """A wanted series. ``ceiling``: the largest value that is believed. ``mark``: hash of its labels; where it differs
    between series with one identity, it is unknown which is meant.
    """

    ceiling: float
    identity: ValueKey
    mark: int
    family: Family


NO_SERIES: Final = Series(-1.0, ValueKey(SeriesOwner(*[""] * 6), "", "", 0, "", 0), 0, Family("gauge", ()))
"""Stands for one that is not known: no value of it is believed."""


def classify(
    sample: SampleName, labels: Mapping[str, str], owners: dict[tuple[str, ...], SeriesOwner]
) -> Series | None:
    """The series with this name and labels; ``None`` if it is not wanted: without a model, or of a process where
    several servers share the endpoint. ``owners``: those of all series, each kept once.

    Raises ``BadLine`` for a bucket without a valid bound and for too long names.
    """
    family, whose = sample.family, dialect(sample.dialect)
    canonical, named = family.canonical_for(labels), _owner(family, whose, sample.dialect, labels)
    if canonical is None or named is None:
        return None
    part: str | float | ConfigLabels = sample.part
    mark = copy = 0
    if family.kind == "config":
        kept = sorted(whose.config_labels & labels.keys())
        part = tuple((name, visible(labels[name])) for name in kept if labels[name] not in ("None", ""))
    else:
        part = _bound(labels) if part == "bucket" else part
        mark = hash(frozenset(item for item in labels.items() if item[0] not in whose.repeated_by))
    if family.kind == "page":
        copy = mark
    elif family.kind == "gauge" or family.join == "sum":
        copy = hash((family.join == "sum" and family.names[0], *map(labels.get, (*family.copies, family.label))))
    owner = owners.get(named)
    if owner is None:
        owner = SeriesOwner(*map(visible, named))
        if max(map(len, owner)) > MAX_NAME_CHARS:
            raise BadLine("name too long")
        owners[named] = owner
    return Series(family.ceiling, ValueKey(owner, family.kind, canonical, sample.age, part, copy), mark, family)


def _owner(family: Family, whose: EngineDialect, name: str, labels: Mapping[str, str]) -> tuple[str, ...] | None:
    """The fields of a series' owner, as written."""
    server = owner_of(labels)
    if family.kind == "page":
        return _PAGE if server is PAGE_ITSELF else None
    model, engine = whose.identify(labels)
    if family.kind == "config":
        return "config", name, "", *server, "" if engine is None else engine or "0"
    if model is None:
        return None
    if engine is None and (family.per_model or family.per_server):
        return "model" if family.per_model else "server", name, model, *server, ""
    return "engine", name, model, *server, engine or "0"


def _bound(labels: Mapping[str, str]) -> float:
    bound = ceilings.number_in(labels.get("le"), math.inf)
    if bound is None or ceilings.COUNT < bound < math.inf:
        raise BadLine("bucket without a possible bound")
    return bound


@dataclass(slots=True)
class _Scalar:
    """A gauge, counter or page value. Several places form one value where several series do: one per process, joined
    by maximum, or one per handler, joined by sum.
    """

    age: int
    join: Callable[[Iterable[Any]], float]
    places: list[int]


class _Buckets:
    """One histogram under one spelling."""

    def __init__(self, canonical: str, age: int) -> None:
        self.canonical = canonical
        self.age = age
        self.places: dict[object, int] = {"sum": -1, "count": -1}  # by part; the last of the values is None
        self._bounds: tuple[float, ...] = ()
        self._pick: Callable[[Values], tuple[Any, ...]] | None = None

    def value(self, values: Values, known: HistogramsRead) -> tuple[Histogram | None, bool]:
        """(histogram or ``None`` if absent, whether its buckets are valid); the same object as long as no value
        changes. ``known``: what the last page was read as.

        Buckets that do not rise up to ``+Inf`` are dropped; sum and count stay.
        """
        if self._pick is None:
            self._bounds = tuple(sorted(part for part in self.places if isinstance(part, float)))
            self._pick = itemgetter(*(self.places[part] for part in ("sum", "count", *self._bounds)))
        seen = self._pick(values)
        if self not in known or known[self][0] != seen:
            known[self] = seen, self._read(*seen)
        return known[self][1]

    def _read(self, total: float | None, count: float | None, *counts: float) -> tuple[Histogram | None, bool]:
        bounds = self._bounds
        sound = not bounds or (bounds[-1] == math.inf and sorted(counts) == list(counts))
        if not sound:
            bounds = counts = ()
        if count is None and counts:
            count = counts[-1]  # the +Inf bucket counts everything
        return None if count is None and total is None else Histogram(bounds, counts, total, count), sound


HistogramsRead = dict[_Buckets, tuple[tuple[Any, ...], tuple[Histogram | None, bool]]]
"""Histograms of a target's last page: their values, and what these were read as."""


@dataclass(slots=True)
class _Group:
    """All values of one owner."""

    gauges: dict[str, _Scalar] = field(default_factory=dict)
    counters: dict[str, _Scalar] = field(default_factory=dict)
    histograms: dict[tuple[str, int, int], _Buckets] = field(default_factory=dict)
    config: ConfigLabels = ()
    scales: dict[str, float] = field(default_factory=dict)  # of counters that are not in base units

    def add(self, identity: ValueKey, family: Family, place: int) -> bool:
        """Whether there is room for this value."""
        if isinstance(identity.part, tuple):
            less, more = sorted((self.config, identity.part))  # of two values of a label, always the same one
            self.config = tuple(sorted({**dict(less), **dict(more)}.items()))
            return True
        if family.kind == "histogram":
            key = identity.canonical, identity.age, identity.copy
            if key not in self.histograms:
                self.histograms[key] = _Buckets(identity.canonical, identity.age)
            places = self.histograms[key].places
            if len(places) >= MAX_BUCKETS + 2 and identity.part not in places:
                return False
            places[identity.part] = place
            return True
        scalars = self.counters if family.kind == "counter" else self.gauges
        is_open = family.label and not family.values
        if is_open and sum(name.startswith(family.canonical) for name in scalars) >= MAX_VALUES:
            return False
        join = sum if family.join == "sum" or (family.kind == "page" and family.label) else max
        if family.scale != 1.0:
            self.scales[identity.canonical] = family.scale
        name: str | None = identity.canonical
        while name is not None:
            scalar = scalars.get(name)
            if scalar is None or identity.age < scalar.age:  # the newest spelling counts
                scalars[name] = _Scalar(identity.age, join, [place])
            elif identity.age == scalar.age:
                scalar.places.append(place)
            name = family.also.get(name)
        return True

    def read(self, values: Values, known: HistogramsRead) -> tuple[Fields, int]:
        """(the page's values, number of histograms with invalid buckets)."""
        histograms: dict[str, Histogram] = {}
        ages: dict[str, int] = {}
        unsound = 0
        for each in self.histograms.values():
            histogram, sound = each.value(values, known)
            unsound += not sound
            if histogram is not None:
                name = each.canonical
                # of one age there are several only where a family adds up
                histograms[name] = histograms[name].plus(histogram) if ages.get(name) == each.age else histogram
                ages[name] = each.age
        counters = _read(self.counters, values)
        for name, scale in self.scales.items():
            counters[name] *= scale
        return (_read(self.gauges, values), counters, histograms), unsound


def _read(scalars: Mapping[str, _Scalar], values: Values) -> dict[str, Any]:
    return {
        name: values[each.places[0]] if len(each.places) == 1 else each.join(values[place] for place in each.places)
        for name, each in scalars.items()
    }


class Layout:
    """Reads engines from the values of these series; both are in the order of the page's lines. Nothing in it changes,
    so that targets may share it. ``lines``: name and labels as written -> series, ``None``: not wanted.

    ``collisions``: values left out because several series have them; ``rival_lines``: two lines of such series.
    ``refused``: series beyond the limits.
    """

    def __init__(self, series: list[Series | None], lines: dict[str, Series | None]) -> None:
        self.series = series
        self.lines = lines
        self.refused = 0
        self._groups: dict[SeriesOwner, _Group] = {}
        latest: dict[ValueKey, tuple[int, Series]] = {}  # of duplicates the last counts
        rivals: set[ValueKey] = set()
        self.rival_lines: tuple[int, ...] = ()
        for place, one in enumerate(series):
            if one is not None:
                before, other = latest.get(one.identity, (place, one))
                if other.mark != one.mark:
                    rivals.add(one.identity)
                    self.rival_lines = before, place
                latest[one.identity] = place, one
        self.collisions = len(rivals)
        for number, (identity, (place, one)) in enumerate(latest.items()):
            if identity not in rivals:
                self.refused += number >= MAX_SERIES or not self._add(identity, one.family, place)
        for group in self._groups.values():  # oldest spelling first: in a dict, the newest present one wins
            group.histograms = dict(sorted(group.histograms.items(), key=lambda item: -item[1].age))

    def _add(self, identity: ValueKey, family: Family, place: int) -> bool:
        group = self._groups.get(identity.owner)
        if group is None:
            if len(self._groups) >= MAX_OWNERS:
                return False
            group = self._groups[identity.owner] = _Group()
        return group.add(identity, family, place)

    def read(
        self, values: list[float | None], known: HistogramsRead
    ) -> tuple[tuple[EngineReading, ...], dict[str, float], int]:
        """(engines, page values, histograms with invalid buckets). ``known``: the histograms of the target's last page
        of this layout, which is updated.
        """
        values = [*values, None]  # for what a histogram lacks
        fields, unsound = {}, 0
        for owner, group in self._groups.items():
            read, bad = group.read(values, known)
            unsound += bad
            if any(read):
                fields[owner] = read
        alone = Counter(owner[1:5] for owner in fields if owner.scope == "engine")
        engines: list[EngineReading] = []
        for owner, (gauges, counters, histograms) in fields.items():
            if owner.scope == "engine":
                _, whose, model, replica, origin, engine = owner
                for scope in ("model", "server") if alone[owner[1:5]] == 1 else ("model",):
                    shared = fields.get(SeriesOwner(scope, *owner[1:5], ""), _NOTHING)
                    gauges, counters = {**shared[0], **gauges}, {**shared[1], **counters}
                    histograms = {**shared[2], **histograms}
                configs = (
                    self._groups.get(SeriesOwner("config", whose, "", replica, origin, own)) for own in (engine, "")
                )
                config = next((dict(group.config) for group in configs if group is not None), {})
                name = f"{engine}/{origin}" if origin else engine
                engines.append(EngineReading(model, name, gauges, counters, histograms, config, whose, replica, origin))
        engines.sort(key=lambda each: (each.model_name, len(each.engine), each.engine, each.replica, each.dialect))
        return tuple(engines), fields.get(_PAGE, _NOTHING)[0], unsound
