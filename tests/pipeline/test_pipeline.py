"""The pipeline as a whole: joins, absence, staleness, churn, and order-proofness. Pages are real captures."""

from __future__ import annotations

import dataclasses
import gc
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.engines.registry import log_line
from kvpressure.engines.vllm import limits
from kvpressure.model import readings as r
from kvpressure.model.readings import (
    AllocatorReading,
    ContainerReading,
    EngineKey,
    EngineReading,
    GpuOwner,
    GpuProcess,
    GpuReading,
    Run,
    Scrape,
    Snapshot,
    Termination,
)
from kvpressure.model.state import NO_ENGINE
from kvpressure.pipeline.engines import FORGET_SECONDS, MAX_GONE_ENGINES
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.sources.gpu.nvidia.codes import DEVICE_DOWN

GIB = 2**30


def page(t, gauges=None, counters=None, pod="chat-0", engines=None, **more) -> Scrape:
    reading = EngineReading("m", "0", gauges or {}, counters or {}, {}, more.pop("config", {}))
    return Scrape("http://10.0.0.5:8000/metrics", t, "inference", pod, "vllm", engines=engines or (reading,), **more)


def failed(t, reason="timeout", **more) -> Scrape:
    return dataclasses.replace(page(t, **more), engines=(), error=reason)


def busy(t, kv=0.3, running=4, waiting=0):
    return page(
        t,
        {r.RUNNING: running, r.WAITING: waiting, r.KV_USAGE: kv},
        {r.GENERATION_TOKENS: t * 100, r.PROMPT_TOKENS: t * 10},
    )


def feed(pipeline, pages, start=1000.0):
    state = None
    for i, item in enumerate(pages):
        state = pipeline.observe(Snapshot(start + i, pages=() if item is None else (item(start + i),)))
    return state


def test_an_engine_that_never_answered_is_listed_and_unknown():
    state = Pipeline().observe(
        Snapshot(1000.0, pages=(failed(1000.0, "refused", args=("--served-model-name", "chat")),))
    )
    (engine,) = state.engines
    assert engine.key == EngineKey("inference", "chat-0", "chat", "0")
    assert (engine.up, engine.error, engine.diagnosis.verdict) == (False, "refused", "unknown")
    assert tuple(engine.diagnosis.supporting) == (), "what is unknown is no evidence"
    assert tuple(engine.diagnosis.missing) == (
        "what the engine does now",
        "whether the metrics are fresh: unknown (never scraped: connection refused)",
    )
    assert engine.counters == {}
    assert engine.reading is None


def test_an_engine_that_is_only_assumed_is_one_from_its_first_answer_on():
    """A job that runs an engine's image is no engine that is down, and nothing that happens to it wakes anybody."""
    killed = Termination("OOMKilled", 137, 990.0)
    reading = ContainerReading("inference", "chat-0", "vllm", restarts=5, last_termination=killed)

    def tick(page, run=None):
        run = run or Run(900.0, stopped="CrashLoopBackOff", assumed=True)
        pages, containers = (dataclasses.replace(page, assumed=True),), (dataclasses.replace(reading, run=run),)
        return pipeline.observe(Snapshot(page.time, pages=pages, containers=containers))

    pipeline = Pipeline()
    for t in range(1000, 3000, 200):
        state = tick(failed(float(t), "refused"))
    assert (state.engines, state.containers, [pod.answers for pod in state.pods]) == ((), (), [None])
    state = tick(busy(3000.0))
    assert ([engine.up for engine in state.engines], len(state.containers)) == ([True], 1)
    for t in (3001.0, 3002.0, 3003.0):
        state = tick(failed(t, "refused"))
    assert ([engine.up for engine in state.engines], [pod.answers for pod in state.pods]) == ([False], [False])


@pytest.mark.parametrize(("args", "known", "raised"), [((), None, None), (("vllm", "serve", "m"), 0.4, 0.7)])
def test_nothing_rests_on_a_default_that_hidden_arguments_may_have_changed(monkeypatch, args, known, raised):
    """Without arguments the share of memory may be any, so its raise would be a guess."""
    monkeypatch.setattr(limits, "default_limits", lambda *_: {"gpu_memory_utilization": 0.4})
    gpu = GpuReading("GPU-1", 0, "nvidia", memory_total_bytes=80 * GIB, memory_used_bytes=33 * GIB)
    pipeline = Pipeline()
    for t in range(1000, 1060):
        page = dataclasses.replace(busy(float(t), kv=0.99, running=40, waiting=30), args=args, gpus=("GPU-1",))
        (engine,) = pipeline.observe(Snapshot(float(t), pages=(page,), gpus=(gpu,))).engines
    limit = engine.limit("gpu_memory_utilization")
    assert (engine.diagnosis.verdict, limit.value, limit.known, limit.recommended) == (
        "kv_pressure",
        0.4,
        known,
        raised,
    )


