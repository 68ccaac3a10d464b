"""An LRU cache that requests of the trace run through, as vLLM's does: the truth that a prediction is held against."""

from __future__ import annotations

import gzip
import json
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from kvpressure.kvevents.reuse import ReuseEstimator

TRACE = Path(__file__).parents[1] / "fixtures/traffic/mooncake_conversation.jsonl.gz"
_BITS = 2**64 - 1


def block_hash(number: int) -> int:
    """A number of the trace spread over 64 bits, as hashes of engines are."""
    number = (number * 0x9E3779B97F4A7C15 + 0x1234567) & _BITS
    number = ((number ^ (number >> 31)) * 0xBF58476D1CE4E5B9) & _BITS
    return number ^ (number >> 27)


def trace() -> list[tuple[float, list[int]]]:
    """Arrival in seconds and block hashes of each request."""
    with gzip.open(TRACE, "rt") as file:
        rows = [json.loads(line) for line in file]
    return [(row["timestamp"] / 1000, [block_hash(number) for number in row["hash_ids"]]) for row in rows]


def replay(
    requests: list[tuple[float, list[int]]], capacity: int, estimator: ReuseEstimator | None = None
) -> Iterator[tuple[int, int]]:
    """Blocks asked for and found so far, after each request; ``estimator`` gets the events."""
    cache: OrderedDict[int, None] = OrderedDict()
    asked = found = 0
    for at, blocks in requests:
        asked += len(blocks)
        found += next((index for index, block in enumerate(blocks) if block not in cache), len(blocks))
        if estimator:
            estimator.clock = at
        for block in reversed(blocks[:capacity]):  # the first block of a prompt is used last, so it stays longest
            if estimator and block not in cache:
                estimator.stored([block], ("", ""))
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            evicted, _ = cache.popitem(last=False)
            if estimator:
                estimator.removed([evicted])
        yield asked, found
