"""Golden ``/metrics`` of the real process for each kind of GPU, both sources on, real bindings over stub libraries.

Names, labels and values are compared line by line with ``tests/golden/gpu_*.metrics``; what depends on the moment
stands there as ``*``. ``UPDATE_GOLDEN=1`` rewrites them: read the difference before you commit it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvpressure.publish.metrics import METRICS
from tests.gpu.nodes import NODES, Build, Node, h100
from tests.gpu.serving import exporter, masked, scrape
from tests.helpers.waiting import until
from tests.sources.gpu.nvml_stub import GIB, gpu_uuid, write
from tests.sources.kubernetes.node import Node as KubeNode

pytestmark = pytest.mark.live

GOLDEN = Path(__file__).parents[1] / "golden"
SAMPLE = re.compile(r"(\w+)\{(.*)\} (\S+)")
OWN = re.compile(r"kvpressure_gpus?_")


def compare(name: str, found: Sequence[str]) -> None:
    """With the golden file, which is written first if asked for."""
    path = GOLDEN / f"gpu_{name}.metrics"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text("\n".join(found) + "\n")
    assert list(found) == path.read_text().splitlines()


def served(node: Node, where: Path, nvml: Build, rocm: Callable[[], Path]) -> list[str]:
    """The node's page, masked."""
    environ = node.environment(where, nvml, rocm)
    with exporter(where / "sys", environ, *node.arguments) as address:
        until(lambda: node.ready in scrape(address), 20)
        if node.then is not None:
            write(where / "world", node.then)
            until(lambda: all(map(scrape(address).__contains__, node.then_ready)), 20)
        return masked(scrape(address))


@pytest.mark.parametrize("name", NODES)
def test_page_of_each_gpu(name: str, tmp_path: Path, nvml: Build, rocm: Callable[[], Path]) -> None:
    compare(name, served(NODES[name], tmp_path, nvml, rocm))


@pytest.mark.parametrize("sharing", ["time_sliced", "mps"])
def test_page_of_a_shared_gpu(sharing: str, tmp_path: Path, nvml: Build) -> None:
    """Two pods on one GPU through the kubelet and the host's /proc: both owners, marked, each with its own memory."""
    with KubeNode(tmp_path, nvml(())) as node:
        for number, name in enumerate(("chat-0", "search-0")):
            node.add(name, [f"{gpu_uuid(0)}::{number}"], pids=(100 + number,))
        held = ((100, 30 * GIB), (101, 18 * GIB))
        node.gpus = [h100(processes=held) if sharing == "time_sliced" else h100(processes=(), mps_processes=held)]
        node.write_world()
        node.start()
        until(lambda: len(node.samples("gpu_process_memory_bytes")) == 2 and len(node.samples("gpu_pod_info")) == 2, 20)
        compare(
            f"h100_{sharing}",
            [
                line
                for line in masked(node.scrape())
                if OWN.match(line) and not line.startswith("kvpressure_gpu_memory_demand_ratio")
            ],
        )


# --- what must hold on every golden page ----------------------------------------------------------------------------


def pages() -> dict[str, list[tuple[str, dict[str, str], str]]]:
    """The golden pages as (series name, labels, value)."""
    found = {}
    for path in sorted(GOLDEN.glob("gpu_*.metrics")):
        samples = [SAMPLE.fullmatch(line) for line in path.read_text().splitlines()]
        assert all(samples), path
        found[path.name] = [(s[1], dict(re.findall(r'(\w+)="([^"]*)"', s[2])), s[3]) for s in samples if s]
    return found


def test_there_is_a_page_for_each_kind_and_no_other() -> None:
    assert set(pages()) == {f"gpu_{name}.metrics" for name in (*NODES, "h100_time_sliced", "h100_mps")}


@pytest.mark.parametrize("name", [*NODES, "h100_time_sliced", "h100_mps"])
def test_what_a_gpu_tells_is_never_zero_for_not_known(name: str) -> None:
    """No GPU of the matrix is idle: a 0 among the figures would be a made-up one."""
    samples = pages()[f"gpu_{name}.metrics"]
    figures = [s for s in samples if s[0].startswith("kvpressure_gpu_") and s[0] != "kvpressure_gpu_up"]
    assert figures
    assert [s for s in figures if s[2] != "*" and float(s[2]) == 0] == []


def test_every_metric_of_a_gpu_is_seen_in_the_matrix() -> None:
    shown = {sample[0] for samples in pages().values() for sample in samples}
    elsewhere = {"kvpressure_gpu_memory_floor_ratio"}  # tests/pipeline/test_gpu_demand.py
    expected = {m.full_name for m in METRICS if m.name.startswith(("gpu_", "gpus_"))}
    assert expected - shown == elsewhere
