"""What do other Python GPU exporters cost? ``python -m benchmarks.compare``: the same machine, the same 8 GPUs, one
after another.

All of them run on the stub NVIDIA driver of the tests, with every function that the binding knows (those that the tests
do not need answer "not supported", as a driver does). They are installed, pinned, into a virtual environment under
``build/``. CPU is the operating system's accounting of the process: first while nobody scrapes it, then at two scrapes
a second; the difference is what a scrape costs. An exporter that cannot be installed or does not run is listed with the
reason.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.sources.gpu.nvml_stub import LIBRARY, SOURCE, Gpu, World, environment, write

from benchmarks.node import cpu_seconds, free_port, node, rss_mib

ROOT: Final = Path(__file__).parents[1]
VENV: Final = ROOT / "build" / "bench-compare"
GPUS: Final = 8
WARM_UP_SECONDS: Final = 10.0
SCRAPES_A_SECOND: Final = 2.0
GLANCES: Final = "[prometheus]\nhost=127.0.0.1\nport={port}\nprefix=glances\nlabels=src:glances\n"


@dataclass(frozen=True, slots=True)
class Contender:
    """An exporter: its pinned packages, and the command that serves on a port (it may write into a directory)."""

    name: str
    packages: tuple[str, ...]
    command: Callable[[int, Path], list[str]]


@dataclass(frozen=True, slots=True)
class Cost:
    """What one exporter costs: CPU as a share of a core, seconds, MiB, series."""

    idle_cpu: float
    scrape_cpu_seconds: float
    p50: float
    p99: float
    rss: float
    series: int


def _tool(name: str) -> str:
    return str(VENV / "bin" / name)


def _nvitop(port: int, _: Path) -> list[str]:
    return [_tool("nvitop-exporter"), "--bind-address", "127.0.0.1", "--port", str(port)]


def _glances(port: int, directory: Path) -> list[str]:
    config = directory / "glances.conf"
    config.write_text(GLANCES.format(port=port))
    return [
        _tool("glances"),
        "-C",
        str(config),
        "--export",
        "prometheus",
        "--disable-plugin",
        "all",
        "--enable-plugin",
        "gpu",
        "--quiet",
        "--time",
        "1",
    ]


def _kvpressure(port: int, _: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "kvpressure",
        "serve",
        "--web.listen-address",
        f"127.0.0.1:{port}",
        "--no-collector.engines",
        "--no-collector.amd",
    ]


CONTENDERS: Final = (
    Contender("kvpressure, GPUs only", (), _kvpressure),
    Contender("nvitop-exporter 1.7.2", ("nvitop-exporter==1.7.2",), _nvitop),
    Contender("Glances 4.5.8, its GPU plugin alone", ("glances==4.5.8", "nvidia-ml-py", "prometheus_client"), _glances),
    Contender(
        "four values a GPU, read on every scrape",
        ("nvidia-ml-py", "prometheus_client"),
        lambda port, _: [_tool("python"), str(Path(__file__).with_name("smallest_exporter.py")), str(port)],
    ),
)


def build_driver(directory: Path) -> Path:
    """The stub driver with every function of the binding; the library's path."""
    import pynvml

    names = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', Path(str(pynvml.__file__)).read_text()))
    names |= {f"{name}{suffix}" for name in names for suffix in ("_v2", "_v3") if not re.search(r"_v\d$", name)}
    known = set(re.findall(r"\bnvml[A-Z]\w+", SOURCE.read_text()))
    missing = "\n".join(f"int {name}(void) {{ return 3; }}" for name in sorted(names - known))
    source = directory / "driver.c"
    source.write_text(f'#include "{SOURCE}"\n{missing}\n')
    library: Path = directory / LIBRARY
    subprocess.run(
        ["cc", "-std=gnu11", "-w", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-lpthread"], check=True
    )
    return library


def install(packages: Sequence[str]) -> None:
    """Install into the virtual environment, which is made if need be. Raises ``RuntimeError`` with pip's last line."""
    if not packages:
        return
    if not (VENV / "bin" / "pip").exists():
        venv.create(VENV, with_pip=True)
    done = subprocess.run(
        [_tool("pip"), "install", "--quiet", "--disable-pip-version-check", *packages],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"cannot be installed: {done.stderr.strip().splitlines()[-1]}")


def scrape(url: str) -> tuple[float, bytes]:
    """Seconds of one scrape, and the page."""
    request = urllib.request.Request(url, headers={"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "gzip"})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=5) as answer:
        body: bytes = answer.read()
    return time.perf_counter() - began, body


def plain(url: str) -> str:
    """The page without compression."""
    with urllib.request.urlopen(url, timeout=5) as answer:
        text: str = answer.read().decode()
    return text


def wait_for_gpus(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until the page has values of GPUs. Raises ``RuntimeError`` when it does not come."""
    end = time.monotonic() + 20
    while time.monotonic() < end and process.poll() is None:
        try:
            if re.search(r"^\w*gpu\w*\{", plain(url), re.MULTILINE):
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"does not run: exit status {process.poll()}" if process.poll() is not None else "shows no GPU")


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


def row(name: str, found: Cost | str) -> str:
    """A row of the table, in Markdown."""
    if isinstance(found, str):
        return f"| {name} | {found} | | | | | |"
    return (
        f"| {name} | {found.idle_cpu * 100:.2f} % | {found.scrape_cpu_seconds * 1e3:.1f} ms | {found.p50 * 1e3:.1f} ms"
        f" | {found.p99 * 1e3:.1f} ms | {found.rss:.1f} MiB | {found.series} |"
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0, help="of each of the two phases")
    seconds = parser.parse_args().seconds
    print("| exporter | CPU of a core, not scraped | CPU of a scrape | scrape p50 | p99 | resident | series |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        library = build_driver(directory)
        write(directory / "world", World(gpus=[Gpu() for _ in range(GPUS)]))
        for contender in CONTENDERS:
            print(row(contender.name, measure(contender, library, directory, seconds)), flush=True)
        with node(GPUS, GPUS, False, directory / "node") as (pid, url, _):
            print(row("kvpressure, GPUs and 8 vLLM engines", cost(pid, f"{url}/metrics", seconds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
