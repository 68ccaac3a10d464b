"""What the conclusions cost: ``python -m lab.tick``, CPU of one tick's signals and diagnosis for eight engines.

No thread, no socket and no driver: the pipeline alone, on pages of a real vLLM under pressure with windows that are
full. In a loop everything it needs is in the processor's caches; once a second, as in ``serve``, it is not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import islice

from kvpressure.model.readings import Snapshot
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.runtime.process_tuning import tune_gc
from kvpressure.sources.scrape.scanner import Scanner, parse_scrape
from lab.engines import pages

ENGINES = 8
BEGIN = 1_700_000_000.0
WINDOW_TICKS = 75  # as many samples as are kept of the last minute


def snapshots() -> Iterator[Snapshot]:
    """One a second, each engine at another place of the recording."""
    bodies, scanners = pages(), [Scanner() for _ in range(ENGINES)]
    tick = 0
    while True:
        yield Snapshot(
            BEGIN + tick,
            pages=tuple(
                parse_scrape(
                    bodies[(tick + 7 * engine) % len(bodies)],
                    target=f"http://{engine}/metrics",
                    time=BEGIN + tick,
                    namespace="inference",
                    pod=f"vllm-{engine}",
                    args=("vllm", "serve", "m", "--max-num-seqs", "64"),
                    scanner=scanner,
                )
                for engine, scanner in enumerate(scanners)
            ),
        )
        tick += 1


def milliseconds(pipeline: Pipeline, given: Iterator[Snapshot], ticks: int, pause: float) -> float:
    """CPU of a tick, with so many seconds between two."""
    spent = 0.0
    for snapshot in islice(given, ticks):
        time.sleep(pause)
        began = time.thread_time()
        pipeline.observe(snapshot)
        spent += time.thread_time() - began
    return 1000 * spent / ticks


def main() -> None:
    """Print both figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ticks", type=int, default=60)
    ticks = parser.parse_args().ticks
    pipeline, given = Pipeline(), snapshots()
    milliseconds(pipeline, given, WINDOW_TICKS, 0.0)
    tune_gc()
    warm, cold = milliseconds(pipeline, given, ticks, 0.0), milliseconds(pipeline, given, ticks, 1.0)
    print(f"signals and diagnosis of {ENGINES} engines, CPU of a tick")
    for name, found in (("in a loop", warm), ("once a second", cold)):
        print(f"  {name:14s} {found:6.2f} ms, {found / ENGINES:5.2f} ms an engine, {found / 10:5.2f} % of a core")


if __name__ == "__main__":
    main()
