"""Const families from the table of metrics: nothing lingers between two renderings.

``Families`` takes values by metric name and keeps what may be published: ``None`` and non-finite values are
dropped, a second sample with the same labels is dropped (it would void the whole page), and label values that
come from outside are bounded and free of control characters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from kvpressure.model.metrics import PREFIX, Metric, Published
from kvpressure.publish.metrics import table

LABEL_LIMIT: Final = 256
_SUFFIX: Final = {"counter": "_total", "info": "_info", "gauge": "", "histogram": "", "summary": ""}

Labels = tuple[str, ...]


def clean(value: str | None) -> str:
    """A label value that may be published: at most ``LABEL_LIMIT`` printable characters, ``""`` for ``None``."""
    return "" if value is None else _printable(value[:LABEL_LIMIT])


@lru_cache(maxsize=1024)  # a node of 64 engines has about 400
def _printable(value: str) -> str:
    return value if value.isprintable() else "".join(char for char in value if char.isprintable())


class Families:
    """Samples by metric, in the order of the table."""

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[Labels, list[Sample]] = {}

    def add(self, name: str, labels: Labels, value: float | None) -> None:
        """One sample of ``name`` (as in the table); booleans count as 1 and 0, ``None`` is no sample."""
        if value is None or not math.isfinite(value):
            return
        rows = self._values.get(name)
        if rows is None:
            self._values[name] = {labels: value}
        else:
            rows.setdefault(labels, value)

    def each(self, name: str, labels: Labels, values: Mapping[str, float | None]) -> None:
        """Samples that differ in the last label only."""
        for key, value in values.items():
            self.add(name, (*labels, clean(key)), value)

    def states(self, name: str, labels: Labels, names: tuple[str, ...], present: str | None) -> None:
        """A state set: 1 for ``present``, 0 for the other names."""
        for state in names:
            self.add(name, (*labels, state), float(state == present))

    def signal(self, labels: Labels, group: object, value: Any, published: Published) -> None:
        """What a signal group declares to be published of one value of it."""
        name, labels = published.metric.name, (*labels, *published.labels)
        if published.states:
            self.states(name, labels, published.states, value)
        elif published.total:
            self.histogram(name, labels, value, getattr(group, published.total))
        elif value is not None and type(value) is not float and isinstance(value, Mapping):  # asking the last is dear
            self.each(name, labels, value)
        else:
            self.add(name, labels, value)

    def histogram(self, name: str, labels: Labels, cumulative: Mapping[float, int], total: float) -> None:
        """A histogram from cumulative counts by upper bound; without counts no sample."""
        if not cumulative or labels in self._histograms or not math.isfinite(total):
            return
        full = PREFIX + name
        named = dict(zip(table()[name].labels, labels, strict=True))
        count = float(max(cumulative.values()))
        bounds = {**{bound: float(n) for bound, n in sorted(cumulative.items())}, math.inf: count}
        samples = [
            Sample(f"{full}_bucket", {**named, "le": floatToGoString(bound)}, n)  # type: ignore[no-untyped-call]  # the library is not typed there
            for bound, n in bounds.items()
        ]
        samples += [Sample(f"{full}_count", named, count), Sample(f"{full}_sum", named, total)]
        self._histograms[labels] = samples

    def discard(self, label_names: Labels, labels: Labels) -> None:
        """Take back every sample of one subject: of metrics that begin with ``label_names``, those with
        these ``labels``.
        """
        count = len(labels)
        known = table()
        for name, values in self._values.items():
            if known[name].labels[:count] == label_names:
                for key in [key for key in values if key[:count] == labels]:
                    del values[key]
        for key in [key for key in self._histograms if key[:count] == labels]:
            del self._histograms[key]

    def collect(self) -> Iterator[Family]:
        """The families that have samples."""
        for metric in table().values():
            if metric.kind != "histogram":
                if rows := self._values.get(metric.name):
                    yield TableFamily(metric, rows)
            elif self._histograms:
                family = Family(_name(metric), metric.help, metric.kind)
                family.samples = [sample for samples in self._histograms.values() for sample in samples]
                yield family


class TableFamily(Family):
    """A family of the table with one value for each series. ``rows``: values by label values, in the order
    of the table.
    """

    def __init__(self, metric: Metric, rows: Mapping[Labels, float]) -> None:
        super().__init__(_name(metric), metric.help, metric.kind)
        self.sample_name = metric.full_name
        self.label_names = metric.labels
        self.rows = rows

    @property
    def samples(self) -> list[Sample]:
        """The same as the library's samples, made when somebody looks."""
        return [
            Sample(self.sample_name, dict(zip(self.label_names, labels, strict=True)), value)
            for labels, value in self.rows.items()
        ]

    @samples.setter
    def samples(self, _: list[Sample]) -> None:
        """The library sets them to none at first."""


def _name(metric: Metric) -> str:
    return metric.full_name.removesuffix(_SUFFIX[metric.kind])
