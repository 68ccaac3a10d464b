"""What a page looks like: which series there are, and how their values become engines.

A page changes its values every second and its series hardly ever. So every series gets a *slot* once, by the
careful reading of ``series``; from then on a scan only drops numbers into a list, slot by slot, and ``Layout.read``
picks them up. The layout remembers series of earlier pages too: on a page without them their slots stay ``None``,
and the result is the same as that of a layout which never saw them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final, TypeVar

from kvpressure.readings import EngineReading, Histogram
from kvpressure.sources.vllm.aliases import CONFIG_LABELS, Family, Sample
from kvpressure.sources.vllm.bounds import MAX_ENGINES
from kvpressure.sources.vllm.series import BadLine, TooMany

UNWANTED: Final = -1
MAX_OWNERS: Final = 4 * MAX_ENGINES  # engines and models whose series are placed, before the first of them are chosen
MAX_BUCKETS: Final = 64  # of one histogram; vLLM's longest has 23
MAX_VALUES: Final = 32  # of a label that makes a name, of one engine; vLLM has five reasons for a request to end
MAX_SLOTS: Final = 32_768  # 64 engines need about 17 000

Values = Sequence[float | None]
_Key = TypeVar("_Key")


@dataclass(slots=True)
class _Scalar:
    """A gauge, counter or page value under one spelling.

    It has several slots where several series make one value: one a process (``pid``), joined by maximum, or one a
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
    """The slots of one histogram under one spelling, buckets in order of their bounds."""

    def __init__(self, canonical: str, age: int) -> None:
        self.canonical = canonical
        self.age = age
        self.sum_slot = self.count_slot = UNWANTED
        self._slots: dict[float, int] = {}  # bound -> slot
        self._bounds: tuple[float, ...] = ()
        self._pick: Callable[[Values], tuple[float | None, ...]] = lambda _: ()

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
        """No room for another bucket."""
        return len(self._slots) >= MAX_BUCKETS

    def value(self, values: Values) -> tuple[Histogram | None, bool]:
        """The histogram (``None`` when the page has nothing of it), and whether its buckets are sound.

        Buckets that do not rise up to ``+Inf`` are dropped; sum and count stay.
        """
        total = values[self.sum_slot] if self.sum_slot >= 0 else None
        count = values[self.count_slot] if self.count_slot >= 0 else None
        bounds, counts = self._there(values)
        sound = not bounds or (bounds[-1] == math.inf and sorted(counts) == list(counts))
        if not sound:
            bounds = counts = ()
        if count is None and counts:
            count = counts[-1]  # the +Inf bucket counts everything
        if count is None and total is None:
            return None, sound
        return Histogram(bounds, counts, total, count), sound

    def _there(self, values: Values) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Bounds and counts of the buckets that this page has."""
        picked = self._pick(values)
        if None not in picked:
            return self._bounds, picked  # type: ignore[return-value]
        pairs = zip(self._bounds, picked, strict=True)
        there = [(bound, count) for bound, count in pairs if count is not None]
        return tuple(bound for bound, _ in there), tuple(count for _, count in there)


class _Group:
    """All fields of one owner: an engine, a model (what has no engine label), or the page.

    Lists are kept oldest spelling first, so that in ``dict`` order the newest one that is there wins.
    """

    def __init__(self) -> None:
        self.gauges: list[_Scalar] = []
        self.counters: list[_Scalar] = []
        self.histograms: list[_Buckets] = []
        self._by_name: dict[tuple[str, str, int], _Scalar | _Buckets] = {}

    def scalar(self, family: Family, canonical: str, age: int) -> _Scalar:
        key = (family.kind, canonical, age)
        known = self._by_name.get(key)
        if not isinstance(known, _Scalar):
            known = _Scalar(canonical, age, sum if family.kind == "page" and family.label else max)
            self._by_name[key] = known
            (self.counters if family.kind == "counter" else self.gauges).append(known)
        return known

    def buckets(self, canonical: str, age: int) -> _Buckets:
        key = ("histogram", canonical, age)
        known = self._by_name.get(key)
        if not isinstance(known, _Buckets):
            known = self._by_name[key] = _Buckets(canonical, age)
            self.histograms.append(known)
        return known

    def has_enough(self, family: Family) -> bool:
        """No room for another value of the label that makes the names of this family."""
        if not family.label or family.values:
            return False
        return sum(each.canonical.startswith(family.canonical) for each in self.counters) >= MAX_VALUES

    def sort(self) -> None:
        for fields in (self.gauges, self.counters, self.histograms):
            fields.sort(key=lambda each: -each.age)

    def read_histograms(self, values: Values) -> tuple[dict[str, Histogram], int]:
        """The histograms that the page has, and how many of them had unsound buckets."""
        found: dict[str, Histogram] = {}
        unsound = 0
        for each in self.histograms:
            histogram, sound = each.value(values)
            unsound += not sound
            if histogram is not None:
                found[each.canonical] = histogram
        return found, unsound


def _read(scalars: list[_Scalar], values: Values) -> dict[str, float]:
    return {each.canonical: value for each in scalars if (value := each.value(values)) is not None}


@dataclass(frozen=True, slots=True)
class _Config:
    """One ``cache_config_info`` series. ``engine`` None: it holds for every engine of the page."""

    slot: int
    engine: str | None
    labels: Mapping[str, str]


class Layout:
    """Slots for the wanted series of a page, and the reading of engines from slot values."""

    def __init__(self) -> None:
        self.ceilings: list[float] = []  # by slot: the largest value that makes sense
        self._identities: dict[tuple[Any, ...], int] = {}
        self._page = _Group()
        self._models: dict[str, _Group] = {}
        self._engines: dict[tuple[str, ...], _Group] = {}  # by model and engine
        self._configs: list[_Config] = []
        self._sorted = True
        self.full = False  # a series was refused for want of room
        self.refused = 0  # so many series, of all pages

    @property
    def engines(self) -> int:
        """Engines that are remembered, of this page and of earlier ones."""
        return len(self._engines)

    def place(self, sample: Sample, labels: Mapping[str, str]) -> int:
        """The slot of a series; ``UNWANTED`` when its label values are not among the wanted ones.

        Raises ``BadLine`` for a bucket without a readable bound, ``TooMany`` when there are too many series.
        """
        family = sample.family
        if family.kind == "config":
            return self._place_config(labels)
        canonical = family.canonical_for(labels)
        if canonical is None:
            return UNWANTED
        owner = _owner(family, labels)
        if owner[0] != "page" and "model_name" not in labels:
            return UNWANTED  # a router repeats gauges of its servers under vLLM's names; every vLLM names its model
        part: str | float = _bound(labels) if sample.part == "bucket" else sample.part
        identity = (*owner, family.kind, canonical, sample.age, part, _copy(family, labels))
        known = self._identities.get(identity)
        if known is not None:
            return known
        group = self._group(owner)
        if family.kind == "histogram":
            buckets = group.buckets(canonical, sample.age)
            slot = self._next_slot(family.ceiling, full=sample.part == "bucket" and buckets.full)
            buckets.add(part, slot)
        else:
            slot = self._next_slot(family.ceiling, full=group.has_enough(family))
            group.scalar(family, canonical, sample.age).slots.append(slot)
        self._identities[identity] = slot
        return slot

    def _place_config(self, labels: Mapping[str, str]) -> int:
        engine = _engine(labels) if "engine" in labels else None
        kept = {name: labels[name] for name in sorted(CONFIG_LABELS & labels.keys()) if labels[name] != "None"}
        identity = ("config", engine, *kept.items())
        known = self._identities.get(identity)
        if known is None:
            known = self._identities[identity] = self._next_slot(math.inf)
            self._configs.append(_Config(known, engine, kept))
        return known

    def _next_slot(self, ceiling: float, full: bool = False) -> int:
        if full or len(self.ceilings) >= MAX_SLOTS:
            raise self._too_many()
        self.ceilings.append(ceiling)
        self._sorted = False
        return len(self.ceilings) - 1

    def _too_many(self) -> TooMany:
        self.full = True
        self.refused += 1
        return TooMany("too many series")

    def _group(self, owner: tuple[str, ...]) -> _Group:
        if owner[0] == "page":
            return self._page
        if owner[0] == "model":
            return self._models.get(owner[1]) or self._new_group(self._models, owner[1])
        return self._engines.get(owner[1:]) or self._new_group(self._engines, owner[1:])

    def _new_group(self, groups: dict[_Key, _Group], key: _Key) -> _Group:
        if len(groups) >= MAX_OWNERS:
            raise self._too_many()
        groups[key] = group = _Group()
        return group

    def read(self, values: Values) -> tuple[tuple[EngineReading, ...], dict[str, float], int]:
        """Engines and page values of one scan, and how many histograms had unsound buckets."""
        self._sort()
        configs = self._present_configs(values)
        engines: list[EngineReading] = []
        unsound_histograms = 0
        for (model, engine), group in self._engines.items():
            gauges, counters = _read(group.gauges, values), _read(group.counters, values)
            histograms, unsound = group.read_histograms(values)
            unsound_histograms += unsound
            if not (gauges or counters or histograms):
                continue
            if model in self._models:
                counters = {**_read(self._models[model].counters, values), **counters}
            config = configs.get(engine, configs.get(None, {}))
            engines.append(EngineReading(model, engine, gauges, counters, histograms, config))
        if len(engines) > 1:
            engines.sort(key=lambda each: (each.model_name, len(each.engine), each.engine))
        return tuple(engines), _read(self._page.gauges, values), unsound_histograms

    def _present_configs(self, values: Values) -> dict[str | None, Mapping[str, str]]:
        return {each.engine: each.labels for each in self._configs if values[each.slot] is not None}

    def _sort(self) -> None:
        """Bring fields into an order that does not depend on what earlier pages had."""
        if self._sorted:
            return
        for group in (self._page, *self._models.values(), *self._engines.values()):
            group.sort()
        self._configs.sort(key=lambda each: tuple(each.labels.items()))
        self._sorted = True


def _engine(labels: Mapping[str, str]) -> str:
    """The engine label, "0" without one. Under Ray several replicas share a page: the replica is part of it."""
    engine = labels.get("engine") or "0"
    replica = labels.get("ReplicaId")
    return f"{engine}/{replica}" if replica else engine


def _owner(family: Family, labels: Mapping[str, str]) -> tuple[str, ...]:
    if family.kind == "page":
        return ("page",)
    model = labels.get("model_name", "")
    if family.per_model and "engine" not in labels:
        return ("model", model)
    return ("engine", model, _engine(labels))


def _copy(family: Family, labels: Mapping[str, str]) -> tuple[str, ...]:
    """What tells series apart that are joined to one value: handlers, processes, kinds of sleep.

    vLLM 0.9.2 to 0.11 lacked a multi-process mode for the KV gauge and shows it once a process, with a ``pid``.
    """
    if family.kind == "page":
        return tuple(f"{name}={value}" for name, value in sorted(labels.items()))
    if family.kind == "gauge":
        return (labels.get("pid", ""), labels.get(family.label, ""))
    return ()


def _bound(labels: Mapping[str, str]) -> float:
    try:
        bound = float(labels["le"])
    except (KeyError, ValueError):
        raise BadLine("bucket without a bound") from None
    if math.isnan(bound):
        raise BadLine("bucket without a bound")
    return bound
