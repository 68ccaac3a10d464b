"""Parts of the test bed: a server with the exporters beside it, readings of both, and vLLM's own step log
as the truth.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from session import ROOT, SERVER_ENV, free_port, page, process, server_options, value, verdict, wait_for

TICKS = os.sysconf("SC_CLK_TCK")
LAG = 1.5  # seconds by which a page is behind: a report or scrape each second, and a tick each second


@dataclass(frozen=True)
class Step:
    """One engine step as vLLM reports it: when it ended, and how many requests decoded."""

    t: float
    engine: str
    decoding: int


@dataclass
class Server:
    """A running vLLM. ``truth`` is the stem of the step log."""

    pid: int
    port: int
    log: Path
    truth: Path
    max_num_seqs: int

    def steps(self) -> list[Step]:
        """All steps so far."""
        lines = [
            line.split()
            for file in sorted(self.truth.parent.glob(self.truth.name + ".*"))
            for line in file.read_text().splitlines()
        ]
        return sorted(
            (Step(float(line[0]), line[1], int(line[4])) for line in lines if len(line) == 5), key=lambda step: step.t
        )

    def cpu_seconds(self) -> float:
        """CPU time of the API server process so far (the engine is another process)."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def pages_served(self) -> int:
        """How often somebody asked for its metrics so far, by its access log."""
        return self.log.read_bytes().count(b'"GET /metrics ')

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


@dataclass(frozen=True)
class Exporter:
    """A running exporter."""

    port: int
    pid: int

    def pause(self) -> None:
        """Let it do nothing until ``resume``."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def page(self) -> str:
        """Its metrics."""
        return page(f"http://127.0.0.1:{self.port}/metrics")


@contextmanager
def server(
    name: str,
    workdir: Path,
    model: str,
    max_num_seqs: int = 64,
    plugin: bool = True,
    extra: tuple[str, ...] = (),
) -> Iterator[Server]:
    """A vLLM on the CPU that starts (``ready`` waits for it); ended with the block. ``plugin``: kvpressure's plugin
    reports on its page.
    """
    port, home = free_port(), workdir / name
    shutil.rmtree(home, ignore_errors=True)
    multiproc = home / "multiproc"
    multiproc.mkdir(parents=True)
    command = [
        ".vllm/bin/python",
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        model,
        *server_options(port, max_num_seqs),
        "--enable-logging-iteration-details",
        *extra,
    ]
    env = SERVER_ENV | {
        "PYTHONPATH": f"{ROOT}/.vllm/plugin:{ROOT}/lab/vllm/truth",
        "KVPRESSURE_TRUTH": str(home / "steps"),
        **({"KVPRESSURE_PLUGIN": "1", "PROMETHEUS_MULTIPROC_DIR": str(multiproc)} if plugin else {}),
    }
    with process(command, env, home / "server.log") as child:
        yield Server(child.pid, port, home / "server.log", home / "steps", max_num_seqs)


def ready(*servers: Server) -> None:
    """Wait until these answer. They start at the same time: a start uses one core."""
    begin = time.monotonic()
    for one in servers:
        wait_for(f"http://127.0.0.1:{one.port}/health", 300)
    print(f"{len(servers)} vLLM answer after {time.monotonic() - begin:.0f} s", flush=True)


@contextmanager
def exporter(of: Server, *flags: str) -> Iterator[Exporter]:
    """The exporter beside ``of``, which it knows by address: it prints commands that run here, without kubectl."""
    port = free_port()
    target = f"http://127.0.0.1:{of.port}/metrics;args=--max-num-seqs {of.max_num_seqs} --max-model-len 2048"
    command = [
        sys.executable,
        "-m",
        "kvpressure",
        "serve",
        "--web.listen-address",
        f"127.0.0.1:{port}",
        "--no-collector.nvidia",
        "--no-collector.amd",
        "--no-collector.processes",
        "--engine.target",
        target,
        *flags,
    ]
    with process(command, {}, of.log.with_name(f"exporter-{port}.log")) as child:
        wait_for(f"http://127.0.0.1:{port}/-/ready", 30)
        running = Exporter(port, child.pid)
        try:
            yield running
        finally:
            running.resume()  # a stopped process does not end


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
    """Readings of a phase, by exporter."""

    rows: dict[Exporter, list[Row]] = field(default_factory=dict)
    clients: dict[str, object] = field(default_factory=dict)
    begin: float = field(default_factory=time.time)

    def after(self, by: Exporter, seconds: float) -> list[Row]:
        """The readings later than ``seconds`` into the phase."""
        return [row for row in self.rows[by] if row.t - self.begin >= seconds]

    def said(self, by: Exporter, seconds: float) -> dict[str, float]:
        """Share of each verdict, later than ``seconds``."""
        rows = self.after(by, seconds)
        return {
            name: sum(row.verdict == name for row in rows) / len(rows)
            for name in dict.fromkeys(row.verdict for row in rows)
        }


@contextmanager
def loaded(of: Server, load: str | None, seconds: float) -> Iterator[subprocess.Popen[bytes] | None]:
    """Clients (``load``: mode and options of load.py; none without) for ``seconds`` or until the block ends."""
    if not load:
        yield None
        return
    mode, *options = load.split()
    with subprocess.Popen(
        [sys.executable, str(ROOT / "lab/vllm/load.py"), str(of.port), mode, str(seconds), *options],
        stdout=subprocess.PIPE,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def run(
    of: Server, by: tuple[Exporter, ...], name: str, seconds: float, load: str | None = None, after: float = 0.0
) -> Watch:
    """Drive ``load`` for ``seconds`` and read all pages every two; then go on reading ``after`` seconds."""
    with loaded(of, load, seconds) as child:
        watch = Watch({one: [] for one in by})
        while time.time() - watch.begin < seconds + after:
            theirs = page(f"http://127.0.0.1:{of.port}/metrics")
            for one in by:
                watch.rows[one].append(Row(time.time(), one.page(), theirs))
            time.sleep(2)
        if child is not None:
            watch.clients = json.loads(child.communicate(timeout=60)[0])
    print(f"{name}: {[watch.said(one, 0) for one in by]} {watch.clients}", flush=True)
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
