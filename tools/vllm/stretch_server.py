"""Servers of the stretches, the flight recorder beside them, and what the machine did meanwhile.

A server runs in a control group of its own (as root, with cgroup v1 and the bare v2 tree mounted, as in many virtual
machines), so that CPU limits and throttling are real; elsewhere it runs without, and the recording has no
``containers``.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from session import ROOT, SERVER_ENV

CGROUPS = Path("/sys/fs/cgroup")
TREES = ("cpu", "cpuacct", "memory", "unified")
SHARES = 4096  # before other work on the machine: a stretch is to be what it says
PERIOD = 100_000
LATE = 2.5  # seconds after which a sample is no longer the containers' state
NAMESPACE = "inference"
TICKS = os.sysconf("SC_CLK_TCK")
STATS = re.compile(
    r"Engine (\d+): Avg prompt throughput: ([\d.]+) tokens/s, Avg generation throughput: ([\d.]+) tokens/s, "
    r"Running: (\d+) reqs, Waiting: (\d+) reqs, .*?KV cache usage: ([\d.]+)%(?:, Prefix cache hit rate: ([\d.]+)%)?"
)
DROPPED = re.compile(r"^(?:# HELP |(?:# TYPE )?(?:python_|\S+_created[ {]|http_\w+_bucket\{))")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Spec:
    """How a server is started. ``model`` is a folder of the models' folder, ``flags`` its further options."""

    flags: str
    model: str = "small-llama"
    core: int | None = None

    def args(self, port: int) -> list[str]:
        """The command line after the module's name."""
        return [
            "--model",
            f"./{self.model}",
            "--served-model-name",
            "small",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--block-size",
            "32",
            "--enforce-eager",
            "--disable-uvicorn-access-log",
            *self.flags.split(),
        ]


@dataclass
class Places:
    """Folders: of the Python environment with vLLM, of the models, and where work files go."""

    vllm: Path
    models: Path
    work: Path


