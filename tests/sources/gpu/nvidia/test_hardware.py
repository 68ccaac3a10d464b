"""What PCI bus and modules say of a node without NVML, and what is logged of it."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpressure.sources.base import NothingHere
from kvpressure.sources.gpu.nvidia.source import NvidiaSource

BRIDGE, NVIDIA, AMD = ("0x060400", "0x1022"), ("0x030200", "0x10de"), ("0x030000", "0x1002")
ACCELERATOR, NVIDIA_NETWORK = ("0x120000", "0x1002"), ("0x020000", "0x10de")


@pytest.mark.parametrize(
    ("devices", "module", "reason"),
    [
        ([BRIDGE], False, "no_devices"),
        ([BRIDGE, AMD, ACCELERATOR, NVIDIA_NETWORK], False, "no_devices"),
        ([BRIDGE], True, "library_missing"),
        ([BRIDGE, NVIDIA], False, "library_missing"),
        ([], False, "library_missing"),
    ],
    ids=["no GPU", "another vendor's GPUs and a network card", "a loaded driver", "an NVIDIA GPU", "a hidden bus"],
)
def test_a_missing_library_is_a_failure_only_where_a_gpu_may_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, devices: list[tuple[str, str]], module: bool, reason: str
) -> None:
    for number, (kind, vendor) in enumerate(devices):
        device = tmp_path / f"bus/pci/devices/0000:0{number}:00.0"
        device.mkdir(parents=True)
        (device / "class").write_text(f"{kind}\n")
        (device / "vendor").write_text(f"{vendor}\n")
    if module:
        (tmp_path / "module/nvidia").mkdir(parents=True)
    source = NvidiaSource(SimpleNamespace(host_sys=tmp_path))
    with caplog.at_level(logging.DEBUG, logger="kvpressure.sources.gpu.nvidia.source"):
        down = source._went_down("library_missing")
    assert (down.reason, isinstance(down, NothingHere)) == (reason, reason == "no_devices")
    assert [record.levelname for record in caplog.records] == ([] if reason == "no_devices" else ["WARNING"])
