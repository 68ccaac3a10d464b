"""A real vLLM on the CPU through everything that the exporter has to distinguish: ``make -C lab test-vllm``.

Every scenario asserts what the exporter said against what was done, and its batch sizes against vLLM's own step log
(``--enable-logging-iteration-details``). Last of all it measures what being watched costs the engine. Writes
``build/vllm-testbed.md``; exit 1 if anything was not as it should be. Takes about a quarter of an hour on two cores.
Usage: testbed.py REPORT.md [--only NAME...]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bed import (
    Exporter,
    Row,
    Server,
    Step,
    exporter,
    loaded,
    ready,
    run,
    server,
    truth_mean,
    truth_p95,
)
from cost import (
    ADAPTIVE,
    BUDGETS,
    EVERY_SECOND,
    NOBODY,
    SECOND,
    Cost,
    idle_cost,
    loaded_cost,
    table,
)
from session import ROOT, page

from kvpressure.settings.thresholds import builtin

STEADY = "closed --clients 8 --prompt 150 250 --output 150 250"
PRESSURE = "closed --clients 48 --prompt 300 500 --output 400 900"
PACE_SECONDS = {SECOND: 1.0, ADAPTIVE: 5.0}
COMMAND_NOT_FOUND = 127  # such as nvidia-smi on a machine without GPU
TO_FILL_IN = re.compile(r"<[a-z ]+>|^kvpressure ")
NO_ANSWER = 28  # of curl: what asks a stopped engine ends by itself
SMALL, TINY = ".vllm/small-llama", ".vllm/tiny-llama"


class Book:
    """What was found: one line a check."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, bool, str]] = []
        self.costs: list[Cost] = []

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

    def near(
        self,
        scenario: str,
        what: str,
        ours: float | None,
        truth: float | None,
        *,
        ratio: float | None = None,
        distance: float | None = None,
    ) -> None:
        """Ours is within a share or a distance of the truth."""
        if ours is None or truth is None:
            self.check(scenario, what, False, f"ours {ours}, vLLM's steps {truth}")
            return
        off = abs(ours - truth)
        good = off <= ratio * truth if ratio is not None else off <= (distance or 0.0)
        allowed = f"{ratio:.0%}" if ratio is not None else f"{distance:g}"
        self.check(
            scenario,
            f"{what} within {allowed}",
            good,
            f"ours {ours:.2f}, vLLM's steps {truth:.2f} ({(ours - truth) / truth:+.1%})",
        )

    def costs_little(self, cost: Cost, *ways: str) -> None:
        """Scraping stays within its budget of the API server's core, and does not slow the engine beyond noise."""
        self.costs.append(cost)
        for way in ways:
            extra, half = cost.extra_cpu(way)
            allowed = BUDGETS[cost.phase]
            self.check(
                f"cost, {cost.phase}",
                f"watched {way}: at most {allowed:.1%} of a core more",
                extra <= allowed,
                f"{extra:+.2%}" + (f" ± {half:.2%}" if half else ""),
            )
            if cost.phase != "idle":
                change, half = cost.fewer_tokens(way)
                self.check(
                    f"cost, {cost.phase}",
                    f"watched {way}: throughput within noise",
                    change + half >= 0 or change >= -0.01,
                    f"{change:+.1%} ± {half:.1%}",
                )


def shares(said: dict[str, float]) -> str:
    """Verdicts as text."""
    return ", ".join(f"{name} {share:.0%}" for name, share in said.items())


