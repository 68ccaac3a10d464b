"""Small builders for windows of samples, so that a table test shows only the numbers it is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvpressure.model import readings as r
from kvpressure.model.readings import Histogram
from kvpressure.signals.window import EngineWindow


def window(rows: Iterable[tuple[float, Mapping[str, float]]], **histograms: Iterable[Histogram]) -> EngineWindow:
    """A window from (time, values); names of counters and gauges are told apart by the canonical constants."""
    built = EngineWindow()
    columns = {name: list(items) for name, items in histograms.items()}
    for index, (t, values) in enumerate(rows):
        gauges = {n: v for n, v in values.items() if n in GAUGES}
        page = {n: v for n, v in values.items() if n.startswith((r.HTTP_PREFIX, "process_"))}
        counters = {n: v for n, v in values.items() if n not in gauges and n not in page}
        built.observe(t, gauges, counters, {n: items[index] for n, items in columns.items()}, page)
    return built


GAUGES = frozenset(
    (
        *(r.RUNNING, r.WAITING, r.SWAPPED, r.WAITING_CAPACITY, r.WAITING_DEFERRED),
        *(r.KV_USAGE, r.GENERATION_RATE, r.PROMPT_RATE, r.ASLEEP),
    )
)
FINISHED = r.FINISHED_PREFIX + "stop"


def every(
    step: float, values: Iterable[Mapping[str, float]], start: float = 1000.0
) -> list[tuple[float, Mapping[str, float]]]:
    return [(start + index * step, row) for index, row in enumerate(values)]


def histogram(bounds: tuple[float, ...], counts: tuple[float, ...], total: float) -> Histogram:
    """A cumulative histogram whose count is its last bucket."""
    return Histogram(bounds, counts, total, counts[-1] if counts else 0.0)
