"""Runs an ``NvidiaSource`` on the real binding in a process of its own, driven by JSON lines on stdin.

Commands: ``{"op": "read"}``, ``{"op": "new", "settings": {...}}`` (a fresh source and stub), ``{"op": "advance",
"seconds": 5}``, ``{"op": "calls"}``, ``{"op": "close"}``, ``{"op": "sweep", ...}``. Each gets one JSON line in answer.
Time stands still between ``advance`` commands, so that back-off and refresh intervals are tested without waiting.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import pynvml

from kvpressure.sources.base import FatalSourceError, NothingHere, Reading, SourceError
from kvpressure.sources.gpu.nvidia.source import SHARE_OF_DEADLINE, NvidiaSource
from tests.sources.gpu.nvml_stub import write


class Clock:
    """A clock that moves only when told, and by ``drift`` seconds each time it is asked."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.drift = 0.0

    def __call__(self) -> float:
        self.now += self.drift
        return self.now


def answer(source: NvidiaSource) -> dict[str, Any]:
    """One reading, or why there is none, as JSON-able data."""
    started = time.monotonic()
    try:
        reading: Reading = source.read()
    except SourceError as error:
        return {
            "reason": error.reason,
            "fatal": isinstance(error, FatalSourceError),
            "detail": error.detail,
            "nothing_here": isinstance(error, NothingHere),
            "seconds": time.monotonic() - started,
            "threads": threading.active_count(),
        }
    return {
        "gpus": [dataclasses.asdict(gpu) for gpu in reading.gpus or ()],
        "errors": dict(reading.errors),
        "expected": reading.expected_gpus,
        "seconds": time.monotonic() - started,
        "threads": threading.active_count(),
    }


def calls() -> dict[str, int]:
    """How often each driver call was made in this process."""
    import ctypes

    function = pynvml.nvmlLib.nvml_stub_calls
    function.restype = ctypes.c_char_p
    return {name: int(count) for name, count in (line.split() for line in function().decode().splitlines())}


class Runner:
    def __init__(self) -> None:
        self.clock = Clock()
        self.source: NvidiaSource | None = None

    def new(self, settings: dict[str, Any]) -> NvidiaSource:
        if self.source is not None:
            self.source.close()
        if pynvml.nvmlLib is not None:
            pynvml.nvmlLib.nvml_stub_reset()
        settings = {"host_sys": os.devnull, **settings}  # this machine's own bus says nothing of the stub's GPUs
        budget = settings.pop("budget_seconds", None)
        if budget is not None:
            collector = SimpleNamespace(deadline_seconds=budget / SHARE_OF_DEADLINE)
            settings["collectors"] = {"nvidia": collector}
        self.source = NvidiaSource(SimpleNamespace(**settings), clock=self.clock)
        return self.source

    def do(self, command: dict[str, Any]) -> Any:
        match command["op"]:
            case "new":
                self.new(command["settings"])
                return {}
            case "read":
                return answer(self.source or self.new({}))
            case "advance":
                self.clock.now += command["seconds"]
                self.clock.drift = command["drift"]
                return {}
            case "calls":
                return calls()
            case "sweep":
                return self.sweep(command)
            case "close":
                if self.source is not None:
                    self.source.close()
                    self.source = None
                return {}
        raise ValueError(command)

    def sweep(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """A fresh source for each (world text, times to read): many worlds without as many processes."""
        results = []
        for text in command["worlds"]:
            write(Path(command["path"]), text)
            source = self.new(command["settings"])
            for _ in range(command["reads"]):
                results.append(answer(source))
                self.clock.now += 1.0
        return results


def main(commands: TextIO, answers: TextIO) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    runner = Runner()
    for line in commands:
        try:
            result = runner.do(json.loads(line))
        except Exception:  # told to the test that asked; the next one gets a fresh source
            result = {"crash": traceback.format_exc()}
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