def test_the_placeholder_name_goes_when_the_page_tells_the_right_one():
    pipeline = Pipeline()
    pipeline.observe(Snapshot(1000.0, pages=(failed(1000.0, args=("--model", "org/name")),)))
    state = pipeline.observe(Snapshot(1001.0, pages=(busy(1001.0),)))
    assert [engine.key.model_name for engine in state.engines] == ["m"]


def test_values_go_when_the_page_goes_and_identity_stays():
    pipeline = Pipeline()
    assert feed(pipeline, [busy] * 5).engines[0].up
    state = feed(pipeline, [failed] * 3, start=1005.0)
    (engine,) = state.engines
    assert not engine.up
    assert engine.reading is None
    assert engine.counters == {}
    state = feed(pipeline, [None] * 20, start=1008.0)
    assert state.engines[0].diagnosis.verdict == "unknown"
    assert state.engines[0].signals.kv.kv_used_ratio is None, "a number from 20 s ago describes another moment"


def test_one_answer_that_comes_too_late_does_not_change_the_verdict_and_a_second_in_a_row_is_none():
    pipeline = Pipeline()
    feed(pipeline, [busy] * 10)
    for i, pages in enumerate([(None,), (busy,), (failed,), (None,), (busy,), (failed,)]):
        (engine,) = feed(pipeline, pages, start=1010.0 + i).engines
        assert (engine.up, engine.diagnosis.verdict) == (True, "healthy")
    (engine,) = feed(pipeline, [failed], start=1016.0).engines
    assert (engine.up, engine.diagnosis.verdict) == (False, "unknown")


FULL = partial(busy, kv=0.99, running=40, waiting=30)
STANDING = {
    "healthy": busy,
    "kv_pressure": FULL,
    "idle": lambda t: page(t, {r.RUNNING: 0, r.WAITING: 0, r.KV_USAGE: 0.0}, {r.GENERATION_TOKENS: 5.0}),
}


def only_another(t):
    return page(t, engines=(EngineReading("m", "1", {r.RUNNING: 1.0}, {}, {}, {}),))


@pytest.mark.parametrize("verdict", STANDING)
@pytest.mark.parametrize(
    ("gone", "reason", "said"),
    [
        (partial(failed, reason="refused"), "refused", "refused"),
        (partial(failed, reason="http_5xx"), "http_5xx", "HTTP 5xx"),
        (only_another, "absent", "absent"),
    ],
    ids=["refused", "error page", "page without it"],
)
def test_no_verdict_stands_over_an_engine_that_is_gone(verdict, gone, reason, said):
    """From the first reading on: neither the age of the last page nor hysteresis holds what was concluded from it."""
    pipeline = Pipeline()
    assert feed(pipeline, [STANDING[verdict]] * 20).engines[0].diagnosis.verdict == verdict
    engine = feed(pipeline, [gone], start=1020.0).engines[0]
    assert (engine.up, engine.error, engine.diagnosis.verdict, engine.diagnosis.stage) == (
        False,
        reason,
        "unknown",
        None,
    )
    assert said in engine.diagnosis.supporting[0]
    assert tuple(engine.diagnosis.missing) == ("what the engine does now",)
    assert engine.signals.load.running is None
    assert feed(pipeline, [STANDING[verdict]], start=1021.0).engines[0].diagnosis.verdict == verdict, "back at once"


@pytest.mark.slow
@given(
    st.lists(st.sampled_from([busy, FULL, failed, partial(failed, reason="reset"), only_another, None]), max_size=40)
)
def test_an_engine_that_is_down_is_unknown_and_one_that_is_unknown_says_why(events):
    pipeline = Pipeline()
    for i, event in enumerate(events):
        for engine in feed(pipeline, [event], start=1000.0 + i).engines:
            assert engine.up or engine.diagnosis.verdict == "unknown"
            assert engine.diagnosis.verdict != "unknown" or engine.diagnosis.missing


