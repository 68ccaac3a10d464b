"""What does a node cost with every Kubernetes source? ``python -m lab.kubernetes``: 8 GPUs x 8 pods at 1 s.

The real ``kvpressure serve`` with the stub driver, a small API server that speaks list and watch, a kubelet's
PodResources service (gRPC), cgroups, a process table and log files of pods. Exit 1 when a budget is missed.
``--seconds 3600`` shows what the API server is asked at rest.
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
CALLS_BUDGET = 15.0  # of the API server in an hour, those at the start included


def main() -> int:
    """Print the largest resident size and the calls of the API server."""
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
            calls = [query.get("watch") == "1" for _, query in node.api.requests]
    mib = largest / 2**20
    met = mib <= RSS_BUDGET_MIB and len(calls) <= CALLS_BUDGET * max(1.0, seconds / 3600)
    print(
        f"{engines} engines, {up} sources up, after {seconds:.0f} s: {mib:.1f} MiB resident, budget"
        f" {RSS_BUDGET_MIB:.0f} MiB; {calls.count(False)} lists and {sum(calls)} watches, budget"
        f" {CALLS_BUDGET:.0f} calls an hour   {'met' if met else 'MISSED'}"
    )
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
