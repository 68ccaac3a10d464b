"""What does one node cost? ``python -m lab.node``: 8 GPUs x 8 engines at 1 s, beside the budgets.

The real ``kvpressure serve`` runs on the stub NVIDIA driver of the tests (the real binding) and scrapes real vLLM pages
of 50 KB over loopback; a ninth engine accepts and never answers. CPU is the operating system's accounting of the
process over the measured minute with a scrape every five seconds, memory its resident size, latency that of whole
scrapes by a client four times a second afterwards.

How fast a core is differs from machine to machine, and from hour to hour on a shared one. So two other processes run
over the same minute: ``nvitop-exporter`` on the same driver, and the floor (``lab.floor``), which reads the same
and does nothing with it. Exit 1 when a budget or a ratio is missed; ``--no-beside`` leaves the others out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.helpers.ports import free_port
from tests.sources.gpu.nvml_stub import Gpu, World, build, environment, write

from lab.contenders import NVITOP, build_driver, install, wait_for_gpus

CPU_BUDGET: Final = 0.02
RSS_BUDGET_MIB: Final = 64.0
SCRAPE_BUDGET_SECONDS: Final = 0.020
LOOP_RATIO: Final = 2.5  # CPU of the exporter to that of nvitop-exporter, both scraped every five seconds
SCRAPE_RATIO: Final = 1.5  # CPU of a further scrape to that of one of nvitop-exporter
START_BUDGET_SECONDS: Final = 2.0
WARM_UP_SECONDS: Final = 70.0  # a full minute's window
SCRAPE_EVERY_SECONDS: Final = 5.0
OFTEN_SECONDS: Final = 1.0
LATENCY_SCRAPES: Final = 120
TICKS: Final = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(frozen=True, slots=True)
class Process:
    """A process that is measured; ``url`` is where it is scraped, if it is."""

    name: str
    pid: int
    url: str | None = None


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

    ``world`` is what the driver tells, instead of ``gpus`` whole GPUs.
    """
    library = build(workdir)
    write(workdir / "world", world or World(gpus=[Gpu() for _ in range(gpus)]))
    command = [sys.executable, "-m", "lab.engines", str(engines), *(["--slow"] if slow else [])]
    servers = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    assert servers.stdout is not None
    ports = [int(servers.stdout.readline()) for _ in range(engines + slow)]
    url = f"http://127.0.0.1:{free_port()}"
    serve = [
        sys.executable,
        "-m",
        "kvpressure",
        "serve",
        "--web.listen-address",
        url.removeprefix("http://"),
        "--engine.pace",
        "fixed",
        *extra,
    ]
    for number, port in enumerate(ports):
        serve += ["--engine.target", f"inference/vllm-{number}=http://127.0.0.1:{port};args=--max-num-seqs 64"]
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
    request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip", "Accept": "text/plain"})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=5) as answer:
        answer.read()
    return time.perf_counter() - began


@contextmanager
def beside(workdir: Path, engines: Sequence[str]) -> Iterator[list[Process]]:
    """nvitop-exporter and the floor, on the same driver and engines as the exporter."""
    install(NVITOP.packages)
    environ = os.environ | environment(build_driver(workdir), workdir / "world")
    port = free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    with (workdir / "beside.log").open("wb") as log:
        commands = (NVITOP.command(port, workdir), [sys.executable, "-m", "lab.floor", *engines])
        started = [subprocess.Popen(command, env=environ, stdout=log, stderr=log) for command in commands]
        try:
            wait_for_gpus(url, started[0])
            yield [Process(NVITOP.name, started[0].pid, url), Process("floor", started[1].pid)]
        finally:
            for process in started:
                process.kill()
                process.wait(20)


