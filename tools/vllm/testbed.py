"""A real vLLM on the CPU through everything that the exporter has to tell apart: ``make test-vllm``.

Every scenario asserts what the exporter said against what was done, and its batch sizes against vLLM's own step log
(``--enable-logging-iteration-details``). Last of all it measures what being watched costs the engine. Writes
``docs/vllm-testbed.md``; exit 1 if anything was not as it should be. Takes about a quarter of an hour on two cores.
Usage: testbed.py REPORT.md [--only NAME...]
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bed import Row, Server, Step, exporter, plugin_flags, run, server, truth_mean, truth_p95
from session import ROOT

STEADY = "closed --clients 8 --prompt 150 250 --output 150 250"
IDLE_SECONDS, BUSY_SECONDS = 12, 20
SMALL, TINY = ".vllm/small-llama", ".vllm/tiny-llama"


class Book:
    """What was found: one line a check."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, bool, str]] = []
        self.costs: list[tuple[str, ...]] = []

    def check(self, scenario: str, what: str, good: bool, found: str) -> None:
        """Note and print one result."""
        self.lines.append((scenario, what, good, found))
        print(f"  {'ok  ' if good else 'FAIL'} {scenario}: {what}: {found}", flush=True)

    def mostly(self, scenario: str, said: dict[str, float], *allowed: str, share: float = 0.8) -> None:
        """The verdict was one of ``allowed`` in most readings."""
        got = sum(said.get(name, 0.0) for name in allowed)
        self.check(scenario, f"verdict {' or '.join(allowed)} in {share:.0%} of readings", got >= share, shares(said))

    def never(self, scenario: str, said: dict[str, float], *names: str) -> None:
        """None of these verdicts was given."""
        self.check(scenario, f"never {' or '.join(names)}", not any(said.get(name) for name in names), shares(said))

    def near(self, scenario: str, what: str, ours: float | None, truth: float | None, *, ratio: float | None = None,
             distance: float | None = None) -> None:
        """Ours is within a share or a distance of the truth."""
        if ours is None or truth is None:
            self.check(scenario, what, False, f"ours {ours}, vLLM's steps {truth}")
            return
        off = abs(ours - truth)
        good = off <= ratio * truth if ratio is not None else off <= (distance or 0.0)
        allowed = f"{ratio:.0%}" if ratio is not None else f"{distance:g}"
        self.check(scenario, f"{what} within {allowed}", good,
                   f"ours {ours:.2f}, vLLM's steps {truth:.2f} ({(ours - truth) / truth:+.1%})")


def shares(said: dict[str, float]) -> str:
    """Verdicts as text."""
    return ", ".join(f"{name} {share:.0%}" for name, share in said.items())


