"""What cannot be is absent and counted, of whichever source, where readings enter."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvpressure.model.readings import AllocatorReading, ContainerReading, GpuProcess, GpuReading, Termination
from kvpressure.runtime import plausibility
from kvpressure.runtime.plausibility import IMPOSSIBLE, believed
from kvpressure.sources.base import Reading
from tests.runtime.test_monitor import Clock, Scripted, worker

GPU = GpuReading("GPU-1", 0, "nvidia", memory_used_bytes=5, power_watts=0.0, xid_errors={79: 1})
SOUND = Reading(
    gpus=(dataclasses.replace(GPU, processes=(GpuProcess(1, 7),)),),
    containers=(ContainerReading("n", "p", "c", restarts=3, last_termination=Termination("OOMKilled", 137, 1e9)),),
    allocator=(AllocatorReading("n", "p", 0, 5, 6),),
)
IMPOSSIBLE_VALUES = (-1, float("nan"), float("inf"), -float("inf"), 1e300, 10**400)


def test_a_sound_reading_is_the_same_object() -> None:
    assert believed(SOUND) is SOUND


@pytest.mark.fault(
    "sources",
    "a driver, cgroup or API object gives impossible numbers",
    "those values are absent, the rest of the reading counts",
    '`source_errors_total{reason="impossible"}`',
    "next good value",
)
@pytest.mark.parametrize("value", IMPOSSIBLE_VALUES, ids=lambda value: str(value)[:10])
@pytest.mark.parametrize(
    ("kind", "fields"),
    [("gpus", plausibility._GPU), ("containers", plausibility._CONTAINER), ("allocator", plausibility._ALLOCATOR)],
)
def test_what_cannot_be_is_absent_and_counted(kind: str, fields: tuple[tuple[str, float], ...], value: Any) -> None:
    (one,) = getattr(SOUND, kind)
    for name, most in fields:
        for bad in (value, most * 1.01):
            given = dataclasses.replace(
                SOUND, **{kind: (dataclasses.replace(one, **{name: bad}),)}, errors={"other": 2}
            )
            found = believed(given)
            assert getattr(found, kind) == (dataclasses.replace(one, **{name: None}),)
            assert found.errors == {"other": 2, IMPOSSIBLE: 1}
        assert believed(dataclasses.replace(SOUND, **{kind: (dataclasses.replace(one, **{name: most}),)})).errors == {}


def test_every_number_of_a_reading_has_a_ceiling() -> None:
    """A field that somebody adds is believed only once it is in the table."""
    known = {
        GpuReading: {name for name, _ in plausibility._GPU},
        ContainerReading: {name for name, _ in plausibility._CONTAINER},
        AllocatorReading: {name for name, _ in plausibility._ALLOCATOR},
    }
    for reading, names in known.items():
        numbers = {one.name for one in dataclasses.fields(reading) if one.type in ("int | None", "float | None")}
        assert numbers == names


@pytest.mark.parametrize("value", IMPOSSIBLE_VALUES, ids=lambda value: str(value)[:10])
def test_parts_of_a_reading_are_left_out_alone(value: Any) -> None:
    gpu = dataclasses.replace(
        SOUND.gpus[0], driver="1\x1b[2J", name="a\n", processes=(GpuProcess(1, value),), xid_errors={79: value, 13: 2}
    )
    ended = Termination("a\x1b[2J", 2**70, value)
    box = dataclasses.replace(SOUND.containers[0], last_termination=ended)
    found = believed(Reading(gpus=(gpu,), containers=(box,)))
    assert (found.gpus[0].driver, found.gpus[0].name) == ("1\\x1b[2J", "a\\n")
    assert found.gpus[0].processes == (GpuProcess(1, None),)
    assert found.gpus[0].xid_errors == {13: 2}
    assert found.containers[0].last_termination == Termination("a\\x1b[2J", None, None)
    assert found.errors == {IMPOSSIBLE: 4}


def test_a_worker_gives_out_what_is_believed_and_counts_the_rest() -> None:
    clock = Clock()
    lie = Reading(gpus=(GpuReading("GPU-1", 0, "nvidia", memory_used_bytes=-5, power_watts=100.0),))
    one = worker(Scripted(lambda: lie), clock)
    assert one.read_once()
    found = one.take(clock.now)
    assert found.gpus == (GpuReading("GPU-1", 0, "nvidia", power_watts=100.0),)
    assert one.health(clock.now).errors == {IMPOSSIBLE: 1}
    assert one.health(clock.now).up is True
