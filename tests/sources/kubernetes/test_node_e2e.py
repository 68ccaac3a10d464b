"""The whole exporter on a node: what is joined, what a churn of pods leaves behind, what each failure costs."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.waiting import until
from tests.sources.gpu.nvml_stub import GIB, Gpu
from tests.sources.kubernetes.node import SOURCES, Node, uuid

pytestmark = pytest.mark.live

OOM = (
    "(EngineCore pid=2) ERROR 11-14 22:18:22 [core.py:1101] torch.OutOfMemoryError: CUDA out of memory. Tried to"
    " allocate"
)


@contextmanager
def running(where: Path, library: Path) -> Iterator[Node]:
    """A node with an exclusive GPU of ``vllm-0`` and one that ``vllm-1`` and ``vllm-2`` share."""
    with Node(where, library) as made:
        made.gpus = [Gpu(processes=[(4242, 20 * GIB)]), Gpu(processes=[(5001, 3 * GIB), (5002, 5 * GIB), (7, GIB)])]
        made.write_world()
        made.add(
            "vllm-0",
            [uuid(0)],
            (4242,),
            restarts=2,
            last={"reason": "OOMKilled", "exitCode": 137, "finishedAt": "2026-01-02T03:04:05Z"},
        )
        made.add("vllm-1", [f"{uuid(1)}::0"], (5001,))
        made.add("vllm-2", [f"{uuid(1)}::1"], (5002,))
        (made.proc / "7").mkdir()
        (made.proc / "7" / "cgroup").write_text("0::/system.slice/dcgm.service\n")
        made.start()
        until(lambda: made.labels("engine_up", "pod") == {"vllm-0", "vllm-1", "vllm-2"}, 20)
        yield made


@pytest.fixture
def node(tmp_path: Path, nvml_library: Path) -> Iterator[Node]:
    """A node of the test's own."""
    with running(tmp_path, nvml_library) as made:
        yield made


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[Node]:
    """A node for tests that leave it as they found it."""
    with running(tmp_path_factory.mktemp("node"), nvml_library) as made:
        yield made


def test_gpus_pods_and_engines_are_joined(steady: Node) -> None:
    node = steady
    until(lambda: all(node.value("source_up", source=name) == 1 for name in SOURCES))
    assert set(node.samples("engine_up").values()) == {1.0}
    owners = until(lambda: len(found := node.samples("gpu_pod_info")) == 3 and found)
    assert {(dict(k)["uuid"], dict(k)["pod"], dict(k)["container"], dict(k)["shared"]) for k in owners} == {
        (uuid(0), "vllm-0", "vllm", "false"),
        (uuid(1), "vllm-1", "vllm", "true"),
        (uuid(1), "vllm-2", "vllm", "true"),
    }
    assert node.labels("engine_gpu_info", "uuid", pod="vllm-0") == {uuid(0)}
    memory = until(lambda: len(found := node.samples("gpu_process_memory_bytes")) == 4 and found)
    assert {(dict(k)["uuid"], dict(k)["pod"]): v for k, v in memory.items()} == {
        (uuid(0), "vllm-0"): 20 * GIB,
        (uuid(1), "vllm-1"): 3 * GIB,
        (uuid(1), "vllm-2"): 5 * GIB,
        (uuid(1), ""): GIB,
    }
    assert node.value("container_restarts_total", pod="vllm-0") == 2
    assert node.value("container_last_termination_info", pod="vllm-0", reason="OOMKilled", exit_code="137") == 1
    assert node.value("container_memory_used_ratio", pod="vllm-0") == 0.25
    assert node.value("limit", pod="vllm-0", limit="max_num_seqs") == 64
    assert node.value("limit_explicit", pod="vllm-0", limit="max_num_seqs") == 1


def test_pods_come_and_go(node: Node) -> None:
    """Afterwards the page tells of the pods that are left and of no other, and memory has not grown with the dead."""
    draw = random.Random(3)
    sizes = []
    for i in range(120):
        node.add(f"churn-{i}", [uuid(i % 2) + f"::{i}"])
        while len(node.pods) > 15:
            node.remove(draw.choice([name for name in node.pods if name.startswith("churn")]))
        if i % 10 == 9:
            node.api.cut()
        if i == 44:
            node.api.compact()
            node.api.cut()
        if i % 30 == 29:
            until(lambda: node.labels("engine_up", "pod") == set(node.pods), 40)
            sizes.append(node.memory_bytes())
    until(lambda: node.labels("gpu_pod_info", "pod") == set(node.pods), 20)
    until(lambda: node.labels("container_memory_used_ratio", "pod") == set(node.pods), 20)
    assert sizes[-1] - sizes[0] < 12 * 2**20, sizes


