"""How a dialect maps series to canonical readings: families, and the table built from them.

A family lists its spellings newest first; if several are present, the newest counts. Spellings omit the prefix and a
counter's ``_total``; every prefix and both counter forms are accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Final, Literal

from kvpressure.model import ceilings
from kvpressure.model import readings as r
from kvpressure.model.frozen import frozen

Kind = Literal["gauge", "counter", "histogram", "page", "config"]
Part = Literal["value", "bucket", "sum", "count"]


@frozen
class Family:
    """One metric under all its names.

    ``canonical``: its name here. A family split by ``label`` has ``values`` (label value -> canonical name), or
    ``canonical`` as prefix of any value. ``ceiling``: the largest accepted value. ``per_model``: no engine label; the
    value holds for every engine of the model. ``per_server``: no engine label; the value is of all engines of the
    server together, so it is used only where the model has one engine. ``join``: how several series form one value,
    e.g. of several processes, which the labels in ``copies`` distinguish; with ``sum``, families of one canonical
    name add up. ``also``: canonical name -> another one to which the value is added too.
    """

    kind: Kind
    names: tuple[str, ...]
    canonical: str = ""
    label: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    ceiling: float = ceilings.COUNT
    per_model: bool = False
    per_server: bool = False
    join: Literal["max", "sum"] = "max"
    copies: tuple[str, ...] = ("pid",)
    also: Mapping[str, str] = field(default_factory=dict)

    def canonical_for(self, labels: Mapping[str, str]) -> str | None:
        """The canonical name of a series with these labels; ``None`` if it is not used."""
        if not self.label:
            return self.canonical
        value = labels.get(self.label)
        if value is None:
            return None
        return self.values.get(value) if self.values else self.canonical + value


@frozen
class SampleName:
    """Meaning of one sample name: part of which family, age of the spelling (0 = newest), and dialect."""

    family: Family
    age: int
    part: Part = "value"
    dialect: str = ""


def gauge(canonical: str, *names: str, ceiling: float = ceilings.REQUESTS) -> Family:
    """A gauge under these names, newest first."""
    return Family("gauge", names, canonical, ceiling=ceiling)


def counter(canonical: str, *names: str, ceiling: float = ceilings.COUNT) -> Family:
    """A counter under these names, newest first."""
    return Family("counter", names, canonical, ceiling=ceiling)


def histogram(canonical: str, *names: str) -> Family:
    """A histogram under these names, newest first."""
    return Family("histogram", names, canonical)


# Status is a class ("2xx") by default and a code ("200") when the instrumentation does not group.
_STATUSES: Final = {
    f"{c}{rest}": f"{r.HTTP_PREFIX}{c}xx" for c in "12345" for rest in ("xx", *(f"{n:02d}" for n in range(100)))
}
PAGE_FAMILIES: Final = (
    Family("page", ("process_cpu_seconds_total",), r.PROCESS_CPU_SECONDS, ceiling=ceilings.SECONDS),
    Family("page", ("process_resident_memory_bytes",), r.PROCESS_RSS_BYTES, ceiling=ceilings.BYTES),
    Family("page", ("process_start_time_seconds",), r.PROCESS_START, ceiling=ceilings.MOMENT),
    Family("page", ("process_open_fds",), r.PROCESS_OPEN_FDS),
    Family("page", ("http_requests_total",), label="status", values=_STATUSES),
)
"""Series of any Python server: of Prometheus' client and its FastAPI instrumentation."""
PAGE_SAMPLES: Final[Mapping[str, SampleName]] = {
    name: SampleName(family, 0) for family in PAGE_FAMILIES for name in family.names
}


def _suffixes(kind: Kind) -> tuple[tuple[str, Part], ...]:
    """(suffix, part) of a kind's samples. A counter has ``_total`` or, from old clients, none."""
    if kind == "histogram":
        return ("_bucket", "bucket"), ("_sum", "sum"), ("_count", "count")
    if kind == "counter":
        return ("_total", "value"), ("", "value")
    return (("", "value"),)


def table(
    dialect: str, families: Iterable[Family], prefixes: tuple[str, ...], bare_names: tuple[str, ...] = ()
) -> dict[str, SampleName]:
    """Every sample name of these families; ``bare_names`` also without a prefix."""
    found: dict[str, SampleName] = {}
    for family in families:
        for age, name in enumerate(family.names):
            heads = (*prefixes, "") if name in bare_names else prefixes
            for suffix, part in _suffixes(family.kind):
                found.update({head + name + suffix: SampleName(family, age, part, dialect) for head in heads})
    return found