def average(values: list[float | None]) -> float | None:
    """Mean of what is there."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def batches(book: Book, scenario: str, rows: list[Row], steps: list[Step], *, plugin: bool, engine: str = "0",
            mean_ratio: float | None = None) -> None:
    """Batch mean and p95 of these readings against the steps that vLLM told, reading by reading."""
    label = f'engine="{engine}"'
    steps = [step for step in steps if step.engine == engine]
    with_without = "with the plugin" if plugin else "without the plugin"
    book.near(scenario, f"batch mean {with_without} (engine {engine})",
              average([row.signal("effective_batch_size_mean", label) for row in rows]),
              average([truth_mean(steps, row.t, 30, by_time=not plugin) for row in rows]),
              ratio=mean_ratio or (0.02 if plugin else 0.05))
    if plugin:
        book.near(scenario, f"batch p95 {with_without} (engine {engine})",
                  average([row.signal("effective_batch_size", label, 'quantile="0.95"') for row in rows]),
                  average([truth_p95(steps, row.t) for row in rows]), distance=1.0)


def one_server(book: Book, workdir: Path) -> None:
    """Idle, steady, pressure, burst, long prompts, all clients gone, engine killed: one after the other."""
    with server("one", workdir, SMALL) as vllm, exporter(vllm, *plugin_flags(vllm)) as on, exporter(vllm) as off:
        ports = (on, off)
        watch = run(vllm, ports, "idle", 12)
        for port in ports:
            book.mostly("idle", watch.said(port, 4), "idle", share=1.0)
        book.check("plugin", "reports of the API server", bool(list(vllm.reports.glob("frontend-*.json"))),
                   ", ".join(sorted(path.name for path in vllm.reports.iterdir())))
        watch = run(vllm, ports, "steady", 75, STEADY)
        steps = vllm.steps()
        batches(book, "steady", watch.after(on, 62), steps, plugin=True)
        batches(book, "steady", watch.after(off, 45), steps, plugin=False)
        for port in ports:
            book.mostly("steady", watch.said(port, 20), "healthy")
        watch = run(vllm, ports, "pressure", 75, "closed --clients 48 --prompt 300 500 --output 400 900")
        batches(book, "pressure", watch.after(on, 62), vllm.steps(), plugin=True)
        for port in ports:
            book.mostly("pressure", watch.said(port, 25), "kv_pressure")
        kv = watch.rows[on][-2].signal("kv_cache_used_ratio_max")
        book.check("pressure", "KV maximum at least 0.95", kv is not None and kv >= 0.95, f"{kv}")
        watch = run(vllm, ports, "abort-all", 0.1, None, after=30)
        for port in ports:
            book.mostly("abort-all", watch.said(port, 20), "idle", "healthy")
        left = watch.rows[on][-1].signal("requests_running")
        book.check("abort-all", "nothing runs after all clients hung up", left == 0, f"running {left}")
        watch = run(vllm, ports, "burst", 20, "burst --clients 80 --prompt 50 100 --output 40 80", after=10)
        for port in ports:
            book.never("burst", watch.said(port, 0), "stalled", "host_bound")
        watch = run(vllm, ports, "long-prompt", 30, "closed --clients 2 --prompt 1500 1900 --output 16 32")
        for port in ports:
            book.never("long-prompt", watch.said(port, 10), "kv_pressure", "stalled")
        longest = watch.rows[on][-2].signal("context_length_tokens", 'stat="max_5m"')
        book.check("long-prompt", "longest context at least 1 500 tokens", (longest or 0) >= 1500, f"{longest}")
        engine_killed(book, vllm, ports)


def engine_killed(book: Book, vllm: Server, ports: tuple[int, ...]) -> None:
    """The engine core dies under load."""
    engines = [pid for pid, name in vllm.children() if "EngineCor" in name]
    book.check("engine-killed", "there is an engine process to kill", len(engines) == 1, f"{vllm.children()}")
    timer = threading.Timer(6, lambda: [os.kill(pid, signal.SIGKILL) for pid in engines])
    timer.start()
    watch = run(vllm, ports, "engine-killed", 6, STEADY, after=28)
    for port in ports:  # the API server answers a few seconds longer, and a page counts for 15 s
        book.mostly("engine-killed", watch.said(port, 26), "unknown", share=1.0)
        up = watch.rows[port][-1].signal("engine_up")
        book.check("engine-killed", "engine_up is 0", up == 0, f"{up}")


def sequence_limit(book: Book, workdir: Path) -> None:
    """Four sequences allowed, sixteen clients, an almost empty cache; the plugin reports on vLLM's own page."""
    with server("limit", workdir, SMALL, max_num_seqs=4, on_page=True) as vllm, exporter(vllm) as port:
        watch = run(vllm, (port,), "sequence-limit", 65, "closed --clients 16 --prompt 100 150 --output 100 200")
        book.mostly("sequence-limit", watch.said(port, 25), "concurrency_limited")
        told = "kvpressure:frontends 1.0" in watch.rows[port][-2].theirs
        book.check("sequence-limit", "the plugin is on vLLM's own page", told, "kvpressure:frontends")
        batches(book, "sequence-limit", watch.after(port, 55), vllm.steps(), plugin=True)


def two_api_servers(book: Book, workdir: Path) -> None:
    """Two API servers share one engine; its outputs are split between them."""
    extra = ("--api-server-count", "2")
    with server("two-api", workdir, SMALL, extra=extra) as vllm, exporter(vllm, *plugin_flags(vllm)) as on, \
            exporter(vllm) as off:
        watch = run(vllm, (on, off), "two API servers", 75, STEADY)
        files = sorted(path.name for path in vllm.reports.glob("frontend-*.json"))
        book.check("two API servers", "both report", len(files) == 2, ", ".join(files))
        steps = vllm.steps()
        batches(book, "two API servers", watch.after(on, 62), steps, plugin=True)
        batches(book, "two API servers", watch.after(off, 45), steps, plugin=False)
        for port in (on, off):
            book.mostly("two API servers", watch.said(port, 20), "healthy")


def data_parallel(book: Book, workdir: Path) -> None:
    """Two engines behind one address."""
    extra = ("--data-parallel-size", "2")
    with server("dp2", workdir, TINY, extra=extra) as vllm, exporter(vllm, *plugin_flags(vllm)) as on:
        watch = run(vllm, (on,), "data parallel 2", 70, STEADY.replace("8", "12", 1))
        steps = vllm.steps()
        for engine in ("0", "1"):
            up = watch.rows[on][-2].signal("engine_up", f'engine="{engine}"')
            book.check("data parallel 2", f"engine {engine} is there", up == 1, f"{up}")
            batches(book, "data parallel 2", watch.after(on, 58), steps, plugin=True, engine=engine)


