"""Part ``loads``: are a tensor-bound, a DRAM-bound and a host-bound load distinguished, by each level of evidence?

GPU figures are measured; the engine beside them is made up (its page always says the same), since only what the GPU's
evidence says of each load is looked at: the score's compute factor, and whether the GPU counts as starved or saturated.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final

from kvpressure.model import readings as r
from kvpressure.model.readings import EngineReading, GpuReading, Scrape, Snapshot
from kvpressure.model.signals import POWER, PROFILING, UTILIZATION
from kvpressure.pipeline.pipeline import Pipeline
from lab.gpu.children import ChildError
from lab.gpu.load import Running
from lab.gpu.options import Options
from lab.gpu.result import Result
from lab.gpu.sampling import Sampler

LOADS: Final = ("tensor", "dram", "host")
FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    PROFILING: ("sm_activity_ratio", "tensor_activity_ratio", "dram_activity_ratio"),
    POWER: ("power_watts", "power_limit_watts"),
    UTILIZATION: ("utilization_ratio",),
}
FIGURES: Final = tuple(field for fields in FIELDS.values() for field in fields)
APART: Final = 0.5  # the compute factor of a decode is above it, that of the other loads below


def run(result: Result, options: Options) -> None:
    """Put each load on the GPU, read, and ask the pipeline."""
    with ExitStack() as stack:
        try:
            load = stack.enter_context(Running(*options.load))
        except ChildError as error:
            result.lacks("loads", error)
            return
        sampler = stack.enter_context(Sampler())
        readings: dict[str, list[tuple[float, GpuReading]]] = {}
        for kind in LOADS:
            load.switch(kind)
            load.collect()
            time.sleep(options.settle)
            began = time.time()
            time.sleep(options.phase)
            readings[kind] = sampler.between(began, time.time())
            rates = load.rates(kind, began, time.time())
            result.data.setdefault("rates", {})[kind] = (
                {name: statistics.median(rate[name] for rate in rates) for name in ("steps", "flops", "bytes")}
                if rates
                else {}
            )
        result.data["load"] = load.facts
    result.data |= judge(result, readings)


def judge(result: Result, readings: Mapping[str, Sequence[tuple[float, GpuReading]]]) -> dict[str, Any]:
    """What each level says of each load, with the checks."""
    figures = {kind: _means([gpu for _, gpu in rows]) for kind, rows in readings.items()}
    said = {level: {kind: _ask(level, rows) for kind, rows in readings.items()} for level in FIELDS}
    for level in (PROFILING, POWER):
        factors = {kind: found["factor"] for kind, found in said[level].items()}
        if None in factors.values():
            result.lacks(
                f"{level}: the loads told apart", f"not known for {[k for k, f in factors.items() if f is None]}"
            )
            continue
        told = " ".join(f"{kind} {factor:.2f}" for kind, factor in factors.items())
        good = factors["dram"] > APART > max(factors["tensor"], factors["host"])
        result.check(f"{level}: compute factor above {APART:g} for dram alone", good, told)
    for level in (PROFILING, UTILIZATION):
        starved = {kind: found["starved"] for kind, found in said[level].items()}
        if None in starved.values():
            result.lacks(f"{level}: which load leaves the GPU starved", "not known")
            continue
        result.check(
            f"{level}: only the host-bound load leaves the GPU starved",
            starved == {"tensor": False, "dram": False, "host": True},
            starved,
        )
    saturated = {kind: found["saturated"] for kind, found in said[PROFILING].items()}
    if None not in saturated.values():
        result.check(
            "profiling: tensor and dram saturate the GPU, host does not",
            saturated == {"tensor": True, "dram": True, "host": False},
            saturated,
        )
    kept = {
        kind: [[round(t, 2), *(getattr(gpu, name) for name in FIGURES)] for t, gpu in rows]
        for kind, rows in readings.items()
    }
    return {"figures": figures, "levels": said, "readings": kept}


def kept(result: Result) -> dict[str, list[tuple[float, GpuReading]]]:
    """The readings of a result that was kept, to be judged again by the thresholds of today."""
    return {
        kind: [
            (t, GpuReading("GPU-0", 0, "nvidia", result.machine.get("name"), **dict(zip(FIGURES, values, strict=True))))
            for t, *values in rows
        ]
        for kind, rows in result.data["readings"].items()
    }


def _means(readings: Sequence[GpuReading]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name in FIGURES:
        known = [value for reading in readings if (value := getattr(reading, name)) is not None]
        found[name] = round(statistics.mean(known), 4) if known else None
    return found


def _ask(level: str, rows: Sequence[tuple[float, GpuReading]]) -> dict[str, Any]:
    """The pipeline's answer when the GPU reports nothing but the fields of one level."""
    hidden: dict[str, Any] = dict.fromkeys(set(FIGURES) - set(FIELDS[level]))
    pipeline, state = Pipeline(), None
    for t, gpu in rows:
        state = pipeline.observe(_snapshot(t, replace(gpu, **hidden)))
    if state is None or not state.engines:
        return {"factor": None, "starved": None, "saturated": None, "level": None}
    engine = state.engines[0]
    evidence = engine.diagnosis.evidence
    known = engine.signals.compute.activity_level == level
    return {
        "level": engine.signals.compute.activity_level,
        "factor": engine.signals.compute.score_compute_factor if known else None,
        "starved": evidence["gpu_starved"].value if known else None,
        "saturated": evidence["gpu_saturated"].value if known else None,
    }


def _snapshot(t: float, gpu: GpuReading) -> Snapshot:
    """The GPU beside an engine that always says the same."""
    gauges = {r.RUNNING: 40.0, r.WAITING: 12.0, r.KV_USAGE: 0.99}
    counters = {r.PROMPT_TOKENS: 300 * t, r.GENERATION_TOKENS: 900 * t}
    page = Scrape(
        "http://127.0.0.1/metrics",
        t,
        "inference",
        "vllm-0",
        "vllm",
        gpus=(gpu.uuid,),
        args=("--max-num-seqs", "256"),
        engines=(EngineReading("m", "0", gauges, counters),),
    )
    return Snapshot(t, gpus=(gpu,), pages=(page,))