@pytest.mark.attack("a pod replaced every few seconds at one address", "only the living have series, memory and CPU")
@pytest.mark.fault(
    "engines",
    "a pod is replaced at the same address (host's network, an address used again, a StatefulSet)",
    "the old pod's series end with it; the new pod begins anew",
    "–",
    "by itself",
)
def test_pods_that_are_replaced_at_one_address_leave_nothing_behind(node: Node) -> None:
    """Each comes before the one before it goes, so that its address is scraped all the time."""
    others = {"vllm-0", "vllm-1", "vllm-2"}
    for i in range(5):
        node.add(f"hop-{i}", address_of="hop")
        if i:
            node.remove(f"hop-{i - 1}")
        until(lambda i=i: node.value("engine_up", pod=f"hop-{i}") == 1 and pods_on(node) == {*others, f"hop-{i}"})
    node.logs["hop-4"].write(OOM)
    until(lambda: node.value("log_events_total", pod="hop-4", event="cuda_oom") == 1)
    node.remove("hop-4")
    node.add("hop-4", address_of="hop", uid="d3a1b2c4-0000-4000-8000-000000000001")
    until(lambda: node.value("log_events_total", pod="hop-4", event="cuda_oom") is None)
    until(lambda: node.value("engine_up", pod="hop-4") == 1)
    node.remove("hop-4")
    until(lambda: pods_on(node) == others)


def pods_on(node: Node) -> set[str]:
    """Pods that the page names, but for the series that says for a while which are gone, and why."""
    return set(re.findall(r'pod="([^"]+)"', re.sub(r"kvpressure_down_info.*", "", node.scrape())))


# --- each failure alone -----------------------------------------------------------------------------------------------


def _api(status: int, what: str = "pods") -> tuple[Callable[[Node], object], Callable[[Node], object]]:
    def breaks(node: Node) -> None:
        node.api.status[f"/api/v1/{what}"] = status
        node.api.cut()

    return breaks, lambda node: node.api.status.clear()


def _moved(name: str) -> tuple[Callable[[Node], object], Callable[[Node], object]]:
    return (
        lambda node: (node.where / name).rename(node.where / f"{name}.away"),
        lambda node: (node.where / f"{name}.away").rename(node.where / name),
    )


FAILURES = {
    "api server down": (*_api(503), "pods", "api_error", {"container_restarts_total"}),
    "api server forbids": (*_api(403), "pods", "api_forbidden", {"container_restarts_total"}),
    "node forbidden": (*_api(403, "nodes"), "node", "api_forbidden", set()),
    "kubelet gone": (lambda n: n.kubelet.stop(), lambda n: n.kubelet.start(), "podresources", "no_socket", set()),
    "proc gone": (*_moved("proc"), "procfs", "no_proc", {"gpu_process_memory_bytes"}),
    "cgroups gone": (*_moved("cgroup"), "cgroup", "no_cgroup_tree", {"container_memory_used_ratio"}),
    "logs gone": (*_moved("pods"), "logs", "no_log_directory", set()),
}
FAMILIES = {
    "engine_up",
    "gpu_up",
    "gpu_pod_info",
    "gpu_process_memory_bytes",
    "container_restarts_total",
    "container_memory_used_ratio",
}


@pytest.mark.parametrize("name", FAILURES)
def test_each_failure_breaks_only_its_own_series_and_says_why(steady: Node, name: str) -> None:
    breaks, heals, source, reason, lost = FAILURES[name]
    until(lambda: all(steady.samples(family) for family in FAMILIES), 20)
    failures = steady.value("source_errors_total", source=source, reason=reason) or 0
    breaks(steady)
    try:
        until(lambda: steady.value("source_up", source=source) == 0)
        until(lambda: (steady.value("source_errors_total", source=source, reason=reason) or 0) > failures)
        until(lambda: not any(steady.samples(family) for family in lost))
        for other in set(SOURCES) - {source}:
            until(lambda other=other: steady.value("source_up", source=other) == 1)
        for family in FAMILIES - lost:
            assert steady.samples(family), family
        assert set(steady.samples("engine_up").values()) == {1.0}
    finally:
        heals(steady)
    until(lambda: all(steady.value("source_up", source=other) == 1 for other in SOURCES), 40)
    until(lambda: all(steady.samples(family) for family in FAMILIES), 20)
