"""Calls that do not return, and closing: nobody waits for them, and what returns is used again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvpressure.sources.gpu.nvidia.call_guard import HangGuard
from tests.helpers.failing import raising
from tests.helpers.waiting import until
from tests.sources.gpu.nvml_stub import Gpu, World
from tests.sources.gpu.nvml_stub.driver import Child, StartChild

pytestmark = pytest.mark.live

BUDGET = 1.0  # each GPU may use half of it
PATIENCE = 3.0  # what a busy test machine adds; a hang would take a minute


def reading(child: Child, check: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first reading for which ``check`` holds."""
    return until(lambda: got if check(got := child.read()) else None)


def errors(got: dict[str, Any]) -> list[str | None]:
    return [gpu["error"] for gpu in got["gpus"]]


def test_a_hanging_gpu_is_given_up_and_the_rest_goes_on(start: StartChild) -> None:
    child = start(World(gpus=[Gpu(), Gpu(), Gpu()]), own_process=True, budget_seconds=BUDGET)
    child.read()
    child.set(World(gpus=[Gpu(), Gpu(hangs={"nvmlDeviceGetPowerUsage": 60}), Gpu(utilization=11)]))
    got = child.read()
    assert got["seconds"] < BUDGET + PATIENCE
    assert errors(got) == [None, "timeout", None]
    assert got["errors"] == {"timeout": 1}
    assert got["gpus"][1]["power_watts"] is None
    assert got["gpus"][1]["name"] is not None
    assert got["gpus"][2]["utilization_ratio"] == 0.11
    for _ in range(20):  # not tried again while it hangs, so nothing waits and no thread is added
        got = child.read()
        assert got["seconds"] < BUDGET / 2
        assert errors(got) == [None, "timeout", None]
        assert got["errors"] == {"timeout": 1}
        assert got["threads"] == 3
    child.set(World(gpus=[Gpu(), Gpu(), Gpu()]))
    assert errors(reading(child, lambda got: errors(got) == [None] * 3)) == [None] * 3
    assert reading(child, lambda got: got["threads"] == 2)["threads"] == 2


def test_all_gpus_hanging_is_a_failed_source(start: StartChild) -> None:
    hanging = {"nvmlDeviceGetMemoryInfo": 60.0}
    child = start(World(gpus=[Gpu() for _ in range(4)]), own_process=True, budget_seconds=BUDGET)
    child.read()
    child.set(World(gpus=[Gpu(hangs=hanging) for _ in range(4)]))
    for _ in range(4):
        got = child.read()
        assert got["reason"] == "timeout"
        assert got["seconds"] < BUDGET + PATIENCE
        assert not got["fatal"]
        assert got["threads"] <= 1 + 4 + 1
    assert child.read()["seconds"] < BUDGET / 2
    child.set(World(gpus=[Gpu() for _ in range(4)]))
    got = reading(child, lambda got: "gpus" in got and errors(got) == [None] * 4)
    assert errors(got) == [None] * 4
    assert got["errors"] == {}, "a source that failed as a whole is counted by whoever asked it"


def test_gpus_that_no_time_is_left_for_are_not_given_up(start: StartChild) -> None:
    hanging = Gpu(hangs={"nvmlDeviceGetMemoryInfo": 60})
    child = start(World(gpus=[Gpu(), Gpu(), Gpu(), Gpu()]), own_process=True, budget_seconds=BUDGET)
    child.read()
    child.set(World(gpus=[hanging, hanging, hanging, Gpu()]))
    assert child.read()["threads"] == 1 + 2  # two have used up the time; the others were not begun
    assert errors(child.read()) == ["timeout", "timeout", "timeout", None]


def test_opening_that_takes_long_is_waited_for_once(start: StartChild) -> None:
    child = start(World(gpus=[Gpu()], hangs={"nvmlInitWithFlags": 60}), own_process=True, budget_seconds=0.2)
    for _ in range(3):
        got = child.read()
        assert (got["reason"], got["fatal"]) == ("timeout", False)
        assert got["seconds"] < 0.2 + PATIENCE
    child.set(World(gpus=[Gpu()]))
    assert errors(reading(child, lambda got: "gpus" in got)) == [None]
    assert child.calls()["nvmlInitWithFlags"] == 1


