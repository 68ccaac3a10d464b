"""A real vLLM on the CPU, the exporter beside it, and a report of what both said. Runs in the project's .venv.

Phases: idle, steady, pressure, recovery. Every two seconds both pages are read; the report puts the exporter's numbers
next to vLLM's own. Usage: session.py REPORT.md [--model DIR] [--record FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PHASES = (
    ("idle", 15, None),
    ("steady", 60, ["closed", "60", "--clients", "8", "--prompt", "150", "250", "--output", "150", "250"]),
    ("pressure", 75, ["closed", "75", "--clients", "48", "--prompt", "300", "500", "--output", "400", "900"]),
    ("recovery", 40, ["poisson", "40", "--rate", "1.5", "--prompt", "20", "60", "--output", "10", "40"]),
)
OURS = (
    "engine_up",
    "requests_running",
    "kv_cache_used_ratio",
    "kv_cache_used_ratio_max",
    "effective_batch_size_mean",
    "concurrency_ratio",
    "preemption_rate",
    "verdict_confidence",
)
THEIRS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv": "vllm:kv_cache_usage_perc",
    "preemptions": "vllm:num_preemptions_total",
}


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def page(url: str) -> str:
    """The body at ``url``; empty when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=3) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def value(text: str, name: str, *labels: str) -> float | None:
    """First sample of ``name`` whose line has all ``labels``."""
    for line in text.splitlines():
        if line.startswith((name + "{", name + " ")) and all(label in line for label in labels):
            return float(line.rsplit(" ", 1)[1])
    return None


def verdict(text: str) -> str:
    """The verdict of the exporter's page."""
    found = re.search(r'kvpressure_verdict\{[^}]*verdict="(\w+)"\} 1\.0', text)
    return found[1] if found else "-"


