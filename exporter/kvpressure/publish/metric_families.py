"""Metric families built from the table of metrics; nothing is kept between two renderings.

``Families`` takes values by metric name. ``None``, non-finite values and a second sample with the same labels (which
would void the whole exposition) are dropped; label values are bounded and free of control characters.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from kvpressure.model import ceilings
from kvpressure.model.metrics import Metric, Published
from kvpressure.publish.metrics import BY_NAME

LABEL_LIMIT: Final = 256
_SUFFIX: Final = {"counter": "_total", "info": "_info", "gauge": "", "histogram": "", "summary": ""}
_COUNT, _SUM = "_count", "_sum"

Labels = tuple[str, ...]


def clean(value: str | None) -> str:
    """A safe label value: at most ``LABEL_LIMIT`` characters, only printable ones, ``""`` for ``None``."""
    return "" if value is None else _printable(value[:LABEL_LIMIT])


@lru_cache(maxsize=1024)  # a node of 64 engines has about 400
def _printable(value: str) -> str:
    return value if value.isprintable() else "".join(char for char in value if char.isprintable())


class Families:
    """Samples by metric, in the table's order."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, float]] = defaultdict(dict)
        self._histograms: dict[Labels, dict[Labels, float]] = {}

    def add(self, name: str, labels: Labels, value: float | None) -> None:
        """Add one sample of ``name``; booleans count as 1 and 0, ``None`` adds none."""
        if value is None or not ceilings.is_finite(value):
            return
        self._values[name].setdefault(labels, value)

    def each(self, name: str, labels: Labels, values: Mapping[str, float | None]) -> None:
        """Add samples that differ in the last label only."""
        rows = self._values[name]
        for key, value in values.items():
            if value is not None and ceilings.is_finite(value):
                rows.setdefault((*labels, clean(key)), value)

    def states(self, name: str, labels: Labels, names: tuple[str, ...], present: str | None) -> None:
        """Add a state set: 1 for ``present``, 0 for the other names."""
        for state in names:
            self.add(name, (*labels, state), float(state == present))

    def signal(self, labels: Labels, group: object, value: Any, published: Published) -> None:
        """Add what a signal group declares to publish of one of its values."""
        name = published.metric.name
        if published.labels:
            labels = (*labels, *published.labels)
        if published.states:
            self.states(name, labels, published.states, value)
        elif published.total:
            self.histogram(labels, value, getattr(group, published.total))
        elif value is not None and type(value) is not float and isinstance(value, Mapping):  # asking the last is dear
            self.each(name, labels, value)
        else:
            self.add(name, labels, value)

    def histogram(self, labels: Labels, cumulative: Mapping[float, int], total: float) -> None:
        """Add a histogram from cumulative counts by upper bound; nothing without counts."""
        if not cumulative or labels in self._histograms or not ceilings.is_finite(total):
            return
        count = float(max(cumulative.values()))
        rows = {(*labels, _bound(bound)): float(n) for bound, n in sorted(cumulative.items())}
        self._histograms[labels] = rows | {
            (*labels, _bound(math.inf)): count,
            (*labels, _COUNT): count,
            (*labels, _SUM): total,
        }

    def discard(self, label_names: Labels, labels: Labels) -> None:
        """Remove all samples of one subject: those with ``labels`` of metrics whose labels start with
        ``label_names``.
        """
        count = len(labels)
        known = BY_NAME
        for name, values in self._values.items():
            if known[name].labels[:count] == label_names:
                for key in [key for key in values if key[:count] == labels]:
                    del values[key]
        for key in [key for key in self._histograms if key[:count] == labels]:
            del self._histograms[key]

    def collect(self) -> Iterator[Family]:
        """The families that have samples."""
        for metric in BY_NAME.values():
            if metric.kind != "histogram":
                if rows := self._values.get(metric.name):
                    yield TableFamily(metric, rows)
            elif self._histograms:
                yield HistogramFamily(metric, {key: n for rows in self._histograms.values() for key, n in rows.items()})


class TableFamily(Family):
    """A family with one value per series. ``rows``: values by label values, in the table's order."""

    def __init__(self, metric: Metric, rows: Mapping[Labels, float]) -> None:
        super().__init__(_name(metric), metric.help, metric.kind)
        self.sample_name = metric.full_name
        self.label_names = metric.labels
        self.rows = rows

    def series(self, key: Labels) -> tuple[str, dict[str, str]]:
        """Name and labels of the sample of a row."""
        return self.sample_name, dict(zip(self.label_names, key, strict=True))

    @property
    def samples(self) -> list[Sample]:
        """The library's samples, built on demand."""
        return [Sample(*self.series(key), value) for key, value in self.rows.items()]

    @samples.setter
    def samples(self, _: list[Sample]) -> None:
        """The library sets them to none at first."""


class HistogramFamily(TableFamily):
    """A family of histograms; each row's key ends with the bucket's bound, or the suffix of count or sum."""

    def series(self, key: Labels) -> tuple[str, dict[str, str]]:
        """Name and labels of the sample of a row."""
        *labels, part = key
        named = dict(zip(self.label_names, labels, strict=True))
        if part in (_COUNT, _SUM):
            return self.sample_name + part, named
        return f"{self.sample_name}_bucket", {**named, "le": part}


@lru_cache(maxsize=256)
def _bound(bound: float) -> str:
    text: str = floatToGoString(bound)  # type: ignore[no-untyped-call]  # the library is not typed there
    return text


def _name(metric: Metric) -> str:
    return metric.full_name.removesuffix(_SUFFIX[metric.kind])