def costs(processes: Sequence[Process], seconds: float) -> dict[str, tuple[float, float]]:
    """By name the CPU of a core with a scrape every five seconds, and the CPU seconds of a further scrape.

    All processes are measured over the same time.
    """

    def now() -> list[float]:
        return [cpu_seconds(process.pid) for process in processes]

    def scraped(every: float) -> tuple[list[float], float, int]:
        before, began, times = now(), time.monotonic(), 0
        while time.monotonic() - began < seconds:
            for process in processes:
                if process.url is not None:
                    scrape(process.url)
            times += 1
            time.sleep(max(0.0, began + times * every - time.monotonic()))
        spent = [after - first for first, after in zip(before, now(), strict=True)]
        return spent, time.monotonic() - began, times

    seldom, elapsed, few = scraped(SCRAPE_EVERY_SECONDS)
    often, longer, many = scraped(OFTEN_SECONDS)
    return {
        process.name: (first / elapsed, max(0.0, more / longer - first / elapsed) / (many / longer - few / elapsed))
        for process, first, more in zip(processes, seldom, often, strict=True)
    }


def measure_beside(
    gpus: int, engines: int, seconds: float, extra: Sequence[str] = ()
) -> dict[str, tuple[float, float]]:
    """The costs of the exporter, of nvitop-exporter and of the floor, side by side."""
    with tempfile.TemporaryDirectory() as directory:
        workdir = Path(directory)
        with (
            node(gpus, engines, False, workdir, extra) as (pid, url, _),
            beside(workdir, engine_urls(pid)) as others,
        ):
            time.sleep(min(seconds, WARM_UP_SECONDS))
            return costs([Process("kvpressure", pid, f"{url}/metrics"), *others], seconds)


def engine_urls(pid: int) -> list[str]:
    """The engines that an exporter was started with."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return [word.partition("=")[2].partition(";")[0] for word in words if word.startswith("inference/")]


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
            scrape(url + "/metrics")
            largest = max(largest, rss_mib(pid))
            time.sleep(SCRAPE_EVERY_SECONDS)
        share = (cpu_seconds(pid) - cpu) / (time.monotonic() - began)
        latencies = []
        for _ in range(LATENCY_SCRAPES):
            latencies.append(scrape(url + "/metrics"))
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
    parser.add_argument("--no-beside", action="store_true", help="without nvitop-exporter and the floor")
    parser.add_argument("--only-beside", action="store_true", help="the ratios alone")
    options, extra = parser.parse_known_args()
    ratios_met = options.no_beside or print_ratios(options.gpus, options.engines, options.seconds, extra)
    if options.only_beside:
        return int(not ratios_met)
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
    return 0 if (ratios_met and all(met for *_, met in rows)) or not full_size else 1


def print_ratios(gpus: int, engines: int, seconds: float, extra: Sequence[str]) -> bool:
    """Print what the others cost over the same time; whether both ratios are met."""
    try:
        found = measure_beside(gpus, engines, seconds, extra)
    except RuntimeError as error:
        print(f"not compared: {error}")
        return False
    (ours, our_scrape), (theirs, their_scrape), (floor, _) = found.values()
    print(f"side by side, {gpus} GPUs x {engines} engines at 1 s, a scrape every {SCRAPE_EVERY_SECONDS:.0f} s")
    for name, (share, of_scrape) in found.items():
        print(f"  {name:28s} {share * 100:8.2f} %   a scrape {of_scrape * 1e3:6.1f} ms")
    if not (theirs and their_scrape and floor):
        print("not compared: too short, the clock of the accounting did not tick")
        return False
    print(f"  the floor alone is {floor / theirs:.2f} x nvitop-exporter")
    rows = (("CPU", ours / theirs, LOOP_RATIO), ("CPU of a scrape", our_scrape / their_scrape, SCRAPE_RATIO))
    for name, ratio, goal in rows:
        print(
            f"  {name + ' / nvitop-exporter':28s} {ratio:8.2f}     goal {goal:.1f}  "
            f" {'met' if ratio <= goal else 'MISSED'}"
        )
    return all(ratio <= goal for _, ratio, goal in rows)


if __name__ == "__main__":
    sys.exit(main())