def test_library_that_fails_after_a_hang_is_opened_anew(start: StartChild) -> None:
    child = start(World(gpus=[Gpu(), Gpu()]), own_process=True, budget_seconds=BUDGET)
    child.read()
    child.set(World(gpus=[Gpu(hangs={"nvmlDeviceGetMemoryInfo": 60}), Gpu()]))
    assert errors(child.read()) == ["timeout", None]
    child.set(World(gpus=[Gpu(hangs={"nvmlDeviceGetMemoryInfo": 60}), Gpu()], epoch=2))
    assert child.read()["reason"] == "uninitialized"
    assert "nvmlShutdown" not in child.calls()  # not under a call that is still inside
    child.set(World(gpus=[Gpu(), Gpu()], epoch=2))
    child.advance(1)
    got = reading(child, lambda got: "gpus" in got and errors(got) == [None, None])
    assert errors(got) == [None, None]


def test_a_repair_that_hangs_is_not_begun_twice(start: StartChild) -> None:
    lost = Gpu(codes={"nvmlDeviceGetMemoryInfo": 15})
    child = start(World(gpus=[Gpu(), lost]), own_process=True, budget_seconds=0.2)
    assert errors(child.read()) == [None, "lost"]
    child.set(World(gpus=[Gpu(), lost], hangs={"nvmlInitWithFlags": 60}))
    for _ in range(3):
        child.advance(3600)
        assert child.read()["reason"] == "timeout"
    child.set(World(gpus=[Gpu(), Gpu()]))
    assert errors(reading(child, lambda got: "gpus" in got)) == [None, None]
    calls = child.calls()
    assert (calls["nvmlInitWithFlags"], calls["nvmlShutdown"]) == (2, 1)


@pytest.mark.parametrize(
    "world",
    [
        World(gpus=[Gpu(hangs={"nvmlDeviceGetMemoryInfo": 60})]),
        World(gpus=[Gpu()], hangs={"nvmlInitWithFlags": 60}),
        World(gpus=[Gpu(event_types=8)], hangs={"nvmlShutdown": 60}),
        World(gpus=[Gpu(event_types=8)], hangs={"nvmlEventSetWait_v2": 60}),
    ],
)
def test_closing_does_not_wait_for_what_hangs(start: StartChild, world: World) -> None:
    child = start(world, own_process=True, budget_seconds=0.2)
    child.read()
    began = time.monotonic()
    child.close_source()
    assert time.monotonic() - began < 2.0 + PATIENCE


def test_a_driver_that_could_not_be_released_is_released_the_next_time(start: StartChild) -> None:
    """It counts how often it was initialised, and finds a lost GPU again only when it was released as often."""
    gpus = [Gpu(event_types=8), Gpu(event_types=8)]
    lost = [gpus[0], Gpu(codes={"all": 15})]
    child = start(World(gpus=gpus, hangs={"nvmlEventSetWait_v2": 60}))
    child.gpus()
    child.set(World(gpus=lost, hangs={"nvmlEventSetWait_v2": 60}))
    child.gpus()
    child.advance(61)
    child.gpus()
    calls = child.calls()
    assert (calls["nvmlInitWithFlags"], calls.get("nvmlShutdown", 0)) == (2, 0), "not under a wait that hangs"
    child.set(World(gpus=lost))
    until(lambda: child.calls().get("nvmlEventSetFree", 0) >= 1)
    child.advance(121)
    child.gpus()
    calls = child.calls()
    assert (calls["nvmlInitWithFlags"], calls["nvmlShutdown"]) == (3, 2)


def test_closing_releases_the_driver(start: StartChild) -> None:
    child = start(World(gpus=[Gpu(gpm=1, sm=1.0, event_types=8)]), nvidia_gpm=True)
    for _ in range(3):
        child.read()
        child.advance(1)
    child.close_source()
    calls = child.calls()
    assert calls["nvmlShutdown"] == calls["nvmlInitWithFlags"] == 1
    assert calls["nvmlGpmSampleFree"] == calls["nvmlGpmSampleAlloc"]
    assert calls["nvmlEventSetFree"] == calls["nvmlEventSetCreate"] == 1


def test_a_thread_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls waited for a thread that was never there, and every GPU counted as hanging."""
    guard = HangGuard("test")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError):
            guard.call("GPU-1", lambda: 1, 5.0)
    assert guard.call("GPU-1", lambda: 1, 5.0) == 1
    guard.close()
