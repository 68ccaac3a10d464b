"""The load on a server: request lengths as numbers or quantiles.

A request's weight is its output length, because requests with long outputs are in flight for longer.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, sqrt
from typing import Final

from kvpressure.errors import InputError, shown

_GRID: Final = 100  # quantiles taken of a stated distribution


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Lengths of one request in tokens, and its weight among requests in flight."""

    prompt: int
    output: int
    weight: float

    @property
    def total(self) -> int:
        """Prompt plus output tokens."""
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """A sample of requests, unordered. ``known_share``: lengths are known up to this quantile; below 1 the longest
    request is unknown.
    """

    requests: tuple[RequestLengths, ...]
    known_share: float = 1.0

    def quantile(self, of: str, q: float) -> int:
        """Quantile ``q`` of ``prompt``, ``output`` or ``total`` over requests (not weighted)."""
        values = sorted(getattr(request, of) for request in self.requests)
        return int(values[max(0, ceil(q * len(values)) - 1)])

    @property
    def longest(self) -> int:
        """The longest request of the sample."""
        return max(request.total for request in self.requests)

    def mean_and_deviation(self, cost: Mapping[int, float]) -> tuple[float, float]:
        """Weighted mean and standard deviation of ``cost[total]`` over the requests in flight."""
        weight = sum(request.weight for request in self.requests)
        mean = sum(request.weight * cost[request.total] for request in self.requests) / weight
        variance = sum(request.weight * (cost[request.total] - mean) ** 2 for request in self.requests) / weight
        return mean, sqrt(variance)


def stated(prompt: str, output: str) -> RequestLoad:
    """From lengths as text: "1500", or quantiles "p50=1000,p95=4000,p100=8000" with straight lines between them.

    Prompt and output are taken as independent. Raises ``InputError``.
    """
    (prompts, known), (outputs, known_outputs) = _lengths(prompt, "--prompt"), _lengths(output, "--output")
    requests = tuple(RequestLengths(p, o, float(max(1, o))) for p in prompts for o in outputs)
    return RequestLoad(requests, known_share=min(known, known_outputs))


def _lengths(text: str, where: str) -> tuple[Sequence[int], float]:
    """Lengths, and the quantile up to which they are known."""
    if re.fullmatch(r"\d{1,9}", text):
        return (int(text),), 1.0
    points: list[tuple[float, float]] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*p(\d{1,2}(?:\.\d{1,3})?|100)=(\d{1,9})\s*", part)
        if match is None:
            raise InputError(
                f"{where}: {shown(part)} is not allowed; allowed: a number of tokens, or quantiles like"
                " p50=1000,p95=4000,p100=8000"
            )
        points.append((float(match[1]) / 100, float(match[2])))
    if any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(points)):
        raise InputError(
            f"{where}: {shown(text)} is not allowed; allowed: quantiles in rising order, with lengths that do not fall,"
            " such as p50=1000,p95=4000"
        )
    return from_quantiles(points), points[-1][0]


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
