"""The command: run the parts, each in a process of its own, then write the report.

Exit status: 0 all is as it should be, 1 something is not (the report says what), 2 wrong usage or no GPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from lab.gpu import plan, publish, report
from lab.gpu.children import ROOT, ChildError, ask, environment, module
from lab.gpu.machine import NoGpu
from lab.gpu.options import Options
from lab.gpu.result import Result

RESULTS: Final = ROOT / "build/gpu"
REPORT: Final = "report"
DRIVER_SECONDS: Final = 60.0  # a driver that takes longer to say who it is hangs


def main(arguments: list[str] | None = None) -> int:
    """See above."""
    given = _parser().parse_args(arguments)
    options = Options(
        given.results.resolve(), given.reads, given.phase_seconds, given.settle_seconds, given.leak_minutes
    )
    if given.list:
        print(plan.listing(options))
        return 0
    try:
        options.results.mkdir(parents=True, exist_ok=True)
        if given.here:
            return 0 if plan.run_here(plan.named(given.here), options).good else 1
        wanted = given.part or [*plan.NAMES, REPORT]
        machine = ask(module("machine"), DRIVER_SECONDS) if set(wanted) - {REPORT} else None
    except (ChildError, NoGpu, OSError) as error:
        print(f"lab.gpu: {error}; needs an NVIDIA GPU with its driver, and a folder to write to", file=sys.stderr)
        return 2
    if machine is not None:
        print(f"{machine['name']}, driver {machine['driver']}, results in {options.results}", flush=True)
    good = [
        _run(plan.named(name), options, sys.argv[1:] if arguments is None else arguments)
        for name in wanted
        if name != REPORT
    ]
    if REPORT in wanted:
        path = publish.publish(options.results) if given.publish else report.write(options.results)
        print(f"{report.count(options.results)} Report: {path}")
    return 0 if all(good) else 1


def _run(part: plan.Part, options: Options, arguments: list[str]) -> bool:
    """The part in a process of its own; one that hangs is ended, and its result says so."""
    print(f"{part.name}: {part.what} ({part.seconds(options) / 60:.1f} min)", flush=True)
    (options.results / f"{part.name}.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "lab.gpu", *arguments, "--here", part.name]
    child = subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True)
    try:
        status = child.wait(part.limit(options))
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as stopped:
        _end(child)
        if isinstance(stopped, KeyboardInterrupt):
            raise
        return _lost(part, options, f"did not end within {part.limit(options):.0f} s")
    if not (options.results / f"{part.name}.json").exists():
        return _lost(part, options, f"ended with {status} and left nothing")
    return status == 0


def _lost(part: plan.Part, options: Options, why: str) -> bool:
    Result(part.name, failed=why).write(options.results)
    print(f"  FAIL {part.name}: {why}", flush=True)
    return False


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the part and all that it started."""
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m lab.gpu", description="Does kvpressure tell the truth on this NVIDIA GPU?"
    )
    parser.add_argument("--list", action="store_true", help="say what would be done and how long it takes")
    parser.add_argument("--part", action="append", choices=[*plan.NAMES, REPORT], help="only this; repeat for several")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results (default build/gpu)")
    parser.add_argument("--reads", type=int, default=Options.reads, help="readings in each identity of part calls")
    parser.add_argument("--phase-seconds", type=float, default=Options.phase, help="how long each load is watched")
    parser.add_argument("--settle-seconds", type=float, default=Options.settle, help="and left alone before")
    parser.add_argument(
        "--leak-minutes",
        type=float,
        default=Options.leak_minutes,
        help="minutes of readings in part leak; it takes a fifth longer",
    )
    parser.add_argument(
        "--publish",
        action="store_true",
        help="with the report: keep results and report in lab/gpu/results, write the fixture",
    )
    parser.add_argument("--here", choices=plan.NAMES, help=argparse.SUPPRESS)
    return parser