def test_engines_are_forgotten_when_their_target_goes_or_after_a_while():
    pipeline = Pipeline()
    feed(pipeline, [busy] * 3)
    gone = pipeline.observe(Snapshot(1003.0, targets=()))
    assert gone.engines == ()
    feed(pipeline, [busy] * 3, start=1004.0)
    assert pipeline.observe(Snapshot(1007.0 + FORGET_SECONDS)).engines == ()


def test_start_up_lines_give_the_pool_and_so_the_real_demand():
    gpu = GpuReading("GPU-1", 0, "nvidia", memory_total_bytes=80 * GIB, memory_used_bytes=72 * GIB)
    lines = tuple(
        log_line("inference", "chat-0", "vllm", text)
        for text in (
            "INFO 11-02 10:00:00 [gpu_worker.py:1] Available KV cache memory: 40.00 GiB",
            "INFO 11-02 10:00:00 [gpu_model_runner.py:1] Model loading took 26.00 GiB and 5.1 seconds",
        )
    )
    pipeline = Pipeline()
    for i in range(3):
        owners, pages = (GpuOwner("GPU-1", "inference", "chat-0", "vllm"),), (busy(1000.0 + i, kv=0.25),)
        told = {"gpus": (gpu,), "owners": owners, "pages": pages, "logs": lines if i == 0 else ()}
        state = pipeline.observe(Snapshot(1000.0 + i, **told))
    (engine,) = state.engines
    assert engine.signals.memory.kv_pool_bytes == 40 * GIB
    assert engine.signals.memory.components == {"weights": 26 * GIB, "kv_pool": 40 * GIB, "other": 6 * GIB}
    assert state.gpus[0].demand_ratio == pytest.approx((72 - 30) / 80)
    assert engine.signals.memory.device_demand_ratio == state.gpus[0].demand_ratio


def test_a_new_start_begins_with_no_fact_of_the_one_before_it():
    texts = ("non-default args: {'max_num_seqs': 17}", "Available KV cache memory: 40.00 GiB")
    first, pool = (log_line("inference", "chat-0", "vllm", text) for text in texts)
    pipeline = Pipeline()
    pools = [
        pipeline.observe(Snapshot(t, pages=(busy(t),), logs=lines)).engines[0].signals.memory.kv_pool_bytes
        for t, lines in ((1000.0, (first, pool)), (1001.0, (first,)))
    ]
    assert pools == [40 * GIB, None]


def test_two_engines_on_one_gpu_share_its_demand_only_when_both_pools_are_known():
    gpu = GpuReading("GPU-1", 0, "nvidia", memory_total_bytes=80 * GIB, memory_used_bytes=72 * GIB)
    owners = tuple(GpuOwner("GPU-1", "inference", pod, "vllm", True) for pod in ("chat-0", "code-0"))
    line = log_line("inference", "chat-0", "vllm", "Available KV cache memory: 40.00 GiB")
    pages = tuple(dataclasses.replace(busy(1000.0), pod=pod, target=f"http://{pod}") for pod in ("chat-0", "code-0"))
    state = Pipeline().observe(Snapshot(1000.0, gpus=(gpu,), owners=owners, pages=pages, logs=(line,)))
    assert state.gpus[0].demand_ratio is None


@pytest.mark.parametrize(
    ("restarts", "reason", "ended_ago", "killed", "looping", "restarted"),
    [
        (1, "OOMKilled", 3 * 86400.0, False, False, False),
        (1, "OOMKilled", 30.0, True, False, True),
        (17, "Error", 30.0, False, None, True),
        (17, "Error", None, False, None, None),
        (17, "Error", 86400.0, False, False, False),
        (1, "OOMKilled", None, None, False, None),
        (0, None, None, False, False, False),
    ],
)
def test_what_an_exporter_that_has_just_started_knows_of_restarts(
    restarts, reason, ended_ago, killed, looping, restarted
):
    """The restarts before its own start are known by their number and the last of them alone."""
    pipeline, start = Pipeline(), 1.8e9
    ended = Termination(reason, 137, None if ended_ago is None else start - ended_ago) if reason else None
    for i in range(20):
        container = ContainerReading("inference", "chat-0", "vllm", restarts=restarts, last_termination=ended)
        state = pipeline.observe(Snapshot(start + i, containers=(container,), pages=(busy(start + i),)))
        said, recent = state.engines[0].diagnosis, state.engines[0].signals.host.restarts_recent
        found = (said.conditions["host_oom_killed"], said.conditions["crash_loop"])
        assert (*found, None if recent is None else recent > 0) == (killed, looping, restarted), i


