"""What do other Python GPU exporters cost? ``python -m lab.compare [--write]``: the same machine, the same
8 GPUs, one after another. ``--write`` puts the table into docs/reports/benchmarks.md.

CPU is the operating system's accounting of the process: first while nobody scrapes it, then at two scrapes
a second; the difference is what a scrape costs. An exporter that cannot be installed or does not run is listed with the
reason.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from docs.generate import parts
from tests.helpers.ports import free_port
from tests.sources.gpu.nvml_stub import Gpu, World, environment, write

from lab.contenders import CONTENDERS, Contender, build_driver, install, plain, wait_for_gpus
from lab.node import cpu_seconds, node, rss_mib

PAGE: Final = Path(__file__).parents[1] / "docs/reports/benchmarks.md"
HEAD: Final = (
    "exporter",
    "CPU of a core, not scraped",
    "CPU of a scrape",
    "scrape p50",
    "p99",
    "resident",
    "series",
)
GPUS: Final = 8
WARM_UP_SECONDS: Final = 10.0
SCRAPES_A_SECOND: Final = 2.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What one exporter costs: CPU as a share of a core, seconds, MiB, series."""

    idle_cpu: float
    scrape_cpu_seconds: float
    p50: float
    p99: float
    rss: float
    series: int


def scrape(url: str) -> tuple[float, bytes]:
    """Seconds of one scrape, and the page."""
    request = urllib.request.Request(url, headers={"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "gzip"})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=5) as answer:
        body: bytes = answer.read()
    return time.perf_counter() - began, body


def cost(pid: int, url: str, seconds: float) -> Cost:
    """Measure a process that is serving."""
    time.sleep(WARM_UP_SECONDS)
    before = cpu_seconds(pid)
    time.sleep(seconds)
    idle = (cpu_seconds(pid) - before) / seconds
    before, began, latencies = cpu_seconds(pid), time.monotonic(), []
    while time.monotonic() - began < seconds:
        latencies.append(scrape(url)[0])
        time.sleep(max(0.0, began + len(latencies) / SCRAPES_A_SECOND - time.monotonic()))
    busy = cpu_seconds(pid) - before - idle * (time.monotonic() - began)
    ordered = sorted(latencies)
    series = sum(not line.startswith("#") for line in plain(url).splitlines() if line)
    return Cost(
        idle,
        max(0.0, busy) / len(latencies),
        ordered[len(ordered) // 2],
        ordered[int(0.99 * len(ordered))],
        rss_mib(pid),
        series,
    )


def measure(contender: Contender, library: Path, directory: Path, seconds: float) -> Cost | str:
    """The costs of one exporter, or why there are none."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    try:
        install(contender.packages)
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                contender.command(port, directory),
                env=os.environ | environment(library, directory / "world"),
                stdout=log,
                stderr=log,
            )
        try:
            wait_for_gpus(url, process)
            return cost(process.pid, url, seconds)
        finally:
            process.kill()
            process.wait(20)
    except (RuntimeError, OSError) as error:
        return str(error)


def row(name: str, found: Cost | str) -> tuple[str, ...]:
    """A row of the table."""
    if isinstance(found, str):
        return name, found, "", "", "", "", ""
    cpu = (f"{found.idle_cpu * 100:.2f} %", f"{found.scrape_cpu_seconds * 1e3:.1f} ms")
    times = (f"{found.p50 * 1e3:.1f} ms", f"{found.p99 * 1e3:.1f} ms")
    return name, *cpu, *times, f"{found.rss:.1f} MiB", f"{found.series}"


def main() -> int:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of the two phases")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reports/benchmarks.md")
    options = parser.parse_args()
    rows: list[tuple[str, ...]] = []

    def add(name: str, found: Cost | str) -> None:
        rows.append(row(name, found))
        print(*rows[-1], sep=" | ", flush=True)

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        library = build_driver(directory)
        write(directory / "world", World(gpus=[Gpu() for _ in range(GPUS)]))
        for contender in CONTENDERS:
            add(contender.name, measure(contender, library, directory, options.seconds))
        with node(GPUS, GPUS, False, directory / "node") as (pid, url, _):
            add("kvpressure, GPUs and 8 vLLM engines", cost(pid, f"{url}/metrics", options.seconds))
    table = parts.table(HEAD, rows)
    print(table)
    if options.write:
        parts.write(PAGE, "compared", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
