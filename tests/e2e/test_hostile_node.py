"""A pod that lies about who it is takes nothing from another: neither its logs, its GPU nor its cgroup."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.waiting import until
from tests.sources.gpu.nvml_stub import GIB, Gpu
from tests.sources.kubernetes import objects
from tests.sources.kubernetes.node import Node, uuid

pytestmark = pytest.mark.live

OOM = "ERROR 11-14 22:18:22 [core.py:1101] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"
VICTIM = objects.uid_of("inference", "vllm-0")
EVIL = objects.uid_of("zzz", "evil")


def evil(name: str = "evil", running: bool = False, **annotations: str) -> dict[str, Any]:
    """A pod that comes after the victim by its name; ``running``: the kubelet runs it."""
    made = objects.pod(name, "zzz", annotations={f"kubernetes.io/config.{key}": v for key, v in annotations.items()})
    made["metadata"]["ownerReferences"] = [
        {"apiVersion": "v1", "kind": "Node", "name": objects.NODE, "uid": "1", "controller": True}
    ]
    if not running:
        made["status"] = {"phase": "Pending"}
    return made


def its_logs(node: Node, elsewhere: Path, *names: str) -> None:
    """What the kubelet makes for the pod before its container starts, and what its owner has put ``elsewhere``."""
    (node.logs_root / f"zzz_evil_{EVIL}").mkdir()
    (elsewhere / "vllm").mkdir(parents=True)
    for name in names:
        (elsewhere / "vllm" / name).write_text(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ} stderr F {OOM}\n")


def long_name(_: Node) -> dict[str, Any]:
    return evil("e" * 253)


def path_to_another_log(node: Node) -> dict[str, Any]:
    its_logs(node, node.where / "unused")
    written = f"{EVIL}/../inference_vllm-0_{VICTIM}"
    return evil(hash=written, mirror=written)


def path_out_of_the_logs(node: Node) -> dict[str, Any]:
    its_logs(node, node.where / "outside", "0.log")
    return evil(hash=f"{EVIL}/../../outside")


def path_to_a_pipe(node: Node) -> dict[str, Any]:
    its_logs(node, node.where / "plugin" / "zzz_evil", "0.log")
    os.mkfifo(node.where / "plugin" / "zzz_evil" / "vllm" / "0.log.20261126-130000")
    return evil(hash=f"{EVIL}/../../plugin/zzz_evil")


def uid_of_another_in_every_place(_: Node) -> dict[str, Any]:
    return evil(hash=VICTIM, mirror=VICTIM, running=True)


def uid_of_another_without_the_kubelet(node: Node) -> dict[str, Any]:
    node.kubelet.stop()
    return evil(hash=VICTIM, mirror=VICTIM, running=True)


def container_of_another(_: Node) -> dict[str, Any]:
    made = evil(running=True)
    claimed = objects.container_id("inference", "vllm-0", "vllm")
    made["status"]["containerStatuses"][0]["containerID"] = f"containerd://{claimed}"
    return made


def letter_of_a_slice(_: Node) -> dict[str, Any]:
    return evil(hash="k", running=True)


@pytest.mark.attack(
    "a pod that never runs with a name of 253 characters, or with a path, a letter or another pod's uid as the hash"
    " of a static pod",
    "no log, GPU or cgroup of another pod is lost or taken",
)
@pytest.mark.writer(
    "anyone who may create a pod, even one that never runs",
    "any name; annotations of the kubelet",
    "nothing: logs, processes and cgroups stay those of the pod that the API server knows by that uid",
    "a hash counts with its shape, the mirror annotation and running containers, never as another pod's uid",
)
@pytest.mark.parametrize(
    "lie",
    [
        long_name,
        path_to_another_log,
        path_out_of_the_logs,
        path_to_a_pipe,
        uid_of_another_in_every_place,
        uid_of_another_without_the_kubelet,
        container_of_another,
        letter_of_a_slice,
    ],
)
def test_a_pod_that_lies_about_itself_takes_nothing_from_another(
    tmp_path: Path, nvml_library: Path, lie: Callable[[Node], dict[str, Any]]
) -> None:
    with Node(tmp_path, nvml_library) as node:
        node.gpus = [Gpu(processes=[(4242, 20 * GIB)])]
        node.write_world()
        node.api.apply(lie(node))
        node.add("vllm-0", [uuid(0)], (4242,))
        node.start()
        until(lambda: node.value("engine_up", pod="vllm-0") == 1, 20)
        until(lambda: node.value("container_memory_used_ratio", pod="vllm-0") == 0.25)
        until(lambda: node.value("gpu_process_memory_bytes", pod="vllm-0") == 20 * GIB)
        until(lambda: node.labels("gpu_pod_info", "pod") == {"vllm-0"})
        until(lambda: node.value("source_up", source="logs") == 1)
        for count in (1, 2):  # at the second, every log has been read since the first
            node.logs["vllm-0"].write(OOM)
            until(lambda count=count: node.value("log_events_total", pod="vllm-0", event="cuda_oom") == count)
        for family in ("log_events_total", "gpu_pod_info", "gpu_process_memory_bytes", "engine_gpu_info"):
            assert node.labels(family, "namespace") <= {"inference"}, family
        assert node.samples("source_errors_total", reason="internal") == {}


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.attack("a pipe in place of a rotated log", "the logs are followed as before")
def test_a_pipe_among_the_logs_holds_up_no_log(tmp_path: Path, nvml_library: Path) -> None:
    with Node(tmp_path, nvml_library) as node:
        node.add("vllm-0", [uuid(0)])
        pipe(node.logs["vllm-0"].directory / "0.log.20260101-000000")
        node.start()
        until(lambda: node.value("source_up", source="logs") == 1, 20)
        for count in (1, 2):
            node.logs["vllm-0"].write(OOM)
            until(lambda count=count: node.value("log_events_total", pod="vllm-0", event="cuda_oom") == count)


@pytest.mark.attack("a pipe in place of the token for the API server", "`api_unauthorized` until the token is back")
def test_a_pipe_in_place_of_the_token_is_over_when_the_token_is_back(tmp_path: Path, nvml_library: Path) -> None:
    with Node(tmp_path, nvml_library) as node:
        node.add("vllm-0", [uuid(0)])
        node.start()
        until(lambda: node.value("source_up", source="pods") == 1, 20)
        pipe(tmp_path / "token")
        node.api.cut()
        until(lambda: node.value("source_errors_total", source="pods", reason="api_unauthorized"))
        (tmp_path / "token.new").write_text("token-1")
        (tmp_path / "token.new").rename(tmp_path / "token")
        until(lambda: node.value("source_up", source="pods") == 1, 40)
