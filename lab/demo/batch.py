"""The decoding requests: KV blocks and finishing times of all of them at constant cost per step.

Every decoding request gets one token per engine step. So a request stores its length relative to the step counter,
and the batch keeps sums and counts by position in the block, which makes one step, or many, independent of the batch
size.
"""

from __future__ import annotations

import heapq
from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lab.demo.requests import SimulatedRequest


class DecodeBatch:
    """Decoding requests on a block grid of ``block_size`` tokens; ``steps`` counts engine steps."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.steps = 0
        self.size = 0
        self._base_sum = 0
        self._residues = [0] * block_size
        self._finishing: list[tuple[int, int, SimulatedRequest]] = []

    @property
    def slots(self) -> int:
        """KV slots in use by all decoding requests."""
        return self._base_sum + self.size * self.steps

    def add(self, request: SimulatedRequest, slots: int) -> None:
        """Decode a request with ``slots`` computed tokens from the next step on."""
        request.base = slots - self.steps
        request.output_base = request.outputs - self.steps
        request.finish_step = request.output_target - request.output_base
        self._residues[request.base % self.block_size] += 1
        self._base_sum += request.base
        self.size += 1
        heapq.heappush(self._finishing, (request.finish_step, request.number, request))

    def remove(self, request: SimulatedRequest) -> int:
        """Remove a request and fix its output count; returns the blocks it held."""
        slots = request.base + self.steps
        request.outputs = request.output_base + self.steps
        request.finish_step = -1  # its entry in the heap is void from now on
        self._residues[request.base % self.block_size] -= 1
        self._base_sum -= request.base
        self.size -= 1
        return -(-slots // self.block_size)

    def blocks_needed(self) -> int:
        """New blocks that the next step needs: requests whose last block is full."""
        return self._residues[-self.steps % self.block_size]

    def steps_within(self, free_blocks: int) -> int:
        """Maximum number of steps for which ``free_blocks`` suffice."""
        rounds = free_blocks // self.size
        free = free_blocks - rounds * self.size
        count = rounds * self.block_size
        for offset in range(self.block_size):
            free -= self._residues[-(self.steps + offset) % self.block_size]
            if free < 0:
                break
            count += 1
        return count

    def blocks_over(self, steps: int) -> int:
        """New blocks that the next ``steps`` steps need together."""
        rounds, rest = divmod(steps, self.block_size)
        partial = sum(self._residues[-(self.steps + offset) % self.block_size] for offset in range(rest))
        return rounds * self.size + partial

    def next_finish(self) -> int | None:
        """Step count at which the next request finishes; ``None`` without requests."""
        while self._finishing:
            step, _, request = self._finishing[0]
            if request.finish_step == step:
                return step
            heapq.heappop(self._finishing)
        return None

    def pop_finished(self) -> list[SimulatedRequest]:
        """Requests that finish with the present step, still in the batch."""
        done: list[SimulatedRequest] = []
        while (step := self.next_finish()) is not None and step <= self.steps:
            done.append(heapq.heappop(self._finishing)[2])
        return done


def steps_within(seconds: float, first: float, slope: float) -> int:
    """Maximum number of steps of ``first``, ``first + slope``, ... seconds within ``seconds``."""
    if seconds < first:
        return 0
    if slope * seconds < 1e-12 * first * first:
        return int(seconds / first)
    half = first - slope / 2
    return int((sqrt(half * half + 2 * slope * seconds) - half) / slope)
