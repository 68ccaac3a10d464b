"""What does one node cost? ``python -m benchmarks.node``: 8 GPUs x 8 engines at 1 s, beside the budgets.

The real ``kvpressure serve`` runs on the stub NVIDIA driver of the tests (the real binding) and scrapes real vLLM pages of
50 KB over loopback; a ninth engine accepts and never answers. CPU is the operating system's accounting of the process over
the measured minute with a scrape every five seconds, memory its resident size, latency that of whole scrapes by a client
four times a second afterwards. Exit 1 when a budget is missed.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from nvml_stub import Gpu, World, build, environment, write

CPU_BUDGET: Final = 0.02
RSS_BUDGET_MIB: Final = 64.0
SCRAPE_BUDGET_SECONDS: Final = 0.020
START_BUDGET_SECONDS: Final = 2.0
WARM_UP_SECONDS: Final = 70.0  # a full minute's window
SCRAPE_EVERY_SECONDS: Final = 5.0
LATENCY_SCRAPES: Final = 120
TICKS: Final = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def node(
    gpus: int,
    engines: int,
    slow: bool,
    workdir: Path,
    extra: Sequence[str] = (),
    world: World | None = None,
) -> Iterator[tuple[int, str, float]]:
    """The engines and the exporter; yields (pid, url, seconds from start to the first good scrape).

    ``world`` is what the driver tells, instead of ``gpus`` whole cards.
    """
    library = build(workdir)
    write(workdir / "world", world or World(gpus=[Gpu() for _ in range(gpus)]))
    command = [sys.executable, "-m", "benchmarks.engines", str(engines), *(["--slow"] if slow else [])]
    servers = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    assert servers.stdout is not None
    ports = [int(servers.stdout.readline()) for _ in range(engines + slow)]
    url = f"http://127.0.0.1:{free_port()}"
    serve = [
        sys.executable,
        "-m",
        "kvpressure.cli",
        "serve",
        "--web.listen-address",
        url.removeprefix("http://"),
        "--vllm.pace",
        "fixed",
        *extra,
    ]
    for number, port in enumerate(ports):
        serve += ["--vllm.target", f"inference/vllm-{number}=http://127.0.0.1:{port};args=--max-num-seqs 64"]
    began = time.monotonic()
    exporter = subprocess.Popen(
        serve, env=os.environ | environment(library, workdir / "world"), stderr=(workdir / "exporter.log").open("w")
    )
    try:
        yield exporter.pid, url, first_scrape(url, began)
    finally:
        exporter.terminate()
        servers.terminate()
        exporter.wait(20)
        servers.wait(20)


def first_scrape(url: str, began: float) -> float:
    """Seconds until a scrape carries an engine that is up."""
    while time.monotonic() < began + 20:
        try:
            with urllib.request.urlopen(url + "/metrics", timeout=1) as answer:
                if b"kvpressure_requests_running{" in answer.read():
                    return time.monotonic() - began
        except OSError:
            pass
        time.sleep(0.02)
    raise RuntimeError("no good scrape within 20 s")


def scrape(url: str) -> float:
    """Seconds of one whole scrape as Prometheus does it."""
    request = urllib.request.Request(url + "/metrics", headers={"Accept-Encoding": "gzip", "Accept": "text/plain"})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=5) as answer:
        answer.read()
    return time.perf_counter() - began


def measure(
    gpus: int, engines: int, seconds: float, slow: bool = True, extra: Sequence[str] = (), world: World | None = None
) -> dict[str, float]:
    """One run: fill the windows, measure CPU under a scrape every five seconds, then the latency of many scrapes."""
    with (
        tempfile.TemporaryDirectory() as directory,
        node(gpus, engines, slow, Path(directory), extra, world) as (pid, url, start),
    ):
        time.sleep(min(seconds, WARM_UP_SECONDS))
        cpu, began, largest = cpu_seconds(pid), time.monotonic(), 0.0
        while time.monotonic() - began < seconds:
            scrape(url)
            largest = max(largest, rss_mib(pid))
            time.sleep(SCRAPE_EVERY_SECONDS)
        share = (cpu_seconds(pid) - cpu) / (time.monotonic() - began)
        latencies = []
        for _ in range(LATENCY_SCRAPES):
            latencies.append(scrape(url))
            time.sleep(0.25)
        ordered = sorted(latencies)
        return {
            "cpu": share,
            "rss": largest,
            "start": start,
            "p50": ordered[len(ordered) // 2],
            "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        }


def main() -> int:
    """Print the figures beside the budgets."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--no-slow", action="store_true", help="without the engine that never answers")
    options, extra = parser.parse_known_args()
    found = measure(options.gpus, options.engines, options.seconds, not options.no_slow, extra)
    full_size = options.gpus <= 8 and options.engines <= 8
    rows = (
        ("CPU of one core", f"{found['cpu'] * 100:.2f} %", f"{CPU_BUDGET * 100:.0f} %", found["cpu"] <= CPU_BUDGET),
        ("resident memory", f"{found['rss']:.1f} MiB", f"{RSS_BUDGET_MIB:.0f} MiB", found["rss"] <= RSS_BUDGET_MIB),
        ("scrape p50", f"{found['p50'] * 1e3:.1f} ms", "", True),
        (
            "scrape p99",
            f"{found['p99'] * 1e3:.1f} ms",
            f"{SCRAPE_BUDGET_SECONDS * 1e3:.0f} ms",
            found["p99"] <= SCRAPE_BUDGET_SECONDS,
        ),
        (
            "start to first good scrape",
            f"{found['start']:.2f} s",
            f"{START_BUDGET_SECONDS:.0f} s",
            found["start"] <= START_BUDGET_SECONDS,
        ),
    )
    print(
        f"{options.gpus} GPUs x {options.engines} engines at 1 s, {options.seconds:.0f} s measured"
        + ("" if options.no_slow else ", one more engine accepts and never answers")
    )
    for name, value, budget, met in rows:
        print(
            f"  {name:28s} {value:>10s}   budget {budget:>7s}   {'met' if met else 'MISSED'}"
            if budget
            else f"  {name:28s} {value:>10s}"
        )
    return 0 if all(met for *_, met in rows) or not full_size else 1


if __name__ == "__main__":
    sys.exit(main())