def average(values: list[float | None]) -> float | None:
    """Mean of what is there."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def batches(
    book: Book,
    scenario: str,
    rows: list[Row],
    steps: list[Step],
    *,
    plugin: bool,
    engine: str = "0",
    mean_ratio: float | None = None,
) -> None:
    """Batch mean and p95 of these readings against the steps that vLLM told, reading by reading."""
    label = f'engine="{engine}"'
    steps = [step for step in steps if step.engine == engine]
    with_without = "with the plugin" if plugin else "without the plugin"
    book.near(
        scenario,
        f"batch mean {with_without} (engine {engine})",
        average([row.signal("effective_batch_size_mean", label) for row in rows]),
        average([truth_mean(steps, row.t, 30, by_time=not plugin) for row in rows]),
        ratio=mean_ratio or (0.02 if plugin else 0.05),
    )
    if plugin:
        book.near(
            scenario,
            f"batch p95 {with_without} (engine {engine})",
            average([row.signal("effective_batch_size", label, 'quantile="0.95"') for row in rows]),
            average([truth_p95(steps, row.t) for row in rows]),
            distance=1.0,
        )


def one_server(book: Book, workdir: Path, before_the_end: Callable[[], object]) -> None:
    """What being watched costs an idle engine; idle, steady, pressure, all clients gone, burst, long prompts; what
    being watched costs under load; at last, when nothing is measured any more (``before_the_end``), the engine stops
    and dies.
    """
    with server("one", workdir, SMALL, plugin=False) as vllm:
        book.costs_little(idle_cost(workdir, SMALL, vllm), ADAPTIVE)
        with exporter(vllm) as by:
            calm_and_steady(book, vllm, by)
            under_pressure(book, vllm, by)
            odd_loads(book, vllm, by)
        with exporter(vllm, *EVERY_SECOND) as second, exporter(vllm) as adaptive:
            time.sleep(5)
            for watcher in (
                second,
                adaptive,
            ):  # the first minute of the adaptive one passes in the first turns of the others
                watcher.pause()
            cost = loaded_cost("steady", vllm, {NOBODY: None, SECOND: second, ADAPTIVE: adaptive}, STEADY)
            book.costs_little(cost, ADAPTIVE)
            book.costs_little(loaded_cost("pressure", vllm, {NOBODY: None, ADAPTIVE: adaptive}, PRESSURE), ADAPTIVE)
            for watcher in (second, adaptive):
                watcher.resume()
            before_the_end()
            engine_frozen_and_killed(book, vllm, {SECOND: second, ADAPTIVE: adaptive})


def calm_and_steady(book: Book, vllm: Server, by: Exporter) -> None:
    """Nothing to do, then eight clients."""
    watch = run(vllm, (by,), "idle", 9)
    book.mostly("idle", watch.said(by, 4), "idle", share=1.0)
    watch = run(vllm, (by,), "steady", 50, STEADY)
    batches(book, "steady", watch.after(by, 32), vllm.steps(), plugin=False)
    book.mostly("steady", watch.said(by, 20), "healthy")


def under_pressure(book: Book, vllm: Server, by: Exporter) -> None:
    """More than the cache holds; then all clients hang up."""
    watch = run(vllm, (by,), "pressure", 56, PRESSURE)
    book.mostly("pressure", watch.said(by, 25), "kv_pressure")
    kv = watch.rows[by][-2].signal("kv_cache_used_ratio_max")
    book.check("pressure", "KV maximum at least 0.95", kv is not None and kv >= 0.95, f"{kv}")
    watch = run(vllm, (by,), "abort-all", 18)
    book.mostly("abort-all", watch.said(by, 12), "idle", "healthy")
    left = watch.rows[by][-1].signal("requests_running")
    book.check("abort-all", "nothing runs after all clients hung up", left == 0, f"running {left}")


def odd_loads(book: Book, vllm: Server, by: Exporter) -> None:
    """Eighty requests at once, and a few with long prompts."""
    watch = run(vllm, (by,), "burst", 17, "burst --clients 80 --prompt 50 100 --output 40 80", after=5)
    book.never("burst", watch.said(by, 0), "stalled", "host_bound")
    watch = run(vllm, (by,), "long-prompt", 21, "closed --clients 2 --prompt 1500 1900 --output 16 32")
    book.never("long-prompt", watch.said(by, 10), "kv_pressure", "stalled")
    longest = watch.rows[by][-2].signal("context_length_max_tokens")
    book.check("long-prompt", "longest context at least 1 500 tokens", (longest or 0) >= 1500, f"{longest}")


def engine_frozen_and_killed(book: Book, vllm: Server, by: dict[str, Exporter]) -> None:
    """The engine core stops under load while its API server goes on, comes back, and dies."""
    engines = [pid for pid, name in vllm.children() if "EngineCor" in name]
    book.check("engine-frozen", "there is an engine process to stop", len(engines) == 1, f"{vllm.children()}")
    with loaded(vllm, STEADY, 90):
        time.sleep(10)
        stopped = tell(engines, signal.SIGSTOP)
        frozen = readings(vllm, by, 18)
        for one in by.values():
            printed_commands(book, "engine-frozen", one)
        tell(engines, signal.SIGCONT)
        time.sleep(8)
        before = {name: Row(time.time(), one.page(), "").verdict for name, one in by.items()}
        killed = tell(engines, signal.SIGKILL)
        dead = readings(vllm, by, 14)
    patience = builtin()["no_progress_seconds"]
    for name, rows in frozen.items():
        late = [row.verdict for row in rows if row.t - stopped > patience + PACE_SECONDS[name] + 2]
        book.check(
            "engine-frozen",
            f"watched {name}: unknown or stalled once nothing came for {patience:.0f} s, a scrape and a tick",
            bool(late) and set(late) <= {"unknown", "stalled"},
            shares({v: late.count(v) / len(late) for v in dict.fromkeys(late)}),
        )
    check_killed(book, dead, killed, before)


def printed_commands(book: Book, scenario: str, by: Exporter) -> None:
    """Run what the exporter prints for this server, but what stops it and what has a place to fill in; the evidence of
    a stall has to hold the engine's processes.
    """
    (engine,) = json.loads(page(f"http://127.0.0.1:{by.port}/api/v1/diagnosis"))["engines"]
    printed = [command for action in engine["mitigation"]["actions"] for command in action["commands"]]
    printed += [step["command"] for step in engine["triage"] if step["command"]]
    with tempfile.TemporaryDirectory() as folder:
        for command in dict.fromkeys(one for one in printed if not TO_FILL_IN.search(one)):
            done = subprocess.run(["sh", "-c", command], cwd=folder, timeout=60, capture_output=True, check=False)
            ran = done.returncode in (0, COMMAND_NOT_FOUND, NO_ANSWER) or not done.stderr  # grep may find nothing
            book.check(scenario, f"runs as printed: {command[:60]}", ran, str(done.stderr))
        stacks = Path(folder, "stacks.txt")
        found = stacks.read_text() if stacks.exists() else ""
        book.check(scenario, "the saved stacks are of the engine", "VLLM::EngineCor" in found, found[:200])


def tell(processes: list[int], what: signal.Signals) -> float:
    """Send a signal; when that was."""
    for pid in processes:
        os.kill(pid, what)
    return time.time()


def readings(vllm: Server, by: dict[str, Exporter], seconds: float) -> dict[str, list[Row]]:
    """Pages of all exporters, five times a second, and vLLM's own."""
    rows: dict[str, list[Row]] = {name: [] for name in by}
    end = time.time() + seconds
    while time.time() < end:
        theirs = page(f"http://127.0.0.1:{vllm.port}/metrics")
        for name, one in by.items():
            rows[name].append(Row(time.time(), one.page(), theirs))
        time.sleep(0.2)
    return rows


