"""Record stretches of a real vLLM on the CPU under loads that the test bed does not have, each with the truth beside
it.

Usage: stretches.py OUT [--vllm DIR] [--models DIR] [--only NAME ...]. Needs ``install.sh``, ``make_model.py`` (tiny and
small) and ``stretch_models.py``; as root for CPU limits. Writes OUT/NAME.jsonl.gz and OUT/truth/NAME.json. Nothing is
judged here: the labels (labels.csv) are written by hand from what was sent and from the truth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from session import ROOT, free_port
from stretch_clients import Clients, Load, agents, closed, growing, poisson, table
from stretch_server import Places, Sampler, Server, Spec, merge, recorder

Act = Callable[[list[Server]], Awaitable[None]]


@dataclass(frozen=True)
class Phase:
    """A part of a stretch. A load that the phase before had, too, goes on; ``act`` is done first, within
    the seconds.
    """

    name: str
    seconds: float
    loads: tuple[Load, ...]
    act: Act | None = None
    did: str = ""


@dataclass(frozen=True)
class Stretch:
    """Servers and phases."""

    name: str
    specs: tuple[Spec, ...]
    phases: tuple[Phase, ...]


@dataclass
class Record:
    """What is kept of a stretch beside the metrics."""

    begin: float = 0.0
    phases: list[dict[str, Any]] = field(default_factory=list)


LIMITS = "--max-model-len 2048 --max-num-seqs 64 --num-gpu-blocks-override 256"
ONE_ADAPTER = Spec(
    LIMITS + " --enable-lora --max-loras 1 --max-lora-rank 8 --max-cpu-loras 4 --lora-modules "
    "a0=./adapter-0 a1=./adapter-1 a2=./adapter-2"
)
LIGHT = poisson(1.0, (20, 60), (10, 40))
STEADY = closed(6, (100, 200), (100, 200))


def signals(number: signal.Signals, to: str) -> Act:
    """Send a signal to the engine core's process or to the API server's."""

    async def act(servers: list[Server]) -> None:
        if to == "engine":
            servers[0].signal_engine(number)
        else:
            servers[0].signal_api(number)

    return act


def cpu_limit(cores: float | None) -> Act:
    """Set or lift the container's CPU limit."""

    async def act(servers: list[Server]) -> None:
        servers[0].limit_cpu(cores)

    return act


def restarted(spec: Spec) -> Act:
    """End the server and start it with other options."""

    async def act(servers: list[Server]) -> None:
        await servers[0].restart(spec)

    return act


