"""XID events, counted by the thread that waits for them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvpressure.model.gpu_faults import NVIDIA_XIDS, OF_APPLICATIONS, OF_KERNELS, OTHER_XID
from kvpressure.sources.gpu.nvidia.events import XIDS
from tests.helpers.waiting import until
from tests.sources.gpu.nvml_stub import Gpu, World
from tests.sources.gpu.nvml_stub.driver import Child, StartChild

pytestmark = pytest.mark.live

SINGLE_BIT, XID = 1, 8


@pytest.fixture
def start(start: StartChild) -> StartChild:
    """A process for each test: threads that wait for events must not meet those of the test before."""
    return functools.partial(start, own_process=True)


def node(*gpus: Gpu, **changes: Any) -> World:
    for gpu in gpus:
        gpu.event_types = SINGLE_BIT | XID
    return World(gpus=list(gpus), **changes)


def gpus_once(child: Child, check: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """GPUs of the first reading for which ``check`` holds."""
    return until(lambda: gpus if check(gpus := child.gpus()) else None)


def test_events_are_counted_by_gpu(start: StartChild) -> None:
    child = start(node(Gpu(), Gpu()))
    assert [gpu["xid_errors"] for gpu in child.gpus()] == [{}, {}]
    before = time.time()
    child.set(node(Gpu(), Gpu(), events=[(1, XID, 79), (1, XID, 31), (1, XID, 31), (0, XID, 48)]))
    _, second = gpus_once(child, lambda gpus: gpus[0]["xid_errors"] == {"48": 1})
    assert second["xid_errors"] == {"79": 1, "31": 2}
    assert set(second["xid_last_times"]) == {"79", "31"}
    assert before <= second["xid_last_times"]["79"] <= time.time()


def test_counts_outlive_the_gpu_and_the_library(start: StartChild) -> None:
    events = [(0, XID, 79)]
    child = start(node(Gpu(), Gpu()))
    child.gpus()
    child.set(node(Gpu(codes={"all": 15}), Gpu(), events=events))
    gpus = gpus_once(child, lambda gpus: bool(gpus[0]["xid_errors"]))
    assert (gpus[0]["error"], gpus[0]["xid_errors"]) == ("lost", {"79": 1})
    child.set(node(Gpu(), Gpu(), events=[*events, (0, XID, 43)]))
    child.advance(61)
    gpus = gpus_once(child, lambda gpus: len(gpus[0]["xid_errors"]) == 2)
    assert (gpus[0]["error"], gpus[0]["xid_errors"]) == (None, {"79": 1, "43": 1})


@pytest.mark.parametrize("code", [3, 15, 999])
def test_a_gpu_that_cannot_be_registered_is_left_out(start: StartChild, code: int) -> None:
    refusing = Gpu(codes={"nvmlDeviceRegisterEvents": code})
    child = start(node(refusing, Gpu(), events=[(0, XID, 13), (1, XID, 31)]))
    gpus = gpus_once(child, lambda gpus: bool(gpus[1]["xid_errors"]))
    assert [gpu["xid_errors"] for gpu in gpus] == [{}, {"31": 1}]
    child.close_source()
    sets = 1 if code == 3 else 2
    until(lambda: child.calls().get("nvmlEventSetFree") == sets)  # closing does not wait for a thread that is late
    assert child.calls()["nvmlEventSetFree"] == child.calls()["nvmlEventSetCreate"] == sets


@pytest.mark.parametrize(
    "world",
    [
        World(gpus=[Gpu(event_types=0)]),
        World(gpus=[Gpu(event_types=XID)], codes={"nvmlEventSetCreate": 3}),
        World(gpus=[Gpu(event_types=XID, codes={"nvmlDeviceGetSupportedEventTypes": 13})]),
    ],
)
def test_no_events_is_no_failure(start: StartChild, world: World) -> None:
    child = start(world)
    got = child.read()
    assert got["errors"] == {}
    assert got["threads"] == 2
    assert "nvmlEventSetWait_v2" not in child.calls()


@pytest.mark.parametrize("code", [10, 15, 999])
def test_a_failing_wait_does_not_spin(start: StartChild, code: int) -> None:
    child = start(node(Gpu(), codes={"nvmlEventSetWait_v2": code}))
    child.gpus()
    time.sleep(0.3)
    assert child.gpus()[0]["error"] is None
    assert child.calls()["nvmlEventSetWait_v2"] == 1


@pytest.mark.parametrize("code", [1, 9, 13, 18])
def test_a_wait_that_can_not_succeed_ends(start: StartChild, code: int) -> None:
    child = start(node(Gpu(), codes={"nvmlEventSetWait_v2": code}))
    until(lambda: child.read()["threads"] == 2)
    assert child.calls()["nvmlEventSetFree"] == 1


def test_numbers_that_the_catalogue_does_not_have_are_counted_together(start: StartChild) -> None:
    child = start(node(Gpu()))
    child.gpus()
    child.set(node(Gpu(), events=[*((0, XID, number) for number in range(400)), (0, XID, 79)]))
    (gpu,) = gpus_once(child, lambda gpus: gpus[0]["xid_errors"].get("79") == 2)
    known = {str(number) for number in XIDS}
    assert gpu["xid_errors"].keys() == gpu["xid_last_times"].keys() == known | {str(OTHER_XID)}
    assert gpu["xid_errors"][str(OTHER_XID)] == 400 - len(known)


def test_every_number_that_an_alert_or_a_verdict_names_is_counted_apart() -> None:
    assert set(NVIDIA_XIDS) | OF_APPLICATIONS["nvidia"] | OF_KERNELS["nvidia"] <= XIDS
