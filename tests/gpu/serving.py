"""The real ``kvpressure serve`` on a node with both GPU sources on, and its page without what depends on the moment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

TICK = "0.15"

TIMED = re.compile(r"kvpressure_(gpu_xid_last_timestamp_seconds|source_errors_total)")


@contextmanager
def exporter(sysfs: Path, environ: Mapping[str, str], *arguments: str) -> Iterator[str]:
    """The exporter over the given sysfs and whatever libraries ``environ`` leads to; yields its address."""
    command = [
        sys.executable,
        "-m",
        "kvpressure",
        "serve",
        "--web.listen-address",
        "127.0.0.1:0",
        "--node-name",
        "n",
        "--host.sys",
        str(sysfs),
        "--interval",
        TICK,
        "--collector.nvidia.interval",
        TICK,
        "--collector.amd.interval",
        TICK,
        "--no-collector.engines",
        *arguments,
    ]
    clean = {name: value for name, value in environ.items() if not name.startswith("KVPRESSURE_")}
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=clean)
    assert child.stderr is not None
    try:
        said = []
        for line in child.stderr:
            said.append(line)
            if found := re.search(r"listening address=(\S+)", line):
                break
        else:
            raise AssertionError("the exporter did not start: " + "".join(said))
        yield f"http://{found[1]}"
    finally:
        child.terminate()
        child.wait(10)
        child.stderr.close()


def without_gpu_libraries() -> dict[str, str]:
    """The environment of the tests with no way to AMD's library."""
    return {name: value for name, value in os.environ.items() if name not in ("ROCM_PATH", "ROCM_HOME")}


def scrape(address: str) -> str:
    """The page now."""
    with urllib.request.urlopen(address + "/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def masked(page: str) -> list[str]:
    """Everything about GPUs and their sources; ``*`` for times, running counts and the kernel's release."""
    lines = []
    for line in page.splitlines():
        if not re.match(r"kvpressure_(gpus?_|source_(up|errors_total)\{source=\"(nvidia|amd)\")", line):
            continue
        series, value = re.sub(r'"kernel [^"]*"', '"kernel *"', line).rsplit(" ", 1)
        lines.append(f"{series} {'*' if TIMED.match(series) else value}")
    return sorted(lines)
