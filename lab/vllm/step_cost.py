"""What an engine step costs, from vLLM's own line about every step: the way to compare runs on a machine that is not
always as fast.

A step takes a constant, something for each request that decodes, and something for each token of prompts (or of
requests that are computed again). The three are fitted to one run; applied to the steps of another they say how long
that would have taken then.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

_LINE = re.compile(
    r"Iteration\(\d+\): \d+ context requests, (\d+) context tokens, (\d+) generation requests, (\d+) generation"
    r" tokens, "
    r"iteration elapsed time: ([\d.]+) ms"
)
_PREFILL_TOKENS = 64  # from here on the tokens of a step tell their cost


@dataclass(frozen=True)
class Step:
    """``prefill`` tokens of new prompts, ``decoding`` requests, ``again`` tokens that are computed once more, and
    milliseconds. (vLLM counts a request that is computed again as generating, with all its tokens.)
    """

    prefill: int
    decoding: int
    again: int
    milliseconds: float


@dataclass(frozen=True)
class Cost:
    """Milliseconds of a step, of each request that decodes in it, and of each token of prefill."""

    step: float
    request: float
    token: float

    def seconds(self, steps: Sequence[Step]) -> float:
        """What these steps take."""
        return (
            sum(self.step + self.request * one.decoding + self.token * (one.prefill + one.again) for one in steps)
            / 1000
        )


def parse(log: str) -> list[Step]:
    """All steps that a server's log tells."""
    return [
        Step(int(context), int(requests), int(tokens) - int(requests), float(elapsed))
        for context, requests, tokens, elapsed in _LINE.findall(log)
    ]


def fit(steps: Sequence[Step]) -> Cost:
    """The cost that explains ``steps``. Medians, because a step that something else held up says nothing
    about its cost.
    """
    times: dict[int, list[float]] = {}
    for step in steps:
        if not step.prefill and not step.again:
            times.setdefault(step.decoding, []).append(step.milliseconds)
    points = [(size, median(found), len(found)) for size, found in times.items()]
    weight = sum(count for *_, count in points)
    mean_size = sum(size * count for size, _, count in points) / weight
    mean_time = sum(time * count for _, time, count in points) / weight
    slope = sum(count * (size - mean_size) * (time - mean_time) for size, time, count in points) / sum(
        count * (size - mean_size) ** 2 for size, _, count in points
    )
    base = mean_time - slope * mean_size
    rest = [
        (step.milliseconds - base - slope * step.decoding) / (step.prefill + step.again)
        for step in steps
        if step.prefill + step.again >= _PREFILL_TOKENS
    ]
    return Cost(base, slope, median(rest))
