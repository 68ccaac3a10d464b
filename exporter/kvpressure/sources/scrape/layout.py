"""Layout of a metrics page: which series it has, and how their values become engines.

Values change at every scrape, series hardly ever. So ``series`` assigns every series a *slot* once; later scans only
write numbers into a list by slot, from which ``Layout.read`` reads them. The layout remembers series of earlier pages
too; on a page without them their slots are ``None``, and the result is that of a layout without them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import itemgetter
from sys import getsizeof
from typing import Any, Final, TypeVar

from kvpressure.engines.base import EngineDialect
from kvpressure.engines.identity import PAGE_ITSELF, Owner, owner_of
from kvpressure.engines.registry import dialect
from kvpressure.engines.series import Family, SampleName
from kvpressure.model import ceilings
from kvpressure.model.readings import EngineReading, Histogram
from kvpressure.printable import visible
from kvpressure.sources.scrape.lines import BadLine, TooMany
from kvpressure.sources.scrape.memory_limits import MAX_ENGINES, REMEMBERED_BYTES

UNWANTED: Final = -1
MAX_OWNERS: Final = 4 * MAX_ENGINES  # engines and models whose series are placed, before the first of them are chosen
MAX_BUCKETS: Final = 64  # of one histogram; the longest known has 23
MAX_VALUES: Final = 32  # of a label that makes a name, of one engine; there are five reasons for a request to end
MAX_SLOTS: Final = 32_768  # 64 engines need about 17 000
"""Series of one target. Beyond: further series are left out. Shown as: `page_cut{reason="series"}`."""
MAX_NAME_CHARS: Final = 256  # of a model or an engine; it stands in each of their series
"""Model or engine name, characters. Beyond: its lines are left out. Shown as: `page_bad_lines`."""
MAX_CONFIGS: Final = 4 * MAX_ENGINES  # cache_config_info series; an engine has one
SLOT_BYTES: Final = 300  # of a series: its key, its field and its last value
GROUP_BYTES: Final = 1_024  # of an engine or a model, beside its name

Values = Sequence[float | None]
_Key = TypeVar("_Key")


@dataclass(slots=True)
class _Scalar:
    """A gauge, counter or page value under one spelling.

    Several slots form one value where several series do: one per process (``pid``), joined by maximum, or one per
    handler, joined by sum.
    """

    canonical: str
    age: int
    join: Callable[[Iterable[float]], float]
    slots: list[int] = field(default_factory=list)

    def value(self, values: Values) -> float | None:
        if len(self.slots) == 1:
            return values[self.slots[0]]
        found = [value for slot in self.slots if (value := values[slot]) is not None]
        return self.join(found) if found else None


class _Buckets:
    """The slots of one histogram under one spelling, buckets ordered by bound."""

    def __init__(self, canonical: str, age: int) -> None:
        self.canonical = canonical
        self.age = age
        self.sum_slot = self.count_slot = UNWANTED
        self._slots: dict[float, int] = {}  # bound -> slot
        self._bounds: tuple[float, ...] = ()
        self._pick: Callable[[Values], tuple[float | None, ...]] = lambda _: ()
        self._seen: tuple[Any, ...] | None = None  # values of the last page,
        self._last: tuple[Histogram | None, bool] = None, True  # and what they were read as

    def add(self, part: str | float, slot: int) -> None:
        if part == "sum":
            self.sum_slot = slot
        elif part == "count":
            self.count_slot = slot
        else:
            self._slots[float(part)] = slot
            self._bounds = tuple(sorted(self._slots))
            slots = [self._slots[bound] for bound in self._bounds]
            one = slots[0]
            self._pick = itemgetter(*slots) if len(slots) > 1 else lambda values: (values[one],)

    @property
    def full(self) -> bool:
        """Whether no further bucket is accepted."""
        return len(self._slots) >= MAX_BUCKETS

    def value(self, values: Values) -> tuple[Histogram | None, bool]:
        """(histogram or ``None`` if absent, whether its buckets are valid); the same object as long as no value
        changes.

        Buckets that do not rise up to ``+Inf`` are dropped; sum and count stay.
        """
        total = values[self.sum_slot] if self.sum_slot >= 0 else None
        count = values[self.count_slot] if self.count_slot >= 0 else None
        picked = self._pick(values)
        if (picked, total, count) != self._seen:
            self._seen = picked, total, count
            self._last = self._read(picked, total, count)
        return self._last

    def _read(
        self, picked: tuple[float | None, ...], total: float | None, count: float | None
    ) -> tuple[Histogram | None, bool]:
        bounds, counts = self._there(picked)
        sound = not bounds or (bounds[-1] == math.inf and sorted(counts) == list(counts))
        if not sound:
            bounds = counts = ()
        if count is None and counts:
            count = counts[-1]  # the +Inf bucket counts everything
        if count is None and total is None:
            return None, sound
        return Histogram(bounds, counts, total, count), sound

    def _there(self, picked: tuple[float | None, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Bounds and counts of the buckets on this page."""
        if None not in picked:
            return self._bounds, picked  # type: ignore[return-value]  # no None in it, as just seen
        pairs = zip(self._bounds, picked, strict=True)
        there = [(bound, count) for bound, count in pairs if count is not None]
        return tuple(bound for bound, _ in there), tuple(count for _, count in there)


