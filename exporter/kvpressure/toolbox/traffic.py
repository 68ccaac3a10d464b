"""Loads from files: traces (CSV or JSON lines) and recordings."""

from __future__ import annotations

import csv
import io
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from kvpressure.capacity.errors import CapacityError
from kvpressure.capacity.load import BURST_SECONDS, MAX_LENGTH, MAX_SAMPLES, RequestLengths, RequestLoad
from kvpressure.errors import refused_file, shown
from kvpressure.files import open_packed
from kvpressure.model import ceilings
from kvpressure.parsed import json_of
from kvpressure.toolbox.recorded_traffic import from_recording

_PROMPT_KEYS: Final = (
    "input_tokens",
    "prompt_tokens",
    "input_length",
    "contexttokens",
    "num_prefill_tokens",
    "request tokens",
)
_OUTPUT_KEYS: Final = (
    "output_tokens",
    "completion_tokens",
    "output_length",
    "generatedtokens",
    "num_decode_tokens",
    "response tokens",
)
_TIME_KEYS: Final = ("t_s", "arrived_at", "timestamp_s")
_MAX_LINE: Final = 1_000_000


def from_file(path: Path) -> RequestLoad:
    """The load of a trace (CSV with a header line, or JSON lines; gzip or plain) or a recording. Raises
    ``CapacityError`` with file, line and what is allowed.
    """
    first = _first_line(path)
    if '"kvpressure-recording"' in first:
        return from_recording(path)
    return _from_trace(path)


@contextmanager
def _open(path: Path) -> Iterator[IO[str]]:
    with open_packed(path) as raw, io.TextIOWrapper(raw, encoding="utf-8", errors="replace") as text:
        yield text


def _first_line(path: Path) -> str:
    try:
        with _open(path) as stream:
            return stream.readline(_MAX_LINE)
    except (OSError, EOFError) as error:
        raise CapacityError(refused_file(str(path), error, "a complete trace or recording")) from error


def _from_trace(path: Path) -> RequestLoad:
    sample: list[RequestLengths] = []
    longest: RequestLengths | None = None
    stride, seen = 1, 0
    arrivals = _Arrivals()
    try:
        with _open(path) as stream:
            for time, request in _rows(stream, path):
                arrivals.add(time)
                if seen % stride == 0:
                    sample.append(request)
                seen += 1
                longest = request if longest is None or request.total > longest.total else longest
                if len(sample) >= 2 * MAX_SAMPLES:
                    sample, stride = sample[::2], stride * 2
    except (OSError, EOFError) as error:
        raise CapacityError(refused_file(str(path), error, "a complete trace or recording")) from error
    if longest is None:
        raise CapacityError(f"{path}: no requests; the file must have one request on each line")
    if longest not in sample:
        sample.append(longest)
    return RequestLoad(tuple(sample), burst_ratio=arrivals.burst_ratio())


class _Arrivals:
    """Arrivals in the busiest ten seconds divided by the mean."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._first: float | None = None
        self._last = 0.0
        self._count = self._most = 0

    def add(self, time: float | None) -> None:
        """Take the next arrival; rows without a time, or out of order, are ignored."""
        if time is None or (self._first is not None and time < self._last):
            return
        self._first = time if self._first is None else self._first
        self._last = time
        self._count += 1
        self._recent.append(time)
        while self._recent[0] <= time - BURST_SECONDS:
            self._recent.popleft()
        self._most = max(self._most, len(self._recent))

    def burst_ratio(self) -> float | None:
        """The ratio; None for less than a minute of arrivals."""
        span = self._last - (self._first or 0.0)
        return self._most * span / (self._count * BURST_SECONDS) if span >= 60 else None


def _rows(stream: IO[str], path: Path) -> Iterator[tuple[float | None, RequestLengths]]:
    lines = iter(lambda: stream.readline(_MAX_LINE), "")
    first = next(lines, "")
    if first.lstrip().startswith("{"):
        yield from (
            _row(_json(line, path, number), path, number)
            for number, line in enumerate(_chain(first, lines), 1)
            if line.strip()
        )
        return
    reader = csv.reader(_chain(first, lines))
    header = [name.strip().lower() for name in next(reader, [])]
    try:
        for cells in reader:
            if cells:
                yield _row(dict(zip(header, cells, strict=False)), path, reader.line_num)
    except csv.Error as error:
        raise CapacityError(f"{path}:{reader.line_num}: {error}; the file must be valid CSV") from error


def _chain(first: str, rest: Iterable[str]) -> Iterator[str]:
    yield first
    yield from rest


def _json(line: str, path: Path, number: int) -> Mapping[str, object]:
    row = json_of(line)
    if not isinstance(row, dict):
        raise CapacityError(
            f"{path}:{number}: not a JSON object; allowed: one JSON object on each line, one for each request"
        )
    return {str(key).lower(): value for key, value in row.items()}


def _row(row: Mapping[str, object], path: Path, number: int) -> tuple[float | None, RequestLengths]:
    prompt, output = _length(row, _PROMPT_KEYS, path, number), _length(row, _OUTPUT_KEYS, path, number)
    time = next((row[key] for key in _TIME_KEYS if key in row), None)
    seconds = ceilings.number_in(str(time), ceilings.SECONDS, -ceilings.SECONDS)
    return seconds, RequestLengths(prompt, output, float(max(1, output)))


def _length(row: Mapping[str, object], keys: Sequence[str], path: Path, number: int) -> int:
    found = next((key for key in keys if key in row), None)
    if found is None:
        raise CapacityError(
            f"{path}:{number}: no column of prompt or output lengths; allowed: {keys[0]} (also {', '.join(keys[1:])})"
        )
    value = ceilings.number_in(str(row[found]), MAX_LENGTH)
    if value is None:
        raise CapacityError(f"{path}:{number}: {found} is {shown(row[found])}; allowed: a number of tokens")
    return int(value)
