"""What is sent to a server: request lengths as numbers, quantiles, a trace or a recording.

A request's weight is its output length: long answers stay longer, so they are met in flight more often.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, sqrt
from pathlib import Path
from typing import IO, Final

from kvpressure.capacity import CapacityError

MAX_SAMPLES: Final = 50_000
BURST_SECONDS: Final = 10.0
_GRID: Final = 100  # quantiles taken of a stated distribution
_MAX_LENGTH: Final = 100_000_000
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


@dataclass(frozen=True, slots=True)
class Request:
    """Lengths of one request in tokens, and how often it is met in flight."""

    prompt: int
    output: int
    weight: float

    @property
    def total(self) -> int:
        """Tokens at its end."""
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Load:
    """Requests as a sample, in no order. ``in_flight`` = requests at the server at once, where the source tells;
    ``burst_ratio`` = arrivals in the busiest 10 s against the mean, where it tells.
    """

    requests: tuple[Request, ...]
    in_flight: float | None = None
    burst_ratio: float | None = None

    def quantile(self, of: str, q: float) -> int:
        """Quantile ``q`` of ``prompt``, ``output`` or ``total`` over requests (not weighted)."""
        values = sorted(getattr(request, of) for request in self.requests)
        return int(values[min(len(values) - 1, int(q * len(values)))])

    @property
    def longest(self) -> int:
        """The longest request."""
        return max(request.total for request in self.requests)

    def mean_and_deviation(self, cost: Mapping[int, float]) -> tuple[float, float]:
        """Weighted mean and standard deviation of ``cost[total]`` over the requests in flight."""
        weight = sum(request.weight for request in self.requests)
        mean = sum(request.weight * cost[request.total] for request in self.requests) / weight
        variance = sum(request.weight * (cost[request.total] - mean) ** 2 for request in self.requests) / weight
        return mean, sqrt(variance)


def stated(prompt: str, output: str) -> Load:
    """From lengths as text: "1500", or quantiles "p50=1000,p95=4000,p99=8000" with straight lines between them.

    Prompt and output are taken as independent. Raises ``CapacityError``.
    """
    prompts, outputs = _lengths(prompt, "--prompt"), _lengths(output, "--output")
    return Load(tuple(Request(p, o, float(max(1, o))) for p in prompts for o in outputs))


def _lengths(text: str, where: str) -> Sequence[int]:
    if re.fullmatch(r"\d{1,9}", text):
        return (int(text),)
    points: list[tuple[float, float]] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*p(\d{1,2}(?:\.\d{1,3})?|100)=(\d{1,9})\s*", part)
        if match is None:
            raise CapacityError(
                f"{where}: {text!r:.100}; allowed: a number of tokens, or quantiles like p50=1000,p95=4000,p99=8000"
            )
        points.append((float(match[1]) / 100, float(match[2])))
    if any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(points)):
        raise CapacityError(f"{where}: {text!r:.100}; allowed: quantiles in rising order of share and length")
    return from_quantiles(points)


def from_quantiles(points: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """Lengths at evenly spaced shares of a distribution given by (share, length) points, the last of them the longest
    that is given. Below the first point it falls to 0 in a straight line, beyond the last nothing is known.
    """
    shares = [0.0, *(share for share, _ in points if share > 0), 1.0]
    lengths = [
        0.0 if points[0][0] > 0 else points[0][1],
        *(length for share, length in points if share > 0),
        points[-1][1],
    ]
    found = []
    for step in range(_GRID):
        share = (step + 0.5) / _GRID
        right = min(bisect_right(shares, share), len(shares) - 1)
        low, high = shares[right - 1], shares[right]
        part = (share - low) / (high - low) if high > low else 1.0
        found.append(round(lengths[right - 1] + part * (lengths[right] - lengths[right - 1])))
    return (*found[:-1], round(points[-1][1]))


# --- files --------------------------------------------------------------------------------------------------------


def from_file(path: Path) -> Load:
    """From a trace (CSV with a header line, or JSON lines; gzip or plain) or a recording of this project.

    Raises ``CapacityError`` naming the file, the line and what is allowed.
    """
    first = _first_line(path)
    if '"kvpressure-recording"' in first:
        from kvpressure.capacity.observed import from_recording

        return from_recording(path)
    return _from_trace(path)


def _open(path: Path) -> IO[str]:
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
    return (
        gzip.open(path, "rt", encoding="utf-8", errors="replace")
        if zipped
        else path.open(encoding="utf-8", errors="replace")
    )


def _first_line(path: Path) -> str:
    try:
        with _open(path) as stream:
            return stream.readline(_MAX_LINE)
    except (OSError, EOFError) as error:
        raise CapacityError(
            f"{path}: {getattr(error, 'strerror', None) or error}; allowed: a trace or a recording"
        ) from error


def _from_trace(path: Path) -> Load:
    sample: list[Request] = []
    stride, seen = 1, 0
    arrivals = _Arrivals()
    try:
        with _open(path) as stream:
            for time, request in _rows(stream, path):
                arrivals.add(time)
                if seen % stride == 0:
                    sample.append(request)
                seen += 1
                if len(sample) >= 2 * MAX_SAMPLES:
                    sample, stride = sample[::2], stride * 2
    except (OSError, EOFError) as error:
        raise CapacityError(
            f"{path}: {getattr(error, 'strerror', None) or error}; allowed: a trace or a recording"
        ) from error
    if not sample:
        raise CapacityError(f"{path}: no requests; allowed: one request a line")
    return Load(tuple(sample), burst_ratio=arrivals.burst_ratio())


class _Arrivals:
    """Arrivals in the busiest ten seconds against the mean."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._first: float | None = None
        self._last = 0.0
        self._count = self._most = 0

    def add(self, time: float | None) -> None:
        """Take the next arrival; rows without a time, or out of order, do not count."""
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
        """None for less than a minute of times."""
        span = self._last - (self._first or 0.0)
        return self._most * span / (self._count * BURST_SECONDS) if span >= 60 else None


def _rows(stream: IO[str], path: Path) -> Iterator[tuple[float | None, Request]]:
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
        raise CapacityError(f"{path}:{reader.line_num}: {error}; allowed: comma-separated values") from error


def _chain(first: str, rest: Iterable[str]) -> Iterator[str]:
    yield first
    yield from rest


def _json(line: str, path: Path, number: int) -> Mapping[str, object]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise CapacityError(f"{path}:{number}: no JSON object; allowed: one request a line")
    return {str(key).lower(): value for key, value in row.items()}


def _row(row: Mapping[str, object], path: Path, number: int) -> tuple[float | None, Request]:
    prompt, output = _length(row, _PROMPT_KEYS, path, number), _length(row, _OUTPUT_KEYS, path, number)
    time = next((row[key] for key in _TIME_KEYS if key in row), None)
    try:
        seconds = None if time is None else float(str(time))
    except ValueError:
        seconds = None
    return None if seconds is None or not isfinite(seconds) else seconds, Request(prompt, output, float(max(1, output)))


def _length(row: Mapping[str, object], keys: Sequence[str], path: Path, number: int) -> int:
    found = next((key for key in keys if key in row), None)
    if found is None:
        raise CapacityError(
            f"{path}:{number}: no column of prompt or output lengths; allowed: {keys[0]} (also {', '.join(keys[1:])})"
        )
    try:
        value = float(str(row[found]))
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MAX_LENGTH:
        raise CapacityError(f"{path}:{number}: {found} is {row[found]!r:.50}; allowed: a number of tokens")
    return int(value)
