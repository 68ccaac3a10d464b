"""What a GPU does not tell is absent on the page: no 0, nothing from before, nothing of another device, no double
count.

Random worlds: any calls of the driver fail with any codes, any files are missing, refused, empty or junk.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from kvpressure.model.readings import GpuReading, Snapshot
from kvpressure.model.state import GpuState, State
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.collector import families
from kvpressure.sources.base import NothingHere
from kvpressure.sources.gpu.amd.source import AmdSource
from tests.sources.gpu.amd import trees
from tests.sources.gpu.amd.test_sysfs import Clock, Given
from tests.sources.gpu.nvml_stub import GIB

pytestmark = pytest.mark.live

EXAMPLES = 60
NEVER_ZERO = (
    "memory_total_bytes",
    "memory_used_bytes",
    "memory_reserved_bytes",
    "memory_used_ratio",
    "memory_demand_ratio",
    "utilization_ratio",
    "sm_activity_ratio",
    "tensor_activity_ratio",
    "dram_activity_ratio",
    "power_watts",
    "power_limit_watts",
)

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


def check(found: Page, truth: Mapping[str, Mapping[str, float]]) -> None:
    """Each figure on the page is the true one of its device; a device that is down has none."""
    down = {uuid for (name, uuid), value in found.items() if name == "kvpressure_gpu_up" and value == 0}
    for (name, uuid), value in found.items():
        short = name.removeprefix("kvpressure_gpu_")
        if short == "up":
            continue
        assert uuid not in down, (name, uuid)
        assert short in NEVER_ZERO, name
        same = short.replace("demand", "used")  # without an engine
        assert value == pytest.approx(truth[uuid][same]), (name, uuid)


# --- AMD ------------------------------------------------------------------------------------------------------------

FILES = (
    "mem_info_vram_total",
    "mem_info_vram_used",
    "gpu_busy_percent",
    "hwmon/*/power1_input",
    "hwmon/*/power1_cap",
    "unique_id",
    "product_name",
    "vendor",
    "current_compute_partition",
)
JUNK = ("", "0", "N/A", "-1", "999999999999999999999", "\x00\xff", "12 34", "nan", "0x10")


def amd_truth(parts: int) -> dict[str, float]:
    """Figures of a whole MI300X of ``trees``, or of one of its partitions."""
    total, used = trees.MI300X_VRAM // parts, (100 if parts == 1 else 12) * GIB
    found = {"memory_total_bytes": float(total), "memory_used_bytes": float(used), "memory_used_ratio": used / total}
    return (
        found if parts > 1 else {**found, "utilization_ratio": 0.97, "power_watts": 612.0, "power_limit_watts": 750.0}
    )


def broken_trees(where: Path) -> Iterator[tuple[Path, bool]]:
    """Trees in which some files of the first GPU are gone or hold junk, and whether the GPU is split."""
    for number in range(EXAMPLES):
        draw = random.Random(number)
        split = number % 3 == 0
        root = where / str(number)
        (trees.mi300x_cpx(root, 1) if split else trees.mi300x(root, 2))
        gpu = root / "devices/pci0000:00/0000:05:00.0"
        for name in draw.sample(FILES, draw.randint(1, 5)):
            path = next(gpu.glob(name))
            if draw.random() < 0.4:
                path.unlink()
            else:
                # 0 % busy is an answer; a 0 anywhere else is the driver's "not known"
                path.write_text(draw.choice([text for text in JUNK if text != "0" or name != "gpu_busy_percent"]))
        yield root, split


def test_amd_pages_hold_the_truth_or_nothing(tmp_path: Path) -> None:
    shown: set[str] = set()
    only_gpu_is_nobodys: list[bool] = []
    for root, split in broken_trees(tmp_path):
        try:
            gpus = AmdSource(Given(root), Clock()).read().gpus or ()
        except NothingHere:  # the only GPU does not say that it is AMD's
            only_gpu_is_nobodys.append(split)
            continue
        whole = {**amd_truth(1), "memory_used_bytes": float(97 * GIB)} if split else amd_truth(1)
        truth = {gpu.uuid: amd_truth(8) if gpu.parent_uuid else whole for gpu in gpus}
        found = page(gpus)
        check(found, truth)
        shown |= {name.removeprefix("kvpressure_gpu_") for name, _ in found}
    assert shown == {*(name for name in NEVER_ZERO if "activity" not in name and "reserved" not in name), "up"}
    assert all(only_gpu_is_nobodys)


# --- GPUs that are split ---------------------------------------------------------------------------------------------


def split_gpu(vendor: str, *parts: Mapping[str, int | None]) -> tuple[GpuReading, ...]:
    """A GPU of 80 GiB, 60 of them used, and its parts."""
    gpu = GpuReading(
        "GPU-1", 0, vendor, memory_total_bytes=80, memory_used_bytes=60, memory_reserved_bytes=2, power_watts=350.0
    )
    return (
        gpu,
        *(GpuReading(f"part-{n}", 0, vendor, parent_uuid="GPU-1", **fields) for n, fields in enumerate(parts)),
    )


def of_gpu(found: Page) -> set[str]:
    return {name.removeprefix("kvpressure_gpu_") for name, uuid in found if uuid == "GPU-1"}


def test_a_gpu_does_not_repeat_the_memory_that_its_instances_tell() -> None:
    part = {"memory_total_bytes": 10, "memory_used_bytes": 6}
    assert of_gpu(page(split_gpu("nvidia", part, part))) == {"up", "power_watts"}


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


def test_gpus_beside_a_split_one_keep_their_figures() -> None:
    other = replace(split_gpu("nvidia")[0], uuid="GPU-2", index=1)
    found = page((*split_gpu("nvidia", {"memory_total_bytes": 10}), other))
    assert ("kvpressure_gpu_memory_used_ratio", "GPU-2") in found
    assert ("kvpressure_gpu_memory_total_bytes", "GPU-1") not in found


def test_the_demand_of_an_engine_on_a_split_gpu_as_a_whole_is_shown() -> None:
    gpu, part = split_gpu("nvidia", {"memory_total_bytes": 10})
    state = State(time=1000.0, gpus=(GpuState(gpu, 0.5), GpuState(part)))
    names = {s.name for family in families(state).collect() for s in family.samples if s.labels.get("uuid") == "GPU-1"}
    assert "kvpressure_gpu_memory_demand_ratio" in names