def test_restarts_are_known_once_they_were_watched_for_half_an_hour():
    pipeline, said = Pipeline(), []
    for i in range(0, 1900, 20):
        container = ContainerReading("inference", "chat-0", "vllm", restarts=17)
        state = pipeline.observe(Snapshot(1000.0 + i, containers=(container,), pages=(busy(1000.0 + i),)))
        said.append(state.engines[0].diagnosis.conditions["crash_loop"])
    assert said == [None] * 90 + [False] * 5


def test_a_lost_gpu_is_a_fault_and_application_xids_are_not():
    def gpu(**more):
        return GpuReading("GPU-1", 0, "nvidia", **more)

    owner = GpuOwner("GPU-1", "inference", "chat-0", "vllm")
    well = ContainerReading("inference", "chat-0", "vllm", restarts=0)
    for readings, expected in (
        ((gpu(xid_errors={13: 1}), gpu(xid_errors={13: 5})), False),
        ((gpu(xid_errors={79: 1}), gpu(xid_errors={79: 2})), True),
        *(((gpu(), gpu(error=reason)), True) for reason in DEVICE_DOWN),
        ((gpu(xid_errors={79: 1}), gpu(xid_errors={79: 1})), False),
    ):
        pipeline = Pipeline()
        for i, reading in enumerate(readings):
            state = pipeline.observe(
                Snapshot(1000.0 + i, gpus=(reading,), owners=(owner,), containers=(well,), pages=(busy(1000.0 + i),))
            )
        assert state.engines[0].diagnosis.conditions["gpu_fault"] is expected


def test_a_lost_gpu_stays_the_engine_s_although_no_process_is_listed_on_it():
    """Outside Kubernetes only the processes say whose GPU it is; on others, or begun since, it is another server."""
    engines = {}
    for on, begun in ((("GPU-1",), 0.0), ((), 0.0), (("GPU-2",), 0.0), ((), 1.0)):
        pipeline = Pipeline()
        for i, (error, uuids) in enumerate(((None, ("GPU-0", "GPU-1")), ("lost", ("GPU-0", *on)[-2:]))):
            owners = tuple(GpuOwner(uuid, "inference", "chat-0", "") for uuid in uuids)
            gpus = (GpuReading("GPU-0", 0, "nvidia"), GpuReading("GPU-1", 1, "nvidia", error=error))
            served = dataclasses.replace(busy(1000.0 + i), page={r.PROCESS_START: 500.0 + i * begun})
            engines[on, begun] = pipeline.observe(
                Snapshot(1000.0 + i, gpus=gpus, owners=owners, pages=(served,))
            ).engines[0]
    lost, alone = ("GPU-0", "GPU-1"), ("GPU-0",)
    assert [engine.gpus for engine in engines.values()] == [lost, lost, ("GPU-0", "GPU-2"), alone]
    assert [engine.diagnosis.conditions["gpu_fault"] for engine in engines.values()] == [True, True, False, False]


def test_a_gpu_that_is_lost_after_its_engine_was_that_engine_s_for_a_while():
    pipeline, owner = Pipeline(), GpuOwner("GPU-1", "inference", "chat-0", "vllm")
    gpu = GpuReading("GPU-1", 0, "nvidia")
    pipeline.observe(Snapshot(1001.0, gpus=(gpu,), owners=(owner,), pages=(busy(1001.0),)))
    for seconds, known in ((1, True), (FORGET_SECONDS, True), (FORGET_SECONDS + 1, False)):
        lost = dataclasses.replace(gpu, error="lost")
        state = pipeline.observe(Snapshot(1001.0 + seconds, gpus=(lost,), targets=()))
        assert state.engines == ()
        assert state.gpus[0].engine == (("inference", "chat-0", "m", "chat") if known else NO_ENGINE)


def test_an_application_xid_is_a_fault_where_the_engine_went_down_with_it():
    """A kernel that writes out of range ends the engine: XID 13, then nobody answers. 45 follows the end of any."""
    owner = GpuOwner("GPU-1", "inference", "chat-0", "vllm")
    for xids, expected in (({13: 1}, True), ({31: 2}, True), ({45: 1}, False), ({}, False)):
        pipeline = Pipeline()
        for i in range(40):
            reading = GpuReading("GPU-1", 0, "nvidia", xid_errors=xids if i >= 10 else {})
            answer = busy(1000.0 + i) if i < 10 else failed(1000.0 + i, "refused")
            state = pipeline.observe(Snapshot(1000.0 + i, gpus=(reading,), owners=(owner,), pages=(answer,)))
        engine = next(one for one in state.engines if one.key.model_name)
        assert engine.diagnosis.conditions["gpu_fault"] is expected


