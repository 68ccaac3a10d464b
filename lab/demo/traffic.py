"""Requests of users: Poisson arrivals, log-normal lengths, seeded."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from lab.demo.requests import SimulatedRequest


@dataclass(frozen=True, slots=True)
class TrafficLoad:
    """Arrivals: requests per second, median lengths in tokens with the standard deviation of their logarithm, and the
    clients' ``max_tokens``. ``prompt_limit``: longer prompts are rejected at the gateway and never arrive.
    """

    requests_per_second: float
    prompt_tokens: float
    output_tokens: float
    prompt_spread: float = 0.5
    output_spread: float = 0.5
    max_tokens: int = 1024
    prompt_limit: int | None = None


class Traffic:
    """A stream of requests whose load can change at any time."""

    def __init__(self, load: TrafficLoad, start: float, seed: int) -> None:
        self._load = load
        self._random = random.Random(seed)
        self._next = start
        self._draw_next(start)

    def change(self, load: TrafficLoad, at: float) -> None:
        """Change the load at ``at``."""
        self._load = load
        self._draw_next(at)

    def until(self, to: float) -> Iterator[SimulatedRequest]:
        """Requests arrived by ``to`` that were not yielded before."""
        while self._next <= to:
            at = self._next
            self._draw_next(at)
            request = self._request(at)
            limit = self._load.prompt_limit
            if limit is None or request.prompt_tokens <= limit:
                yield request

    def _draw_next(self, after: float) -> None:
        rate = self._load.requests_per_second
        self._next = after + self._random.expovariate(rate) if rate > 0 else math.inf

    def _request(self, at: float) -> SimulatedRequest:
        load, draw = self._load, self._random.lognormvariate
        prompt = max(1, round(load.prompt_tokens * draw(0, load.prompt_spread)))
        output = max(1, round(load.output_tokens * draw(0, load.output_spread)))
        return SimulatedRequest(at, prompt, output, load.max_tokens)