class _Group:
    """All fields of one owner: an engine, a model (for series without an engine), a server, or the page.

    Lists are ordered oldest spelling first, so that in a ``dict`` the newest present one wins.
    """

    def __init__(self) -> None:
        self.gauges: list[_Scalar] = []
        self.counters: list[_Scalar] = []
        self.histograms: list[_Buckets] = []
        self._by_name: dict[tuple[Any, ...], _Scalar | _Buckets] = {}
        self.slots: dict[tuple[Any, ...], int] = {}  # identity of a series within this owner -> slot

    def scalar(self, family: Family, canonical: str, age: int) -> _Scalar:
        key = (family.kind, canonical, age)
        known = self._by_name.get(key)
        if not isinstance(known, _Scalar):
            joined = sum if family.join == "sum" or (family.kind == "page" and family.label) else max
            known = _Scalar(canonical, age, joined)
            self._by_name[key] = known
            (self.counters if family.kind == "counter" else self.gauges).append(known)
        return known

    def buckets(self, canonical: str, age: int, copy: bytes | None) -> _Buckets:
        key = ("histogram", canonical, age, copy)
        known = self._by_name.get(key)
        if not isinstance(known, _Buckets):
            known = self._by_name[key] = _Buckets(canonical, age)
            self.histograms.append(known)
        return known

    def has_enough(self, family: Family) -> bool:
        """Whether the label that forms names of this family has too many values."""
        if not family.label or family.values:
            return False
        return sum(each.canonical.startswith(family.canonical) for each in self.counters) >= MAX_VALUES

    def sort(self) -> None:
        for fields in (self.gauges, self.counters, self.histograms):
            fields.sort(key=lambda each: -each.age)

    def read_histograms(self, values: Values) -> tuple[dict[str, Histogram], int]:
        """(the page's histograms, number of them with invalid buckets)."""
        found: dict[str, Histogram] = {}
        ages: dict[str, int] = {}
        unsound = 0
        for each in self.histograms:
            histogram, sound = each.value(values)
            unsound += not sound
            if histogram is not None:
                name = each.canonical
                # of one age there are several only where a family adds up
                found[name] = _added(found[name], histogram) if ages.get(name) == each.age else histogram
                ages[name] = each.age
        return found, unsound


def _added(one: Histogram, other: Histogram) -> Histogram:
    """The sum of both; without buckets if their bounds differ."""
    alike = one.bounds == other.bounds
    return Histogram(
        one.bounds if alike else (),
        tuple(a + b for a, b in zip(one.counts, other.counts, strict=True)) if alike else (),
        None if one.sum is None or other.sum is None else one.sum + other.sum,
        None if one.count is None or other.count is None else one.count + other.count,
    )


def _read(scalars: list[_Scalar], values: Values) -> dict[str, float]:
    return {each.canonical: value for each in scalars if (value := each.value(values)) is not None}


@dataclass(frozen=True, slots=True)
class _Config:
    """One series whose labels are the configuration. ``engine`` None: of every engine of that server."""

    slot: int
    dialect: str
    owner: Owner
    engine: str | None
    labels: Mapping[str, str]


