"""Out of GPU memory in the log: the figures in torch's text become evidence, never a reading of the allocator."""

from __future__ import annotations

import pytest

from kvpressure.engines.registry import log_line
from kvpressure.model import readings as r
from kvpressure.model.readings import ContainerReading, EngineReading, Scrape, Snapshot
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.diagnosis_json import diagnosis_document
from kvpressure.settings.thresholds import builtin

FRAGMENTED = (
    "(EngineCore pid=201) ERROR 11-14 22:18:22 [core.py:1101] torch.OutOfMemoryError: CUDA out of memory. Tried to "
    "allocate 1.16 GiB. GPU 0 has a total capacity of 79.11 GiB of which 21.75 MiB is free. Of the allocated memory "
    "70.00 GiB is allocated by PyTorch, with 1.50 GiB allocated in private pools (e.g., CUDA Graphs), and 3.21 GiB "
    "is reserved by PyTorch but unallocated."
)
FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 50.00 MiB. GPU 0 has a total capacity of 23.56 GiB"
    " of which 21.75 MiB is free. Including non-PyTorch memory, this process has 23.53 GiB memory in use. Of the"
    " allocated memory 22.88 GiB is allocated by PyTorch, and 275.00 MiB is reserved by PyTorch but unallocated."
)
BARE = "RuntimeError: CUDA error: out of memory"


def snapshot(t: float, *lines: str) -> Snapshot:
    reading = EngineReading(
        "m", "0", {r.RUNNING: 4.0, r.WAITING: 0.0, r.KV_USAGE: 0.3}, {r.GENERATION_TOKENS: t * 100}, {}, {}
    )
    return Snapshot(
        t,
        pages=(Scrape("t", t, "ns", "p", "vllm", engines=(reading,)),),
        containers=(ContainerReading("ns", "p", "vllm", restarts=0),),
        logs=tuple(log_line("ns", "p", "vllm", line) for line in lines),
    )


def after(*lines: str):
    pipeline = Pipeline()
    for t in (1000.0, 1001.0, 1002.0):
        state = pipeline.observe(snapshot(t, *(lines if t == 1001.0 else ())))
    return state.engines[0]


def test_the_newest_figures_count_and_are_no_reading_of_the_allocator() -> None:
    """A text without any does not hide them."""
    engine = after(FULL, FRAGMENTED, BARE)
    text = engine.diagnosis.evidence["gpu_out_of_memory"].text
    assert text.startswith("the log shows that GPU memory ran out: 3 ×")
    assert "3.2 GiB" in text
    assert "275 MiB" not in text
    assert engine.diagnosis.conditions["gpu_out_of_memory"] is True
    assert engine.diagnosis.conditions["allocator_fragmentation"] is None
    assert engine.signals.memory.allocator_reserved_bytes is engine.signals.memory.allocator_allocated_bytes is None


def test_figures_are_published_as_long_as_the_event_counts() -> None:
    pipeline = Pipeline()
    states = [
        pipeline.observe(snapshot(1000.0 + t, *([FRAGMENTED] if t == 0 else [])))
        for t in range(int(builtin()["log_window_seconds"]) + 2)
    ]
    last, gone = states[-2:]
    engine = diagnosis_document(last, "node-1")["engines"][0]
    assert engine["signals"]["oom:reserved_unallocated_bytes"] == pytest.approx(3.21 * 2**30)
    assert "probably fragmented" in engine["evidence"]["gpu_out_of_memory"]["text"]
    assert gone.engines[0].signals.oom == {}
    assert gone.engines[0].diagnosis.evidence["gpu_out_of_memory"].value is False
