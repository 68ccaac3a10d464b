"""The counts behind an engine's ``/metrics``.

Apart from the scheduler, so that what happens (``simulator``) and what vLLM reports of it are separate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

# vllm/v1/metrics/buckets.py; the same from 0.8.5 to 0.33.0
REQUEST_LATENCY: Final = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
    7680.0,
)
FIRST_TOKEN: Final = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)
INTER_TOKEN: Final = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
ITERATION: Final = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
PARAMS_N: Final = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS: Final = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
HTTP_FINE: Final = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    2.5,
    3.0,
    3.5,
    4.0,
    4.5,
    5.0,
    7.5,
    10.0,
    30.0,
    60.0,
)
HTTP_COARSE: Final = (0.1, 0.5, 1.0)


def token_bounds(max_model_len: int) -> tuple[float, ...]:
    """Bounds of the token histograms: 1, 2, 5, 10, ... up to the largest that a request can have."""
    bounds: list[float] = []
    decade = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * decade > max_model_len:
                return tuple(bounds)
            bounds.append(float(mantissa * decade))
        decade *= 10


class BucketCounts:
    """A histogram with fixed bounds; ``counts`` are per bucket (not cumulative), the last one is above all bounds."""

    __slots__ = ("bounds", "counts", "sum", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0
        self.total = 0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value`` ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times
        self.total += times

    def observe_ramp(self, first: float, slope: float, steps: int, times: int) -> None:
        """Count ``first``, ``first + slope``, ... (``steps`` values, ``slope`` >= 0), each ``times`` times."""
        last = first + slope * (steps - 1)
        low, high = bisect_left(self.bounds, first), bisect_left(self.bounds, last)
        done = 0
        for bucket in range(low, high):
            below = min(steps, int((self.bounds[bucket] - first) / slope) + 1)
            self.counts[bucket] += (below - done) * times
            done = below
        self.counts[high] += (steps - done) * times
        self.sum += times * (steps * first + slope * steps * (steps - 1) / 2)
        self.total += steps * times


class Books:
    """All counts of one vLLM server process since its start. Gauges are those of the last engine step and do not
    change between steps.
    """

    def __init__(self, max_model_len: int) -> None:
        tokens = token_bounds(max_model_len)
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.prefix_queries = 0
        self.rejected_requests = 0
        self.finished = dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
        self.http = dict.fromkeys(("2xx", "4xx", "5xx"), 0)
        self.cpu_seconds = 0.0
        self.first_token = BucketCounts(FIRST_TOKEN)
        self.inter_token = BucketCounts(INTER_TOKEN)
        self.iteration = BucketCounts(ITERATION)
        self.e2e = BucketCounts(REQUEST_LATENCY)
        self.queue = BucketCounts(REQUEST_LATENCY)
        self.inference = BucketCounts(REQUEST_LATENCY)
        self.prefill = BucketCounts(REQUEST_LATENCY)
        self.decode = BucketCounts(REQUEST_LATENCY)
        self.per_output_token = BucketCounts(INTER_TOKEN)
        self.request_prompt = BucketCounts(tokens)
        self.request_output = BucketCounts(tokens)
        self.request_max_output = BucketCounts(tokens)
        self.params_n = BucketCounts(PARAMS_N)
        self.params_max_tokens = BucketCounts(tokens)
        self.request_preemptions = BucketCounts(PREEMPTIONS)
        self.request_computed = BucketCounts(tokens)
        self.http_fine = BucketCounts(HTTP_FINE)
        self.http_coarse = BucketCounts(HTTP_COARSE)
