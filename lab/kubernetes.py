"""What does a node cost with every Kubernetes source? ``python -m lab.kubernetes``: 8 GPUs x 8 pods at 1 s.

The real ``kvpressure serve`` with the stub driver, a small API server that speaks list and watch, a kubelet's
PodResources service (gRPC), cgroups, a process table and log files of pods. Exit 1 when the memory budget is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.sources.gpu.nvml_stub import GIB, Gpu, build
from tests.sources.kubernetes import node as kubernetes

GPUS = 8
RSS_BUDGET_MIB = 50.0


def main() -> int:
    """Print the largest resident size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=130.0, help="how long it is watched; windows fill meanwhile")
    seconds = parser.parse_args().seconds
    kubernetes.TICK = "1"
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        with kubernetes.Node(where, build(where / "driver")) as node:
            node.gpus = [Gpu(processes=[(5000 + number, 70 * GIB)]) for number in range(GPUS)]
            node.write_world()
            for number in range(GPUS):
                node.add(f"vllm-{number}", [kubernetes.uuid(number)], (5000 + number,))
            node.start()
            began, largest = time.monotonic(), 0
            while time.monotonic() - began < seconds:
                node.scrape()
                largest = max(largest, node.memory_bytes())
                time.sleep(1)
            engines = len(node.labels("engine_up", "pod"))
            up = sum(value == 1 for value in node.samples("source_up").values())
    mib = largest / 2**20
    met = mib <= RSS_BUDGET_MIB
    print(
        f"{engines} engines, {up} sources up, after {seconds:.0f} s: {mib:.1f} MiB resident, budget"
        f" {RSS_BUDGET_MIB:.0f} MiB   {'met' if met else 'MISSED'}"
    )
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
