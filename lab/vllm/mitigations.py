"""What each mitigation does to the same overload of a real vLLM on the CPU: ``make -C lab measure-mitigations``.

One list of requests, drawn once from a fixed seed, goes to a fresh server for every variant; every request is waited
for, so that all latencies are complete and all variants do the same work. Results stay in ``.vllm/mitigations``, one
file a variant, so that the variants can run in pieces; the report is made of all that are there. Usage: mitigations.py
REPORT.md [--only NAME...] [--report-only]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mitigations_report import report
from session import ROOT, SERVER_ENV, THEIRS, free_port, page, process, server_command, value, wait_for
from step_cost import Step, fit, parse

MODEL = ".vllm/small-llama"
STORE = ROOT / ".vllm" / "mitigations"
SEED, REQUESTS, CLIENTS = 8, 72, 40
LONG_SHARE = 0.15
SHORT, LONG = ((100, 250), (100, 250)), ((800, 1200), (400, 700))  # prompt and answer, tokens from and to
BLOCKS = 256  # of 32 tokens, one of them the null block
WATCH_AFTER, WATCH_SECONDS = 15, 25  # when and how long kvpressure looks at the baseline
LIMIT = 600.0  # seconds after which a variant counts as hung


@dataclass(frozen=True)
class Request:
    """One of the list: tokens of the prompt and of the answer."""

    prompt: int
    output: int


@dataclass(frozen=True)
class Variant:
    """A setting to try. ``flags`` are made from the baseline's result; ``caps`` = (prompt, answer) enforced in front of
    the server, None = no cap of that kind.
    """

    name: str
    title: str
    flags: Callable[[dict[str, Any]], list[str]] = lambda _: []
    caps: Callable[[dict[str, Any]], tuple[int | None, int | None]] = lambda _: (None, None)


def cut(share: float) -> Callable[[dict[str, Any]], list[str]]:
    """``max_num_seqs`` this share below what really ran at once."""
    return lambda baseline: ["--max-num-seqs", str(max(1, int(baseline["running_max"] * (1 - share))))]


def planned(baseline: dict[str, Any]) -> list[str]:
    """Everything that ``kvpressure mitigate`` said to set."""
    return [
        word
        for name, number in baseline["plan"]["set"].items()
        for word in (f"--{name.replace('_', '-')}", f"{number:g}")
    ]


def blocks(share: float) -> Callable[[dict[str, Any]], list[str]]:
    """A KV pool of this share of the baseline's."""
    return lambda _: ["--num-gpu-blocks-override", str(int((BLOCKS - 1) * share) + 1)]


VARIANTS = (
    Variant("baseline", "as it was: `--max-num-seqs 64`"),
    Variant(
        "caps",
        "prompts above the plan's cap refused, answers cut to its cap",
        caps=lambda b: (b["plan"]["caps"]["input_tokens"], b["plan"]["caps"]["output_tokens"]),
    ),
    Variant(
        "cap-answers", "only answers cut to the plan's cap", caps=lambda b: (None, b["plan"]["caps"]["output_tokens"])
    ),
    Variant("limit-50", "`max_num_seqs` 50 % below the limit that was set", lambda _: ["--max-num-seqs", "32"]),
    Variant("cut-25", "`max_num_seqs` 25 % below what ran at once", cut(0.25)),
    Variant("cut-50", "`max_num_seqs` 50 % below what ran at once", cut(0.5)),
    Variant("cut-75", "`max_num_seqs` 75 % below what ran at once (not in the guides)", cut(0.75)),
    Variant("batched-512", "`max_num_batched_tokens` to 512", lambda _: ["--max-num-batched-tokens", "512"]),
    Variant("pool-70", "KV pool 30 % smaller, as a lower `gpu_memory_utilization` makes it", blocks(0.7)),
    Variant("watermark", "`--watermark 0.1`", lambda _: ["--watermark", "0.1"]),
    Variant("pool-150", "KV pool half as large again", blocks(1.5)),
    Variant("pool-200", "KV pool twice as large (fp8 instead of 16 bit)", blocks(2.0)),
    Variant("queue-16", "`--max-num-queued-reqs 24`: the rest gets 503", lambda _: ["--max-num-queued-reqs", "24"]),
    Variant("plan", "all that `kvpressure mitigate` said to set", planned),
    Variant("again", "the baseline once more: how far runs differ"),
)