@dataclass
class Server:
    """A vLLM that can be ended and started again at the same address."""

    number: int
    port: int
    places: Places
    spec: Spec
    child: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    last_termination: dict[str, Any] | None = None
    read: int = 0  # bytes of the log

    @property
    def pod(self) -> str:
        """Its pod's name in the recording."""
        return f"vllm-{self.number}"

    @property
    def url(self) -> str:
        """Where its metrics are."""
        return f"http://127.0.0.1:{self.port}/metrics"

    @property
    def log(self) -> Path:
        """Its log file."""
        return self.places.work / f"{self.pod}.log"

    def group(self, tree: str) -> Path:
        """Its control group."""
        return CGROUPS / tree / f"kvpressure-{self.pod}"

    def start(self) -> None:
        """Start it; ``ready`` waits for it."""
        join = " ".join(f"echo $$ > {self.group(tree)}/cgroup.procs;" for tree in TREES if self._make(tree))
        env = SERVER_ENV | {"VLLM_LOG_STATS_INTERVAL": "1"}
        if self.spec.core is not None:
            env["VLLM_CPU_OMP_THREADS_BIND"] = str(self.spec.core)
        command = [
            str(self.places.vllm / "bin/python"),
            "-m",
            "vllm.entrypoints.openai.api_server",
            *self.spec.args(self.port),
        ]
        with self.log.open("ab") as out:
            self.child = subprocess.Popen(
                ["sh", "-c", f'{join} exec "$@"', "sh", *command],
                env=os.environ | env,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.places.models,
            )

    def _make(self, tree: str) -> bool:
        """Whether it has a control group in ``tree``."""
        try:
            self.group(tree).mkdir(exist_ok=True)
            if tree == "cpu":
                (self.group(tree) / "cpu.shares").write_text(str(SHARES))
        except OSError:
            return False
        return True

    async def ready(self, seconds: float = 240) -> None:
        """Wait until it answers. Raises ``SystemExit`` when it ends or ``seconds`` are over."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.child is not None and self.child.poll() is None:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(b"GET /health HTTP/1.0\r\n\r\n")
                answer = await reader.read(20)
                writer.close()
                if b" 200" in answer:
                    return
            await asyncio.sleep(0.5)
        raise SystemExit(f"stretches: vLLM does not answer on port {self.port}; see {self.log}")

    async def stop(self) -> None:
        """End it as a kubelet would, and remember how it went."""
        if self.child is None:
            return
        self.child.send_signal(signal.SIGTERM)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self.child.wait), 25)
        if self.child.poll() is None:
            self.child.kill()
        code = self.child.wait()
        self.last_termination = {
            "reason": "Completed" if code == 0 else "Error",
            "exit_code": code if code >= 0 else 128 - code,
            "finished_at": round(time.time(), 3),
        }
        self.child = None

    async def restart(self, spec: Spec) -> None:
        """End it, start it with other options and wait until it answers."""
        await self.stop()
        self.spec, self.restarts = spec, self.restarts + 1
        self.start()
        await self.ready()

    async def remove_groups(self) -> None:
        """Remove its control groups, as soon as the last process has left them."""
        for tree in TREES:
            for _ in range(50):
                with suppress(OSError):
                    self.group(tree).rmdir()
                if not self.group(tree).exists():
                    break
                await asyncio.sleep(0.2)

    def engine_pid(self) -> int:
        """The engine core's process, a child of the API server's."""
        for entry in Path("/proc").iterdir():
            with suppress(OSError, IndexError, ValueError):
                name, fields = (entry / "stat").read_text().rsplit(")", 1)
                if self.child is not None and int(fields.split()[1]) == self.child.pid and "EngineCor" in name:
                    return int(entry.name)
        raise SystemExit("stretches: no engine core process found")

    def signal_engine(self, number: signal.Signals) -> None:
        """Send a signal to the engine core's process."""
        os.kill(self.engine_pid(), number)

    def signal_api(self, number: signal.Signals) -> None:
        """Send a signal to the API server's process alone."""
        if self.child is not None:
            self.child.send_signal(number)

    def limit_cpu(self, cores: float | None) -> None:
        """A CPU limit as Kubernetes sets it (CFS quota); None takes it away."""
        quota = -1 if cores is None else int(cores * PERIOD)
        (self.group("cpu") / "cpu.cfs_period_us").write_text(str(PERIOD))
        (self.group("cpu") / "cpu.cfs_quota_us").write_text(str(quota))

    def container(self) -> dict[str, Any]:
        """What cgroup v2 and the pod's status would give; what cannot be read is absent."""
        facts: dict[str, Any] = {
            "namespace": NAMESPACE,
            "pod": self.pod,
            "container": "vllm",
            "restarts": self.restarts,
        }
        if self.last_termination is not None:
            facts["last_termination"] = self.last_termination
        with suppress(OSError, ValueError):
            facts["cpu_usage_seconds"] = int((self.group("cpuacct") / "cpuacct.usage").read_text()) / 1e9
            facts["memory_working_set_bytes"] = self._working_set()
            quota = int((self.group("cpu") / "cpu.cfs_quota_us").read_text())
            if quota > 0:
                facts |= {"cpu_limit_cores": quota / PERIOD} | self._throttling()
            pressure = re.search(
                r"^some avg10=([\d.]+)", (self.group("unified") / "cpu.pressure").read_text(), re.MULTILINE
            )
            if pressure:
                facts["cpu_pressure_some_ratio"] = round(float(pressure[1]) / 100, 4)
        return facts

    def _working_set(self) -> int:
        stat = dict(line.split() for line in (self.group("memory") / "memory.stat").read_text().splitlines())
        usage = int((self.group("memory") / "memory.usage_in_bytes").read_text())
        return max(0, usage - int(stat.get("total_inactive_file", 0)))

    def _throttling(self) -> dict[str, int]:
        stat = dict(line.split() for line in (self.group("cpu") / "cpu.stat").read_text().splitlines())
        return {"cpu_periods": int(stat["nr_periods"]), "cpu_throttled_periods": int(stat["nr_throttled"])}

    def cpu_of_processes(self) -> tuple[float, float]:
        """CPU seconds so far of the API server's process, and of all that it started."""
        spent: dict[int, tuple[int, float]] = {}
        for entry in Path("/proc").iterdir():
            with suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                spent[int(entry.name)] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS
        if self.child is None or self.child.pid not in spent:
            return 0.0, 0.0
        family = {self.child.pid}
        while more := {pid for pid, (parent, _) in spent.items() if parent in family and pid not in family}:
            family |= more
        own = spent[self.child.pid][1]
        return own, sum(spent[pid][1] for pid in family) - own

    def new_lines(self) -> list[str]:
        """Log lines since the last call, without colours and this machine's paths."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as file:
            file.seek(self.read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.read += len(whole)
        lines = COLOURS.sub("", whole.decode(errors="replace")).splitlines()
        for folder, short in (
            (self.places.vllm, "/opt/venv"),
            (Path(sys.base_prefix), "/usr/local"),
            (self.places.models, "/models"),
            (ROOT, "/src"),
        ):
            lines = [line.replace(str(folder), short) for line in lines]
        return lines


@dataclass
class Sample:
    """What was seen at ``t`` beside the metrics endpoint. ``args`` is the command line by pod."""

    t: float
    args: dict[str, list[str]]
    containers: list[dict[str, Any]]
    logs: list[dict[str, str]]


@dataclass
class Sampler:
    """Samples once a second; keeps the server's own statistics lines (``stats``) and the machine's load as
    the truth.
    """

    servers: list[Server]
    samples: list[Sample] = field(default_factory=list)
    stats: list[list[float | str | None]] = field(default_factory=list)
    machine: list[list[float | None]] = field(default_factory=list)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self.take()
            await asyncio.sleep(1)

    def take(self) -> None:
        """One sample."""
        now, logs = time.time(), []
        for server in self.servers:
            for line in server.new_lines():
                found = STATS.search(line)
                if found:
                    prompt, output, running, waiting, usage, hits = found.groups()[1:]
                    self.stats.append(
                        [
                            round(now, 2),
                            server.pod,
                            int(running),
                            int(waiting),
                            float(usage),
                            float(prompt),
                            float(output),
                            None if hits is None else float(hits),
                        ]
                    )
                elif line.strip():
                    logs.append({"namespace": NAMESPACE, "pod": server.pod, "container": "vllm", "line": line})
        self.samples.append(
            Sample(
                now,
                {server.pod: server.spec.args(server.port) for server in self.servers},
                [server.container() for server in self.servers],
                logs,
            )
        )
        self.machine.append(
            [
                round(now, 2),
                _busy_seconds(),
                *(v for s in self.servers for v in s.cpu_of_processes()),
                _machine_pressure(),
            ]
        )


def _busy_seconds() -> float:
    """CPU seconds that the machine has spent on anything so far."""
    values = [int(v) for v in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(values) - values[3] - values[4]) / TICKS


def _machine_pressure() -> float | None:
    """Share of the last ten seconds in which something on the machine waited for a CPU; None without PSI."""
    with suppress(OSError):
        found = re.search(r"some avg10=([\d.]+)", Path("/proc/pressure/cpu").read_text())
        return float(found[1]) / 100 if found else None
    return None


def recorder_command(urls: dict[str, str], out: Path) -> list[str]:
    """The flight recorder that scrapes each server once a second. ``urls``: of each pod's metrics."""
    command = [
        sys.executable,
        "-m",
        "kvpressure",
        "record",
        "--out",
        str(out),
        "--interval",
        "1",
        "--engine.pace",
        "fixed",
        "--no-collector.nvidia",
        "--no-collector.amd",
        "--node-name",
        "node-1",
        "--log.level",
        "error",
    ]
    for pod, url in urls.items():
        command += ["--engine.target", f"{NAMESPACE}/{pod}={url}"]
    return command


