"""Parts of the test bed: a server with the exporters beside it, readings of both, and vLLM's own step log as the truth."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from session import ROOT, SERVER_ENV, free_port, page, process, value, verdict, wait_for

TICKS = os.sysconf("SC_CLK_TCK")
LAG = 1.5  # seconds by which a page is behind: a report or scrape each second, and a tick each second
POD = ("inference", "vllm-0")


@dataclass(frozen=True)
class Step:
    """One engine step as vLLM tells it: when it ended, and how many requests decoded."""

    t: float
    engine: str
    decoding: int


@dataclass
class Server:
    """A running vLLM. ``plugin`` says whether kvpressure's plugin reports; ``truth`` is the stem of the step log."""

    pid: int
    port: int
    log: Path
    reports: Path
    truth: Path
    max_num_seqs: int

    def steps(self) -> list[Step]:
        """All steps so far."""
        lines = [line.split() for file in sorted(self.truth.parent.glob(self.truth.name + ".*"))
                 for line in file.read_text().splitlines()]
        return sorted((Step(float(line[0]), line[1], int(line[4])) for line in lines if len(line) == 5),
                      key=lambda step: step.t)

    def cpu_seconds(self) -> float:
        """CPU time of the API server process so far (the engine is another process)."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def children(self) -> list[tuple[int, str]]:
        """Pid and name of the processes that the server started."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)
            except (OSError, IndexError):
                continue
            if entry.name.isdigit() and int(fields[1].split()[1]) == self.pid:
                found.append((int(entry.name), (entry / "comm").read_text().strip()))
        return found


@contextmanager
def server(name: str, workdir: Path, model: str, max_num_seqs: int = 64, plugin: bool = True,
           on_page: bool = False, extra: tuple[str, ...] = ()) -> Iterator[Server]:
    """A vLLM on the CPU; ended with the block. The plugin reports to a directory, or (``on_page``) on vLLM's own page."""
    port, home = free_port(), workdir / name
    shutil.rmtree(home, ignore_errors=True)
    reports = home / "reports"
    reports.mkdir(parents=True)
    command = [".vllm/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", model, "--served-model-name", "small",
               "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", "--max-num-seqs", str(max_num_seqs),
               "--block-size", "32", "--num-gpu-blocks-override", "256", "--enforce-eager",
               "--enable-logging-iteration-details", *extra]
    env = SERVER_ENV | {"PYTHONPATH": f"{ROOT}/.vllm/plugin:{ROOT}/tools/vllm/truth", "KVPRESSURE_TRUTH": str(home / "steps"),
                        "KVPRESSURE_PLUGIN": "1" if plugin else "0",
                        "PROMETHEUS_MULTIPROC_DIR" if on_page else "KVPRESSURE_PLUGIN_DIR": str(reports),
                        "POD_NAMESPACE": POD[0], "POD_NAME": POD[1]}
    with process(command, env, home / "server.log") as child:
        wait_for(f"http://127.0.0.1:{port}/health", 240)
        print(f"{name}: vLLM answers", flush=True)
        yield Server(child.pid, port, home / "server.log", reports, home / "steps", max_num_seqs)


@contextmanager
def exporter(of: Server, *flags: str) -> Iterator[int]:
    """The exporter beside ``of``; yields its port."""
    port = free_port()
    target = (f"{POD[0]}/{POD[1]}=http://127.0.0.1:{of.port}/metrics;"
              f"args=--max-num-seqs {of.max_num_seqs} --max-model-len 2048")
    command = [sys.executable, "-m", "kvpressure.cli", "serve", "--web.listen-address", f"127.0.0.1:{port}",
               "--no-collector.nvidia", "--no-collector.amd", "--vllm.target", target, *flags]
    with process(command, {}, of.log.with_name(f"exporter-{port}.log")):
        wait_for(f"http://127.0.0.1:{port}/-/ready", 30)
        yield port


def plugin_flags(of: Server) -> tuple[str, ...]:
    """What makes the exporter read the plugin's reports."""
    return ("--collector.allocator", "--plugin.directory", str(of.reports))


@dataclass(frozen=True)
class Row:
    """Both pages at one moment."""

    t: float
    ours: str
    theirs: str

    @property
    def verdict(self) -> str:
        """What the exporter said."""
        return verdict(self.ours)

    def signal(self, name: str, *labels: str) -> float | None:
        """A value of the exporter's page."""
        return value(self.ours, "kvpressure_" + name, *labels)


@dataclass
class Watch:
    """Readings of a phase, by exporter port."""

    rows: dict[int, list[Row]] = field(default_factory=dict)
    clients: dict[str, object] = field(default_factory=dict)
    begin: float = field(default_factory=time.time)

    def after(self, port: int, seconds: float) -> list[Row]:
        """The readings later than ``seconds`` into the phase."""
        return [row for row in self.rows[port] if row.t - self.begin >= seconds]

    def said(self, port: int, seconds: float) -> dict[str, float]:
        """Share of each verdict, later than ``seconds``."""
        rows = self.after(port, seconds)
        return {name: sum(row.verdict == name for row in rows) / len(rows)
                for name in dict.fromkeys(row.verdict for row in rows)}


def run(of: Server, ports: tuple[int, ...], name: str, seconds: float, load: str | None = None,
        after: float = 0.0) -> Watch:
    """Drive ``load`` for ``seconds`` and read all pages every two; then go on reading ``after`` seconds."""
    with ExitStack() as stack:
        child = None
        if load:
            mode, *options = load.split()
            child = stack.enter_context(subprocess.Popen(
                [sys.executable, str(ROOT / "tools/vllm/load.py"), str(of.port), mode, str(seconds), *options],
                stdout=subprocess.PIPE))
        watch = Watch({port: [] for port in ports})
        while time.time() - watch.begin < seconds + after:
            theirs = page(f"http://127.0.0.1:{of.port}/metrics")
            for port in ports:
                watch.rows[port].append(Row(time.time(), page(f"http://127.0.0.1:{port}/metrics"), theirs))
            time.sleep(2)
        if child is not None:
            watch.clients = json.loads(child.communicate(timeout=60)[0])
    said = {port: watch.said(port, 0) for port in ports}
    print(f"{name}: {list(said.values())} {watch.clients}", flush=True)
    return watch


def truth_mean(steps: list[Step], now: float, seconds: float, by_time: bool) -> float | None:
    """Mean decoding batch over the steps before ``now``: of each step alike, or weighted by how long it took."""
    part = [step for step in steps if now - LAG - seconds < step.t <= now - LAG and step.decoding]
    if len(part) < 2:
        return None
    if not by_time:
        return sum(step.decoding for step in part) / len(part)
    return sum(b.decoding * (b.t - a.t) for a, b in pairwise(part)) / (part[-1].t - part[0].t)


def truth_p95(steps: list[Step], now: float) -> float | None:
    """95th percentile (nearest rank) of the decoding batch over the last minute's steps."""
    sizes = sorted(step.decoding for step in steps if now - LAG - 60 < step.t <= now - LAG and step.decoding)
    return float(sizes[max(0, -int(-0.95 * len(sizes) // 1) - 1)]) if sizes else None