class Layout:
    """Slots of the wanted series of a page; reads engines from slot values."""

    def __init__(self, most_bytes: int = REMEMBERED_BYTES) -> None:
        self.most_bytes = most_bytes  # beyond it no further series gets a slot
        self.ceilings: list[float] = []  # by slot: the largest value that is believed
        self._page = _Group()
        self._models: dict[tuple[str, ...], _Group] = {}  # by dialect, model and server
        self._servers: dict[tuple[str, ...], _Group] = {}  # the same: of all engines together
        self._engines: dict[tuple[str, ...], _Group] = {}  # by dialect, model, server and engine
        self._labels: list[int] = []  # by slot: hash of its series' labels
        self._rivals: dict[int, list[int]] = {}  # slot -> slots of other series that name the same value
        self._configs: list[_Config] = []
        self._config_slots: dict[bytes, int] = {}
        self.bytes = 0  # memory of the series, rather over- than underestimated
        self._sorted = True
        self.full = False  # a series was refused for want of room
        self.refused = 0  # so many series, of all pages

    @property
    def engines(self) -> int:
        """Number of engines remembered, of this and earlier pages."""
        return len(self._engines)

    def place(self, sample: SampleName, labels: Mapping[str, str]) -> int:
        """The slot of a series; ``UNWANTED`` if its labels are not wanted.

        Raises ``BadLine`` for a bucket without a valid bound, ``TooMany`` when there are too many series.
        """
        family = sample.family
        if family.kind == "config":
            return self._place_config(dialect(sample.dialect), labels)
        canonical = family.canonical_for(labels)
        owner = _owner(sample, labels)
        if canonical is None or owner is None:
            return UNWANTED
        if any(len(name) > MAX_NAME_CHARS for name in owner):
            raise BadLine("name too long")
        part: str | float = _bound(labels) if sample.part == "bucket" else sample.part
        group = self._group(owner)
        copy = _copy(family, labels)
        identity = (family.kind, canonical, sample.age, part, copy)
        repeated_by = dialect(sample.dialect).repeated_by
        mark = hash(frozenset(item for item in labels.items() if item[0] not in repeated_by))
        known = group.slots.get(identity)
        if known is not None:
            return known if self._labels[known] == mark else self._rival(group, identity, known, mark)
        if family.kind == "histogram":
            buckets = group.buckets(canonical, sample.age, copy)
            slot = self._next_slot(family.ceiling, full=sample.part == "bucket" and buckets.full)
            buckets.add(part, slot)
        else:
            slot = self._next_slot(family.ceiling, full=group.has_enough(family))
            for name in (canonical, family.also.get(canonical)):
                if name is not None:
                    group.scalar(family, name, sample.age).slots.append(slot)
        group.slots[identity] = slot
        self._labels[slot] = mark
        self.bytes += getsizeof(canonical)
        return slot

    def _rival(self, group: _Group, identity: tuple[Any, ...], known: int, mark: int) -> int:
        """The slot of a series that differs from that of ``known`` only by labels that are not read."""
        slot = group.slots.get((identity, mark))
        if slot is None:
            slot = group.slots[identity, mark] = self._next_slot(self.ceilings[known])
            self._labels[slot] = mark
            self._rivals.setdefault(known, []).append(slot)
        return slot

    def _place_config(self, whose: EngineDialect, labels: Mapping[str, str]) -> int:
        engine, owner = _identity(whose, labels)[1], _owner_of(labels)
        kept = {
            name: visible(labels[name])
            for name in sorted(whose.config_labels & labels.keys())
            if labels[name] != "None"
        }
        identity = _digest((whose.name, *owner, f"{engine}", *(f"{name}={value}" for name, value in kept.items())))
        known = self._config_slots.get(identity)
        if known is None:
            known = self._config_slots[identity] = self._next_slot(math.inf, full=len(self._configs) >= MAX_CONFIGS)
            self._configs.append(_Config(known, whose.name, owner, None if engine is None else engine or "0", kept))
            self.bytes += getsizeof(kept) + sum(getsizeof(name) + getsizeof(value) for name, value in kept.items())
        return known

    def _next_slot(self, ceiling: float, full: bool = False) -> int:
        if full or len(self.ceilings) >= MAX_SLOTS or self.bytes > self.most_bytes:
            raise self._too_many()
        self.ceilings.append(ceiling)
        self._labels.append(0)
        self.bytes += SLOT_BYTES
        self._sorted = False
        return len(self.ceilings) - 1

    def _too_many(self) -> TooMany:
        self.full = True
        self.refused += 1
        return TooMany("too many series")

    def _group(self, owner: tuple[str, ...]) -> _Group:
        if owner[0] == "page":
            return self._page
        if owner[0] == "server":
            return self._servers.get(owner[1:]) or self._new_group(self._servers, owner[1:])
        if owner[0] == "model":
            return self._models.get(owner[1:]) or self._new_group(self._models, owner[1:])
        return self._engines.get(owner[1:]) or self._new_group(self._engines, owner[1:])

    def _new_group(self, groups: dict[_Key, _Group], key: _Key) -> _Group:
        if len(groups) >= MAX_OWNERS:
            raise self._too_many()
        groups[key] = group = _Group()
        self.bytes += GROUP_BYTES + sum(map(getsizeof, key if isinstance(key, tuple) else (key,)))
        return group

    def read(self, values: list[float | None]) -> tuple[tuple[EngineReading, ...], dict[str, float], int, int]:
        """(engines, page values, histograms with invalid buckets, values left out because several series have them)."""
        self._sort()
        collisions = self._settle_rivals(values)
        configs = self._present_configs(values)
        unsound_histograms = 0
        found: list[tuple[tuple[str, ...], dict[str, float], dict[str, float], dict[str, Histogram]]] = []
        for named, group in self._engines.items():
            gauges, counters = _read(group.gauges, values), _read(group.counters, values)
            histograms, unsound = group.read_histograms(values)
            unsound_histograms += unsound
            if gauges or counters or histograms:
                found.append((named, gauges, counters, histograms))
        alone = Counter(named[:-1] for named, *_ in found) if self._servers else Counter()
        engines: list[EngineReading] = []
        for named, gauges, counters, histograms in found:
            whose, model, replica, origin, engine = named
            for groups in (self._models, *([self._servers] if alone[named[:-1]] == 1 else [])):
                shared = groups.get(named[:-1])
                if shared is not None:
                    gauges = {**_read(shared.gauges, values), **gauges}
                    counters = {**_read(shared.counters, values), **counters}
                    common, unsound = shared.read_histograms(values)
                    unsound_histograms += unsound
                    histograms = {**common, **histograms}
            owner = Owner(replica, origin)
            config = configs.get((whose, owner, engine), configs.get((whose, owner, None), {}))
            name = f"{engine}/{origin}" if origin else engine
            engines.append(EngineReading(model, name, gauges, counters, histograms, config, whose, replica, origin))
        if len(engines) > 1:
            engines.sort(key=lambda each: (each.model_name, len(each.engine), each.engine, each.replica, each.dialect))
        return tuple(engines), _read(self._page.gauges, values), unsound_histograms, collisions

    def _settle_rivals(self, values: list[float | None]) -> int:
        """Keep a value that only one series on this page has; drop it if several have, because it is unknown which is
        meant.
        """
        collisions = 0
        for slot, rivals in self._rivals.items():
            there = [value for each in (slot, *rivals) if (value := values[each]) is not None]
            collisions += len(there) > 1
            values[slot] = there[0] if len(there) == 1 else None
        return collisions

    def _present_configs(self, values: Values) -> dict[tuple[str, Owner, str | None], Mapping[str, str]]:
        return {
            (each.dialect, each.owner, each.engine): each.labels
            for each in self._configs
            if values[each.slot] is not None
        }

    def _sort(self) -> None:
        """Order fields independently of earlier pages."""
        if self._sorted:
            return
        for group in (self._page, *self._models.values(), *self._servers.values(), *self._engines.values()):
            group.sort()
        self._configs.sort(key=lambda each: tuple(each.labels.items()))
        self._sorted = True


