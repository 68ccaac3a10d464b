"""The demo, run until its incident has begun."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Addresses:
    """Where the demo's exporter and its Prometheus answer, without a slash at the end."""

    exporter: str
    prometheus: str


@contextmanager
def incident(scenario: str, seconds: int, tell: bool = False) -> Iterator[Addresses]:
    """Run ``scenario`` over ``seconds``; the body begins with its incident and ends the demo. Raises
    ``RuntimeError`` if it ends before.
    """
    command = [sys.executable, "-u", "-m", "lab.demo", "--scenario", scenario, "--for", str(seconds)]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    found: dict[str, str] = {}
    try:
        for line in demo.stdout:
            if tell:
                print(line, end="", flush=True)
            if match := re.match(r"  (exporter|Prometheus) +(http://\S+)", line):
                found[match[1]] = match[2].rstrip("/")
            if "== incident" in line:
                break
        if "Prometheus" not in found:
            raise RuntimeError(
                "the demo did not start Prometheus (Debian: apt install prometheus prometheus-alertmanager)"
            )
        threading.Thread(
            target=lambda: [None for _ in demo.stdout or ()], daemon=True
        ).start()  # its pipe must not fill up
        yield Addresses(found["exporter"], found["Prometheus"])
    finally:
        demo.terminate()
        demo.wait()
