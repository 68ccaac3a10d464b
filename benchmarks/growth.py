"""How does the cost of a node grow? ``python -m benchmarks.growth``: from 8 to 64 engines, and 64 GPU partitions.

As ``benchmarks.node``, with 8 cards of which each is split into as many MIG instances as there are engines to an
eighth. Linear means: an engine costs no more CPU, and a scrape no more time for each, among 64 than among 8. Exit 1
otherwise.
"""

from __future__ import annotations

import argparse
import sys
from typing import Final

from tests.sources.gpu.nvml_stub import Gpu, Mig, World

from benchmarks.node import measure

CARDS: Final = 8
SIZES: Final = (8, 16, 32, 64)
LINEAR: Final = 1.25  # of what an engine of the smallest node costs: what a measurement may be off


def partitioned(partitions: int) -> World:
    """Eight cards with so many MIG instances in all; whole cards when there are no more than that."""
    each = partitions // CARDS
    if each <= 1:
        return World(gpus=[Gpu() for _ in range(CARDS)])
    return World(
        gpus=[
            Gpu(
                mig=1,
                max_mig=each,
                migs=[Mig(f"MIG-{card:08x}-{slot:04x}-5000-8000-000000000000", gi=slot + 1) for slot in range(each)],
            )
            for card in range(CARDS)
        ]
    )


def main() -> int:
    """Print a row a size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    options = parser.parse_args()
    print("| engines and partitions | CPU of a core | for each engine | resident | scrape p50 | p99 | start |")
    print("|---|---|---|---|---|---|---|")
    found = {}
    for size in options.sizes:
        cost = found[size] = measure(CARDS, size, options.seconds, slow=False, world=partitioned(size))
        print(
            f"| {size} | {cost['cpu'] * 100:.2f} % | {cost['cpu'] * 100 / size:.3f} % | {cost['rss']:.1f} MiB | "
            f"{cost['p50'] * 1e3:.1f} ms | {cost['p99'] * 1e3:.1f} ms | {cost['start']:.2f} s |",
            flush=True,
        )
    small, large = min(found), max(found)
    return int(found[large]["cpu"] / large > LINEAR * found[small]["cpu"] / small)


if __name__ == "__main__":
    sys.exit(main())