def _identity(whose: EngineDialect, labels: Mapping[str, str]) -> tuple[str | None, str | None]:
    """(model, engine) of a series, without unprintable characters."""
    model, engine = whose.identify(labels)
    return None if model is None else visible(model), None if engine is None else visible(engine)


def _owner_of(labels: Mapping[str, str]) -> Owner:
    """The server that a series names beside its model, without unprintable characters."""
    found = owner_of(labels)
    return found if found is PAGE_ITSELF else Owner(visible(found.replica), visible(found.origin))


def _owner(sample: SampleName, labels: Mapping[str, str]) -> tuple[str, ...] | None:
    """The page, or a model, server or engine with its dialect; ``None`` for a series without a model, and for a
    process's series where several servers share the endpoint.
    """
    owner = _owner_of(labels)
    if sample.family.kind == "page":
        return ("page",) if owner is PAGE_ITSELF else None
    model, engine = _identity(dialect(sample.dialect), labels)
    if model is None:
        return None
    if sample.family.per_model and engine is None:
        return ("model", sample.dialect, model, *owner)
    if sample.family.per_server and engine is None:
        return ("server", sample.dialect, model, *owner)
    return ("engine", sample.dialect, model, *owner, engine or "0")


def _digest(texts: Iterable[str]) -> bytes:
    """Fixed-size stand-in for texts that only distinguish series."""
    return blake2b("\0".join(texts).encode(errors="replace"), digest_size=16).digest()


def _copy(family: Family, labels: Mapping[str, str]) -> bytes | None:
    """What distinguishes series that are joined to one value (handlers, processes, kinds of sleep, summed names),
    without keeping their labels.

    vLLM 0.9.2 to 0.11 lacked a multi-process mode for the KV gauge and publishes it once per process, with a ``pid``.
    """
    if family.kind == "page":
        return _digest(f"{name}={value}" for name, value in sorted(labels.items()))
    added = (family.names[0],) if family.join == "sum" else ()
    if family.kind == "gauge" or added:
        return _digest((*added, *(labels.get(name, "") for name in family.copies), labels.get(family.label, "")))
    return None


def _bound(labels: Mapping[str, str]) -> float:
    bound = ceilings.number_in(labels.get("le"), math.inf)
    if bound is None or ceilings.COUNT < bound < math.inf:
        raise BadLine("bucket without a possible bound")
    return bound