def requests() -> list[Request]:
    """The list, the same in every run."""
    draw = random.Random(SEED)
    shapes = [LONG if draw.random() < LONG_SHARE else SHORT for _ in range(REQUESTS)]
    return [Request(draw.randint(*prompt), draw.randint(*output)) for prompt, output in shapes]


@dataclass
class Seen:
    """What the clients saw; times in seconds."""

    refused_at_edge: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)


class Clients:
    """``CLIENTS`` of them take request after request from the list, each over its own connection."""

    def __init__(self, port: int, todo: list[Request], caps: tuple[int | None, int | None], seed: int = SEED) -> None:
        self.port, self.todo, self.caps = port, todo[::-1], caps
        self.draw = random.Random(seed)
        self.seen = Seen()

    async def run(self) -> Seen:
        """Until the list is done."""
        await asyncio.wait_for(asyncio.gather(*(self._client() for _ in range(CLIENTS))), LIMIT)
        return self.seen

    async def _client(self) -> None:
        while self.todo:
            request = self.todo.pop()
            most_in, most_out = self.caps
            if most_in is not None and request.prompt > most_in:
                self.seen.refused_at_edge += 1
                continue
            await self._send(Request(request.prompt, min(request.output, most_out or request.output)))

    async def _send(self, request: Request) -> None:
        body = json.dumps(
            {
                "model": "small",
                "prompt": [self.draw.randrange(10, 990) for _ in range(request.prompt)],
                "max_tokens": request.output,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        began = last = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**20)
        try:
            writer.write(head + body)
            await writer.drain()
            status = (await reader.readline()).split()[1].decode()
            first = True
            async for line in reader:
                if line.startswith(b"data: {"):
                    now = time.monotonic()
                    (self.seen.ttft if first else self.seen.gaps).append(now - (began if first else last))
                    first, last = False, now
        finally:
            writer.close()
        if status == "200":
            self.seen.e2e.append(last - began)
        else:
            self.seen.failed[status] = self.seen.failed.get(status, 0) + 1
            await asyncio.sleep(1.0)  # a client that was refused does not come back at once


class Watch(threading.Thread):
    """Reads the server's page every second."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.url, self.rows, self.ended = f"http://127.0.0.1:{port}/metrics", [dict[str, float]()], threading.Event()

    def run(self) -> None:
        """Until ended."""
        while not self.ended.wait(1.0):
            text = page(self.url)
            row = {key: found for key, name in THEIRS.items() if (found := value(text, name)) is not None}
            if row:
                self.rows.append(row)


def ask_for_plan(port: int) -> dict[str, Any]:
    """What ``kvpressure mitigate`` says about the server under load."""
    time.sleep(WATCH_AFTER)
    said = subprocess.run(
        [
            sys.executable,
            "-m",
            "kvpressure",
            "mitigate",
            f"http://127.0.0.1:{port}",
            "--seconds",
            str(WATCH_SECONDS),
            "--args=--max-num-seqs 64 --max-model-len 2048",
            "--format",
            "json",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if not said.stdout:
        print(f"measure-mitigations: kvpressure mitigate: {said.stderr.strip()}", file=sys.stderr)
        return {}
    found: dict[str, Any] = json.loads(said.stdout)
    return {key: found[key] for key in ("verdict", "stage", "confidence", "set", "caps")}


def quantiles(values: list[float]) -> dict[str, float]:
    """p50, p99 by nearest rank, and the maximum."""
    ordered = sorted(values)
    if not ordered:
        return {}
    at = [ordered[min(len(ordered) - 1, int(rank * len(ordered)))] for rank in (0.5, 0.99)]
    return {"p50": at[0], "p99": at[1], "max": ordered[-1]}


def measure(variant: Variant, baseline: dict[str, Any]) -> dict[str, Any]:
    """Run one variant and return everything the report needs."""
    port, flags, caps = free_port(), variant.flags(baseline), variant.caps(baseline)
    log = STORE / f"{variant.name}.log"
    plan: dict[str, Any] = {}
    with process([*server_command(MODEL, port), "--enable-logging-iteration-details", *flags], SERVER_ENV, log):
        wait_for(f"http://127.0.0.1:{port}/health", 240)
        asyncio.run(Clients(port, requests()[:2], (None, 8), SEED + 1).run())  # the first steps are slow
        before, steps_before = page(f"http://127.0.0.1:{port}/metrics"), len(parse(log.read_text(errors="replace")))
        watch, began = Watch(port), time.monotonic()
        watch.start()
        asker = threading.Thread(target=lambda: plan.update(ask_for_plan(port)), daemon=True)
        if variant.name == "baseline":
            asker.start()
        seen = asyncio.run(Clients(port, requests(), caps).run())
        seconds = time.monotonic() - began
        watch.ended.set()
        if variant.name == "baseline":
            asker.join(60)
        time.sleep(1.5)  # the last step's counters
        after = page(f"http://127.0.0.1:{port}/metrics")
    steps = parse(log.read_text(errors="replace"))[steps_before:]
    return _result(variant, flags, caps, seen, seconds, before, after, steps, watch.rows[1:]) | (
        {"plan": plan} if plan else {}
    )


def _result(
    variant: Variant,
    flags: list[str],
    caps: tuple[int | None, int | None],
    seen: Seen,
    seconds: float,
    before: str,
    after: str,
    steps: list[Step],
    rows: list[dict[str, float]],
) -> dict[str, Any]:
    def grown(name: str) -> float:
        return (value(after, name) or 0.0) - (value(before, name) or 0.0)

    loaded = [row for row in rows if row.get("waiting")] or rows
    tokens = len(seen.gaps) + len(seen.ttft)
    found = {
        "name": variant.name,
        "title": variant.title,
        "flags": flags,
        "caps": caps,
        "seconds": seconds,
        "finished": len(seen.e2e),
        "refused_at_edge": seen.refused_at_edge,
        "failed": seen.failed,
        "tokens": tokens,
        "preemptions": grown("vllm:num_preemptions_total"),
        "recomputed": sum(step.again for step in steps),
        "steps": len(steps),
        "decoding_mean": sum(step.decoding for step in steps) / len(steps),
        "running_mean": sum(row["running"] for row in loaded) / len(loaded),
        "running_max": max(row["running"] for row in rows),
        "waiting_mean": sum(row["waiting"] for row in rows) / len(rows),
        "kv_mean": sum(row["kv"] for row in loaded) / len(loaded),
        "kv_max": max(row["kv"] for row in rows),
    }
    return found | {name: quantiles(times) for name, times in asdict(seen).items() if isinstance(times, list)}


def with_engine_seconds(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every result with ``engine_seconds``: what its steps cost at the speed that the machine had during
    the first one.
    """
    steps = {
        result["name"]: parse((STORE / f"{result['name']}.log").read_text(errors="replace"))[-result["steps"] :]
        for result in results
    }
    cost = fit(steps[results[0]["name"]])
    return [result | {"engine_seconds": cost.seconds(steps[result["name"]])} for result in results]


def stored(name: str) -> dict[str, Any] | None:
    """The result of an earlier run."""
    file = STORE / f"{name}.json"
    return dict(json.loads(file.read_text())) if file.exists() else None


def main() -> None:
    """Run what was asked for, then write the report of all that was ever run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[variant.name for variant in VARIANTS],
        default=[variant.name for variant in VARIANTS],
    )
    parser.add_argument("--report-only", action="store_true", help="run nothing, write the report of what is stored")
    options = parser.parse_args()
    STORE.mkdir(parents=True, exist_ok=True)
    for variant in VARIANTS if not options.report_only else ():
        if variant.name in options.only:
            result = measure(variant, stored("baseline") or {})
            (STORE / f"{variant.name}.json").write_text(json.dumps(result, indent=1))
            print(json.dumps(result), flush=True)
    results = [found for variant in VARIANTS if (found := stored(variant.name)) is not None]
    options.report.write_text(report(with_engine_seconds(results), REQUESTS, CLIENTS))
    print(f"measure-mitigations: wrote {options.report}")


if __name__ == "__main__":
    main()
