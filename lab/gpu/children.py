"""Child processes of the parts: one that answers once, and one that is talked to by lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, Self

ROOT: Final = Path(__file__).resolve().parents[2]
LAST_WORDS: Final = 300  # characters of stderr that explain a failure


class ChildError(Exception):
    """A child did not do its work; the text says why."""


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """That of this process, with the package and this folder to be found, and CUDA numbering GPUs as NVML does."""
    ours = [str(ROOT / "exporter"), str(ROOT / "plugin"), str(ROOT)]
    path = os.pathsep.join(filter(None, [*ours, os.environ.get("PYTHONPATH")]))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVPRESSURE_")}
    return {
        **kept,
        "PYTHONPATH": path,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **(extra or {}),
    }


def module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module of this folder."""
    return [sys.executable, "-m", f"lab.gpu.{name}", *arguments]


def ask(command: Sequence[str], timeout: float) -> Any:
    """What the child printed as its last line, as JSON. Raises ``ChildError``."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout, check=False
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        raise ChildError(str(error)) from error
    if done.returncode != 0:
        raise ChildError(done.stderr.strip()[-LAST_WORDS:] or f"exit {done.returncode}")
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise ChildError(f"no JSON: {done.stdout[-LAST_WORDS:]!r}") from error


class Child:
    """A child that is talked to by lines; ended with the block. What it prints can be waited for, with a time limit."""

    def __init__(self, command: Sequence[str], extra: Mapping[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the block)
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(extra),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)
        for pipe in (self.process.stdin, self.process.stdout, self._errors):
            if pipe is not None:
                with suppress(OSError):  # what was not yet written has no reader any more
                    pipe.close()

    def tell(self, line: str) -> None:
        """Give it a line. Raises ``ChildError`` when it has ended."""
        assert self.process.stdin is not None
        try:
            print(line, file=self.process.stdin, flush=True)
        except OSError as error:
            raise ChildError(self.last_words() or str(error)) from error

    def hear(self, timeout: float) -> str:
        """Its next line. Raises ``ChildError`` when none comes in time."""
        try:
            line = self._lines.get(timeout=timeout)
        except Empty:
            raise ChildError(f"silent for {timeout:.0f} s") from None
        if line is None:
            self._lines.put(None)
            raise ChildError(f"ended: {self.last_words()}")
        return line

    def heard(self) -> list[str]:
        """The lines that came and were not taken yet."""
        found = []
        with suppress(Empty):
            while (line := self._lines.get_nowait()) is not None:
                found.append(line)
            self._lines.put(None)
        return found

    def answer(self, timeout: float) -> Any:
        """Its next line as JSON. Raises ``ChildError``, also when the answer is ``{"error": why}``."""
        line = self.hear(timeout)
        try:
            found = json.loads(line)
        except ValueError as error:
            raise ChildError(f"no JSON: {line[:LAST_WORDS]!r}") from error
        if isinstance(found, dict) and "error" in found:
            raise ChildError(str(found["error"]))
        return found

    def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1)  # the reason of a death comes before the death is seen
        self._errors.seek(0)
        return self._errors.read().strip()[-LAST_WORDS:]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)
