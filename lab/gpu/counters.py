"""Part ``counters``: what our source says beside what ``nvidia-smi`` says, once a second, under different loads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final, NamedTuple

from kvpressure.model.readings import GpuReading
from lab.gpu import smi
from lab.gpu.children import ChildError
from lab.gpu.load import Running
from lab.gpu.options import Options
from lab.gpu.result import Result
from lab.gpu.sampling import Sampler

PHASES: Final = ("idle", "tensor", "dram", "host")
APART_SECONDS: Final = 0.75  # readings this close are of the same moment
MIB: Final = 2**20


class Quantity(NamedTuple):
    """Something that both tell. ``ours`` is in the unit of ``nvidia-smi``; ``within`` how far medians may be apart."""

    name: str
    unit: str
    within: float
    ours: Callable[[GpuReading], float | None]
    query: str | None = None
    dmon: str | None = None


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _free(gpu: GpuReading) -> float | None:
    if gpu.memory_used_bytes is None or gpu.memory_total_bytes is None:
        return None
    return (gpu.memory_total_bytes - gpu.memory_used_bytes) / MIB


QUANTITIES: Final = (
    Quantity("utilization", "%", 10.0, lambda gpu: _percent(gpu.utilization_ratio), "utilization.gpu", "sm"),
    Quantity("memory free", "MiB", 16.0, _free, "memory.free"),
    Quantity("power", "W", 15.0, lambda gpu: gpu.power_watts, "power.draw"),
    Quantity("power limit", "W", 0.5, lambda gpu: gpu.power_limit_watts, "enforced.power.limit"),
    Quantity("SM activity", "%", 10.0, lambda gpu: _percent(gpu.sm_activity_ratio), dmon="gpm sm"),
    Quantity("tensor activity", "%", 10.0, lambda gpu: _percent(gpu.tensor_activity_ratio), dmon="gpm tensor"),
    Quantity("DRAM activity", "%", 10.0, lambda gpu: _percent(gpu.dram_activity_ratio), dmon="gpm dram"),
)


def run(result: Result, options: Options) -> None:
    """Read beside ``nvidia-smi`` in each phase; without torch only while idle."""
    with ExitStack() as stack:
        load: Running | None = None
        try:
            load = stack.enter_context(Running(*options.load))
        except ChildError as error:
            result.lacks("counters under load", error)
        query = stack.enter_context(smi.Query())
        dmon = _dmon(stack, result)
        sampler = stack.enter_context(Sampler())
        result.data["rows"] = []
        for phase in PHASES if load is not None else PHASES[:1]:
            if load is not None:
                load.switch(phase)
            time.sleep(options.settle)
            began = time.time()
            _take(query, dmon)  # what was said while settling
            time.sleep(options.phase)
            if load is not None:
                load.collect()
            theirs, watched = _take(query, dmon)
            _compare(result, phase, sampler.between(began, time.time()), theirs, watched)
        if (why := query.ended()) is not None:
            result.lacks("nvidia-smi --query-gpu", why)
        result.data["dmon_columns"] = dmon.header if dmon is not None else []
        result.check(
            "the source read each second", not sampler.errors, sampler.errors[:3] or f"{len(sampler.readings)} readings"
        )


def _dmon(stack: ExitStack, result: Result) -> smi.Dmon | None:
    """Dmon with GPM metrics; without them where it does not know them."""
    reason = ""
    for gpm in (True, False):
        dmon = stack.enter_context(smi.Dmon(gpm))
        found = dmon.refused()
        if found is None:
            if not gpm:
                result.lacks("GPM metrics of nvidia-smi dmon", reason)
            return dmon
        reason = found
    result.lacks("nvidia-smi dmon", reason)
    return None


def _take(query: smi.Query, dmon: smi.Dmon | None) -> tuple[list[smi.Row], list[smi.Row]]:
    watched = dmon.rows() if dmon is not None else []
    names = {column: f"gpm {name}" for name, column in dmon.gpm_columns.items()} if dmon is not None else {}
    return query.rows(), [{names.get(column, column): value for column, value in row.items()} for row in watched]


def _compare(
    result: Result, phase: str, readings: list[tuple[float, GpuReading]], theirs: list[smi.Row], watched: list[smi.Row]
) -> None:
    for quantity in QUANTITIES:
        ours = smi.both([quantity.ours(reading) for _, reading in readings])
        for source, column, rows in (("query", quantity.query, theirs), ("dmon", quantity.dmon, watched)):
            if column is None:
                continue
            what = f"{phase}: {quantity.name} against nvidia-smi {source}"
            told = smi.both([row.get(column) for row in rows])
            if not ours or not told:
                result.lacks(what, "ours is absent" if told else f"nvidia-smi does not tell {column!r}")
                continue
            pairs = _pairs(quantity, readings, rows, column) if source == "query" else []
            mine, other = round(statistics.median(ours), 1), round(statistics.median(told), 1)
            result.data["rows"].append(
                {
                    "phase": phase,
                    "quantity": quantity.name,
                    "unit": quantity.unit,
                    "by": source,
                    "n": len(told),
                    "ours": mine,
                    "theirs": other,
                    "apart_median": round(statistics.median(pairs), 1) if pairs else None,
                    "apart_most": round(max(pairs), 1) if pairs else None,
                }
            )
            result.check(
                f"{what} within {quantity.within:g} {quantity.unit}",
                abs(mine - other) <= quantity.within,
                f"{mine:g} and {other:g}",
            )


def _pairs(
    quantity: Quantity, readings: list[tuple[float, GpuReading]], rows: list[smi.Row], column: str
) -> list[float]:
    """How far apart both were at the same moments."""
    found = []
    for row in rows:
        t, value = row["t"], row.get(column)
        if t is None or value is None or not readings:
            continue
        moment, reading = min(readings, key=lambda item: abs(item[0] - t))
        ours = quantity.ours(reading)
        if ours is not None and abs(moment - t) <= APART_SECONDS:
            found.append(abs(ours - value))
    return found
