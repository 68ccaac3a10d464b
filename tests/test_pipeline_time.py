"""Readings that stop coming and clocks that step back: nothing old is taken for now, and nothing needs a restart."""

from __future__ import annotations

import pytest

from kvpressure import readings as r
from kvpressure.pipeline import FORGET_SECONDS, Pipeline
from kvpressure.readings import (
    ContainerReading,
    EnginePage,
    EngineReading,
    GpuReading,
    LogLine,
    Snapshot,
    Termination,
)
from kvpressure.state import State
from kvpressure.thresholds import builtin

STALE = builtin()["stale_page_seconds"]
HOUR = 3600.0


def page(t: float, i: int, tokens: float | None = None, in_flight: float = 4.0) -> EnginePage:
    counters = {r.GENERATION_TOKENS: i * 100.0 if tokens is None else tokens, r.PROMPT_TOKENS: 10.0}
    reading = EngineReading("m", "0", {r.RUNNING: in_flight, r.WAITING: 0.0, r.KV_USAGE: 0.3}, counters, {}, {})
    return EnginePage("http://10.0.0.5:8000/metrics", t, "inference", "chat-0", "vllm", engines=(reading,), gpus=("GPU-1",))


def gpu(used: int = 72) -> GpuReading:
    return GpuReading("GPU-1", 0, "nvidia", memory_total_bytes=80, memory_used_bytes=used, utilization_ratio=0.2)


def throttled(i: int) -> ContainerReading:
    return ContainerReading("inference", "chat-0", "vllm", restarts=0, cpu_periods=10 * i, cpu_throttled_periods=9 * i,
                            memory_working_set_bytes=99, memory_limit_bytes=100,
                            last_termination=Termination("OOMKilled", 137, 1.0))


def run(pipeline: Pipeline, times: list[float], read_until: float = float("inf")) -> State:
    state = None
    for i, t in enumerate(times):
        read = t <= read_until
        state = pipeline.observe(Snapshot(t, gpus=(gpu(),) if read else (), containers=(throttled(i),) if read else (),
                                          pages=(page(t, i),)))
    assert state is not None
    return state


@pytest.mark.parametrize(("silent_seconds", "known"), [(STALE, True), (STALE + 1, False)])
def test_what_a_dead_source_read_last_is_not_taken_for_now(silent_seconds, known):
    died = 1060.0
    state = run(Pipeline(), [1000.0 + i for i in range(61 + int(silent_seconds))], read_until=died)
    (engine,) = state.engines
    seen = {
        "memory": engine.signals.memory.device_used_ratio, "utilization": engine.signals.compute.gpu_utilization,
        "throttled": engine.signals.host.cpu_throttled_ratio, "signature": engine.diagnosis.documented_signature["gpu_memory_high"],
        "near limit": engine.diagnosis.conditions["host_memory_near_limit"],
    }
    assert all((value is not None) is known for value in seen.values()), seen
    assert engine.diagnosis.evidence["cpu_throttled"].value is (True if known else None)
    assert engine.diagnosis.conditions["gpu_fault"] is False, "a fault of the last half hour stays one"


def test_log_events_stay_counted_while_the_source_of_containers_fails():
    pipeline = Pipeline()
    oom = LogLine("inference", "chat-0", "vllm", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB.")
    pipeline.observe(Snapshot(1000.0, containers=(throttled(1),), logs=(oom,)))
    (container,) = pipeline.observe(Snapshot(1001.0, logs=(oom,))).containers
    assert (container.reading, container.log_events) == (ContainerReading("inference", "chat-0", "vllm"), {"cuda_oom": 2})
    other = ContainerReading("inference", "other", "vllm")
    assert [c.reading for c in pipeline.observe(Snapshot(1002.0, containers=(other,))).containers] == [other], "it is gone"


def stepped(before: int, after: int) -> list[float]:
    return [10_000.0 + i for i in range(before)] + [10_000.0 + before - HOUR + i for i in range(after)]


def test_after_a_clock_stepped_back_gpus_and_containers_are_read_as_before():
    pipeline = Pipeline()
    run(pipeline, stepped(60, 0))
    for i, t in enumerate(stepped(60, 20)[60:], 60):
        state = pipeline.observe(Snapshot(t, gpus=(gpu(used=40),), containers=(throttled(i),), pages=(page(t, i),)))
        assert len(state.containers) == 1
        assert state.engines[0].signals.memory.device_used_ratio == 0.5
        assert state.engines[0].diagnosis.since <= t
        assert state.engines[0].diagnosis.conditions["host_oom_killed"] is False, "it was killed long ago"
    assert state.containers[0].cpu_throttled_ratio == pytest.approx(0.9)


def test_a_stall_is_found_in_time_after_a_clock_stepped_back():
    pipeline = Pipeline()
    run(pipeline, stepped(60, 0))
    for i, t in enumerate(stepped(60, 40)[60:]):
        state = pipeline.observe(Snapshot(t, pages=(page(t, 0, tokens=6000.0, in_flight=4.0 + i % 2),)))
    assert state.engines[0].signals.progress.seconds_without_progress == pytest.approx(39.0)
    assert state.engines[0].diagnosis.verdict == "stalled"


def test_what_was_seen_in_the_future_of_a_clock_that_stepped_back_is_forgotten():
    pipeline = Pipeline()
    xid = GpuReading("GPU-1", 0, "nvidia", xid_errors={79: 1})
    oom = LogLine("inference", "chat-0", "vllm", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB.")
    for i, t in enumerate(stepped(2, 0)):
        pipeline.observe(Snapshot(t, gpus=(gpu() if i == 0 else xid,), logs=(oom,), pages=(page(t, i),)))
    state = pipeline.observe(Snapshot(10_000.0 - HOUR, gpus=(xid,), logs=(LogLine("inference", "chat-0", "vllm", "x"),),
                                      pages=(page(10_000.0 - HOUR, 3),)))
    conditions = state.engines[0].diagnosis.conditions
    assert (conditions["gpu_fault"], conditions["gpu_out_of_memory"]) == (False, False)
    assert pipeline.observe(Snapshot(10_000.0 - 2 * HOUR)).engines == ()
    assert pipeline.observe(Snapshot(10_000.0 - 2 * HOUR - FORGET_SECONDS)).containers == ()
