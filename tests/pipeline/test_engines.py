"""Which engine a page is about: servers that call themselves alike, one address for many, many addresses for one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest

from kvpressure.engines.registry import log_line
from kvpressure.model import readings as r
from kvpressure.model.readings import EngineReading, GpuOwner, GpuReading, Scrape, Snapshot, StepStats
from kvpressure.model.state import State
from kvpressure.pipeline.engines import FORGET_SECONDS
from kvpressure.pipeline.pipeline import Pipeline

GIB = 2**30
FIRST, SECOND = "http://10.0.0.5:8000/metrics", "http://10.0.0.5:8001/metrics"


def page(t: float, target: str = FIRST, container: str = "vllm", running: float = 1.0, **more: object) -> Scrape:
    """``start`` of the process, names of ``engines``, fields of a page."""
    gauges, counters = {r.RUNNING: running, r.WAITING: 0.0, r.KV_USAGE: 0.5}, {r.GENERATION_TOKENS: running * t}
    names, start = more.pop("engines", ("0",)), more.pop("start", None)
    engines = tuple(EngineReading("m", name, gauges, counters | {r.PROMPT_TOKENS: t}, {}, {}) for name in names)
    known = {} if start is None else {r.PROCESS_START: start}
    return Scrape(target, t, "inference", "chat-0", container, engines=engines, page=known, **more)


def failed(t: float, target: str = FIRST, **more: object) -> Scrape:
    return dataclasses.replace(page(t, target, **more), engines=(), error="refused")


def after(pipeline: Pipeline, pages: Iterable[Scrape], targets: Iterable[str] | None = (FIRST, SECOND)) -> State:
    """The state once all pages of one moment have come."""
    pages = tuple(pages)
    return pipeline.observe(Snapshot(pages[0].time, pages=pages, targets=None if targets is None else tuple(targets)))


def running(state: State) -> dict[str, float | None]:
    return {engine.key.engine: engine.signals.load.running for engine in state.engines}


def errors(state: State) -> dict[str, dict[str, int]]:
    return {target.target: dict(target.errors) for target in state.targets if target.errors}


class TestTwoServersThatCallThemselvesAlike:
    @pytest.mark.parametrize(
        ("containers", "name"), [(("a", "b"), "0/b"), (("vllm", "vllm"), "0/8001"), (("", ""), "0/8001")]
    )
    def test_each_is_an_engine_with_its_own_figures(self, containers: tuple[str, str], name: str) -> None:
        pipeline = Pipeline()
        for i in range(60):
            state = after(
                pipeline, (page(1000.0 + i, FIRST, containers[0], 2.0), page(1000.0 + i, SECOND, containers[1], 7.0))
            )
        assert running(state) == {"0": 2.0, name: 7.0}
        rates = {e.key.engine: e.signals.throughput.generation_tokens_per_second for e in state.engines}
        assert rates == {"0": pytest.approx(2.0), name: pytest.approx(7.0)}

    def test_the_smaller_target_has_the_name_whichever_came_first(self) -> None:
        """Or the series of both would change places with every start of the exporter."""
        pipeline = Pipeline()
        after(pipeline, (page(1000.0, SECOND, running=7.0),))
        state = after(pipeline, (page(1001.0, running=2.0), page(1001.0, SECOND, running=7.0)))
        assert running(state) == {"0": 2.0, "0/8001": 7.0}
        state = after(pipeline, (page(1002.0, running=2.0), page(1002.0, SECOND, running=7.0)))
        assert running(state) == {"0": 2.0, "0/8001": 7.0}

    @pytest.mark.parametrize(
        ("targets", "containers"),
        [
            ((FIRST, SECOND, "http://10.0.0.5:8002/metrics"), ("a", "b", "b")),
            ((FIRST, SECOND, "http://10.0.0.5:8002/metrics"), ("a", "a", "a")),
            (("http://h0:8000/metrics", "http://h1:8000/metrics", "http://h2:8000/metrics"), ("", "", "")),
        ],
    )
    def test_any_number_of_them(self, targets: tuple[str, ...], containers: tuple[str, ...]) -> None:
        pipeline = Pipeline()
        for i in range(3):
            pages = [
                page(1000.0 + i, target, container, float(number))
                for number, (target, container) in enumerate(zip(targets, containers, strict=True), 1)
            ]
            state = after(pipeline, pages, targets)
        assert sorted(value or 0.0 for value in running(state).values()) == [1.0, 2.0, 3.0]
        assert {engine.target for engine in state.engines} == set(targets)

    def test_the_name_stays_when_the_other_is_gone(self) -> None:
        pipeline = Pipeline()
        after(pipeline, (page(1000.0), page(1000.0, SECOND)))
        for i in range(5):
            state = after(pipeline, (page(1001.0 + i, SECOND),), targets=(SECOND,))
        assert running(state) == {"0/8001": 1.0}

    def test_one_that_does_not_answer_yet_harms_nobody(self) -> None:
        pipeline = Pipeline()
        after(pipeline, (page(1000.0),))
        arguments = ("--served-model-name", "m")
        state = after(pipeline, (page(1001.0), failed(1001.0, SECOND, args=arguments)))
        assert {engine.key.engine: engine.up for engine in state.engines} == {"0": True, "0/8001": False}
        state = after(pipeline, (page(1002.0), page(1002.0, SECOND, args=arguments)))
        assert {engine.key.engine: engine.up for engine in state.engines} == {"0": True, "0/8001": True}

    def test_steps_that_could_be_either_ones_are_nobodys(self) -> None:
        pipeline = Pipeline()
        for count in (10, 20):
            pages = (page(1000.0 + count), page(1000.0 + count, SECOND))
            steps = (StepStats("inference", "chat-0", "0", 900.0, 1000.0 + count, count, count, True, 0.9, {5: count}),)
            state = pipeline.observe(Snapshot(1000.0 + count, pages=pages, targets=(FIRST, SECOND), steps=steps))
        assert [engine.signals.kv.kv_used_ratio_max for engine in state.engines] == [0.5, 0.5]

    def test_a_new_pod_of_the_same_name_is_the_same_engine(self) -> None:
        """As long as nothing says that it is another one: it comes under another address, and what was learnt of the
        engine holds.
        """
        pipeline = Pipeline()
        after(pipeline, (page(1000.0, start=1.0),), targets=(FIRST,))
        state = after(pipeline, (page(1001.0, SECOND, start=2.0),), targets=(SECOND,))
        assert running(state) == {"0": 1.0}

    def test_in_a_recording_without_targets_an_address_that_fell_silent_is_given_up(self) -> None:
        pipeline = Pipeline()
        after(pipeline, (page(1000.0),), targets=None)
        assert set(running(after(pipeline, (page(1010.0, SECOND),), targets=None))) == {"0", "0/8001"}
        pipeline = Pipeline()
        after(pipeline, (page(1000.0),), targets=None)
        assert set(running(after(pipeline, (page(1020.0, SECOND),), targets=None))) == {"0"}


class TestOneServerUnderTwoAddresses:
    def test_it_is_read_once_and_the_other_says_why(self) -> None:
        pipeline = Pipeline()
        for i in range(3):
            state = after(pipeline, (page(1000.0 + i, start=5.0), page(1000.0 + i, SECOND, start=5.0)))
        assert running(state) == {"0": 1.0}
        assert errors(state) == {SECOND: {"same_server": 3}}
        assert {target.target: target.up for target in state.targets} == {FIRST: True, SECOND: False}

    def test_when_the_first_address_fails_for_long_the_second_serves(self) -> None:
        pipeline = Pipeline()
        after(pipeline, (page(1000.0, start=5.0), page(1000.0, SECOND, start=5.0)))
        for t in range(1001, 1016):
            state = after(pipeline, (failed(float(t)), page(float(t), SECOND, start=5.0)))
        assert {engine.key.engine for engine in state.engines} == {"0"}, (
            "one failed page is no reason for another engine"
        )
        state = after(pipeline, (failed(1016.0), page(1016.0, SECOND, start=5.0)))
        assert {engine.key.engine: engine.up for engine in state.engines} == {"0": False, "0/8001": True}
        state = after(pipeline, (page(1017.0, start=5.0), page(1017.0, SECOND, start=5.0)))
        assert running(state) == {"0": 1.0}


class TestOneAddressOfSeveralServers:
    def test_no_engine_is_made_of_both(self) -> None:
        """A Service with two replicas: every second page would look like a reset of all counters."""
        pipeline = Pipeline()
        for i in range(30):
            state = after(pipeline, (page(1000.0 + i, running=2.0 + i % 2, start=5.0 - i % 2),), targets=(FIRST,))
        (engine,) = state.engines
        assert (engine.up, engine.error, engine.diagnosis.verdict) == (False, "several_servers", "unknown")
        assert errors(state) == {FIRST: {"several_servers": 28}}

    def test_a_restart_is_no_other_server(self) -> None:
        pipeline = Pipeline()
        for i in range(10):
            state = after(pipeline, (page(1000.0 + i, start=900.0 if i < 5 else 1005.0),), targets=(FIRST,))
        assert errors(state) == {}
        assert state.engines[0].up

    def test_it_is_believed_again_when_only_one_answers(self) -> None:
        pipeline = Pipeline()
        for i, start in enumerate((5.0, 4.0, 5.0)):
            after(pipeline, (page(1000.0 + i, start=start),), targets=(FIRST,))
        assert not after(pipeline, (page(1002.0 + FORGET_SECONDS, start=5.0),), targets=(FIRST,)).engines[0].up
        assert after(pipeline, (page(1003.0 + FORGET_SECONDS, start=5.0),), targets=(FIRST,)).engines[0].up

    def test_a_restart_after_the_clock_stepped_back_is_none_either(self) -> None:
        """The new process began earlier than the old one, by the clock; but the old one never comes back."""
        pipeline = Pipeline()
        after(pipeline, (page(1000.0, start=980.0),), targets=(FIRST,))
        for i in range(10):
            state = after(pipeline, (page(972.0 + i, start=970.0),), targets=(FIRST,))
        assert errors(state) == {}
        assert state.engines[0].up


def of_pod(name: str, at: Scrape) -> Scrape:
    return dataclasses.replace(at, pod=name)


class TestPodsThatAreReplaced:
    """The history of an engine is that of its address and its pod's uid."""

    @staticmethod
    def tick(
        pipeline: Pipeline, pages: Iterable[Scrape], pods: dict[str, str] | None, t: float, **more: object
    ) -> State:
        named = None if pods is None else {("inference", name): uid for name, uid in pods.items()}
        return pipeline.observe(Snapshot(t, pages=tuple(pages), targets=(FIRST,), pods=named, **more))

    def test_another_pod_at_the_address_leaves_nothing_of_the_one_before(self) -> None:
        pipeline = Pipeline()
        for i in range(20):
            t, name = 1000.0 + i, f"chat-{i}"
            state = self.tick(pipeline, (of_pod(name, page(t, start=900.0 + i)),), {name: f"uid-{i}"}, t)
            assert [engine.key.pod for engine in state.engines] == [name]

    def test_a_pod_that_is_gone_is_forgotten_before_the_next_one_answers(self) -> None:
        pipeline = Pipeline()
        self.tick(pipeline, (of_pod("a", page(1000.0)),), {"a": "uid-a"}, 1000.0)
        assert not self.tick(pipeline, (), {"b": "uid-b"}, 1001.0).engines
        state = self.tick(pipeline, (of_pod("b", failed(1002.0)),), {"b": "uid-b"}, 1002.0)
        assert [(engine.key.pod, engine.up, engine.error) for engine in state.engines] == [("b", False, "refused")]

    @pytest.mark.parametrize(("uid", "kept"), [("uid-1", True), ("uid-2", False)])
    def test_a_new_pod_of_the_same_name_begins_anew_and_a_restarted_container_does_not(
        self, uid: str, kept: bool
    ) -> None:
        """As a StatefulSet makes one."""
        pipeline = Pipeline()
        for i in range(30):
            t = 1000.0 + i
            self.tick(pipeline, (page(t, start=900.0),), {"chat-0": "uid-1"}, t, logs=(POOL,) if i == 0 else ())
        state = self.tick(pipeline, (page(1030.0, start=1029.0),), {"chat-0": uid}, 1030.0)
        (engine,) = state.engines
        assert engine.up
        assert (engine.signals.memory.kv_pool_bytes is not None) is kept

    def test_what_is_known_of_a_container_goes_with_its_pod(self) -> None:
        pipeline = Pipeline()
        oom = log_line("inference", "chat-0", "vllm", "torch.OutOfMemoryError: CUDA out of memory.")

        def counted(state: State) -> dict[str, dict[str, int]]:
            return {one.reading.pod: dict(one.log_events) for one in state.containers}

        assert counted(self.tick(pipeline, (), {"chat-0": "1"}, 1000.0, logs=(oom,))) == {"chat-0": {"cuda_oom": 1}}
        assert counted(self.tick(pipeline, (), None, 1001.0)) == {"chat-0": {"cuda_oom": 1}}, "pods are unknown"
        assert counted(self.tick(pipeline, (), {"chat-0": "1"}, 1002.0)) == {"chat-0": {"cuda_oom": 1}}
        assert counted(self.tick(pipeline, (), {"chat-0": "2"}, 1003.0)) == {}
        assert counted(self.tick(pipeline, (), {"chat-0": "2"}, 1004.0, logs=(oom,))) == {"chat-0": {"cuda_oom": 1}}
        assert counted(self.tick(pipeline, (), {}, 1005.0, logs=(oom,))) == {}, "its last words"

    def test_an_engine_named_by_hand_is_that_of_its_address(self) -> None:
        """The node's pods say nothing of it."""
        pipeline = Pipeline()
        for i in range(5):
            state = self.tick(pipeline, (page(1000.0 + i),), {"other": "1"}, 1000.0 + i)
        state = self.tick(pipeline, (), {}, 1005.0)
        assert [engine.signals.time - 1005.0 for engine in state.engines] == [0.0]
        assert state.engines[0].up

    def test_several_servers_behind_one_pod_say_nothing_of_the_next(self) -> None:
        pipeline = Pipeline()
        for i, start in enumerate((5.0, 4.0, 5.0)):
            self.tick(pipeline, (page(1000.0 + i, start=start),), {"chat-0": "1"}, 1000.0 + i)
        state = self.tick(pipeline, (page(1003.0, start=1003.0),), {"chat-0": "2"}, 1003.0)
        assert [(engine.up, engine.error) for engine in state.engines] == [(True, None)]


