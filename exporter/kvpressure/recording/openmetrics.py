"""Every published series of a replay, with timestamps, as OpenMetrics for ``promtool tsdb create-blocks-from``.

OpenMetrics wants a family in one piece and within it a series in one piece, while a replay brings all series tick by
tick. The samples therefore go through a temporary database on disk, which keeps memory flat however long the
recording is; only the names of the series are held.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from kvpressure.errors import InputError, refused_file
from kvpressure.files import open_to_write
from kvpressure.model.state import State
from kvpressure.publish.collector import families
from kvpressure.publish.exposition import Encoder

_CACHE_KIB: Final = 8192


class OpenMetricsWriter(AbstractContextManager["OpenMetricsWriter"]):
    """Collects ticks and writes ``out`` when closed without an exception; use as a context manager.

    ``recordings``: what is replayed, which ``out`` must not replace. Raises ``InputError`` when ``out`` cannot be
    written.
    """

    def __init__(self, out: str | Path, recordings: Sequence[str] = ()) -> None:
        self.samples = 0
        self._name = str(out)
        self._out = Path(out)
        with self._writing():
            self._open(recordings)

    def _open(self, recordings: Sequence[str]) -> None:
        if self._out.exists():  # the finished file takes the name: a device or the recording would be gone
            if not self._out.is_file():
                raise ValueError("a directory or a device")
            if any(Path(file).samefile(self._out) for file in recordings):
                raise ValueError("the recording itself")
        self._part = self._out.with_name(self._out.name + ".part")
        os.close(open_to_write(self._part))  # an unusable name fails now, not after a long replay
        self._directory = tempfile.TemporaryDirectory(prefix="kvpressure-")
        self._database = sqlite3.connect(Path(self._directory.name) / "samples", isolation_level=None)
        self._database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.execute("CREATE TABLE samples (family INTEGER, metric INTEGER, line TEXT)")
        self._database.execute("BEGIN")
        self._heads: dict[str, int] = {}  # HELP and TYPE of a family -> its number
        self._metrics: dict[tuple[int, tuple[tuple[str, str], ...]], int] = {}
        self._last_ms: int | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._writing():
            try:
                if kind is None:
                    with os.fdopen(open_to_write(self._part), "w", encoding="utf-8") as out:
                        out.truncate()
                        self._write(out)
                    self._part.replace(self._out)
            finally:
                self._part.unlink(missing_ok=True)
                self._database.close()
                self._directory.cleanup()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error, ValueError) as error:  # ValueError: a name like "/" or ""
            raise InputError(
                refused_file(f"--openmetrics: {self._name}", error, "a file that can be written")
            ) from error

    def add(self, t: float, state: State) -> None:
        """The series of one tick at ``t``. A tick that is not later than the one before, to the millisecond, is left
        out: a series has one value at a time.
        """
        ms = round(t * 1000)
        if self._last_ms is not None and ms <= self._last_ms:
            return
        self._last_ms = ms
        stamp = f"{ms / 1000:.3f}"
        rows: list[tuple[int, int, str]] = []
        for family in families(state).collect():
            help, kind, *lines = (
                Encoder().encode((family,), openmetrics=True).decode().removesuffix("# EOF\n").splitlines()
            )
            number = self._heads.setdefault(f"{help}\n{kind}\n", len(self._heads))
            within = "quantile" if family.type == "summary" else None  # tells samples of one metric apart
            for sample, line in zip(family.samples, lines, strict=True):
                rows.append((number, self._metric(number, sample.labels, within), f"{line} {stamp}\n"))
        with self._writing():
            self._database.executemany("INSERT INTO samples VALUES (?, ?, ?)", rows)
        self.samples += len(rows)

    def _metric(self, family: int, labels: Mapping[str, str], within: str | None) -> int:
        """The number of a label set; the quantiles of a summary belong together."""
        key = (family, tuple(pair for pair in labels.items() if pair[0] != within))
        return self._metrics.setdefault(key, len(self._metrics))

    def _write(self, out: IO[str]) -> None:
        heads = {number: head for head, number in self._heads.items()}
        current = -1
        query = "SELECT family, line FROM samples ORDER BY family, metric, rowid"
        for family, line in self._database.execute(query):
            if family != current:
                out.write(heads[family])
                current = family
            out.write(line)
        out.write("# EOF\n")
