"""Readings that stop coming and clocks that step back: nothing old is taken for now, and nothing needs a restart."""

from __future__ import annotations

import dataclasses

import pytest

from kvpressure.engines.registry import log_line
from kvpressure.model import readings as r
from kvpressure.model.readings import ContainerReading, EngineReading, GpuReading, Scrape, Snapshot, Termination
from kvpressure.model.state import State
from kvpressure.pipeline.pipeline import FORGET_SECONDS, Pipeline
from kvpressure.settings.thresholds import builtin
from kvpressure.signals.hardware import ContainerWindow
from tests.diagnosis.servers import after, cycle, play

STALE = builtin()["stale_page_seconds"]
HOUR = 3600.0
NOW = 1.76e9
THREE_YEARS = 3 * 365 * 24 * HOUR
OOM = log_line("inference", "chat-0", "vllm", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB.")


def page(t: float, i: int, tokens: float | None = None, in_flight: float = 4.0) -> Scrape:
    counters = {r.GENERATION_TOKENS: i * 100.0 if tokens is None else tokens, r.PROMPT_TOKENS: 10.0}
    reading = EngineReading("m", "0", {r.RUNNING: in_flight, r.WAITING: 0.0, r.KV_USAGE: 0.3}, counters, {}, {})
    return Scrape("http://10.0.0.5:8000/metrics", t, "inference", "chat-0", "vllm", engines=(reading,), gpus=("GPU-1",))


def gpu(used: int = 72) -> GpuReading:
    return GpuReading("GPU-1", 0, "nvidia", memory_total_bytes=80, memory_used_bytes=used, utilization_ratio=0.2)


def throttled(i: int) -> ContainerReading:
    cpu = {"cpu_periods": 10 * i, "cpu_throttled_periods": 9 * i}
    memory = {"memory_working_set_bytes": 99, "memory_limit_bytes": 100}
    killed = Termination("OOMKilled", 137, 1.0)
    return ContainerReading("inference", "chat-0", "vllm", restarts=0, last_termination=killed, **cpu, **memory)


def run(pipeline: Pipeline, times: list[float], read_until: float = float("inf")) -> State:
    state = None
    for i, t in enumerate(times):
        read = t <= read_until
        state = pipeline.observe(
            Snapshot(t, gpus=(gpu(),) if read else (), containers=(throttled(i),) if read else (), pages=(page(t, i),))
        )
    assert state is not None
    return state


@pytest.mark.parametrize(("silent_seconds", "known"), [(STALE, True), (STALE + 1, False)])
def test_what_a_dead_source_read_last_is_not_taken_for_now(silent_seconds, known):
    died = 1060.0
    state = run(Pipeline(), [1000.0 + i for i in range(61 + int(silent_seconds))], read_until=died)
    (engine,) = state.engines
    seen = {
        "memory": engine.signals.memory.device_used_ratio,
        "utilization": engine.signals.compute.gpu_utilization,
        "throttled": engine.signals.host.cpu_throttled_ratio,
        "signature": engine.diagnosis.documented_signature["gpu_memory_high"],
        "near limit": engine.diagnosis.conditions["host_memory_near_limit"],
    }
    assert all((value is not None) is known for value in seen.values()), seen
    assert engine.diagnosis.evidence["cpu_throttled"].value is (True if known else None)
    assert engine.diagnosis.conditions["gpu_fault"] is False, "a fault of the last half hour stays one"


def test_log_events_stay_counted_while_the_source_of_containers_fails():
    pipeline = Pipeline()
    pipeline.observe(Snapshot(1000.0, containers=(throttled(1),), logs=(OOM,)))
    (container,) = pipeline.observe(Snapshot(1001.0, logs=(OOM,))).containers
    assert (container.reading, container.log_events) == (
        ContainerReading("inference", "chat-0", "vllm"),
        {"cuda_oom": 2},
    )
    other = ContainerReading("inference", "other", "vllm")
    assert [c.reading for c in pipeline.observe(Snapshot(1002.0, containers=(other,))).containers] == [other], (
        "it is gone"
    )


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
    for i, t in enumerate(stepped(2, 0)):
        pipeline.observe(Snapshot(t, gpus=(gpu() if i == 0 else xid,), logs=(OOM,), pages=(page(t, i),)))
    before, line = 10_000.0 - HOUR, log_line("inference", "chat-0", "vllm", "x")
    state = pipeline.observe(Snapshot(before, gpus=(xid,), logs=(line,), pages=(page(before, 3),)))
    conditions = state.engines[0].diagnosis.conditions
    assert (conditions["gpu_fault"], conditions["gpu_out_of_memory"]) == (False, False)
    assert pipeline.observe(Snapshot(10_000.0 - 2 * HOUR)).engines == ()
    assert pipeline.observe(Snapshot(10_000.0 - 2 * HOUR - FORGET_SECONDS)).containers == ()


@pytest.mark.fault(
    "process",
    "clock stepped back",
    "windows restart; nothing from the future is believed;"
    " after a step of more than five minutes, engines are absent until their next scrape (at most 5 s)",
    "–",
    "next scrapes",
)
@pytest.mark.parametrize("step", [3.0, 40.0, 59.0, 90.0])
def test_after_a_step_back_of_the_clock_the_next_page_counts(step: float) -> None:
    """Not only once the clock has caught up: until then the figures before the step would be shown as fresh."""
    pipeline = Pipeline()
    for i in range(100):
        pipeline.observe(Snapshot(1000.0 + i, pages=(page(1000.0 + i, i),)))
    now = 1100.0 - step
    pipeline.observe(Snapshot(now, pages=(page(now, 100, in_flight=60.0),)))
    state = pipeline.observe(Snapshot(now + 1, pages=(page(now + 1, 101, in_flight=60.0),)))
    assert state.engines[0].signals.load.running == 60.0


@pytest.mark.attack(
    "a clock stepped by an hour or three years, forward or back", "engines are read as before from the next scrape on"
)
@pytest.mark.parametrize("step", [HOUR, -HOUR, THREE_YEARS, -THREE_YEARS])
def test_a_page_that_was_read_before_the_clock_was_stepped_says_nothing_of_now(step: float) -> None:
    """An engine was called down for a tick: its page came an hour late, as it seemed."""
    pipeline = Pipeline()
    for i in range(10):
        pipeline.observe(Snapshot(NOW + i, pages=(page(NOW + i, i),)))
    now = NOW + 10 + step
    assert pipeline.observe(Snapshot(now, pages=(page(NOW + 9.9, 10),))).engines == ()
    (engine,) = pipeline.observe(Snapshot(now + 1, pages=(page(now + 1, 11),))).engines
    assert engine.up


@pytest.mark.parametrize("step", [15.0, 30.0, 60.0, 120.0, 300.0])
class TestSeldomPages:
    """With a sample a minute, a window that holds one sample reaches back to the one before."""

    def test_a_server_that_serves_is_healthy(self, step: float) -> None:
        load = {"waiting": 0.0, "kv": 0.2, "generated": 300.0, "prompt": 300.0, "finished": 1.0}
        played = play(20, step=step, running=cycle(5.0, 6.0, 7.0), **load)
        assert (played.verdict, played.confidence) == ("healthy", 0.85)
        assert played.states[-1].signals.throughput.generation_tokens_per_second == pytest.approx(300.0)

    def test_a_server_that_served_between_the_samples_is_not_idle(self, step: float) -> None:
        played = play(20, step=step, running=0.0, waiting=0.0, kv=0.0, generated=300.0, prompt=300.0, finished=1.0)
        assert "idle" not in played.said(2)

    def test_a_stall_is_seen(self, step: float) -> None:
        flow = {"generated": after(15, 600.0, 0.0), "prompt": after(15, 300.0, 0.0), "finished": after(15, 1.0, 0.0)}
        played = play(30, step=step, running=20.0, waiting=10.0, kv=0.6, **flow)
        assert played.verdict == "stalled"


def test_preemptions_of_a_gap_are_not_of_the_last_minute() -> None:
    """Two requests were preempted while pages failed for 70 s; nothing waits."""
    pipeline = Pipeline()
    for i in range(140):
        gauges = {r.RUNNING: 20.0, r.WAITING: 0.0, r.KV_USAGE: 0.86}
        counters = dict.fromkeys((r.GENERATION_TOKENS, r.PROMPT_TOKENS), 800.0 * i)
        counters |= {r.PREEMPTIONS: 2.0 * (i > 100), r.FINISHED_PREFIX + "stop": 2.0 * i}
        answered = dataclasses.replace(page(1000.0 + i, i), engines=(EngineReading("m", "0", gauges, counters),))
        missed = dataclasses.replace(answered, engines=(), error="timeout")
        state = pipeline.observe(Snapshot(1000.0 + i, pages=(missed if 60 <= i < 130 else answered,)))
        if i >= 130:
            assert state.engines[0].diagnosis.verdict == "healthy", i


def test_what_is_too_old_is_no_part_of_a_window() -> None:
    played = play(10, step=400.0, running=5.0, waiting=0.0, kv=0.2, generated=300.0, prompt=300.0, finished=1.0)
    assert played.states[-1].signals.throughput.generation_tokens_per_second is None


def test_a_reading_that_is_held_is_no_second_one() -> None:
    """Of the container's CPU nothing is known until it was read twice: 0 would be a lie."""
    window, reading = ContainerWindow(), ContainerReading("n", "p", "c", cpu_usage_seconds=100.0, cpu_limit_cores=4.0)
    for t in (1.0, 2.0, 3.0):
        window.observe(t, reading)
    assert window.cpu_used_ratio() is None
    assert window.last_t == 3.0
    window.observe(11.0, dataclasses.replace(reading, cpu_usage_seconds=120.0))
    window.observe(12.0, dataclasses.replace(reading, cpu_usage_seconds=120.0))
    assert window.cpu_used_ratio() == pytest.approx(0.5)