def check_killed(book: Book, rows: dict[str, list[Row]], killed: float, before: dict[str, str]) -> None:
    """From the first reading on in which the engine counts as down nothing but unknown is said of it."""
    answered = max((row.t for row in rows[SECOND] if row.theirs), default=killed) - killed
    for name, seen in rows.items():
        down = [row for row in seen if row.signal("engine_up") == 0]
        wrong = [row.verdict for row in down if row.verdict != "unknown"]
        book.check(
            "engine-killed",
            f"watched {name}: unknown from the first reading with engine_up 0 on",
            bool(down) and not wrong,
            f"{before[name]} before; {len(down)} readings, others than unknown: {wrong or 'none'}",
        )
        late = [row.t - killed for row in seen if row.verdict != "unknown"]
        allowed = answered + PACE_SECONDS[name] + 2  # the API server outlives its engine; then a scrape and a tick
        book.check(
            "engine-killed",
            f"watched {name}: no other verdict later than a scrape and a tick after the page is gone",
            max(late, default=0.0) <= allowed,
            f"page gone after {answered:.1f} s, last other verdict after {max(late, default=0.0):.1f} s",
        )


class Others:
    """The three other kinds of servers; they start together, and are idle until it is their turn."""

    def __init__(self, stack: ExitStack, workdir: Path) -> None:
        self._stack, self._workdir = stack, workdir
        self._servers: list[Server] = []

    def start(self) -> None:
        """Start them, once."""
        if not self._servers:
            kinds = (
                server("limit", self._workdir, SMALL, max_num_seqs=4),
                server("two-api", self._workdir, SMALL, extra=("--api-server-count", "2")),
                server("dp2", self._workdir, TINY, extra=("--data-parallel-size", "2")),
            )
            self._servers = [self._stack.enter_context(kind) for kind in kinds]

    def run(self, book: Book) -> None:
        """One after the other."""
        self.start()
        ready(*self._servers)
        for scenario, vllm in zip((sequence_limit, two_api_servers, data_parallel), self._servers, strict=True):
            scenario(book, vllm)


