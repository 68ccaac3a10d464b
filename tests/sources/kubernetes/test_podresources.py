"""PodResources over real gRPC on a unix socket: owners, restarts of the kubelet, every failure with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpressure.model.readings import GpuOwner, GpuReading
from kvpressure.pipeline.joins import join_owners
from kvpressure.settings.settings import Settings
from kvpressure.sources.kubernetes import podresources
from kvpressure.sources.kubernetes.podresources import REASONS, PodResourcesSource
from tests.helpers.failing import reason_of
from tests.sources.kubernetes.kubelet import FakeKubelet, claim

Build = Callable[..., Settings]


GPUS = (
    *(GpuReading(f"GPU-{n}", n, "nvidia", minor=n) for n in range(3)),
    GpuReading("MIG-1", 2, "nvidia", minor=2, parent_uuid="GPU-2", gpu_instance_id=1),
)


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[FakeKubelet]:
    with FakeKubelet(tmp_path / "kubelet.sock") as server:
        yield server


@pytest.fixture
def source(settings: Build) -> Iterator[PodResourcesSource]:
    chosen = settings()
    chosen.shared.gpus = GPUS
    made = PodResourcesSource(chosen)
    yield made
    made.close()


@pytest.mark.attack(
    "device ids that name no GPU: other devices, numbers and UUIDs that this node does not have",
    "no owner; counted as `unknown_device`",
)
def test_owners(kubelet: FakeKubelet, source: PodResourcesSource) -> None:
    kubelet.pods = [
        claim("a", devices={"nvidia.com/gpu": ["GPU-1", "GPU-2"], "example.com/nic": ["nic-1"]}),
        claim("b", devices={"nvidia.com/mig-1g.10gb.shared": ["MIG-1::0"]}, container="other"),
        claim("c", devices={"nvidia.com/gpu": ["nvidia0", "nvidia5", "GPU-7", "GPU-1-0"]}),
        claim("d", dra=[("gpu.nvidia.com", "gpu-0"), ("nic.example.com", "nic-0")]),
        claim("e", devices={"nvidia.com/hostdev": ["0000:17:00.0"], "amd.com/nic": ["0000:18:00.0"]}),
    ]
    reading = source.read()
    assert join_owners(reading.owners or ()) == (
        GpuOwner("GPU-0", "inference", "c", "vllm", True),
        GpuOwner("GPU-0", "inference", "d", "vllm", True),
        GpuOwner("GPU-1", "inference", "a", "vllm"),
        GpuOwner("GPU-2", "inference", "a", "vllm"),
        GpuOwner("MIG-1", "inference", "b", "other", True),
    )
    assert reading.errors == {"unknown_device": 3}


def test_extra_resource_names_can_be_configured(kubelet: FakeKubelet, settings: Build) -> None:
    kubelet.pods = [claim("a", devices={"example.com/gpu": ["GPU-1"], "nvidia.com/gpu": ["GPU-2"]})]
    source = PodResourcesSource(settings(kubelet_resources=("example.com/gpu",)))
    assert [owner.uuid for owner in source.read().owners or ()] == ["GPU-1"]
    source.close()


@pytest.mark.fault(
    "sources",
    "kubelet restarts",
    "GPU owners absent for a moment",
    '`source_errors_total{source="podresources"}`',
    "the new socket is opened",
)
def test_a_restarted_kubelet_has_a_new_socket(kubelet: FakeKubelet, source: PodResourcesSource) -> None:
    kubelet.pods = [claim("a", devices={"nvidia.com/gpu": ["GPU-1"]})]
    source.read()
    kubelet.stop()
    assert reason_of(source.read, REASONS) == "no_socket"
    kubelet.start()
    assert [owner.uuid for owner in source.read().owners or ()] == ["GPU-1"]


def test_no_socket_and_nobody_behind_it(source: PodResourcesSource, tmp_path: Path) -> None:
    assert reason_of(source.read, REASONS) == "no_socket"
    (tmp_path / "kubelet.sock").write_text("not a socket")
    assert reason_of(source.read, REASONS) == "unavailable"


def test_garbage_and_too_much(
    kubelet: FakeKubelet, source: PodResourcesSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubelet.raw = b"\xff\xff\xff"
    assert reason_of(source.read, REASONS) == "bad_answer"
    monkeypatch.setattr(podresources, "MAX_ANSWER_BYTES", 1000)
    kubelet.raw = None
    kubelet.pods = [claim(f"pod-{i}", devices={"nvidia.com/gpu": [f"GPU-{i % 3}"]}) for i in range(100)]
    assert reason_of(source.read, REASONS) == "too_large"
    monkeypatch.setattr(podresources, "MAX_ANSWER_BYTES", 1_000_000)
    source.close()
    monkeypatch.setattr(podresources, "MAX_OWNERS", 10)
    reading = source.read()
    assert len(reading.owners or ()) == 10
    assert reading.errors == {"too_many_devices": 90}