def test_snapshots_that_step_back_a_little_are_ignored():
    pipeline = Pipeline()
    feed(pipeline, [busy] * 5)
    before = pipeline.observe(Snapshot(1005.0, pages=(busy(1005.0, kv=0.4),)))
    after = pipeline.observe(Snapshot(1004.5, pages=(busy(1004.5, kv=0.9),)))
    assert after.engines[0].signals.kv.kv_used_ratio == before.engines[0].signals.kv.kv_used_ratio == 0.4


@pytest.mark.slow
def test_churn_of_thousands_of_pods_leaves_nothing_behind():
    pipeline = Pipeline()

    def wave(i):
        t = 1000.0 + i
        pages = tuple(dataclasses.replace(busy(t), pod=f"p{i}-{j}", target=f"http://p{i}-{j}") for j in range(20))
        containers = tuple(ContainerReading("inference", p.pod, "vllm", restarts=0) for p in pages)
        pipeline.observe(Snapshot(t, pages=pages, containers=containers, targets=tuple(p.target for p in pages)))

    for i in range(330):  # longer than an engine is remembered
        wave(i)
    gc.collect()
    before = len(gc.get_objects())
    for i in range(330, 420):
        wave(i)
    gc.collect()
    assert len(gc.get_objects()) < before * 1.02 + 2000
    assert len(pipeline.observe(Snapshot(1420.0)).engines) == 20


@pytest.mark.slow
def test_a_page_that_renames_its_engines_every_second_does_not_pile_them_up():
    def other(t: float) -> Scrape:
        return dataclasses.replace(page(t, pod="other"), target="http://10.0.0.6:8000/metrics")

    pipeline = Pipeline()
    for i in range(20):
        t = 1000.0 + i
        engines = tuple(EngineReading(f"m{i}-{j}", "0", {r.RUNNING: 1}, {}, {}, {}) for j in range(MAX_GONE_ENGINES))
        state = pipeline.observe(Snapshot(t, pages=(page(t, engines=engines), other(t))))
    seen = {engine.key for engine in state.engines}
    assert len(seen) == MAX_GONE_ENGINES + MAX_GONE_ENGINES // 2 + 1, (
        "as named now, the target's part of those gone, the other"
    )
    assert {EngineKey("inference", "chat-0", f"m{i}-63", "0") for i in (18, 19)} < seen, "the newest stay"
    assert EngineKey("inference", "other", "m", "0") in seen


def test_a_chatty_log_does_not_push_out_an_out_of_memory_line():
    """A server that logs every step writes hundreds of lines in the time in which one failure is news."""
    oom = log_line(
        "inference", "chat-0", "vllm", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB."
    )
    text = "Iteration(7): 1 context requests, 12 context tokens, 3 generation requests, 3 generation tokens"
    step = log_line("inference", "chat-0", "vllm", f"{text}, iteration elapsed time: 12.00 ms")
    pipeline = Pipeline()
    for i in range(30):
        state = pipeline.observe(
            Snapshot(1000.0 + i, pages=(busy(1000.0 + i),), logs=(oom,) if i == 0 else (step,) * 50)
        )
    assert state.engines[0].signals.events["cuda_oom"] == 1
    assert state.engines[0].diagnosis.conditions["gpu_out_of_memory"] is True


def test_the_context_component_joins_driver_and_plugin_by_pod():
    """The pod's own processes only, and nothing where the driver hides the memory of one of them."""

    def components(mine, other=5 * GIB):
        held = {11: mine, 12: 0 if mine is None else None, 99: other}
        gpu = GpuReading("GPU-1", 0, "nvidia", processes=tuple(GpuProcess(pid, size) for pid, size in held.items()))
        pods = {11: ("inference", "chat-0"), 99: ("inference", "other-0")}
        worker = AllocatorReading("inference", "chat-0", 0, reserved_bytes=60 * GIB)
        seen = Snapshot(1000.0, gpus=(gpu,), pages=(busy(1000.0),), process_pods=pods, allocator=(worker,))
        state = Pipeline().observe(seen)
        return state.engines[0].signals.memory.components

    assert components(61 * GIB) == {"context": GIB}
    assert components(None) == {}
    assert components(59 * GIB) == {}, "less than torch holds: not the same moment"
