"""Snapshots as Hypothesis makes them, pages read from real and from arbitrary text."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from hypothesis import strategies as st

from kvpressure.engines.registry import log_line
from kvpressure.engines.vllm import public
from kvpressure.model.ceilings import MOMENT
from kvpressure.model.readings import (
    AllocatorReading,
    ContainerReading,
    GpuOwner,
    GpuProcess,
    GpuReading,
    NodeCondition,
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
_whole = st.none() | st.integers(0, 2**53)
_count = st.integers(0, 2**40)


@lru_cache
def real_pages() -> tuple[str, ...]:
    """A few pages of real servers, of V0 and V1."""
    found = []
    for name in ("vllm-cpu/d_kv_pressure", "vllm-cpu/l_dp2", "h100/llama-2-7b-046"):
        with gzip.open(RECORDINGS / f"{name}.jsonl.gz", "rt") as lines:
            found += [json.loads(line)["engines"][0]["exposition"] for line in list(lines)[5:7]]
    return tuple(found)


gpus = st.builds(
    GpuReading,
    uuid=_texts,
    index=st.integers(0, 63),
    vendor=_texts,
    name=st.none() | _texts,
    driver=st.none() | _texts,
    pci_bus_id=st.none() | _texts,
    minor=_whole,
    parent_uuid=st.none() | _texts,
    memory_total_bytes=_whole,
    memory_used_bytes=_whole,
    memory_reserved_bytes=_whole,
    utilization_ratio=_ratio,
    sm_activity_ratio=_ratio,
    tensor_activity_ratio=_ratio,
    dram_activity_ratio=_ratio,
    power_watts=_ratio,
    power_limit_watts=_ratio,
    throttle_reasons=st.none() | st.lists(_texts, max_size=2).map(tuple),
    xid_errors=st.dictionaries(st.integers(0, 200), _count, max_size=2),
    gpu_instance_id=_whole,
    xid_last_times=st.dictionaries(st.integers(0, 200), _time, max_size=2),
    ecc_errors=st.dictionaries(_texts, _count, max_size=2),
    processes=st.lists(st.builds(GpuProcess, pid=_count, used_bytes=_whole), max_size=2).map(tuple),
    error=st.none() | _texts,
)
containers = st.builds(
    ContainerReading,
    namespace=_texts,
    pod=_texts,
    container=_texts,
    restarts=_whole,
    ready=st.none() | st.booleans(),
    last_termination=st.none()
    | st.builds(Termination, reason=st.none() | _texts, exit_code=_whole, finished_at=st.none() | _time),
    cpu_usage_seconds=_ratio,
    cpu_limit_cores=_ratio,
    cpu_periods=_whole,
    cpu_throttled_periods=_whole,
    cpu_pressure_some_ratio=_ratio,
    memory_working_set_bytes=_whole,
    memory_limit_bytes=_whole,
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
        args=public.args(draw(st.lists(st.sampled_from(["--model", "m", "-tp=2"])))),
        env=public.environment(
            {f"VLLM_{key}": text for key, text in draw(st.dictionaries(_texts, _texts, max_size=2)).items()}
        ),
        error=error,
        duration_seconds=draw(_ratio),
        keep_text=True,
    )
    return replace(page, group=draw(_texts))


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Any tick that sources could gather."""
    time = draw(_time)

    def some(items: st.SearchStrategy) -> tuple:
        return tuple(draw(st.lists(items, max_size=2)))

    health = draw(
        st.dictionaries(
            _texts,
            st.builds(
                SourceHealth,
                name=st.just(""),
                up=st.none() | st.booleans(),
                reason=st.none() | _texts,
                last_success=st.none() | _number,
                duration_seconds=_ratio,
                errors=st.dictionaries(_texts, _count, max_size=2),
            ),
            max_size=2,
        )
    )
    return Snapshot(
        time=time,
        gpus=some(gpus),
        pages=some(pages(time)),
        containers=some(containers),
        owners=some(st.builds(GpuOwner, *[_texts] * 4, st.booleans(), _texts)),
        logs=some(st.builds(log_line, *[_texts] * 3, st.sampled_from(EVENT_LINES).map(public.log_line))),
        allocator=some(st.builds(AllocatorReading, _texts, _texts, st.integers(0, 64), *[_whole] * 5)),
        steps=some(
            st.builds(
                StepStats,
                _texts,
                _texts,
                _texts,
                _number,
                _number,
                _count,
                _count,
                st.booleans(),
                _whole,
                _ratio,
                st.dictionaries(_count, _count, max_size=3),
            )
        ),
        node_conditions=some(st.builds(NodeCondition, _texts, st.none() | st.booleans())),
        health={
            name: SourceHealth(name, h.up, h.reason, h.last_success, h.duration_seconds, h.errors)
            for name, h in health.items()
        },
        targets=draw(st.none() | st.lists(_texts, max_size=2).map(tuple)),
        pods=draw(st.none() | st.dictionaries(st.tuples(_texts, _texts), _texts, max_size=2)),
        process_pods=draw(st.dictionaries(st.integers(0, 2**22), st.tuples(_texts, _texts), max_size=2)),
        expected_gpus=draw(st.dictionaries(_texts, _count, max_size=2)),
    )