@contextmanager
def process(command: list[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child that is ended with the block."""
    with log.open("wb") as out:
        child = subprocess.Popen(command, env=os.environ | env, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)
        try:
            yield child
        finally:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()


def wait_for(url: str, seconds: float) -> None:
    """Until ``url`` answers."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(1)
    raise SystemExit(f"try-vllm: {url} did not answer within {seconds:.0f} s")


def server_command(model: str, port: int) -> list[str]:
    """The server of the captures: 255 usable blocks of 32 tokens, 64 sequences."""
    return [".vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", model, *server_options(port, 64)]


def server_options(port: int, max_num_seqs: int) -> list[str]:
    """The options of every server here: one name, one port, and a cache of 255 usable blocks of 32 tokens."""
    return [
        "--served-model-name",
        "small",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--max-model-len",
        "2048",
        "--max-num-seqs",
        str(max_num_seqs),
        "--block-size",
        "32",
        "--num-gpu-blocks-override",
        "256",
        "--enforce-eager",
    ]


SERVER_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def watch(port: int, exporter: int, rows: list[dict[str, object]], phase: str, seconds: float) -> None:
    """Read both pages every two seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        vllm, ours = page(f"http://127.0.0.1:{port}/metrics"), page(f"http://127.0.0.1:{exporter}/metrics")
        row: dict[str, object] = {"phase": phase, "t": time.time(), "verdict": verdict(ours)}
        row.update({f"vllm_{key}": value(vllm, name) for key, name in THEIRS.items()})
        row.update({name: value(ours, "kvpressure_" + name) for name in OURS})
        row["batch_p95"] = value(ours, "kvpressure_effective_batch_size", 'quantile="0.95"')
        row["itl_p95"] = value(ours, "kvpressure_latency_seconds", 'phase="inter_token"', 'quantile="0.95"')
        row["ttft_p95"] = value(ours, "kvpressure_latency_seconds", 'phase="ttft"', 'quantile="0.95"')
        rows.append(row)
        print(
            f"{phase:9s} {row['verdict']:20s} vLLM: running {row['vllm_running']} waiting {row['vllm_waiting']} kv"
            f" {row['vllm_kv']}  exporter: kv max {row['kv_cache_used_ratio_max']} batch"
            f" {row['effective_batch_size_mean']}",
            flush=True,
        )
        time.sleep(2)


def run(model: str, record: str | None, workdir: Path) -> tuple[list[dict[str, object]], dict[str, object]]:
    """Start both, drive the phases, return the rows and what the clients saw."""
    port, exporter = free_port(), free_port()
    rows: list[dict[str, object]] = []
    clients: dict[str, object] = {}
    target = f"inference/vllm-0=http://127.0.0.1:{port}/metrics;args=--max-num-seqs 64 --max-model-len 2048"
    serve = [
        sys.executable,
        "-m",
        "kvpressure",
        "serve",
        "--web.listen-address",
        f"127.0.0.1:{exporter}",
        "--engine.target",
        target,
    ]
    if record:
        serve += ["--record.path", record]
    with process(server_command(model, port), SERVER_ENV, workdir / "vllm.log"):
        wait_for(f"http://127.0.0.1:{port}/health", 240)
        with process(serve, {}, workdir / "exporter.log"):
            wait_for(f"http://127.0.0.1:{exporter}/-/ready", 20)
            for phase, seconds, load in PHASES:
                child = None
                if load:
                    child = subprocess.Popen(
                        [sys.executable, str(ROOT / "lab/vllm/load.py"), str(port), *load], stdout=subprocess.PIPE
                    )
                watch(port, exporter, rows, phase, seconds)
                if child:
                    clients[phase] = json.loads(child.communicate(timeout=60)[0])
    return rows, clients


def mean(rows: list[dict[str, object]], name: str) -> float | None:
    """Mean of a column where it is there."""
    values = [float(v) for row in rows if isinstance(v := row.get(name), int | float)]
    return sum(values) / len(values) if values else None


def report(rows: list[dict[str, object]], clients: dict[str, object], version: str) -> str:
    """The session as a page."""
    lines = [
        f"# A real vLLM {version} on the CPU, before, during and after KV pressure",
        "",
        (
            "Written by `make -C lab try-vllm`: a 77 M-parameter random Llama on two cores, 255 usable KV blocks of 32"
            " tokens (8 160"
        ),
        "tokens), `--max-num-seqs 64`; the exporter scrapes it every second. Means over each phase (ramps included).",
        "",
        (
            "| phase | verdicts (share of readings) | vLLM running | vLLM waiting | vLLM KV | our KV max 60 s | our"
            " batch mean | our batch p95 | ITL p95 | TTFT p95 | preemptions so far |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for phase, _, _ in PHASES:
        part = [row for row in rows if row["phase"] == phase]
        said = {v: sum(1 for row in part if row["verdict"] == v) for v in dict.fromkeys(row["verdict"] for row in part)}
        shares = ", ".join(f"{name} {count * 100 // len(part)} %" for name, count in said.items())
        cells = [
            mean(part, n)
            for n in (
                "vllm_running",
                "vllm_waiting",
                "vllm_kv",
                "kv_cache_used_ratio_max",
                "effective_batch_size_mean",
                "batch_p95",
                "itl_p95",
                "ttft_p95",
            )
        ]
        last = part[-1]["vllm_preemptions"] if part else None
        lines.append(
            f"| {phase} | {shares} | "
            + " | ".join("–" if c is None else f"{c:.3g}" for c in cells)
            + f" | {last:.0f} |"
            if last is not None
            else ""
        )
    lines += [
        "",
        "What the clients saw:",
        "",
        "```json",
        json.dumps(clients, indent=1),
        "```",
        "",
        "Every reading of the change from steady load to pressure and out of it again:",
        "",
        (
            "| s | phase | verdict (confidence) | vLLM running / waiting | vLLM KV | vLLM preemptions | our preemption"
            " rate | our batch mean |"
        ),
        "|---|---|---|---|---|---|---|---|",
    ]
    begin = float(str(rows[0]["t"]))
    edges = [i for i in range(1, len(rows)) if rows[i]["phase"] != rows[i - 1]["phase"]]
    shown = sorted({j for i in edges for j in range(max(0, i - 2), min(len(rows), i + 9))})
    for i in shown:
        row = rows[i]
        numbers = {
            k: ("–" if row.get(k) is None else f"{float(str(row[k])):.3g}")
            for k in (
                "verdict_confidence",
                "vllm_running",
                "vllm_waiting",
                "vllm_kv",
                "vllm_preemptions",
                "preemption_rate",
                "effective_batch_size_mean",
            )
        }
        lines.append(
            f"| {float(str(row['t'])) - begin:.0f} | {row['phase']} | {row['verdict']}"
            f" ({numbers['verdict_confidence']}) | {numbers['vllm_running']} / {numbers['vllm_waiting']} |"
            f" {numbers['vllm_kv']} | {numbers['vllm_preemptions']} | {numbers['preemption_rate']} |"
            f" {numbers['effective_batch_size_mean']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the session and write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("report")
    parser.add_argument("--model", default=".vllm/small-llama")
    parser.add_argument("--record")
    options = parser.parse_args()
    workdir = ROOT / ".vllm" / "session"
    workdir.mkdir(parents=True, exist_ok=True)
    rows, clients = run(options.model, options.record, workdir)
    version = re.search(r"version (\d+\.\d+\.\d+)", (workdir / "vllm.log").read_text(errors="replace"))
    Path(options.report).write_text(report(rows, clients, version[1] if version else "(version not logged)"))
    print(f"try-vllm: wrote {options.report}")


if __name__ == "__main__":
    main()
