"""The arithmetic of ``make -C lab test-vllm``: what it takes for the truth, for a difference and for noise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "lab/vllm"


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, ModuleType]]:
    """The scripts, which find each other beside themselves."""
    names = ("session", "bed", "cost", "testbed")
    sys.path.insert(0, str(TOOLS))
    try:
        yield {name: __import__(name) for name in names}
    finally:
        sys.path.remove(str(TOOLS))
        for name in names:
            sys.modules.pop(name, None)


def turns(tools: dict[str, ModuleType], extra: float, seed: int, noise: float = 0.0) -> list[Any]:
    """Turns of a server whose CPU is 1 %, a share for each token, and ``extra``; their load differs by a third."""
    random = Random(seed)
    tokens = [random.uniform(150, 250) for _ in range(tools["cost"].ROUNDS)]
    return [tools["cost"].Turn(0.01 + 0.0002 * count + extra + random.gauss(0, noise), count, 10) for count in tokens]


class TestCost:
    def test_the_cost_of_watching_is_told_from_the_cost_of_tokens(self, tools) -> None:
        cost = tools["cost"].Cost("steady", {"nobody": turns(tools, 0.0, 1), "adaptive": turns(tools, 0.004, 2)})
        extra, half = cost.extra_cpu("adaptive")
        assert extra == pytest.approx(0.004)
        assert half == pytest.approx(0.0, abs=1e-9)

    @pytest.mark.parametrize("seed", range(5))
    def test_its_interval_holds_the_truth_under_noise(self, tools, seed: int) -> None:
        cost = tools["cost"].Cost(
            "steady", {"nobody": turns(tools, 0.0, seed, 0.0005), "adaptive": turns(tools, 0.004, seed + 9, 0.0005)}
        )
        extra, half = cost.extra_cpu("adaptive")
        assert abs(extra - 0.004) < 2 * half
        assert half < 0.002

    @pytest.mark.parametrize(
        ("extra", "tokens", "good"),
        [(0.004, 1.0, [True, True]), (0.006, 1.0, [False, True]), (0.004, 0.9, [True, False])],
        ids=["cheap", "over budget", "slower"],
    )
    def test_a_cost_over_budget_or_a_slower_engine_fails(
        self, tools, extra: float, tokens: float, good: list[bool]
    ) -> None:
        turn, book = tools["cost"].Turn, tools["testbed"].Book()
        base = [turn(0.05, 200.0 + n % 2, 0) for n in range(6)]
        watched = [turn(0.05 + extra, tokens * one.tokens, 12) for one in base]
        book.costs_little(tools["cost"].Cost("steady", {"nobody": base, "adaptive": watched}), "adaptive")
        assert [line[2] for line in book.lines] == good


class TestTruth:
    def test_every_step_alike_or_by_how_long_it_took(self, tools) -> None:
        """Ten short steps of two and one long of eight: counted 2.5, in time more."""
        bed = tools["bed"]
        steps = [bed.Step(100 + n * 0.1, "0", 2) for n in range(11)] + [bed.Step(102.0, "0", 8)]
        now = 102.0 + bed.LAG
        assert bed.truth_mean(steps, now, 30, by_time=False) == pytest.approx(2.5)
        assert bed.truth_mean(steps, now, 30, by_time=True) == pytest.approx((2 * 1.0 + 8 * 1.0) / 2)
        assert bed.truth_p95(steps, now) == 8.0