class Hogs:
    """Processes that only burn CPU."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.children: list[subprocess.Popen[bytes]] = []

    async def begin(self, servers: list[Server]) -> None:
        """Start them outside the server's control group, and take the group's privilege away."""
        (servers[0].group("cpu") / "cpu.shares").write_text("1024")
        self.children = [
            subprocess.Popen(["nice", "-n", "5", sys.executable, "-c", "while True: pass"]) for _ in range(self.number)
        ]

    async def end(self, servers: list[Server]) -> None:
        """End them."""
        for child in self.children:
            child.kill()
            child.wait()
        (servers[0].group("cpu") / "cpu.shares").write_text("4096")


HOGS = Hogs(4)
FEW_SEATS = Spec("--max-model-len 2048 --max-num-seqs 6 --num-gpu-blocks-override 256")
MORE_SEATS = Spec("--max-model-len 2048 --max-num-seqs 48 --num-gpu-blocks-override 256")
CROWD = closed(20, (150, 300), (250, 450))
BEHIND = poisson(0.4, (20, 60), (10, 40), priority=0)
BATCH_FITS = closed(8, (200, 300), (200, 400), priority=10)
BATCH_FLOODS = closed(32, (300, 500), (300, 700), priority=10)
URGENT = poisson(0.7, (200, 400), (50, 150), priority=0)
LIGHT_B = poisson(0.5, (20, 60), (10, 40), server=1)
FULL_A = closed(32, (300, 500), (300, 700))
FULL_B = closed(32, (300, 500), (300, 700), server=1)

STRETCHES = (
    Stretch(
        "agents",
        (Spec("--max-model-len 4096 --max-num-seqs 64 --num-gpu-blocks-override 448"),),
        (
            Phase("light", 20, (LIGHT,)),
            Phase("few agents", 40, (agents(5, 300, (60, 150), (30, 80), (0.5, 2.0), 2200),)),
            Phase("many agents", 60, (agents(30, 300, (120, 250), (60, 150), (0.2, 0.8), 3000),)),
            Phase("recovery", 35, (LIGHT,)),
        ),
    ),
    Stretch(
        "parallel-sampling",
        (Spec(LIMITS),),
        (
            Phase("light", 20, (LIGHT,)),
            Phase("n 6 fits", 35, (closed(2, (150, 250), (100, 250), n=6),)),
            Phase("n 8 floods", 50, (closed(6, (200, 400), (400, 700), n=8),)),
            Phase("recovery", 35, (LIGHT,)),
        ),
    ),
    Stretch(
        "long-outputs",
        (Spec("--max-model-len 4096 --max-num-seqs 32 --num-gpu-blocks-override 200"),),
        (
            Phase("light", 20, (LIGHT,)),
            Phase("growing", 120, (growing(16, 3.0, (40, 80), (1800, 3000)),)),
            Phase("recovery", 35, (LIGHT,)),
        ),
    ),
    Stretch(
        "priorities",
        (Spec(LIMITS + " --scheduling-policy priority"),),
        (
            Phase("light", 20, (BEHIND,)),
            Phase("batch fits", 30, (BEHIND, BATCH_FITS)),
            Phase("batch floods", 55, (BEHIND, URGENT, BATCH_FLOODS)),
            Phase("recovery", 35, (BEHIND,)),
        ),
    ),
    Stretch(
        "disconnects",
        (Spec("--max-model-len 2048 --max-num-seqs 16 --num-gpu-blocks-override 512"),),
        (
            Phase("light", 20, (LIGHT,)),
            Phase("storm", 50, (closed(48, (1400, 1900), (50, 100), give_up=1.5),)),
            Phase("recovery", 35, (LIGHT,)),
        ),
    ),
    Stretch(
        "engine-stopped",
        (Spec(LIMITS),),
        (
            Phase("steady", 30, (STEADY,)),
            Phase(
                "engine stopped",
                40,
                (STEADY,),
                signals(signal.SIGSTOP, "engine"),
                "SIGSTOP to the engine core",
            ),
            Phase("recovery", 40, (STEADY,), signals(signal.SIGCONT, "engine"), "SIGCONT to the engine core"),
        ),
    ),
    Stretch(
        "api-stopped",
        (Spec(LIMITS),),
        (
            Phase("steady", 30, (STEADY,)),
            Phase(
                "API server stopped",
                40,
                (STEADY,),
                signals(signal.SIGSTOP, "api"),
                "SIGSTOP to the API server",
            ),
            Phase("recovery", 40, (STEADY,), signals(signal.SIGCONT, "api"), "SIGCONT to the API server"),
        ),
    ),
    Stretch(
        "cpu-limit",
        (Spec(LIMITS),),
        (
            Phase("steady", 30, (STEADY,), cpu_limit(2.0), "CPU limit of 2 cores"),
            Phase("throttled", 50, (STEADY,), cpu_limit(0.3), "CPU limit of 0.3 cores"),
            Phase("recovery", 35, (STEADY,), cpu_limit(2.0), "CPU limit of 2 cores"),
        ),
    ),
    Stretch(
        "noisy-neighbour",
        (Spec(LIMITS),),
        (
            Phase("steady", 30, (STEADY,)),
            Phase("starved", 45, (STEADY,), HOGS.begin, "4 processes burn CPU beside it"),
            Phase("recovery", 35, (STEADY,), HOGS.end, "they are ended"),
        ),
    ),
    Stretch(
        "two-servers",
        (Spec(LIMITS, core=0), Spec(LIMITS, core=1)),
        (
            Phase("both light", 20, (LIGHT, LIGHT_B)),
            Phase("first floods", 45, (FULL_A, LIGHT_B)),
            Phase("second floods", 45, (LIGHT, FULL_B)),
            Phase("recovery", 35, (LIGHT, LIGHT_B)),
        ),
    ),
    Stretch(
        "sliding-window",
        (Spec(LIMITS, model="window-mistral"),),
        (
            Phase("light", 20, (LIGHT,)),
            Phase("long but windowed", 50, (closed(12, (500, 900), (300, 600)),)),
            Phase("too many", 50, (closed(56, (200, 400), (400, 900)),)),
            Phase("recovery", 35, (LIGHT,)),
        ),
    ),
    Stretch(
        "ngram",
        (Spec(LIMITS + ' --speculative-config {"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4}'),),
        (
            Phase("light", 20, (poisson(1.0, (20, 60), (10, 40), temperature=0),)),
            Phase("steady", 35, (closed(6, (100, 200), (200, 400), temperature=0),)),
            Phase("flood", 50, (closed(40, (300, 500), (400, 900), temperature=0),)),
            Phase("recovery", 35, (poisson(1.0, (20, 60), (10, 40), temperature=0),)),
        ),
    ),
    Stretch(
        "lora-starved",
        (ONE_ADAPTER,),
        (
            Phase("one adapter", 30, (closed(4, (50, 100), (50, 100), models=("a0",)),)),
            Phase("three adapters", 55, (closed(15, (50, 100), (200, 400), models=("a0", "a1", "a2")),)),
            Phase("recovery", 35, (closed(4, (50, 100), (50, 100), models=("a0",)),)),
        ),
    ),
    Stretch(
        "lora-switching",
        (ONE_ADAPTER,),
        (
            Phase("one adapter", 20, (closed(1, (50, 100), (50, 100), models=("a0",)),)),
            Phase("in turn", 50, (closed(3, (50, 100), (50, 100), models=("a0", "a1", "a2")),)),
            Phase("recovery", 30, (closed(1, (50, 100), (50, 100), models=("a0",)),)),
        ),
    ),
    Stretch(
        "restart",
        (FEW_SEATS,),
        (
            Phase("light", 20, (LIGHT,)),
            Phase("6 seats", 40, (CROWD,)),
            Phase(
                "restarting",
                1,
                (CROWD,),
                restarted(MORE_SEATS),
                "SIGTERM, then started with --max-num-seqs 48",
            ),
            Phase("48 seats", 50, (CROWD,)),
            Phase("recovery", 35, (LIGHT,)),
        ),
    ),
    Stretch(
        "busy-api-server",
        (Spec("--max-model-len 2048 --max-num-seqs 128 --num-gpu-blocks-override 1024", model="tiny-llama"),),
        (
            Phase("light", 20, (LIGHT,)),
            Phase("logprobs", 50, (closed(48, (50, 100), (200, 400), logprobs=20),)),
            Phase("recovery", 35, (LIGHT,)),
        ),
    ),
    Stretch(
        "prefill-flood",
        (
            Spec(
                "--max-model-len 2048 --max-num-seqs 64 --num-gpu-blocks-override 1024 "
                "--max-num-batched-tokens 1024 --no-enable-prefix-caching"
            ),
        ),
        (
            Phase("light", 20, (LIGHT,)),
            Phase("long prompts", 50, (closed(10, (1500, 2000), (4, 12)),)),
            Phase("recovery", 35, (LIGHT,)),
        ),
    ),
)


async def drive(stretch: Stretch, servers: list[Server], clients: list[Clients], record: Record) -> None:
    """Go through the phases."""
    running: dict[Load, asyncio.Task[None]] = {}
    try:
        for phase in stretch.phases:
            await hang_up([running.pop(load) for load in list(running) if load not in phase.loads])
            begin = time.time()
            for load in phase.loads:
                if load not in running:
                    running[load] = asyncio.create_task(forever(load, clients[load.server]))
            if phase.act is not None:
                await phase.act(servers)
            await asyncio.sleep(max(0.0, begin + phase.seconds - time.time()))
            record.phases.append(
                {
                    "name": phase.name,
                    "from": begin,
                    "to": time.time(),
                    "did": phase.did,
                    "loads": [f"server {load.server}: {load.text}" for load in phase.loads],
                }
            )
            print(f"  {phase.name}: {time.time() - begin:.0f} s", flush=True)
    finally:
        await hang_up(list(running.values()))


async def forever(load: Load, clients: Clients) -> None:
    """Run a load."""
    await load.run(clients)


async def hang_up(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel loads; what they had open is cut."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


async def warm_up(clients: Clients) -> None:
    """Two requests: the first steps of a server are slow."""
    for _ in range(2):
        await clients.ask(clients.text((100, 100)), 10)
    clients.requests.clear()


async def make(stretch: Stretch, out: Path, places: Places) -> None:
    """Record one stretch and write its truth."""
    servers = [Server(number, free_port(), places, spec) for number, spec in enumerate(stretch.specs)]
    clients = [Clients(server.port, "small", 100 + server.number) for server in servers]
    sampler, record, raw = Sampler(servers), Record(), places.work / f"{stretch.name}.jsonl.gz"
    try:
        for server in servers:
            server.log.unlink(missing_ok=True)
            server.start()
        await asyncio.gather(*(server.ready() for server in servers))
        print(f"{stretch.name}: vLLM answers", flush=True)
        await asyncio.gather(*(warm_up(one) for one in clients))
        with recorder(servers, raw):
            task = asyncio.create_task(sampler.run())
            await asyncio.sleep(3)
            await drive(stretch, servers, clients, record)
            await asyncio.sleep(1)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    finally:
        for server in servers:
            with suppress(ProcessLookupError, SystemExit):
                server.signal_engine(signal.SIGCONT)
                server.signal_api(signal.SIGCONT)
            await server.stop()
            await server.remove_groups()
    record.begin, _ = merge(
        raw,
        out / f"{stretch.name}.jsonl.gz",
        sampler.samples,
        f"vLLM 0.32.0 on a CPU, stretch {stretch.name}, kvpressure record and tools/vllm/stretches.py",
    )
    write_truth(out / "truth" / f"{stretch.name}.json", record, sampler, clients)


def write_truth(path: Path, record: Record, sampler: Sampler, clients: list[Clients]) -> None:
    """The truth as JSON, times in seconds from the recording's first tick; print it in short."""
    zero = record.begin
    begin, end = record.phases[0]["from"], record.phases[-1]["to"]
    phases = [
        phase | {"from": round(phase["from"] - zero, 1), "to": round(phase["to"] - zero, 1)} for phase in record.phases
    ]
    seen = {
        f"vllm-{number}": [
            row | {"from": round(row["from"] + begin - zero, 1)} for row in table(one.requests, begin, end)
        ]
        for number, one in enumerate(clients)
    }
    stats = [[round(float(row[0] or 0) - zero, 1), *row[1:]] for row in sampler.stats if float(row[0] or 0) >= zero]
    rates = machine_rates(sampler, zero)
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = {
        "phases": phases,
        "clients": seen,
        "server_log_columns": STATS_COLUMNS,
        "server_log": stats,
        "machine_columns": machine_columns(len(clients)),
        "machine": rates,
    }
    rows = ",\n".join(
        f" {json.dumps(name)}: "
        + (json.dumps(part) if name != "clients" else json.dumps(part).replace("}, {", "},\n  {"))
        for name, part in parts.items()
    )
    path.write_text("{\n" + rows.replace("], [", "],\n  [") + "\n}\n")
    summarise(phases, stats, seen, rates)


