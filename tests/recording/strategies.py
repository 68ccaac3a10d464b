"""Recordings and pages of real servers, and a snapshot in which everything has a value."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from kvpressure.engines.registry import log_line
from kvpressure.engines.vllm import public
from kvpressure.model.pools import EnginePool
from kvpressure.model.readings import (
    AllocatorReading,
    CacheReading,
    ContainerReading,
    GpuOwner,
    GpuProcess,
    GpuReading,
    NodeCondition,
    Run,
    Snapshot,
    SourceHealth,
    StepStats,
    Termination,
)
from kvpressure.model.state import State
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.recording.reader import Reader
from kvpressure.sources.scrape.scanner import parse_scrape

RECORDINGS = Path(__file__).parents[1] / "fixtures" / "recordings"
T = TypeVar("T")

_BY_TYPE: dict[str, Any] = {
    "str": "é \\n",
    "int": 2**40,
    "float": 0.1,
    "bool": True,
    "Mapping[int, int]": {3: 2**40},
    "Mapping[str, int]": {"a": 3},
    "Mapping[str, float]": {"a": 0.1},
}


def filled(kind: type[T], **own: Any) -> T:
    """A reading of which no field is missing: each by its type, or from ``own``."""
    return kind(
        **{one.name: own.get(one.name, _BY_TYPE.get(str(one.type).removesuffix(" | None"))) for one in fields(kind)}
    )


def replayed(name: str) -> Iterator[State]:
    """What is said at each tick of a recording, by its path below RECORDINGS without its ending."""
    pipeline = Pipeline()
    with Reader(RECORDINGS / f"{name}.jsonl.gz") as reader:
        yield from map(pipeline.observe, reader)


@lru_cache
def real_pages() -> tuple[str, ...]:
    """A few pages of real servers, of V0 and V1."""
    found = []
    for name in ("vllm-cpu/d_kv_pressure", "vllm-cpu/l_dp2", "h100/llama-2-7b-046"):
        with gzip.open(RECORDINGS / f"{name}.jsonl.gz", "rt") as lines:
            found += [json.loads(line)["engines"][0]["exposition"] for line in list(lines)[5:7]]
    return tuple(found)


def full_snapshot(error: str | None = None) -> Snapshot:
    """A tick of every source; ``error``: why there is no page."""
    pool = filled(EnginePool)
    page = parse_scrape(
        None if error else real_pages()[0],
        target="t",
        time=5.0,
        namespace="n",
        pod="p",
        container="c",
        gpus=["G"],
        args=("vllm", "serve", "--model=m"),
        env={"VLLM_USE_V1": "1"},
        error=error,
        dialect="sglang" if error else "vllm",
        duration_seconds=0.1,
        keep_text=True,
    )
    kept = public.public_line("non-default args: {'model': 'm', 'max_num_seqs': 64}")
    return Snapshot(
        time=7.5,
        gpus=(filled(GpuReading, throttle_reasons=("a",), processes=(filled(GpuProcess),), xid_last_times={79: 6.5}),),
        pages=(replace(page, group="g", pool=pool, version="0.11.0", args_source="process", assumed=True),),
        containers=(
            filled(ContainerReading, last_termination=filled(Termination), alerts=None, pool=pool, run=filled(Run)),
        ),
        owners=(filled(GpuOwner),),
        logs=(log_line("n", "p", "c", kept),),
        allocator=(filled(AllocatorReading),),
        steps=(filled(StepStats),),
        caches=(filled(CacheReading),),
        node_conditions=(filled(NodeCondition),),
        health={"s": filled(SourceHealth, name="s")},
        targets=("t",),
        pods={("n", "p"): "u"},
        process_pods={7: ("n", "p")},
        expected_gpus={"nvidia": 8},
    )
