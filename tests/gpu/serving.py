"""The real ``kvpressure serve`` on a node with both GPU sources on, and its page without what depends on the moment."""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from tests.helpers.serve_process import serving

TICK = "0.15"

TIMED = re.compile(r"kvpressure_(gpu_xid_last_timestamp_seconds|source_errors_total)")


def exporter(sysfs: Path, environ: Mapping[str, str], *arguments: str) -> AbstractContextManager[str]:
    """The exporter over the given sysfs and whatever libraries ``environ`` leads to; yields its address."""
    off = ("--no-collector.processes", "--no-collector.engines")
    return serving("--host.sys", str(sysfs), "--interval", TICK, *off, *arguments, environ=environ)


def without_gpu_libraries() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("ROCM_PATH", "ROCM_HOME")}


def scrape(address: str) -> str:
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
