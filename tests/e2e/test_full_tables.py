"""What fills a table of the exporter pushes nobody out who has a better claim, and whoever is left out is listed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.waiting import until
from tests.sources.gpu.nvml_stub import Gpu, World, write
from tests.sources.kubernetes import objects
from tests.sources.kubernetes.node import Node, uuid

pytestmark = pytest.mark.live

XID = 8  # nvmlEventTypeXidCriticalError


@pytest.fixture
def node(tmp_path: Path, nvml_library: Path) -> Iterator[Node]:
    """A node that is not started yet, with the engine ``vllm-0`` on its first GPU."""
    with Node(tmp_path, nvml_library) as made:
        made.add("vllm-0", [uuid(0)])
        yield made


def stranger(name: str, *words: str, **fields: Any) -> dict[str, Any]:
    """A pod of another tenant, first by name, that starts vLLM on no GPU."""
    command = ["vllm", "serve", "m", "--port", "9000", *words]
    container = objects.container(command=command, image="busybox", ports=[], resources={})
    return objects.pod(name, "aaa", ip="127.0.0.9", containers=[container], **fields)


@pytest.mark.attack(
    "a pod without a GPU whose command names 64 data-parallel ranks, each on a port",
    "engines with a GPU keep their places; a rank that has none is down with the reason `target_limit`",
)
@pytest.mark.parametrize("with_kubelet", [True, False])
def test_ranks_of_a_pod_without_a_gpu_take_no_place_of_an_engine_with_one(node: Node, with_kubelet: bool) -> None:
    ranks = ("--data-parallel-size", "64", "--data-parallel-multi-port-external-lb")
    node.api.apply(stranger("evil", *ranks))
    if not with_kubelet:  # the pod's own word has to do
        node.kubelet.stop()
    node.start()
    until(lambda: node.value("engine_up", pod="vllm-0") == 1, 30)
    until(lambda: len(node.samples("engine_up", pod="evil")) == 64, 30)
    until(lambda: node.value("source_errors_total", source="engines", reason="target_limit"))
    before = node.value("source_errors_total", source="engines", reason="target_limit") or 0
    until(lambda: (node.value("source_errors_total", source="engines", reason="target_limit") or 0) > before)
    assert len(node.samples("target_errors_total", reason="target_limit")) == 1
    until(lambda: node.labels("container_discovery_info", "reason", pod="evil") == {"target_limit"})
    assert node.labels("container_discovery_info", "result", pod="vllm-0") == {"engine"}


@pytest.mark.attack(
    "2 100 ended pods on a node, first by name",
    "engines that run are read, new ones too; those that are left out are counted as `too_many_pods`",
)
def test_ended_pods_hide_no_engine(node: Node) -> None:
    for number in range(2100):
        node.api.apply(stranger(f"job-{number:04}", phase="Failed"))
    node.start()
    until(lambda: node.value("engine_up", pod="vllm-0") == 1, 60)
    until(lambda: node.value("source_errors_total", source="pods", reason="too_many_pods"))
    before = node.value("source_errors_total", source="pods", reason="too_many_pods") or 0
    until(lambda: (node.value("source_errors_total", source="pods", reason="too_many_pods") or 0) > before)
    node.add("vllm-1", [uuid(1)])
    until(lambda: node.value("engine_up", pod="vllm-1") == 1, 60)


@pytest.mark.attack(
    "a driver that tells of 3 000 XID numbers, with control characters in its version",
    "numbers that NVIDIA's catalogue does not have make one series; control characters are escaped",
)
def test_numbers_and_texts_of_a_driver(node: Node) -> None:
    events = [(0, XID, number) for number in (*range(1000, 4000), 79)]
    gpu = Gpu(event_types=XID, name="H100\x1b[31m")
    write(node.world_path, World(gpus=[gpu], driver_version="580\x1b[2J", events=events))
    node.start()
    until(lambda: node.value("gpu_xid_errors_total", xid="79") == 1, 60)
    for name in ("gpu_xid_errors_total", "gpu_xid_last_timestamp_seconds"):
        assert node.labels(name, "xid") == {"79", "other"}
    assert node.value("gpu_xid_errors_total", xid="other") == 3000
    assert node.labels("gpu_info", "driver") == {r"580\\x1b[2J"}
    assert node.labels("gpu_info", "name") == {r"H100\\x1b[31m"}