@contextmanager
def recorder(servers: list[Server], out: Path) -> Iterator[None]:
    """The flight recorder, until the block ends."""
    out.unlink(missing_ok=True)
    child = subprocess.Popen(recorder_command({server.pod: server.url for server in servers}, out), cwd=ROOT)
    try:
        yield
    finally:
        child.send_signal(signal.SIGINT)
        child.wait(20)


def slim(exposition: str) -> str:
    """The metrics without HELP, ``_created`` and ``python_*`` lines and without the buckets of ``http_*``."""
    return "\n".join(line for line in exposition.splitlines() if not DROPPED.match(line)) + "\n"


def merge(raw: Path, out: Path, samples: list[Sample], source: str) -> tuple[float, float]:
    """Write the recording with command lines, containers and log lines put in; first and last tick's time."""
    with gzip.open(raw, "rt") as file:
        header, *ticks = [json.loads(line) for line in file]
    header["source"] = source
    before = 0.0
    with gzip.open(out, "wt", compresslevel=9) as file:
        file.write(json.dumps(header) + "\n")
        for tick in ticks:
            _add(tick, before, samples)
            before = tick["t"]
            file.write(json.dumps(tick) + "\n")
    return ticks[0]["t"], ticks[-1]["t"]


def _add(tick: dict[str, Any], before: float, samples: list[Sample]) -> None:
    """Put what was sampled since the tick ``before`` into ``tick``."""
    now = [sample for sample in samples if sample.t <= tick["t"]]
    if now:
        if tick["t"] - now[-1].t < LATE:
            tick["containers"] = now[-1].containers
        for engine in tick.get("engines", ()):
            engine |= {"container": "vllm", "args": now[-1].args.get(engine["pod"], [])}
            if engine.get("exposition"):
                engine["exposition"] = slim(engine["exposition"])
    lines = [line for sample in now if sample.t > before for line in sample.logs]
    if lines:
        tick["logs"] = lines