def cost(book: Book, workdir: Path) -> None:
    """CPU of the API server and tokens per second: watched at 1 s, at the adaptive pace, and not at all."""
    for plugin in (False, True):
        with server(f"cost-{'on' if plugin else 'off'}", workdir, SMALL, plugin=plugin) as vllm:
            run(vllm, (), "warm up", 6, STEADY)
            ways: list[tuple[str, tuple[str, ...] | None]] = [("nobody", None), ("every second", ("--vllm.pace", "fixed"))]
            if not plugin:  # the pace of a calm engine: a fixed one of its calm interval, without waiting for calm
                ways.append(("adaptive, calm (5 s)", ("--vllm.pace", "fixed", "--collector.vllm.interval", "5")))
            for name, flags in ways:
                measure(book, vllm, plugin, name, flags)


def measure(book: Book, vllm: Server, plugin: bool, name: str, flags: tuple[str, ...] | None) -> None:
    """One way of watching, idle and under load."""
    def shares_of() -> tuple[float, float, float]:
        before, begin = vllm.cpu_seconds(), time.monotonic()
        time.sleep(IDLE_SECONDS)
        idle = (vllm.cpu_seconds() - before) / (time.monotonic() - begin)
        before, begin = vllm.cpu_seconds(), time.monotonic()
        watch = run(vllm, (), f"cost, {name}", BUSY_SECONDS, STEADY)
        busy = (vllm.cpu_seconds() - before) / (time.monotonic() - begin)
        return idle, busy, float(str(watch.clients["tokens"])) / BUSY_SECONDS

    if flags is None:
        idle, busy, tokens = shares_of()
    else:
        with exporter(vllm, *flags):
            time.sleep(3)
            idle, busy, tokens = shares_of()
    book.costs.append(("on" if plugin else "off", name, f"{idle:.2%}", f"{busy:.1%}", f"{tokens:.0f}"))
    print("  cost:", book.costs[-1], flush=True)


SCENARIOS: dict[str, Callable[[Book, Path], None]] = {
    "one": one_server, "limit": sequence_limit, "two-api": two_api_servers, "dp2": data_parallel, "cost": cost,
}


def report(book: Book, seconds: float, names: list[str]) -> str:
    """The page in ``docs/``."""
    failed = sum(not good for _, _, good, _ in book.lines)
    lines = ["# Test bed: a real vLLM under every kind of load", "",
             "Written by `make test-vllm` (`tools/vllm/testbed.py`): vLLM 0.32.0 on the CPU, a 77 M-parameter random Llama",
             "(a 0.6 M one for data parallel), 255 usable KV blocks of 32 tokens. \"vLLM's steps\" is what vLLM itself tells of",
             "every step (`--enable-logging-iteration-details`); batches are requests that decode.",
             "A line that stands twice: first the exporter that reads the plugin, then the one without it.", "",
             f"Parts run: {', '.join(names)}. {len(book.lines)} checks, {failed} failed, {seconds / 60:.0f} minutes, "
             f"{os.cpu_count()} cores, load average {os.getloadavg()[1]:.1f}.", "",
             "| scenario | check | | found |", "|---|---|---|---|"]
    lines += [f"| {scenario} | {what} | {'ok' if good else '**failed**'} | {found} |"
              for scenario, what, good, found in book.lines]
    if book.costs:
        lines += ["", "## What being watched costs", "",
                  "CPU of the API server process as a share of one core, and output tokens per second of eight clients, each over",
                  f"{IDLE_SECONDS} and {BUSY_SECONDS} seconds. The two cores are shared by the server, its clients and the exporter, so throughput",
                  "differs by several per cent from run to run; the idle share shows the scraping alone.", "",
                  "| plugin | watched | CPU idle | CPU under load | tokens/s |", "|---|---|---|---|---|"]
        lines += ["| " + " | ".join(row) + " |" for row in book.costs]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what was asked for and write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    options = parser.parse_args()
    book, begin = Book(), time.monotonic()
    workdir = ROOT / ".vllm" / "testbed"
    for name in options.only:
        SCENARIOS[name](book, workdir)
    options.report.write_text(report(book, time.monotonic() - begin, options.only))
    print(f"test-vllm: wrote {options.report}")
    raise SystemExit(any(not good for _, _, good, _ in book.lines))


if __name__ == "__main__":
    main()
