"""Part ``leak``: minutes of readings each second beside a load. Does the exporter grow, and does the load notice it?

The exporter runs as its pod does (root without capabilities, if this is root). The load runs all the time; the exporter
is stopped (SIGSTOP) and goes on in turns, so that throughput with and without readings comes from the same minutes.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from lab.gpu import privileges
from lab.gpu.children import ChildError
from lab.gpu.exporter import Exporter, value
from lab.gpu.load import Running
from lab.gpu.options import Options
from lab.gpu.result import Result
from lab.gpu.timing import summary

TURNS: Final = 2
SHARE_WITHOUT: Final = 0.2  # time without readings, of the time with them
SETTLED: Final = 0.2  # of the readings: the exporter's own windows fill up at first
SCRAPE_SECONDS: Final = 5.0
SAMPLES_KEPT: Final = 120
GROWTH_KIB: Final = 2048
SLOWER: Final = 0.01
WATCHED: Final = ("VmRSS", "Threads")


def run(result: Result, options: Options) -> None:
    """Turns without and with readings."""
    each = 60 * options.leak_minutes / TURNS
    watch = Watch()
    with ExitStack() as stack:
        load: Running | None = None
        try:
            load = stack.enter_context(Running(*options.load))
            load.switch("dram")
            time.sleep(options.settle)
        except ChildError as error:
            result.lacks("the load's throughput", error)
        exporter, identity = _exporter(stack, result)
        stack.callback(_signal, exporter, True)  # else it could not be ended
        spans: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(TURNS):
            for on in (False, True):
                _signal(exporter, on)
                began = time.time()
                watch.follow(exporter, each if on else SHARE_WITHOUT * each, on)
                spans[on].append((began, time.time()))
        result.check("the exporter is still there", exporter.alive(), f"{options.leak_minutes:g} minutes of readings")
        if load is not None:
            _throughput(result, load, spans)
    every = len(watch.samples) // SAMPLES_KEPT + 1
    result.data |= {
        "identity": identity,
        "minutes": options.leak_minutes,
        "samples": watch.samples[::every],
        "scrape_ms": summary(watch.scrapes),
        "gpm": watch.gpm,
        "cpu_share": watch.cpu_share,
    }
    _growth(result, watch.samples)
    result.check(
        "every scrape was answered, with the GPU up", not watch.bad, f"{len(watch.scrapes)} scrapes, {watch.bad} bad"
    )
    if watch.gpm["with"] < watch.gpm["scrapes"] - 2:
        result.lacks(
            "activity (GPM) in every scrape",
            f"{watch.gpm['with']} of {watch.gpm['scrapes']}, the last in scrape "
            f"{watch.gpm['last']}: permission may have gone, or there is none",
        )


def _exporter(stack: ExitStack, result: Result) -> tuple[Exporter, str]:
    """As its pod runs it; where that cannot be had, as this is."""
    if os.getuid() == 0:
        try:
            return stack.enter_context(Exporter(privileges.NO_CAPABILITIES)), privileges.NO_CAPABILITIES
        except ChildError as error:  # e.g. files that root may read by a capability only
            result.lacks(privileges.NO_CAPABILITIES, error)
    return stack.enter_context(Exporter(privileges.AS_IS)), privileges.AS_IS


def _signal(exporter: Exporter, go: bool) -> None:
    if exporter.alive():
        os.kill(exporter.pid, signal.SIGCONT if go else signal.SIGSTOP)


class Watch:
    """What is seen of the exporter from outside. ``samples``: time, KiB of memory, threads, open files."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, int, int, int]] = []
        self.scrapes: list[float] = []
        self.bad = 0
        self.gpm = {"scrapes": 0, "with": 0, "last": 0}
        self._cpu = self._seconds = 0.0

    @property
    def cpu_share(self) -> float | None:
        """CPU time of the exporter, of the time in which it read: 0.01 = one percent of a core."""
        return round(self._cpu / self._seconds, 5) if self._seconds else None

    def follow(self, exporter: Exporter, seconds: float, reading: bool) -> None:
        """Look each second; while it reads, scrape it too."""
        began, cpu = time.monotonic(), _cpu_seconds(exporter.pid)
        end, scrape_due = began + seconds, began + min(SCRAPE_SECONDS, seconds / 2)
        while time.monotonic() < end and exporter.alive():
            if reading:
                self.samples.append((round(time.time(), 1), *_seen(exporter.pid)))
                if time.monotonic() >= scrape_due:
                    scrape_due += SCRAPE_SECONDS
                    self._scrape(exporter)
            time.sleep(max(0.0, min(1.0, end - time.monotonic())))
        if reading and exporter.alive():
            self._cpu += _cpu_seconds(exporter.pid) - cpu
            self._seconds += time.monotonic() - began

    def _scrape(self, exporter: Exporter) -> None:
        began = time.perf_counter()
        page = exporter.page()
        self.scrapes.append(1e3 * (time.perf_counter() - began))
        self.bad += value(page, "gpu_up", 'gpu="0"') != 1
        self.gpm["scrapes"] += 1
        if value(page, "gpu_tensor_activity_ratio", 'gpu="0"') is not None:
            self.gpm["with"] += 1
            self.gpm["last"] = self.gpm["scrapes"]


def _seen(pid: int) -> tuple[int, int, int]:
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    found = {words[0].rstrip(":"): int(words[1]) for words in lines if words and words[0].rstrip(":") in WATCHED}
    return found["VmRSS"], found["Threads"], len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208  (a count)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _growth(result: Result, samples: Sequence[tuple[float, int, int, int]]) -> None:
    settled = samples[int(SETTLED * len(samples)) :]
    third = len(settled) // 3
    if not third:
        result.lacks("growth", f"only {len(samples)} looks at the process")
        return
    first, last = settled[:third], settled[-third:]
    grown = {
        name: statistics.median(row[place] for row in last) - statistics.median(row[place] for row in first)
        for place, name in ((1, "memory_kib"), (2, "threads"), (3, "files"))
    }
    result.data["grown"] = grown
    result.data["memory_kib"] = statistics.median(row[1] for row in last)
    result.check(
        f"memory grows by {GROWTH_KIB} KiB at most",
        grown["memory_kib"] <= GROWTH_KIB,
        f"{grown['memory_kib']:+.0f} KiB",
    )
    result.check("no thread more", grown["threads"] <= 0, f"{grown['threads']:+.0f}")
    result.check("no open file more", grown["files"] <= 0, f"{grown['files']:+.0f}")


def _throughput(result: Result, load: Running, spans: dict[bool, list[tuple[float, float]]]) -> None:
    found: dict[bool, list[float]] = {}
    for on, times in spans.items():
        found[on] = [rate["bytes"] for since, until in times for rate in load.rates("dram", since, until)]
    if not all(found.values()):
        result.lacks("the load's throughput", "too few seconds were measured")
        return
    without, beside = (statistics.median(found[on]) for on in (False, True))
    spread = statistics.pstdev(found[False]) / without
    slower = (without - beside) / without
    rows: dict[str, Any] = {
        "without": without,
        "beside": beside,
        "slower": slower,
        "spread": spread,
        "seconds": [len(found[False]), len(found[True])],
    }
    result.data["throughput"] = rows
    result.check(
        f"the load is at most {SLOWER:.0%} slower beside the exporter",
        slower <= max(SLOWER, 2 * spread),
        f"{slower:+.2%} (spread of single seconds {spread:.2%})",
    )
