"""Recipe: a GPU vendor is a source and a row of the catalog, found through its entry point. The package
stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpressure.model.readings import GpuReading, Snapshot
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.collector import families
from kvpressure.publish.exposition import encode
from kvpressure.publish.reference import render_settings_reference
from kvpressure.settings.settings import Settings
from kvpressure.sources import catalog
from kvpressure.sources.catalog import SourceSpec
from kvpressure.sources.gpu.nvidia.hardware import none_here
from kvpressure.sources.kubernetes.device_ids import from_plugin, is_gpu_driver
from tests.recipes.installed import HERE, run, written_files


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[SourceSpec]:
    monkeypatch.syspath_prepend(str(HERE / "gpu_vendor"))
    assert catalog.adopt("toy")
    yield catalog.registry()["toy"]
    catalog.remove("toy")


def test_a_source_and_a_row_are_all_that_is_written() -> None:
    assert written_files("gpu_vendor") == ["toygpu/catalog.py", "toygpu/source.py"]


def test_its_gpus_are_in_the_metrics(toy: SourceSpec) -> None:
    reading = toy.factory(Settings()).read()
    state = Pipeline().observe(Snapshot(100.0, gpus=reading.gpus, expected_gpus=reading.expected_gpus))
    text = encode(families(state).collect(), openmetrics=False).decode()
    assert 'vendor="toy"' in text
    (used,) = [line for line in text.splitlines() if line.startswith("kvpressure_gpu_memory_used_bytes{")]
    assert 'uuid="TOY-0"' in used
    assert float(used.rpartition(" ")[2]) == 16 * 2**30


@pytest.mark.usefixtures("toy")
def test_its_settings_are_documented() -> None:
    assert "collector.toy" in render_settings_reference()


@pytest.mark.live
def test_serve_takes_its_flags_where_it_is_asked_for() -> None:
    asked = run("gpu_vendor", "serve", "--help", extensions="toy")
    assert "--collector.toy" in asked.stdout
    assert "ToyGPU accelerators" in asked.stdout
    refused = run("gpu_vendor", "serve", "--collector.toy")
    assert (refused.returncode, refused.stdout) == (2, "")


@pytest.mark.usefixtures("toy")
def test_kubernetes_resources_and_devices_are_its_own() -> None:
    assert "toygpu.example/" in Settings().kubelet_resources
    assert is_gpu_driver("gpu.toygpu.example")
    found = from_plugin("TOY-0::1", [GpuReading("TOY-0", 0, "toy")])
    assert found is not None
    assert (found.uuid, found.shared) == ("TOY-0", True)


@pytest.mark.usefixtures("toy")
def test_a_node_of_that_vendor_misses_no_nvidia_driver(tmp_path: Path) -> None:
    device = tmp_path / "bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "class").write_text("0x120000\n")
    (device / "vendor").write_text("0x7070\n")
    assert none_here(tmp_path)
    assert not none_here(tmp_path, "toy")
