"""How fast is a replay, and does its memory stay flat? ``python -m lab.replay``

Replays the pages of a real vLLM server under pressure (34 KB each), strung together to hours of ticks 5 s apart, with
the real command in a process of its own. Exit 1 when a budget is missed.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvpressure.recording.format import Header

PAGES: Final = Path(__file__).parents[1] / "tests" / "fixtures" / "recordings" / "vllm-cpu" / "d_kv_pressure.jsonl.gz"
INTERVAL_SECONDS: Final = 5.0
TIMES_REAL_TIME: Final = 1000.0
GROWTH: Final = 1.10  # of the largest memory, for a recording four times as long
COMMANDS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("json", ("--format", "json")),
    ("text", ("--format", "text")),
    ("openmetrics", ("--openmetrics", "{out}")),
)


def write_recording(path: Path, ticks: int) -> None:
    """A recording of one engine with that many ticks."""
    with gzip.open(PAGES, "rt", encoding="utf-8") as lines:
        next(lines)
        bodies = [json.loads(line) for line in lines]
    with gzip.open(path, "wt", compresslevel=1, encoding="utf-8") as out:
        out.write(Header(INTERVAL_SECONDS, "bench", "benchmark").to_json() + "\n")
        for number in range(ticks):
            body = {**bodies[number % len(bodies)], "t": 1_700_000_000 + INTERVAL_SECONDS * number}
            out.write(json.dumps(body, separators=(",", ":")) + "\n")


# A child's largest memory as its parent learns of it begins with the parent's own, so the command tells its own.
MEASURED: Final = """
import os, sys, time
from kvpressure.cli import main
code = main(sys.argv[2:])
with open("/proc/self/status") as status, open(sys.argv[1], "w") as out:
    peak = next(line.split()[1] for line in status if line.startswith("VmHWM:"))
    print(time.process_time(), peak, file=out)
sys.exit(code)
"""


def measure(recording: Path, arguments: Sequence[str]) -> tuple[float, int]:
    """CPU seconds and largest resident bytes of one ``kvpressure replay``."""
    figures = recording.with_suffix(".measured")
    command = [sys.executable, "-c", MEASURED, str(figures), "replay", str(recording), *arguments]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    seconds, kibibytes = figures.read_text().split()
    return float(seconds), int(kibibytes) * 1024


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table, one line a form of output. Argument: ticks of the long recording (default 8 640, half a day)."""
    arguments = sys.argv[1:] if argv is None else argv
    ticks = int(arguments[0]) if arguments else 8640
    missed = False
    print(
        f"one engine, ticks {INTERVAL_SECONDS:g} s apart, {ticks // 4} and {ticks} of them; CPU time of the whole"
        " command"
    )
    with tempfile.TemporaryDirectory() as directory:
        short, long = Path(directory) / "short.gz", Path(directory) / "long.gz"
        write_recording(short, ticks // 4)
        write_recording(long, ticks)
        for name, template in COMMANDS:
            form = [item.replace("{out}", f"{directory}/out") for item in template]
            _, before = measure(short, form)
            began = time.perf_counter()
            seconds, after = measure(long, form)
            wall = time.perf_counter() - began
            speed = ticks * INTERVAL_SECONDS / seconds
            bad = speed < TIMES_REAL_TIME or after > before * GROWTH
            missed = missed or bad
            print(
                f"{name:12} {1000 * seconds / ticks:.2f} ms a tick, {speed:,.0f} x real time (budget"
                f" {TIMES_REAL_TIME:,.0f}), wall {wall:.1f} s, memory {before / 2**20:.0f} -> {after / 2**20:.0f}"
                f" MiB{'  MISSED' if bad else ''}"
            )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
