"""A GPU that is split repeats nothing that its parts tell, and keeps what they do not."""

from __future__ import annotations

from collections.abc import Mapping

from kvpressure.model.readings import GpuReading, Snapshot
from kvpressure.model.state import GpuState, State
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.collector import families

Page = Mapping[tuple[str, str], float]


def page(gpus: tuple[GpuReading, ...]) -> Page:
    """What is published of these readings, by name and UUID."""
    state = Pipeline().observe(Snapshot(1000.0, gpus=gpus))
    return {
        (s.name, s.labels["uuid"]): s.value
        for family in families(state).collect()
        for s in family.samples
        if s.name.startswith("kvpressure_gpu_") and not s.name.endswith(("_info", "_throttled", "_total"))
    }


def split_gpu(vendor: str, *parts: Mapping[str, int | None]) -> tuple[GpuReading, ...]:
    """A GPU of 80 GiB, 60 of them used, and its parts."""
    gpu = GpuReading("GPU-1", 0, vendor, memory_total_bytes=80, memory_used_bytes=60, power_watts=350.0)
    return (
        gpu,
        *(GpuReading(f"part-{n}", 0, vendor, parent_uuid="GPU-1", **fields) for n, fields in enumerate(parts)),
    )


def of_gpu(found: Page) -> set[str]:
    return {name.removeprefix("kvpressure_gpu_") for name, uuid in found if uuid == "GPU-1"}


def test_what_the_parts_do_not_tell_stays_with_the_gpu() -> None:
    """MI300X in CPX mode under a driver that does not tell what each partition holds: totals there, use here."""
    part = {"memory_total_bytes": 40, "memory_used_bytes": None}
    found = page(split_gpu("amd", part, part))
    assert of_gpu(found) == {"up", "power_watts", "memory_used_bytes"}
    sums = {
        short: sum(value for (name, _), value in found.items() if name == f"kvpressure_gpu_memory_{short}_bytes")
        for short in ("total", "used")
    }
    assert sums == {"total": 80, "used": 60}


def test_one_silent_instance_does_not_bring_the_gpus_figures_back() -> None:
    """Else a sum would jump with every failed call."""
    told = {"memory_total_bytes": 10, "memory_used_bytes": 6}
    assert of_gpu(page(split_gpu("nvidia", told, {}))) == {"up", "power_watts"}


def test_the_demand_of_an_engine_on_a_split_gpu_as_a_whole_is_shown() -> None:
    gpu, part = split_gpu("nvidia", {"memory_total_bytes": 10})
    state = State(time=1000.0, gpus=(GpuState(gpu, 0.5), GpuState(part)))
    names = {s.name for family in families(state).collect() for s in family.samples if s.labels.get("uuid") == "GPU-1"}
    assert "kvpressure_gpu_memory_demand_ratio" in names
