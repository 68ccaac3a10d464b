"""How does the cost of a node grow? ``python -m lab.growth``: 8 to 64 engines, and 64 GPU partitions.

As ``lab.node``, with 8 GPUs of which each is split into as many MIG instances as there are engines to an eighth.
Linear means: an engine costs no more CPU, and a scrape no more time
for each, among 64 than among 8. Exit 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
from typing import Final

from docs.generate import parts
from tests.sources.gpu.nvml_stub import Gpu, Mig, World

from lab.node import measure

GPUS: Final = 8
SIZES: Final = (8, 16, 32, 64)
HEAD: Final = ("engines and partitions", "CPU of a core", "for each engine", "resident", "scrape p50", "p99", "start")
LINEAR: Final = 1.25  # of what an engine of the smallest node costs: what a measurement may be off


def partitioned(partitions: int) -> World:
    """Eight GPUs with so many MIG instances in all; whole GPUs when there are no more than that."""
    each = partitions // GPUS
    if each <= 1:
        return World(gpus=[Gpu() for _ in range(GPUS)])
    return World(
        gpus=[
            Gpu(
                mig=1,
                max_mig=each,
                migs=[Mig(f"MIG-{gpu:08x}-{slot:04x}-5000-8000-000000000000", gi=slot + 1) for slot in range(each)],
            )
            for gpu in range(GPUS)
        ]
    )


def main() -> int:
    """Print a row a size, then the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    options = parser.parse_args()
    rows, found = [], {}
    for size in options.sizes:
        cost = found[size] = measure(GPUS, size, options.seconds, slow=False, world=partitioned(size))
        cpu = (f"{cost['cpu'] * 100:.2f} %", f"{cost['cpu'] * 100 / size:.3f} %")
        times = (f"{cost['p50'] * 1e3:.1f} ms", f"{cost['p99'] * 1e3:.1f} ms", f"{cost['start']:.2f} s")
        rows.append((f"{size}", *cpu, f"{cost['rss']:.1f} MiB", *times))
        print(*rows[-1], sep=" | ", flush=True)
    print(parts.table(HEAD, rows))
    small, large = min(found), max(found)
    return int(found[large]["cpu"] / large > LINEAR * found[small]["cpu"] / small)


if __name__ == "__main__":
    sys.exit(main())
