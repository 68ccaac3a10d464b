"""What the PCI bus says of a node without a usable driver, and how loudly that is logged."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpressure.sources.gpu.nvidia.source import NvidiaSource

BRIDGE, NVIDIA, AMD = ("0x060400", "0x1022"), ("0x030200", "0x10de"), ("0x030000", "0x1002")


@pytest.mark.parametrize(
    ("devices", "level"),
    [([BRIDGE], "INFO"), ([BRIDGE, AMD], "INFO"), ([BRIDGE, NVIDIA], "WARNING"), ([], "WARNING")],
    ids=["no GPU", "another vendor's GPU", "an NVIDIA GPU", "a hidden bus"],
)
def test_a_missing_driver_is_a_warning_only_where_a_gpu_may_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, devices: list[tuple[str, str]], level: str
) -> None:
    for number, (kind, vendor) in enumerate(devices):
        device = tmp_path / f"bus/pci/devices/0000:0{number}:00.0"
        device.mkdir(parents=True)
        (device / "class").write_text(f"{kind}\n")
        (device / "vendor").write_text(f"{vendor}\n")
    source = NvidiaSource()
    source._options = SimpleNamespace(host_sys=tmp_path)
    with caplog.at_level(logging.INFO, logger="kvpressure.sources.gpu.nvidia.source"):
        source._log_down("library_missing")
    assert [record.levelname for record in caplog.records] == [level]
