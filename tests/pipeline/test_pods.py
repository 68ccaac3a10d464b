"""Pods that answer, start or are down, and memory that ran out, from snapshots; with the exporter restarted between."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from kvpressure.engines.registry import log_line
from kvpressure.model import readings as r
from kvpressure.model.pools import EnginePool
from kvpressure.model.readings import ContainerReading, EngineReading, Run, Scrape, Snapshot, Termination
from kvpressure.model.state import REMOVED, VANISHED, PodState, State
from kvpressure.pipeline.engines import FORGET_SECONDS
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.settings.thresholds import builtin

T = 100_000.0
POOL = EnginePool("chat", "", "owner", "7d4b9c6f5")
START, LEAST = (builtin()[name] for name in ("start_seconds", "start_least_seconds"))


def container(
    pod: str = "chat-0", restarts: int = 0, last: Termination | None = None, **run: object
) -> ContainerReading:
    kept = Run(**{"since": T, "counted": True, **run})
    return ContainerReading("inf", pod, "vllm", restarts, last_termination=last, pool=POOL, run=kept)


def page(t: float, error: str | None = None, pod: str = "chat-0", running: float | None = 0.0) -> Scrape:
    gauges = {} if running is None else {r.RUNNING: running, r.WAITING: 0.0}
    reading = EngineReading("m", "0", gauges, {}, {}, {})
    told = {"engines": () if error else (reading,), "error": error, "args": ("--served-model-name", "m")}
    return Scrape(f"http://{pod}:8000/metrics", t, "inf", pod, "vllm", **told, pool=POOL)


def snapshot(t: float, *readings: ContainerReading | Scrape, **more: object) -> Snapshot:
    containers = tuple(one for one in readings if isinstance(one, ContainerReading))
    pods = {("inf", one.pod): f"uid of {one.pod}" for one in containers}
    pages = tuple(one for one in readings if isinstance(one, Scrape))
    return Snapshot(t, **{"pages": pages, "containers": containers, "pods": pods, **more})


def pod_of(state: State, name: str = "chat-0") -> PodState:
    (found,) = (pod for pod in state.pods if pod.pod == name)
    return found


def after(pipeline: Pipeline, snapshots: Iterable[Snapshot]) -> PodState:
    states = [pipeline.observe(one) for one in snapshots]
    return pod_of(states[-1])


def test_a_pod_starts_until_it_answers_and_that_is_told() -> None:
    pipeline = Pipeline()
    pulling = after(pipeline, [snapshot(T + 5, container(stopped="ContainerCreating"))])
    assert (pulling.starting, pulling.answers) == (True, None)
    loading = after(pipeline, [snapshot(T + 60, container(), page(T + 60, "refused"))])
    assert (loading.starting, loading.answers, loading.reason) == (True, None, "")
    up = after(pipeline, [snapshot(T + 300, container(), page(T + 300))])
    assert (up.starting, up.answers, up.answers_since, up.usual_start) == (False, True, T + 300, 300.0)
    assert (up.pool.name, up.pool.revision) == ("chat", "7d4b9c6f5")


@pytest.mark.parametrize("seconds", [60.0, START])
def test_a_start_may_take_twice_what_the_last_ones_took_or_a_minimum(seconds: float) -> None:
    pipeline = Pipeline()
    first = [
        snapshot(T + 5, container(), page(T + 5, "refused")),
        snapshot(T + seconds, container(), page(T + seconds)),
    ]
    after(pipeline, first)
    allowed = max(LEAST, 2 * seconds)
    begun = T + 10 * START
    loading = [container(), container("chat-1", since=begun)]

    def second(after_seconds: float) -> PodState:
        t = begun + after_seconds
        return pod_of(pipeline.observe(snapshot(t, *loading, page(t, "refused", "chat-1"))), "chat-1")

    assert second(allowed - 1).starting
    assert (second(allowed).starting, second(allowed + 1).answers) == (False, False)


def test_a_start_of_which_nothing_is_known_here_may_take_half_an_hour() -> None:
    late = after(Pipeline(), [snapshot(T + START, container(), page(T + START, "refused"))])
    assert (late.starting, late.answers, late.reason) == (False, False, "connection refused")
    assert after(Pipeline(), [snapshot(T + START - 1, container(), page(T + START - 1, "refused"))]).starting


FAILED_STARTS: dict[str, tuple[ContainerReading, str | None]] = {
    "image": (container(stopped="ImagePullBackOff"), None),
    "restarted": (container(restarts=1), "refused"),
    "crashes": (container(restarts=3, stopped="CrashLoopBackOff"), "refused"),
    "ready before": (container(answered=T + 20), "refused"),
}


@pytest.mark.parametrize("name", FAILED_STARTS)
def test_what_failed_or_served_before_does_not_start_whoever_asks_first(name: str) -> None:
    """The exporter itself has just been started: what the pod did before is in its status."""
    reading, error = FAILED_STARTS[name]
    pages = [page(T + 60, error)] if error else []
    for _ in range(3):
        found = after(Pipeline(), [snapshot(T + 60, reading, *pages)])
        assert (found.starting, found.answers) == (False, False)
        assert found.reason


@pytest.mark.parametrize("error", ["unreachable", "dns", "tls", "unauthorized", "http_404", "no_engine_metrics"])
def test_what_says_nothing_about_the_engine_is_no_reading(error: str) -> None:
    pipeline = Pipeline()
    states = [snapshot(T + 60, container(), page(T + 60))]
    found = after(pipeline, [*states, *(snapshot(t, container(), page(t, error)) for t in (T + 90.0, T + 120.0))])
    assert (found.answers, found.starting, found.reason) == (None, False, "")


@pytest.mark.parametrize("error", ["refused", "reset", "timeout", "http_5xx"])
def test_a_refusal_is_one(error: str) -> None:
    states = [snapshot(T + 60, container(), page(T + 60))]
    refused = [snapshot(t, container(), page(t, error)) for t in (T + 90.0, T + 120.0)]
    assert after(Pipeline(), [*states, *refused]).answers is False


@pytest.mark.parametrize(
    ("ready", "answered", "running", "answers"),
    [
        *((False, T + 20, running, running != 0.0) for running in (0.0, 2.0, None)),
        *((False, None, 0.0, True), (None, T + 20, 0.0, True)),
    ],
)
def test_a_pod_that_is_no_longer_ready_and_gets_no_request_answers_us_alone(
    ready: bool | None, answered: float | None, running: float | None, answers: bool
) -> None:
    """A cluster sends no request to it. Whose probe never succeeded in this run is no longer ready."""
    unready = replace(container(answered=answered), ready=ready)
    found = after(Pipeline(), (snapshot(t, unready, page(t, running=running)) for t in (T + 60, T + 90)))
    assert (found.answers, found.starting, bool(found.reason)) == (answers, False, not answers)


def test_an_api_server_that_is_lost_takes_no_reading_and_makes_none() -> None:
    pipeline = Pipeline()
    answering = after(pipeline, [snapshot(T + 60, container(), page(T + 60))])
    lost = after(pipeline, [snapshot(T + 90, page(T + 90), pods=None)])
    assert answering.answers is lost.answers is True
    assert Pipeline().observe(snapshot(T + 120, pods=None)).pods == ()
    for ready, error in ((False, None), (True, "refused")):  # nor does what its probe said last count as what it says
        read = replace(container(answered=T + 20), ready=ready)
        before = [snapshot(T + 60, read, page(T + 60)), snapshot(T + 90, read, page(T + 90, error))]
        after_it = [snapshot(t, page(t, error), pods=None) for t in (T + 120, T + 150)]
        assert (after(pipeline, before).answers, after(pipeline, after_it).answers) == (ready and None, not ready)


def test_a_pod_that_is_deleted_is_not_counted_as_down() -> None:
    pipeline = Pipeline()
    states = [
        snapshot(T + 60, container(), page(T + 60)),
        *(snapshot(t, container(ended="deleted"), page(t, "refused")) for t in (T + 90.0, T + 120.0)),
    ]
    assert after(pipeline, states).answers is None


def gone(t: float) -> Snapshot:
    return snapshot(t, container("other-0"))


def failed(t: float) -> Snapshot:
    return snapshot(t, container("other-0"), container(counted=False, ended="Failed"))


@pytest.mark.parametrize("leave", [gone, failed])
def test_a_bare_pod_that_served_is_missed_for_a_while(leave: Callable[[float], Snapshot]) -> None:
    pipeline = Pipeline()
    pipeline.observe(snapshot(T + 60, container("other-0"), container(counted=False), page(T + 60, running=3.0)))
    found = after(pipeline, [leave(T + 65)])
    assert (found.answers, found.reason, found.pool.name) == (None, VANISHED, "chat")
    assert after(pipeline, [leave(T + 65 + FORGET_SECONDS)]).reason == VANISHED
    assert [one.pod for one in pipeline.observe(leave(T + 66 + FORGET_SECONDS)).pods] == ["other-0"]


@pytest.mark.parametrize(
    ("running", "counted", "idle", "reason"),
    [
        (0.0, False, 5, REMOVED),
        (3.0, True, 0, None),
        (3.0, True, 5, REMOVED),
        (3.0, False, FORGET_SECONDS + 1, REMOVED),
    ],
)
def test_one_without_requests_was_removed_and_one_that_others_count_is_left_to_them(
    running: float, counted: bool, idle: float, reason: str | None
) -> None:
    pipeline = Pipeline()
    there = container(counted=counted)
    pipeline.observe(snapshot(T + 60, container("other-0"), there, page(T + 60, running=running)))
    pipeline.observe(snapshot(T + 60 + idle, container("other-0"), there, page(T + 60 + idle)))
    reasons = {one.pod: one.reason for one in pipeline.observe(gone(T + 65 + idle)).pods}
    assert reasons.get("chat-0") == reason


def test_a_pod_of_several_engine_containers_is_one_pod() -> None:
    two = container(), replace(container(restarts=2), container="second")
    other = replace(page(T + 60), target="http://chat-0:8001/metrics", container="second")
    pipeline = Pipeline()
    up = after(pipeline, [snapshot(T + 60, *two, page(T + 60), other)])
    again = after(pipeline, [snapshot(T + 65, *two, page(T + 65), replace(other, time=T + 65))])
    assert up.answers is again.answers is True
    half = [snapshot(t, *two, page(t), replace(other, time=t, engines=(), error="refused")) for t in (T + 90, T + 95.0)]
    assert after(pipeline, half).answers is False


KILLED = Termination("OOMKilled", 137, T + 50)
OOM = log_line("inf", "chat-0", "vllm", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")


def ran_out(state: State) -> list[tuple[str, float, bool]]:
    (found,) = state.containers
    return [(one.what, one.time, one.lost) for one in found.out_of_memory]


@pytest.mark.parametrize(
    ("ended", "what"),
    [(KILLED, "host"), (Termination("Error", 137, T + 50), "sigkill"), (Termination("Error", 1, T + 50), None)],
)
def test_a_kill_is_told_whoever_saw_it(ended: Termination, what: str | None) -> None:
    state = Pipeline().observe(snapshot(T + 60, container(restarts=1, last=ended), page(T + 60, "refused")))
    assert ran_out(state) == ([(what, T + 50, True)] if what else [])
    assert (state.containers[0].model_name, state.containers[0].pool.name) == ("m", "chat")


def test_an_allocation_that_fails_costs_requests_where_an_engine_served_and_no_longer_answers() -> None:
    for before, lost in ((page(T + 60), True), (page(T + 60, "refused"), False)):
        pipeline = Pipeline()
        pipeline.observe(snapshot(T + 60, container(), before))
        pipeline.observe(snapshot(T + 61, container(), page(T + 61, "refused"), logs=(OOM,)))
        state = pipeline.observe(snapshot(T + 90, container(), page(T + 90, "refused")))
        assert ran_out(state) == [("gpu", T + 61, lost)]
        assert pod_of(state).reason == ("out of GPU memory while serving" if lost else "")


def test_host_memory_near_its_limit_is_a_sign() -> None:
    full = replace(container(), memory_limit_bytes=100, memory_working_set_bytes=90)
    assert ran_out(Pipeline().observe(snapshot(T + 60, full, page(T + 60)))) == [("host_limit", T + 60, False)]
