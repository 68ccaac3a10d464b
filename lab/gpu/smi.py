"""``nvidia-smi`` beside us: one answer, or a stream of them."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Final, Self

from lab.gpu.children import Child, ChildError

PROGRAM: Final = "nvidia-smi"
SECONDS: Final = 30.0
QUERY: Final = ("timestamp", "utilization.gpu", "memory.free", "power.draw", "enforced.power.limit")
GPM_METRICS: Final = {"2": "sm", "5": "tensor", "10": "dram"}
Row = dict[str, float | None]
"""Numbers by column; ``t``, where there is one, is Unix seconds."""

PLAIN_COLUMNS: Final = {"gpu", "sm", "mem", "enc", "dec", "jpg", "ofa"}


def ask(*arguments: str) -> list[list[str]]:
    """The cells of each line of an answer in CSV. Raises ``ChildError``."""
    try:
        done = subprocess.run(
            [PROGRAM, *arguments, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ChildError(f"{PROGRAM}: {error}") from error
    if done.returncode != 0:
        raise ChildError(f"{PROGRAM}: exit {done.returncode}: {(done.stdout + done.stderr).strip()[:200]}")
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def number(cell: str) -> float | None:
    """A cell as a number; ``None`` for ``[N/A]`` and the like."""
    try:
        return float(cell)
    except ValueError:
        return None


class Stream:
    """``nvidia-smi`` that prints for ever. Use as a context manager. Raises ``ChildError`` where it is not there."""

    def __init__(self, *arguments: str) -> None:
        if shutil.which(PROGRAM) is None:
            raise ChildError(f"{PROGRAM} is not there")
        by_line = ("stdbuf", "-oL") if shutil.which("stdbuf") else ()  # else a pipe may get nothing for long
        self._child = Child([*by_line, PROGRAM, *arguments])
        self._odd = ""  # the last line that is no row: what it complains about

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.__exit__(*_)

    def ended(self) -> str | None:
        """Its last words when it is no longer there. It prints its complaints to either stream."""
        if self._child.process.poll() is None:
            return None
        return self._child.last_words() or self._odd or " ".join(self._child.heard()).strip()[:200] or "it ended"


class Query(Stream):
    """``nvidia-smi --query-gpu`` of GPU 0 once a second."""

    def __init__(self) -> None:
        super().__init__("-i", "0", "-l", "1", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits")

    def rows(self) -> list[Row]:
        """What it said: ``t`` and the numbers by field."""
        found = []
        for line in self._child.heard():
            cells = [cell.strip() for cell in line.split(",")]
            if len(cells) == len(QUERY) and (moment := _moment(cells[0])) is not None:
                found.append(
                    {"t": moment, **{name: number(cell) for name, cell in zip(QUERY[1:], cells[1:], strict=True)}}
                )
        return found


class Dmon(Stream):
    """``nvidia-smi dmon`` of GPU 0 once a second: utilization, and the GPM metrics if wanted."""

    def __init__(self, gpm: bool) -> None:
        super().__init__(
            "dmon", "-i", "0", "-d", "1", "-s", "u", *(("--gpm-metrics", ",".join(GPM_METRICS)) if gpm else ())
        )
        self.header: list[str] = []

    def rows(self) -> list[Row]:
        """What it said since the last call, by column. It prints no fractions of a second: collect after each phase."""
        found: list[Row] = []
        for line in self._child.heard():
            if line.startswith("#"):
                self.header = self.header or line.lstrip("# ").split()
            elif len(cells := line.split()) == len(self.header):
                found.append(dict(zip(self.header, map(number, cells), strict=True)))
            else:
                self._odd = line.strip()[:200]
        return found

    def refused(self) -> str | None:
        """Waits for its first row; why there is none and never will be."""
        end = time.monotonic() + SECONDS
        while not self.rows():
            if (why := self.ended()) is not None or time.monotonic() > end:
                return why or f"no row in {SECONDS:.0f} s"
            time.sleep(0.2)
        return None

    @property
    def gpm_columns(self) -> dict[str, str]:
        """Our name -> its column: the columns that plain utilization does not have, in the order of asking."""
        extra = [column for column in self.header if column not in PLAIN_COLUMNS]
        return dict(zip(GPM_METRICS.values(), extra, strict=True)) if len(extra) == len(GPM_METRICS) else {}


def _moment(text: str) -> float | None:
    """Unix seconds of ``2026/01/31 12:00:00.123``, which is local time."""
    try:
        return (
            time.mktime((moment := datetime.strptime(text, "%Y/%m/%d %H:%M:%S.%f")).timetuple())
            + moment.microsecond / 1e6
        )
    except ValueError:
        return None


def both(values: Sequence[float | None]) -> list[float]:
    """Those that are known."""
    return [value for value in values if value is not None]