def sequence_limit(book: Book, vllm: Server) -> None:
    """Four sequences allowed, sixteen clients, an almost empty cache."""
    with exporter(vllm) as by:
        watch = run(vllm, (by,), "sequence-limit", 46, "closed --clients 16 --prompt 100 150 --output 100 200")
        book.mostly("sequence-limit", watch.said(by, 25), "concurrency_limited")
        frontends(book, "sequence-limit", watch.rows[by][-2], 1)
        batches(book, "sequence-limit", watch.after(by, 30), vllm.steps(), plugin=True)


def two_api_servers(book: Book, vllm: Server) -> None:
    """Two API servers share one engine; its outputs are split between them."""
    with exporter(vllm) as by:
        watch = run(vllm, (by,), "two API servers", 50, STEADY)
        frontends(book, "two API servers", watch.rows[by][-2], 2)
        batches(book, "two API servers", watch.after(by, 32), vllm.steps(), plugin=True)
        book.mostly("two API servers", watch.said(by, 20), "healthy")


def data_parallel(book: Book, vllm: Server) -> None:
    """Two engines behind one address."""
    with exporter(vllm) as by:
        watch = run(vllm, (by,), "data parallel 2", 52, STEADY.replace("8", "12", 1))
        steps = vllm.steps()
        for engine in ("0", "1"):
            up = watch.rows[by][-2].signal("engine_up", f'engine="{engine}"')
            book.check("data parallel 2", f"engine {engine} is there", up == 1, f"{up}")
            batches(book, "data parallel 2", watch.after(by, 35), steps, plugin=True, engine=engine)


def frontends(book: Book, scenario: str, row: Row, expected: int) -> None:
    """The plugin runs in each of the API servers."""
    line = f"kvpressure:frontends {expected}.0"
    book.check(scenario, f"the plugin reports from {expected} API servers", line in row.theirs, line)


def plugin_inside(book: Book, workdir: Path) -> None:
    """The stat logger on vLLM's own classes: what it costs a step, and that nothing odd gets out of it."""
    done = subprocess.run(
        [".vllm/bin/python", "lab/vllm/plugin_check.py", str(workdir / "plugin-check")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}/.vllm/plugin"},
        capture_output=True,
        text=True,
        check=False,
    )
    book.check(
        "plugin",
        "checks on vLLM's own classes ran",
        done.returncode == 0,
        done.stderr.strip().splitlines()[-1] if done.returncode and done.stderr.strip() else "all",
    )
    for what, good, found in json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else ():
        book.check("plugin", what, good, found)


PARTS = ["plugin", "one", "others"]


def report(book: Book, seconds: float, names: list[str]) -> str:
    """All checks and costs as a page."""
    failed = sum(not good for _, _, good, _ in book.lines)
    parts = "all parts in one run" if names == PARTS else f"only the parts {', '.join(names)}"
    lines = [
        "# Test bed: a real vLLM under every kind of load",
        "",
        "Written by `make -C lab test-vllm` (`lab/vllm/testbed.py`): vLLM 0.32.0 on the CPU, 77 M-parameter Llama",
        (
            '(a 0.6 M one for data parallel), 255 usable KV blocks of 32 tokens. "vLLM\'s steps" is what vLLM itself'
            " tells of"
        ),
        "every step (`--enable-logging-iteration-details`); batches are requests that decode.",
        "The first server runs without the plugin, the other three with it.",
        "",
        (
            f"{len(book.lines)} checks, {failed} failed; {parts}, {seconds / 60:.1f} minutes on {os.cpu_count()} cores "
            f"({platform.machine()})."
        ),
        "",
        "| scenario | check | | found |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {scenario} | {what} | {'ok' if good else '**failed**'} | {found} |"
        for scenario, what, good, found in book.lines
    ]
    if book.costs:
        lines += table(book.costs)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what was asked for and write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    book, begin = Book(), time.monotonic()
    workdir = ROOT / ".vllm" / "testbed"
    workdir.mkdir(exist_ok=True)
    with ExitStack() as stack:
        late = Others(stack, workdir)
        if "plugin" in options.only:
            plugin_inside(book, workdir)
        if "one" in options.only:
            one_server(book, workdir, late.start if "others" in options.only else lambda: None)
        if "others" in options.only:
            late.run(book)
    seconds = time.monotonic() - begin
    options.report.write_text(report(book, seconds, options.only))
    print(f"test-vllm: {seconds:.0f} s, wrote {options.report}")
    raise SystemExit(any(not good for _, _, good, _ in book.lines))


if __name__ == "__main__":
    main()
