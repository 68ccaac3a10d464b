"""Const families from the table of metrics: nothing lingers between two renderings.

``Families`` takes values by metric name and keeps what may be published: ``None`` and non-finite values are
dropped, a second sample with the same labels is dropped (it would void the whole page), and label values that
come from outside are bounded and free of control characters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from kvpressure.publish.metrics import BY_NAME, METRICS, Metric

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
        self._values.setdefault(name, {}).setdefault(labels, value)

    def each(self, name: str, labels: Labels, values: Mapping[str, float | None]) -> None:
        """Samples that differ in the last label only."""
        for key, value in values.items():
            self.add(name, (*labels, clean(key)), value)

    def states(self, name: str, labels: Labels, names: tuple[str, ...], present: str | None) -> None:
        """A state set: 1 for ``present``, 0 for the other names."""
        for state in names:
            self.add(name, (*labels, state), float(state == present))

    def histogram(self, name: str, labels: Labels, cumulative: Mapping[float, int], total: float) -> None:
        """A histogram from cumulative counts by upper bound; without counts no sample."""
        if not cumulative or labels in self._histograms or not math.isfinite(total):
            return
        full = f"kvpressure_{name}"
        named = dict(zip(BY_NAME[name].labels, labels, strict=True))
        count = float(max(cumulative.values()))
        bounds = {**{bound: float(n) for bound, n in sorted(cumulative.items())}, math.inf: count}
        samples = [
            Sample(f"{full}_bucket", {**named, "le": floatToGoString(bound)}, n)  # type: ignore[no-untyped-call]
            for bound, n in bounds.items()
        ]
        samples += [Sample(f"{full}_count", named, count), Sample(f"{full}_sum", named, total)]
        self._histograms[labels] = samples

    def collect(self) -> Iterator[Family]:
        """The families that have samples."""
        for metric in METRICS:
            family = _family(metric)
            if metric.kind == "histogram":
                family.samples = [sample for samples in self._histograms.values() for sample in samples]
            else:
                name = metric.full_name
                family.samples = [
                    Sample(name, dict(zip(metric.labels, labels, strict=True)), value)
                    for labels, value in self._values.get(metric.name, {}).items()
                ]
            if family.samples:
                yield family


def _family(metric: Metric) -> Family:
    return Family(metric.full_name.removesuffix(_SUFFIX[metric.kind]), metric.help, metric.kind)
