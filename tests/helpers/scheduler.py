"""A scheduler like vLLM's, simulated: it admits a request when its prompt has blocks, and preempts the newest one when
a running request needs a block and none is free.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

BLOCK = 16
TOKENS_PER_SECOND = 20  # of each running request
STEPS = 5  # a second


@dataclass(frozen=True)
class Demand:
    """Clients that send a request as soon as the last one is answered; ``lengths``: of its prompt and output."""

    clients: int
    lengths: Callable[[random.Random], tuple[int, int]]


@dataclass(slots=True, eq=False)
class _Request:
    prompt: int
    output: int
    done: int = 0

    def blocks(self, more: int = 0) -> int:
        return -(-(self.prompt + self.done + more) // BLOCK)


def simulate(demand: Demand, limit: int, capacity: int, seconds: int) -> list[dict[str, float]]:
    """The page's numbers of each second."""
    chance, total = random.Random(1), capacity // BLOCK
    waiting = deque(_Request(*demand.lengths(chance)) for _ in range(demand.clients))
    running: list[_Request] = []
    rows = []
    for _ in range(seconds):
        made = prompts = preempted = 0
        finished: list[_Request] = []
        for _ in range(STEPS):
            for request in list(running):
                if request not in running:
                    continue
                more = min(TOKENS_PER_SECOND // STEPS, request.output - request.done)
                while request in running and _used(running) - request.blocks() + request.blocks(more) > total:
                    waiting.appendleft(running.pop())
                    preempted += 1
                if request in running:
                    request.done += more
                    made += more
            finished += [request for request in running if request.done >= request.output]
            running = [request for request in running if request.done < request.output]
            while len(running) + len(waiting) < demand.clients:
                waiting.append(_Request(*demand.lengths(chance)))
            while waiting and len(running) < limit and _used(running) + waiting[0].blocks() <= total:
                running.append(waiting.popleft())
                prompts += running[-1].prompt + running[-1].done
        count = len(finished)
        rows.append(
            {
                "running": float(len(running)),
                "waiting": float(len(waiting)),
                "kv": _used(running) / total,
                "generated": float(made),
                "prompt": float(prompts),
                "preemptions": float(preempted),
                "finished": float(count),
                "length": sum(request.prompt for request in finished) / count if count else 0.0,
                "output": sum(request.output for request in finished) / count if count else 0.0,
                "queue": 1.0,
            }
        )
    return rows


def _used(running: list[_Request]) -> int:
    return sum(request.blocks() for request in running)
