"""Snapshots as Hypothesis makes them, pages read from real and from arbitrary text."""

from __future__ import annotations

import gzip
import json
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path

from hypothesis import strategies as st

from kvpressure.engines.registry import log_line, public_texts
from kvpressure.engines.vllm import public
from kvpressure.model.ceilings import MOMENT
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
    Scrape,
    Snapshot,
    SourceHealth,
    StepStats,
    Termination,
)
from kvpressure.model.reasons import REASONS
from kvpressure.printable import visible
from kvpressure.sources.scrape.scanner import parse_scrape

RECORDINGS = Path(__file__).parents[1] / "fixtures" / "recordings"

EVENT_LINES = (  # what the source of logs passes on; of other lines a recording keeps no text
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB.",
    "Available KV cache memory: 40.00 GiB",
    "Model loading took 26.00 GiB and 5.1 seconds",
    "non-default args: {'model': 'm', 'max_num_seqs': 64}",
)

_texts = st.text(max_size=12).map(visible)  # as a recording gives names back
_number = st.floats(-MOMENT, MOMENT)
_time = st.floats(0, MOMENT, exclude_max=True)
_ratio = st.none() | st.floats(0, 1)
_count = st.integers(0, 2**40)
_BY_TYPE = {
    "str": _texts,
    "str | None": st.none() | _texts,
    "int": _count,
    "int | None": st.none() | st.integers(0, 2**53),
    "float": _number,
    "float | None": _ratio,
    "bool": st.booleans(),
    "bool | None": st.none() | st.booleans(),
    "Mapping[int, int]": st.dictionaries(_count, _count, max_size=3),
    "Mapping[str, int]": st.dictionaries(_texts, _count, max_size=2),
    "Mapping[str, float]": st.dictionaries(_texts, st.floats(0, 1), max_size=2),
}


def every(kind: type, **own: st.SearchStrategy) -> st.SearchStrategy:
    """Readings of a kind: each field by its type, or from ``own``."""
    return st.builds(kind, **{field.name: own.get(field.name, _BY_TYPE.get(field.type)) for field in fields(kind)})


@lru_cache
def real_pages() -> tuple[str, ...]:
    """A few pages of real servers, of V0 and V1."""
    found = []
    for name in ("vllm-cpu/d_kv_pressure", "vllm-cpu/l_dp2", "h100/llama-2-7b-046"):
        with gzip.open(RECORDINGS / f"{name}.jsonl.gz", "rt") as lines:
            found += [json.loads(line)["engines"][0]["exposition"] for line in list(lines)[5:7]]
    return tuple(found)


gpus = every(
    GpuReading,
    throttle_reasons=st.none() | st.lists(_texts, max_size=2).map(tuple),
    xid_last_times=st.dictionaries(st.integers(0, 200), _time, max_size=2),
    processes=st.lists(every(GpuProcess), max_size=2).map(tuple),
)
ended = every(Termination, finished_at=st.none() | _time)
pools = every(EnginePool)
containers = every(
    ContainerReading,
    last_termination=st.none() | ended,
    alerts=st.none(),
    pool=st.none() | pools,
    run=st.none() | every(Run, since=st.none() | _time, answered=st.none() | _time),
)


@st.composite
def pages(draw: st.DrawFn, tick: float) -> Scrape:
    """A page with the raw text it was read from, or one that failed."""
    error = draw(st.none() | st.sampled_from(REASONS))
    page = parse_scrape(
        None if error else draw(st.sampled_from(real_pages()) | st.text(max_size=60)),
        target=draw(_texts),
        time=draw(st.just(tick) | _time),
        namespace=draw(_texts),
        pod=draw(_texts),
        container=draw(_texts),
        gpus=draw(st.lists(_texts, max_size=2)),
        args=tuple(public_texts(draw(st.lists(st.sampled_from(["--model", "m", "-tp=2"]))))),
        env=public.PUBLIC.environment(
            {f"VLLM_{key}": text for key, text in draw(st.dictionaries(_texts, _texts, max_size=2)).items()}
        ),
        error=error,
        duration_seconds=draw(_ratio),
        keep_text=True,
    )
    return replace(page, group=draw(_texts), pool=draw(st.none() | pools))


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Any tick that sources could gather."""
    time = draw(_time)

    def some(items: st.SearchStrategy) -> tuple:
        return tuple(draw(st.lists(items, max_size=2)))

    return Snapshot(
        time=time,
        gpus=some(gpus),
        pages=some(pages(time)),
        containers=some(containers),
        owners=some(every(GpuOwner)),
        logs=some(st.builds(log_line, *[_texts] * 3, st.sampled_from(EVENT_LINES).map(public.public_line))),
        allocator=some(every(AllocatorReading)),
        steps=some(every(StepStats)),
        caches=some(every(CacheReading)),
        node_conditions=some(every(NodeCondition)),
        health={one.name: one for one in some(every(SourceHealth, last_success=st.none() | _number))},
        targets=draw(st.none() | st.lists(_texts, max_size=2).map(tuple)),
        pods=draw(st.none() | st.dictionaries(st.tuples(_texts, _texts), _texts, max_size=2)),
        process_pods=draw(st.dictionaries(st.integers(0, 2**22), st.tuples(_texts, _texts), max_size=2)),
        expected_gpus=draw(st.dictionaries(_texts, _count, max_size=2)),
    )
