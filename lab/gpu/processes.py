"""Part ``processes``: who uses how much of the GPU, by our source and by ``nvidia-smi``; and how fast we are there.

As a program: ``namespace`` reads from a pid namespace of its own, as a container without ``hostPID`` does; ``start``
times a fresh source.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, Final

from lab.gpu import privileges, smi
from lab.gpu.children import ChildError, ask, module
from lab.gpu.exporter import Exporter, value
from lab.gpu.load import Running
from lab.gpu.options import Options
from lab.gpu.result import Result

MIB: Final = 2**20
CHILD_SECONDS: Final = 90.0
STARTS: Final = 3
WITHIN_MIB: Final = 1.0
PAGE_SECONDS: Final = 30.0
_CLONE_NEWPID: Final = 0x20000000


def run(result: Result, options: Options) -> None:
    """Hold memory in a process and look for it; then time the start."""
    with ExitStack() as stack:
        try:
            load = stack.enter_context(Running(*options.load))
            load.switch("hold")
            time.sleep(options.settle)
            load.collect()
        except ChildError as error:
            result.lacks("memory of a process of known size", error)
        else:
            result.data["held"] = {"pid": load.pid, "gib": load.facts["gib"]}
        _compare(result)
        _from_a_namespace(result)
    result.data["starts"] = []
    for _ in range(STARTS):
        try:
            result.data["starts"].append(ask(module("processes", "start"), CHILD_SECONDS))
        except ChildError as error:
            result.lacks("start time of the source", error)
    _exporter(result)


def _compare(result: Result) -> None:
    try:
        ours = {int(pid): used for pid, used in ask(module("processes", "list"), CHILD_SECONDS).items()}
    except ChildError as error:
        result.lacks("processes by our source", error)
        return
    result.data["ours"] = ours
    try:
        rows = smi.ask("-i", "0", "--query-compute-apps=pid,used_memory")
    except ChildError as error:
        result.lacks("processes by nvidia-smi", error)
        return
    theirs = {int(row[0]): smi.number(row[1]) for row in rows if row[0].isdigit()}
    result.data["theirs"] = theirs
    result.check("the same processes as nvidia-smi", set(ours) == set(theirs), f"{sorted(ours)} and {sorted(theirs)}")
    for pid in sorted(set(ours) & set(theirs)):
        mine, told = ours[pid], theirs[pid]
        if mine is None or told is None:
            result.lacks(f"memory of process {pid}", f"ours {mine}, nvidia-smi {told}")
            continue
        result.check(
            "memory of a process as nvidia-smi tells it",
            abs(mine / MIB - told) <= WITHIN_MIB,
            f"{mine / MIB:.0f} and {told:.0f} MiB",
        )
    if "held" in result.data:
        mine = ours.get(result.data["held"]["pid"])
        held = f"{1024 * result.data['held']['gib']:.0f} MiB held"
        result.check(
            "the process that holds memory is found by its pid",
            mine is not None,
            f"{mine / MIB:.0f} MiB for {held}" if mine else "not among them",
        )


def _from_a_namespace(result: Result) -> None:
    try:
        result.data["from_namespace"] = ask(module("processes", "namespace"), CHILD_SECONDS)
    except ChildError as error:
        result.lacks("processes as seen from another pid namespace", error)


def _exporter(result: Result) -> None:
    began = time.perf_counter()
    try:
        with Exporter(privileges.AS_IS) as exporter:
            while value(exporter.page(), "gpu_up", 'gpu="0"') is None and time.perf_counter() - began < PAGE_SECONDS:
                time.sleep(0.02)
            result.data["page_with_gpu_seconds"] = round(time.perf_counter() - began, 2)
    except ChildError as error:
        result.lacks("start time of the exporter", error)
        return
    result.check(
        f"the exporter shows the GPU within {PAGE_SECONDS / 3:.0f} s of its start",
        result.data["page_with_gpu_seconds"] <= PAGE_SECONDS / 3,
        f"{result.data['page_with_gpu_seconds']} s",
    )


# --- in the children ----------------------------------------------------------------------------------------------


def listed() -> dict[int, int | None]:
    """Bytes by pid, as our source reads them on GPU 0 and its instances."""
    from kvpressure.sources.gpu.nvidia.source import NvidiaSource

    source = NvidiaSource(SimpleNamespace())
    try:
        return {
            process.pid: process.used_bytes
            for gpu in source.read().gpus or ()
            if gpu.index == 0
            for process in gpu.processes
        }
    finally:
        source.close()


def started() -> dict[str, float]:
    """Seconds for importing the source, for its first reading (which opens the library), and for the next one."""
    began = time.perf_counter()
    from kvpressure.sources.gpu.nvidia.source import NvidiaSource

    imported = time.perf_counter()
    source = NvidiaSource(SimpleNamespace(nvidia_gpm=True))
    source.read()
    first = time.perf_counter()
    source.read()
    second = time.perf_counter()
    source.close()
    return {
        "import": round(imported - began, 4),
        "first_reading": round(first - imported, 4),
        "next_reading": round(second - first, 4),
    }


def in_namespace() -> Any:
    """``listed`` by a process that is the first of a pid namespace of its own. Raises ``OSError`` where
    that is refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWPID) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"unshare: {os.strerror(code)}")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(listed()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        raise OSError("the source could not read there")
    return json.loads(text)


if __name__ == "__main__":
    try:
        print(json.dumps({"list": listed, "start": started, "namespace": in_namespace}[sys.argv[1]]()), flush=True)
    except OSError as refused:
        sys.exit(f"{type(refused).__name__}: {refused}")