STATS_COLUMNS = [
    "second",
    "pod",
    "running",
    "waiting",
    "kv_usage_percent",
    "prompt_tokens_per_second",
    "output_tokens_per_second",
    "prefix_hit_percent",
]


def machine_columns(servers: int) -> list[str]:
    """Columns of ``machine_rates``."""
    return [
        "second",
        "busy_cores",
        *(f"vllm-{number}_{part}_cores" for number in range(servers) for part in ("api", "engine")),
        "cpu_pressure_ratio",
    ]


def machine_rates(sampler: Sampler, zero: float) -> list[list[float | None]]:
    """Cores in use on the machine, by each API server and by its children, about every five seconds; pressure last."""
    rates: list[list[float | None]] = []
    rows = [row for row in sampler.machine if (row[0] or 0.0) >= zero][::5]
    for before, row in pairwise(rows):
        seconds = (row[0] or 0.0) - (before[0] or 0.0)
        spent = [max(0.0, (now or 0.0) - (then or 0.0)) for then, now in zip(before[1:-1], row[1:-1], strict=True)]
        rates.append([round((row[0] or 0.0) - zero, 1), *(round(one / seconds, 2) for one in spent), row[-1]])
    return rates


def summarise(
    phases: list[dict[str, Any]],
    stats: list[list[Any]],
    seen: dict[str, list[dict[str, Any]]],
    rates: list[list[float | None]],
) -> None:
    """Print what happened in each phase."""
    for phase in phases:
        print(f"  {phase['from']:6.1f}-{phase['to']:6.1f} {phase['name']}")
        for pod, rows in seen.items():
            part = [row for row in stats if row[1] == pod and phase["from"] <= row[0] < phase["to"]]
            for row in part[:: max(1, len(part) // 6)]:
                print(
                    f"      {pod} at {row[0]:6.1f}: running {row[2]}, waiting {row[3]}, KV {row[4]} %, prompt"
                    f" {row[5]:.0f}, output {row[6]:.0f} tokens/s, hits {row[7]}"
                )
            for window in rows:
                if phase["from"] - 5 <= window["from"] < phase["to"] - 5:
                    print(f"      {pod} clients {window}")
        for rate in rates:
            if phase["from"] <= (rate[0] or 0) < phase["to"] and int(rate[0] or 0) % 3 == 0:
                print(f"      machine {rate}")


def main() -> None:
    """Record what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--vllm", type=Path, default=ROOT / ".vllm")
    parser.add_argument("--models", type=Path, default=ROOT / ".vllm")
    parser.add_argument("--work", type=Path, default=ROOT / ".vllm" / "stretches")
    parser.add_argument("--only", nargs="*", default=[], choices=[stretch.name for stretch in STRETCHES])
    options = parser.parse_args()
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -5)  # clients and recorder are not to be late on a busy machine
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    for stretch in STRETCHES:
        if not options.only or stretch.name in options.only:
            asyncio.run(make(stretch, options.out, Places(options.vllm, options.models, options.work)))


if __name__ == "__main__":
    main()
