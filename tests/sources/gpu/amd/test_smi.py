"""AMD's library: trusted only when it fits, then normalised. The real ``amdsmi`` package over a stub library."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpressure.sources.gpu.amd import smi
from kvpressure.sources.gpu.amd.source import RESCAN_SECONDS, AmdSource
from tests.sources.gpu.amd import trees
from tests.sources.gpu.amd.smi_stub import SmiDevice, build, readings, write
from tests.sources.gpu.amd.test_sysfs import Clock, Given
from tests.sources.gpu.amd.trees import GIB

pytestmark = pytest.mark.live

BUS = "0000:05:00.0"
TOTAL_MIB = trees.MI300X_VRAM >> 20
GAPS: dict[str, object] = {"used": 0, "busy": None, "power_file": None}
"""A card of which sysfs shows the size of its memory alone."""


@pytest.fixture(scope="session")
def rocm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("rocm"))


def full(bus: str = BUS, **changes: object) -> SmiDevice:
    values: dict[str, object] = {
        "total_bytes": trees.MI300X_VRAM,
        "used_bytes": 120 * GIB,
        "total_mib": TOTAL_MIB,
        "used_mib": 120 << 10,
        "gfx": 55,
        "current_watts": 480,
        "cap": 650_000_000,
        **changes,
    }
    return SmiDevice(bus, **values)


def read(rocm: Path, tmp_path: Path, device: SmiDevice, **card: object) -> dict[str, Any]:
    trees.mi300x(tmp_path / "sys", 1, **GAPS | card)
    write(tmp_path / "world", [device])
    (reading,) = readings(rocm, tmp_path / "world", tmp_path / "sys")
    return reading


def one(*given: Any, **card: object) -> dict[str, Any]:
    return read(*given, **card)["gpus"][0]


def refusal(rocm: Path, tmp_path: Path, devices: list[SmiDevice], **world: Any) -> str:
    """Why the library is not used; what sysfs shows is read all the same."""
    trees.mi300x(tmp_path / "sys", 1, busy=None)
    write(tmp_path / "world", devices, **world)
    (reading,) = readings(rocm, tmp_path / "world", tmp_path / "sys")
    assert reading["gpus"][0]["memory_used_bytes"] == 100 * GIB
    assert reading["gpus"][0]["utilization_ratio"] is None
    said: str = reading["log"]
    assert "amdsmi is not used" in said
    return said


# --- figures ------------------------------------------------------------------------------------------------------


def test_the_library_gives_only_what_sysfs_lacks(rocm: Path, tmp_path: Path) -> None:
    gpu = one(rocm, tmp_path, full(), used=100 * GIB, power_file="power1_input")
    assert gpu["utilization_ratio"] == 0.55
    assert gpu["memory_used_bytes"] == 100 * GIB
    assert gpu["power_watts"] == 612.0


def test_the_library_is_not_touched_when_sysfs_tells_all(rocm: Path, tmp_path: Path) -> None:
    assert read(rocm, tmp_path, full(), used=GIB, busy=97, power_file="power1_input")["imported"] is False


def test_memory_in_mebibytes_becomes_bytes(rocm: Path, tmp_path: Path) -> None:
    gpu = one(rocm, tmp_path, full(total_bytes="-", used_bytes="!6", used_mib=1000), vram=0)
    assert gpu["memory_total_bytes"] == TOTAL_MIB << 20
    assert gpu["memory_used_bytes"] == 1000 << 20


FIGURES: tuple[tuple[dict[str, object], dict[str, float | None]], ...] = (  # said of a card, and read
    ({"current_watts": 480, "socket_watts": 470, "average_watts": 300}, {"power_watts": 480.0}),
    ({"current_watts": 0xFFFF, "socket_watts": 470}, {"power_watts": 470.0}),
    ({"current_watts": "-", "average_watts": 300}, {"power_watts": 300.0}),
    ({"current_watts": "-", "socket_watts": 470_500_000}, {"power_watts": 470.5}),
    ({"current_watts": 0, "socket_watts": 0, "average_watts": 0}, {"power_watts": None}),
    ({"current_watts": "-"}, {"power_watts": None}),
    ({"gfx": "-", "cap": "-"}, {"utilization_ratio": None, "power_limit_watts": None}),
    ({"used_bytes": trees.MI300X_VRAM + 1}, {"memory_used_bytes": None}),
)


def test_figures_of_each_card_by_their_names_and_units(rocm: Path, tmp_path: Path) -> None:
    tree = trees.mi300x(tmp_path / "sys", len(FIGURES), **GAPS)
    buses = sorted(card.name for card in (tree.root / "devices/pci0000:00").iterdir())
    write(tmp_path / "world", [full(bus, **said) for bus, (said, _) in zip(buses, FIGURES, strict=True)])
    (reading,) = readings(rocm, tmp_path / "world", tmp_path / "sys")
    for gpu, (said, expected) in zip(reading["gpus"], FIGURES, strict=True):
        assert {name: gpu[name] for name in expected} == expected, said


def test_partitions_keep_their_own_memory_and_get_no_activity(rocm: Path, tmp_path: Path) -> None:
    trees.mi300x_cpx(tmp_path / "sys", busy=None)
    write(tmp_path / "world", [full(), *(full(f"0000:05:00.{n}", used_bytes=1, gfx=0) for n in range(1, 8))])
    (reading,) = readings(rocm, tmp_path / "world", tmp_path / "sys")
    whole, *parts = reading["gpus"]
    assert (whole["memory_used_bytes"], whole["utilization_ratio"]) == (97 * GIB, 0.55)
    assert {part["memory_used_bytes"] for part in parts} == {12 * GIB}
    assert {part["utilization_ratio"] for part in parts} == {None}


def test_a_call_that_is_refused_is_counted_and_the_rest_stays(rocm: Path, tmp_path: Path) -> None:
    reading = read(rocm, tmp_path, full(gfx="!30", cap="!10", total_bytes="!2"))
    assert reading["gpus"][0]["power_watts"] == 480.0
    assert set(reading["errors"]) == {"busy", "no_permission"}


def test_unified_memory_stays_absent(rocm: Path, tmp_path: Path) -> None:
    tree = trees.mi300x(tmp_path / "sys", 2, **GAPS)  # what the other one lacks is asked of both
    tree.write("class/kfd/kfd/topology/nodes/1/mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {900 * GIB}")
    write(tmp_path / "world", [full(), full("0000:27:00.0")])
    (reading,) = readings(rocm, tmp_path / "world", tmp_path / "sys")
    assert reading["gpus"][0]["memory_used_bytes"] is None
    assert reading["gpus"][0]["utilization_ratio"] == 0.55


def test_a_library_that_knows_no_more_is_not_asked_each_second(rocm: Path, tmp_path: Path) -> None:
    trees.mi300x(tmp_path / "sys", 1, busy=None)
    write(tmp_path / "world", [full(gfx="!30")])
    first, *soon = readings(rocm, tmp_path / "world", tmp_path / "sys", times=4, step=1)
    assert first["errors"]["busy"] >= 1
    assert [reading["errors"] for reading in soon] == [{}, {}, {}]
    _, later = readings(rocm, tmp_path / "world", tmp_path / "sys", times=2)
    assert later["errors"] == {"busy": 1}


# --- trust --------------------------------------------------------------------------------------------------------


def test_without_the_library_import_fails_and_nothing_is_printed(tmp_path: Path) -> None:
    assert "KeyError" in refusal(tmp_path / "no-rocm", tmp_path, [full()])


def test_a_library_without_one_symbol_does_not_import(tmp_path: Path) -> None:
    older = build(tmp_path / "rocm-6.4", missing=("amdsmi_get_cpu_affinity_with_scope",))
    assert "amdsmi_get_cpu_affinity_with_scope" in refusal(older, tmp_path, [full()])


@pytest.mark.parametrize("version", [(25, 5, 1), (26, 1, 0)])
def test_a_library_of_another_release_is_not_trusted(rocm: Path, tmp_path: Path, version: tuple[int, int, int]) -> None:
    assert f"belong to library {'.'.join(map(str, version))}" in refusal(rocm, tmp_path, [full()], version=version)


@pytest.mark.parametrize(
    ("devices", "world", "reason"),
    [
        ([full(total_bytes=trees.MI300X_VRAM // 2)], {}, f"{BUS}: the library says {trees.MI300X_VRAM // 2}"),
        ([full("0000:06:00.0")], {}, f"the library does not see {BUS}"),
        ([full()], {"init": 34}, "DRIVER_NOT_LOADED"),
        ([SmiDevice(BUS)], {}, "no device answers"),
    ],
)
def test_a_library_that_contradicts_sysfs_or_answers_nothing_is_not_trusted(
    rocm: Path, tmp_path: Path, devices: list[SmiDevice], world: dict[str, int], reason: str
) -> None:
    assert reason in refusal(rocm, tmp_path, devices, **world)


@pytest.mark.parametrize(
    ("wrapper", "library", "fits"),
    [
        ("7.0.2", {"major": 26, "minor": 0, "release": 2, "build": "x"}, True),
        ("26.0.2+39589fda", {"major": 26, "minor": 0, "release": 0}, False),
        ("24.7.1+1234567", {"year": 24, "major": 7, "minor": 1, "release": 0}, True),
        ("6.4.4", {"major": 25, "minor": 5, "release": 1}, True),
        ("6.3.3", {"major": 24, "minor": 7, "release": 1}, False),
        ("unknown", {"major": 26, "minor": 0, "release": 2}, False),
        ("7.0.2", {"major": "N/A"}, False),
        ("7.0.2", {}, False),
    ],
)
def test_which_wrapper_belongs_to_which_library(wrapper: str, library: dict[str, object], fits: bool) -> None:
    with nullcontext() if fits else pytest.raises(smi.SmiError):
        smi._check_release(SimpleNamespace(__version__=wrapper, amdsmi_get_lib_version=lambda: library))


def test_a_failed_library_is_tried_again_only_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[float] = []
    clock = Clock()

    def failing(_expected: object) -> smi.Smi:
        opened.append(clock.now)
        raise smi.SmiError("no")

    monkeypatch.setattr(smi, "Smi", failing)
    trees.mi300x(tmp_path, 1, **GAPS)
    source = AmdSource(Given(tmp_path), clock)
    for _ in range(int(RESCAN_SECONDS) * 2):
        source.read()
        clock.now += 1
    assert opened == [1000.0, 1000.0 + RESCAN_SECONDS]
