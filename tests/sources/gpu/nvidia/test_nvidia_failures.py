"""How the NVIDIA source fails and recovers: one GPU, the library, the container. Through the real binding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sources.gpu.nvml_stub import GIB, Gpu, World, build, gpu_uuid
from tests.sources.gpu.nvml_stub.driver import Child, StartChild

pytestmark = pytest.mark.live

READ_EACH_TIME = """
    MemoryInfo UtilizationRates PowerUsage EnforcedPowerLimit CurrentClocksEventReasons ComputeRunningProcesses_v3
    MPSComputeRunningProcesses_v3
"""
SILENT = {f"nvmlDeviceGet{name}": 999 for name in READ_EACH_TIME.split()}
READINGS = (
    "memory_total_bytes",
    "memory_used_bytes",
    "utilization_ratio",
    "power_watts",
    "power_limit_watts",
    "throttle_reasons",
)


def errors(child: Child, world: World | None = None, after: float = 0.0) -> list[str | None]:
    """``error`` of each GPU, in order of index, once the world is this one and so many seconds have passed."""
    if world is not None:
        child.set(world)
    if after:
        child.advance(after)
    return [gpu["error"] for gpu in child.gpus()]


# --- one GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "sources",
    "GPU falls off the bus",
    "that GPU `gpu_up` 0, the others on time",
    "`gpus_seen` below `gpus_expected`",
    "the library is opened anew after a minute, then at longer intervals",
)
@pytest.mark.parametrize(("code", "reason"), [(15, "lost"), (16, "reset_required"), (28, "gpu_not_found")])
def test_a_lost_gpu_leaves_the_others_alone_and_comes_back(start: StartChild, code: int, reason: str) -> None:
    child = start(World(gpus=[Gpu(), Gpu(), Gpu()]))
    child.gpus()
    child.set(World(gpus=[Gpu(), Gpu(codes={"all": code}), Gpu()]))
    child.advance(1)
    got = child.read()
    assert [gpu["error"] for gpu in got["gpus"]] == [None, reason, None]
    assert got["errors"] == {reason: 1}
    assert got["expected"] == {"nvidia": 3}
    lost = got["gpus"][1]
    assert (lost["uuid"], lost["name"], lost["minor"]) == (gpu_uuid(1), "NVIDIA H100 80GB HBM3", 1)
    assert all(lost[name] is None for name in READINGS)
    assert lost["processes"] == []

    assert errors(child, World(gpus=[Gpu(), Gpu(), Gpu()]), 59) == [None, reason, None]
    assert child.calls()["nvmlInitWithFlags"] == 1  # opening the library anew disturbs the others: seldom
    assert errors(child, after=2) == [None, None, None]


def test_attempts_to_repair_become_seldom(start: StartChild) -> None:
    child = start(World(gpus=[Gpu(), Gpu(codes={"nvmlDeviceGetMemoryInfo": 15})]))
    for _ in range(3600):
        child.advance(1)
        if _ % 10 == 0:
            child.gpus()
    assert 4 <= child.calls()["nvmlInitWithFlags"] <= 7  # at 1, 3, 7, 15, 31 minutes


def test_an_attempt_that_falls_due_during_a_reading_is_made_in_the_next_one(start: StartChild) -> None:
    drift = 0.001
    healthy = World(gpus=[Gpu(), Gpu()])
    child = start(healthy)
    child.gpus()
    child.set(World(gpus=[Gpu(), Gpu(codes={"all": 15})]))
    child.advance(1, drift)
    assert errors(child) == [None, "lost"]
    child.set(healthy)
    child.advance(60 - 3 * drift, drift)
    assert errors(child) == [None, "lost"], "not yet due when this reading began"
    child.advance(1, drift)
    assert errors(child) == [None, None]


def test_attempts_to_repair_are_soon_again_for_the_next_loss(
    start: StartChild, capfd: pytest.CaptureFixture[str]
) -> None:
    healthy, lost = World(gpus=[Gpu(), Gpu()]), World(gpus=[Gpu(), Gpu(codes={"all": 15})])
    child = start(lost, own_process=True)
    for _ in range(40):
        child.read()
        child.advance(60)
    assert errors(child, healthy, 1800) == [None, None]
    assert errors(child, lost, 1) == [None, "lost"]
    assert errors(child, healthy, 61) == [None, None]
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("GPU")]
    assert set(told[:-2]) == {"GPU 1: lost"}  # known by no UUID yet; once an attempt
    assert told[-2:] == [f"GPU {gpu_uuid(1)}: lost", f"GPU {gpu_uuid(1)} answers again after: lost"]


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ([Gpu()], "gpu_not_found"),
        ([Gpu(), Gpu(codes={"nvmlDeviceGetHandleByIndex_v2": 8})], "insufficient_power"),
    ],
)
def test_a_gpu_that_a_driver_loaded_again_does_not_find_is_still_expected(
    start: StartChild, found: list[Gpu], reason: str
) -> None:
    child = start(World(gpus=[Gpu(), Gpu()], epoch=1))
    child.gpus()
    child.set(World(gpus=found, epoch=2))
    assert child.read()["reason"] == "uninitialized"
    child.advance(1)
    got = child.read()
    assert [gpu["error"] for gpu in got["gpus"]] == [None, reason]
    assert got["expected"] == {"nvidia": 2}


def test_a_gpu_without_handle_is_left_out_counted_and_looked_for_again(start: StartChild) -> None:
    child = start(World(gpus=[Gpu(codes={"nvmlDeviceGetHandleByIndex_v2": 11}), Gpu()]))
    got = child.read()
    assert [gpu["uuid"] for gpu in got["gpus"]] == [gpu_uuid(1)]
    assert got["errors"] == {"irq_issue": 1}
    assert got["expected"] == {"nvidia": 2}
    assert errors(child, World(gpus=[Gpu(), Gpu()]), 61) == [None, None]


def test_two_gpus_with_one_uuid_are_one_series(start: StartChild) -> None:
    got = start(World(gpus=[Gpu(uuid="GPU-same"), Gpu(uuid="GPU-same")])).read()
    assert len(got["gpus"]) == 1
    assert got["errors"] == {"invalid_data": 1}


def test_indexes_may_change_their_gpus(start: StartChild) -> None:
    child = start(World(gpus=[Gpu(uuid="GPU-a", memory_free=GIB), Gpu(uuid="GPU-b", memory_free=2 * GIB)], epoch=1))
    child.gpus()
    child.set(World(gpus=[Gpu(uuid="GPU-b", memory_free=2 * GIB), Gpu(uuid="GPU-a", memory_free=GIB)], epoch=2))
    child.read()
    child.advance(1)
    assert [(g["uuid"], g["index"], g["memory_used_bytes"]) for g in child.gpus()] == [
        ("GPU-b", 0, 78 * GIB),
        ("GPU-a", 1, 79 * GIB),
    ]


# --- the library ------------------------------------------------------------------------------------------------


def test_attempts_to_open_back_off_to_a_minute(start: StartChild) -> None:
    child = start(World(codes={"nvmlInitWithFlags": 9}))
    for _ in range(600):
        assert child.read()["reason"] == "driver_missing"
        child.advance(1)
    assert 14 <= child.calls()["nvmlInitWithFlags"] <= 18


def test_node_without_the_library_until_it_is_mounted(tmp_path: Path) -> None:
    directory = tmp_path / "late"
    directory.mkdir()
    with Child(directory / "libnvidia-ml.so.1", tmp_path / "world", World(gpus=[Gpu()])) as child:
        assert child.read()["reason"] == "library_missing"
        build(directory)
        assert errors(child, after=1) == [None]


def test_a_node_without_nvidia_gpus_is_no_failure_until_it_has_had_some(start: StartChild, tmp_path: Path) -> None:
    card = tmp_path / "bus/pci/devices/0000:00:00.0"
    card.mkdir(parents=True)
    (card / "class").write_text("0x030000\n")
    (card / "vendor").write_text("0x1002\n")
    child = start(World(codes={"nvmlInitWithFlags": 9}), host_sys=str(tmp_path))
    for _ in range(3):  # while waiting for the next attempt, too
        got = child.read()
        assert (got["reason"], got["nothing_here"]) == ("no_devices", True)
    assert errors(child, World(gpus=[Gpu()]), 1) == [None]
    child.set(World(codes={"nvmlInitWithFlags": 9}, epoch=2))
    child.read()
    child.advance(1)
    assert child.read()["reason"] == "driver_missing"


def test_library_without_the_call_to_open_it(start: StartChild) -> None:
    assert start(World(gpus=[Gpu()]), missing=("nvmlInitWithFlags",)).read()["reason"] == "old_driver"


@pytest.mark.parametrize(
    "unloaded",
    [
        World(gpus=[Gpu(codes={"all": 9})], codes={"all": 9}),
        World(gpus=[Gpu()], epoch=7),
        World(gpus=[Gpu(codes={"all": 999})], codes={"nvmlInitWithFlags": 9, "all": 999}),
    ],
)
def test_driver_unloaded_and_back(start: StartChild, unloaded: World) -> None:
    child = start(World(gpus=[Gpu()]))
    assert errors(child) == [None]
    child.set(unloaded)
    child.advance(1)
    got = child.read()
    assert got.get("reason", "unknown") in ("driver_missing", "uninitialized", "unknown")
    child.advance(1)
    child.set(World(gpus=[Gpu()], epoch=8))
    for _ in range(3):
        child.read()
        assert errors(child, after=1) == [None]


def test_what_is_remembered_and_counted_ends_with_the_library(start: StartChild) -> None:
    child = start(World(gpus=[Gpu(power_mw=None)], epoch=1))
    assert child.gpus()[0]["power_watts"] is None
    child.set(World(gpus=[Gpu()], epoch=2))
    assert child.read()["reason"] == "uninitialized"  # counted by whoever gets this
    child.advance(1)
    got = child.read()
    assert got["gpus"][0]["power_watts"] == 350.0
    assert got["errors"] == {}


def test_a_count_that_cannot_be_is_bounded(start: StartChild) -> None:
    got = start(World(gpus=[Gpu()], count=4_000_000_000)).read()
    assert len(got["gpus"]) == 1
    assert got["expected"] == {"nvidia": 256}


# --- only a new container helps -----------------------------------------------------------------------------------


def rounds_until_fatal(child: Child, limit: int) -> tuple[int | None, dict[str, Any]]:
    """Readings, a second apart, until one is fatal."""
    got: dict[str, Any] = {}
    for count in range(1, limit + 1):
        got = child.read()
        if got.get("fatal"):
            return count, got
        child.advance(1)
    return None, got


@pytest.mark.parametrize(("code", "reason"), [(999, "unknown"), (17, "blocked")])
def test_container_that_lost_its_gpus_ends(start: StartChild, code: int, reason: str) -> None:
    child = start(World(gpus=[Gpu(), Gpu()]))
    child.gpus()
    child.set(World(gpus=[Gpu(codes={"all": code}), Gpu(codes={"all": code})]))
    rounds, got = rounds_until_fatal(child, 30)
    assert rounds == 10
    assert got["reason"] == reason


def test_another_failure_in_between_begins_the_count_anew(start: StartChild) -> None:
    child = start(World(gpus=[Gpu()], epoch=1))
    child.gpus()
    for code in [999] * 9 + [9] + [999] * 9:
        child.set(World(gpus=[Gpu()], epoch=2, codes={"nvmlInitWithFlags": code}))
        child.advance(61)
        assert not child.read()["fatal"]
    child.advance(61)
    assert child.read()["fatal"]


def test_opening_anew_is_tried_before_giving_up(start: StartChild) -> None:
    child = start(World(gpus=[Gpu(codes=SILENT)]))
    for _ in range(6):
        assert errors(child) == ["unknown"]
        child.advance(20)
    assert child.calls()["nvmlInitWithFlags"] == 2


def test_one_good_gpu_is_worth_staying(start: StartChild) -> None:
    child = start(World(gpus=[Gpu(), Gpu()]))
    child.gpus()
    child.set(World(gpus=[Gpu(codes={"all": 999}), Gpu()]))
    assert rounds_until_fatal(child, 50)[0] is None


def test_container_that_never_saw_a_gpu_is_patient(start: StartChild) -> None:
    child = start(World(gpus=[Gpu()], codes={"nvmlInitWithFlags": 999}))
    rounds, _ = rounds_until_fatal(child, 1790)
    assert rounds is None
    rounds, _ = rounds_until_fatal(child, 100)
    assert rounds is not None


# --- sandboxes that pass some calls on and refuse others -------------------------------------------------------------


@pytest.mark.parametrize(("code", "reason"), [(17, "blocked"), (999, "unknown")])
def test_a_call_that_is_always_refused_is_left_alone_after_a_few_times(
    start: StartChild, code: int, reason: str
) -> None:
    """As with "not supported": a refused call may cost the host a line in its log each second."""
    child = start(World(gpus=[Gpu(codes={"nvmlDeviceGetPowerUsage": code})]))
    counted = 0
    for _ in range(100):
        got = child.read()
        counted += got["errors"].get(reason, 0)
        assert got["gpus"][0]["power_watts"] is None
        assert got["gpus"][0]["memory_used_bytes"] == 50 * GIB
        child.advance(1)
    assert counted == child.calls()["nvmlDeviceGetPowerUsage"] == 5
    child.set(World(gpus=[Gpu()]))
    child.advance(600)
    assert child.gpus()[0]["power_watts"] == 350.0


def test_a_call_that_fails_now_and_then_is_asked_at_each_reading(start: StartChild) -> None:
    child = start(World(gpus=[Gpu()]))
    for _ in range(10):
        child.set(World(gpus=[Gpu(codes={"nvmlDeviceGetPowerUsage": 999})]))
        for _ in range(4):
            assert child.gpus()[0]["power_watts"] is None
        child.set(World(gpus=[Gpu()]))
        assert child.gpus()[0]["power_watts"] == 350.0


def test_a_gpu_that_refuses_everything_is_asked_again_at_once(start: StartChild) -> None:
    """A device cgroup that was lost and came back, unlike one call that a sandbox does not know."""
    child = start(World(gpus=[Gpu(codes=dict.fromkeys(SILENT, 17)), Gpu()]))
    for _ in range(15):
        assert errors(child) == ["blocked", None]
        child.advance(1)
    assert errors(child, World(gpus=[Gpu(), Gpu()])) == [None, None]
    back = child.gpus()[0]
    assert (back["power_watts"], back["power_limit_watts"]) == (350.0, 700.0)  # also what is read seldom