def gpu(number: int, used: int) -> GpuReading:
    return GpuReading(f"GPU-{number}", number, "nvidia", memory_total_bytes=80 * GIB, memory_used_bytes=used * GIB)


def owned(number: int, container: str = "vllm") -> GpuOwner:
    return GpuOwner(f"GPU-{number}", "inference", "chat-0", container)


def with_kv(page: Scrape, *levels: float) -> Scrape:
    return dataclasses.replace(
        page,
        engines=tuple(
            dataclasses.replace(reading, gauges={**reading.gauges, r.KV_USAGE: level})
            for reading, level in zip(page.engines, levels, strict=True)
        ),
    )


POOL = log_line("inference", "chat-0", "vllm", "Available KV cache memory: 60.00 GiB")


def on_node(pages: tuple[Scrape, ...], gpus: tuple[GpuReading, ...], *owners: GpuOwner) -> State:
    """The state of engines that logged the size of their pool."""
    return Pipeline().observe(Snapshot(1000.0, pages=pages, gpus=gpus, owners=owners, logs=(POOL,)))


class TestGpus:
    def test_each_data_parallel_engine_has_its_own_gpus(self) -> None:
        """Both GPUs hold 74 GiB; the first engine's pool of 60 GiB is all but full, the second's all but empty."""
        arguments = ("vllm", "serve", "m", "--data-parallel-size", "2")
        both = with_kv(page(1000.0, engines=("0", "1"), args=arguments), 0.99, 0.10)
        state = on_node((both,), (gpu(1, 74), gpu(0, 74)), owned(0), owned(1))
        found = {gpu.reading.uuid: gpu.demand_ratio for gpu in state.gpus}
        assert found == {"GPU-0": pytest.approx((74 - 0.6) / 80), "GPU-1": pytest.approx((74 - 54) / 80)}
        demands = [engine.signals.memory.device_demand_ratio for engine in state.engines]
        assert demands == [found["GPU-0"], found["GPU-1"]]

    @pytest.mark.parametrize(
        "arguments",
        [
            ("vllm", "serve", "m", "--data-parallel-size", "2", "--tensor-parallel-size", "2"),
            ("bash", "-c", "exec $CMD"),
        ],
        ids=["half of the ranks' GPUs are on another node", "nobody knows how many GPUs one needs"],
    )
    def test_where_the_gpus_of_an_engine_are_not_known_demand_is_absent(self, arguments: tuple[str, ...]) -> None:
        both = page(1000.0, engines=("0", "1"), args=arguments)
        state = on_node((both,), (gpu(0, 74), gpu(1, 74)), owned(0), owned(1))
        assert [gpu.demand_ratio for gpu in state.gpus] == [None, None]
        assert [engine.signals.memory.device_demand_ratio for engine in state.engines] == [None, None]

    def test_each_container_has_its_own_gpus(self) -> None:
        pages = (page(1000.0, container="a"), page(1000.0, SECOND, container="b"))
        state = on_node(pages, (gpu(0, 74), gpu(1, 8)), owned(0, "a"), owned(1, "b"))
        assert {engine.container: engine.gpus for engine in state.engines} == {"a": ("GPU-0",), "b": ("GPU-1",)}

    @pytest.mark.parametrize(("container", "owner"), [("", "vllm"), ("vllm", "")])
    def test_where_no_container_is_known_the_pod_decides(self, container: str, owner: str) -> None:
        state = on_node((page(1000.0, container=container),), (gpu(0, 74),), owned(0, owner))
        assert state.engines[0].gpus == ("GPU-0",)


@pytest.mark.parametrize(("restarted", "trend"), [(False, pytest.approx(0.0)), (True, None)])
def test_a_new_process_is_not_compared_with_the_standstill_before_it(restarted: bool, trend: float | None) -> None:
    """300 s of tokens, 70 s without any, then a scrape: of the same process, or of one that has just begun."""
    pipeline = Pipeline()
    for i in range(371):
        tokens = 4000.0 + 400.0 * min(i, 300)
        sample = page(1000.0 + i, running=4.0, start=900.0)
        if i == 370 and restarted:
            sample, tokens = page(1000.0 + i, running=4.0, start=1369.0), 0.0
        reading = dataclasses.replace(
            sample.engines[0], counters={r.GENERATION_TOKENS: tokens, r.PROMPT_TOKENS: tokens / 4}
        )
        state = after(pipeline, (dataclasses.replace(sample, engines=(reading,)),), (FIRST,))
    assert state.engines[0].signals.throughput.throughput_trend_ratio == trend
