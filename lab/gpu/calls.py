"""Part ``calls``: every call that the source makes, timed, as root, as a user, and as root without capabilities.

The source itself reads; its clock runs fast, so that what it reads seldom is read each time. As a program
(``python -m lab.gpu.calls IDENTITY READS``) it does so in one identity and prints what it saw.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from kvpressure.model.readings import GpuReading
from kvpressure.sources.base import SourceError
from kvpressure.sources.gpu.nvidia.source import NvidiaSource
from lab.gpu import privileges
from lab.gpu.children import ChildError, ask, module
from lab.gpu.load import Running
from lab.gpu.options import Options
from lab.gpu.result import Result
from lab.gpu.timing import CallTimes, summary

OPENINGS: Final = 5
PAUSE_SECONDS: Final = 0.15  # GPM wants samples more than 0.1 s apart
FAST: Final = 80.0  # 12 s of the source's time between two readings: more than its slow interval
UNDER_LOAD: Final = "under load"
CHILD_SECONDS: Final = 150.0
SLOW_READING_MILLISECONDS: Final = 250.0  # of a reading each second; the budget of a tick
PARAMETERS: Final = Path("/proc/driver/nvidia/params")


def run(result: Result, options: Options) -> None:
    """Ask in every identity that can be had, and once under load for the fixture."""
    result.data["driver_parameters"] = _parameters()
    for identity in privileges.IDENTITIES:
        _one(result, identity, identity, options.reads)
    with ExitStack() as stack:
        try:
            load = stack.enter_context(Running(*options.load))
            load.switch("dram")
            time.sleep(options.settle)
            load.collect()
        except ChildError as error:
            result.lacks("calls and GPU under load", error)
            stack.close()
        else:
            _one(result, UNDER_LOAD, privileges.AS_IS, options.reads)
        try:
            result.data |= ask(module("inventory"), CHILD_SECONDS)
        except ChildError as error:
            result.lacks("answers of the GPU", error)


def _one(result: Result, name: str, identity: str, reads: int) -> None:
    try:
        found = ask(module("calls", identity, str(reads)), CHILD_SECONDS + reads)
    except ChildError as error:
        result.lacks(f"calls {name}", error)
        return
    result.data.setdefault("identities", {})[name] = found
    if "down" in found:
        result.check(f"{name}: the source reads", False, found["down"])
        return
    result.check(f"{name}: memory, utilization and power are known", not found["absent"], found["absent"] or "all")
    result.check(
        f"{name}: p99 of a reading within {SLOW_READING_MILLISECONDS:.0f} ms",
        found["reading_ms"]["p99"] <= SLOW_READING_MILLISECONDS,
        f"{found['reading_ms']['p99']} ms",
    )


def _parameters() -> dict[str, str]:
    """What the driver says about its own permissions; empty where that is hidden."""
    try:
        lines = PARAMETERS.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name: value.strip() for name, _, value in pairs if "Profiling" in name or "Restrict" in name}


# --- in the child ------------------------------------------------------------------------------------------------


def observe(reads: int) -> dict[str, Any]:
    """Open the source several times, then read; what came, how long it took, and every call."""
    times = CallTimes()
    times.install()
    source = NvidiaSource(SimpleNamespace(nvidia_gpm=True), clock=lambda: FAST * time.monotonic())
    opening: list[float] = []
    reading: list[float] = []
    errors: Counter[str] = Counter()
    gpus: tuple[GpuReading, ...] = ()
    activity = [0, 0]  # readings with it, and the last one that had it
    try:
        for _ in range(OPENINGS):
            source.close()
            began = time.perf_counter()
            errors.update(source.read().errors)
            opening.append(1e3 * (time.perf_counter() - began))
        for number in range(reads):
            time.sleep(PAUSE_SECONDS)
            began = time.perf_counter()
            found = source.read()
            reading.append(1e3 * (time.perf_counter() - began))
            errors.update(found.errors)
            gpus = found.gpus or ()
            if any(gpu.dram_activity_ratio is not None for gpu in gpus):
                activity = [activity[0] + 1, number + 1]
    except SourceError as error:
        return {"down": str(error), "calls": times.table()}
    finally:
        source.close()
    return {
        "opening_ms": summary(opening),
        "reading_ms": summary(reading),
        "errors": dict(errors),
        "gpus": len(gpus),
        "absent": sorted({name for gpu in gpus for name in _absent(gpu)}),
        "activity": {"readings": reads, "with": activity[0], "last": activity[1]},
        "calls": times.table(),
    }


def _absent(gpu: GpuReading) -> list[str]:
    if gpu.error is not None:
        return [f"{gpu.index}: {gpu.error}"]
    wanted = (
        ("memory_total_bytes", "memory_used_bytes")
        if gpu.parent_uuid
        else ("memory_total_bytes", "memory_used_bytes", "utilization_ratio", "power_watts", "power_limit_watts")
    )
    values = dataclasses.asdict(gpu)
    return [name for name in wanted if values[name] is None]


if __name__ == "__main__":
    try:
        privileges.become(sys.argv[1])
    except OSError as refused:
        sys.exit(f"{type(refused).__name__}: {refused}")
    print(json.dumps({**observe(int(sys.argv[2])), "process": privileges.facts()}), flush=True)
    os._exit(0)  # a library that hangs in its own clean-up has nothing more to tell
