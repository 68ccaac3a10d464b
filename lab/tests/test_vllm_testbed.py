"""The arithmetic of ``make -C lab test-vllm``: what it takes for the truth, for a difference and for noise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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

    def test_one_turn_is_a_plain_difference(self, tools) -> None:
        turn = tools["cost"].Turn
        cost = tools["cost"].Cost("idle", {"nobody": [turn(0.002, 0.0, 0)], "adaptive": [turn(0.003, 0.0, 12)]})
        assert cost.extra_cpu("adaptive") == (pytest.approx(0.001), 0.0)
        assert cost.pages("adaptive") == 12

    @given(st.lists(st.floats(-1, 1), min_size=6, max_size=6))
    def test_the_interval_of_equal_values_is_nothing_and_grows_with_their_spread(
        self, tools, values: list[float]
    ) -> None:
        mean, half = tools["cost"].interval(values)
        assert min(values) - 1e-9 <= mean <= max(values) + 1e-9
        assert half <= 2.571 * (max(values) - min(values))

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

    def test_the_table_has_a_row_for_each_way(self, tools) -> None:
        costs = [
            tools["cost"].Cost(phase, {"nobody": turns(tools, 0.0, 1), "adaptive": turns(tools, 0.004, 2)})
            for phase in ("steady", "pressure")
        ]
        rows = [line for line in tools["cost"].table(costs) if line.startswith("| ") and "watched" not in line]
        assert [row.split(" | ")[:2] for row in rows] == [
            ["| steady", "nobody"],
            ["| steady", "adaptive"],
            ["| pressure", "nobody"],
            ["| pressure", "adaptive"],
        ]


class TestTruth:
    def test_every_step_alike_or_by_how_long_it_took(self, tools) -> None:
        """Ten short steps of two and one long of eight: counted 2.5, in time more."""
        bed = tools["bed"]
        steps = [bed.Step(100 + n * 0.1, "0", 2) for n in range(11)] + [bed.Step(102.0, "0", 8)]
        now = 102.0 + bed.LAG
        assert bed.truth_mean(steps, now, 30, by_time=False) == pytest.approx(2.5)
        assert bed.truth_mean(steps, now, 30, by_time=True) == pytest.approx((2 * 1.0 + 8 * 1.0) / 2)
        assert bed.truth_p95(steps, now) == 8.0

    def test_steps_of_another_minute_do_not_count(self, tools) -> None:
        bed = tools["bed"]
        steps = [bed.Step(10.0, "0", 50), bed.Step(100.0, "0", 3), bed.Step(100.5, "0", 3)]
        assert bed.truth_p95(steps, 101.0 + bed.LAG) == 3.0
        assert bed.truth_p95(steps, 300.0) is None


class TestBook:
    @pytest.mark.parametrize(("ours", "good"), [(10.2, True), (10.21, False), (None, False)])
    def test_near_is_within_the_share(self, tools, ours: float | None, good: bool) -> None:
        book = tools["testbed"].Book()
        book.near("steady", "mean", ours, 10.0, ratio=0.02)
        assert book.lines[0][2] is good

    def test_the_report_says_what_was_run_and_what_failed(self, tools) -> None:
        testbed = tools["testbed"]
        book = testbed.Book()
        book.check("idle", "is idle", True, "idle 100%")
        book.check("steady", "is healthy", False, "stalled")
        whole, part = (testbed.report(book, 600.0, names) for names in (testbed.PARTS, ["one"]))
        assert "2 checks, 1 failed; all parts in one run, 10.0 minutes" in whole
        assert "only the parts one" in part
        assert "| steady | is healthy | **failed** | stalled |" in whole


class TestRun:
    @pytest.fixture
    def events(self, tools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
        """What a run does, in order; servers, exporters and clients are stood in for."""
        bed, found = tools["testbed"], []

        @contextmanager
        def stand_in(kind: str, name: str) -> Iterator[SimpleNamespace]:
            found.append(f"{kind} {name} starts")
            yield SimpleNamespace(pause=lambda: None, resume=lambda: None)
            found.append(f"{kind} {name} ends")

        monkeypatch.setattr(bed, "server", lambda name, *_, **__: stand_in("server", name))
        monkeypatch.setattr(bed, "exporter", lambda *_: stand_in("exporter", ""))
        monkeypatch.setattr(bed, "ready", lambda *servers: found.append(f"{len(servers)} answer"))
        monkeypatch.setattr(bed.time, "sleep", lambda _: None)
        monkeypatch.setattr(bed, "ROOT", tmp_path)
        (tmp_path / ".vllm").mkdir()
        monkeypatch.setattr(bed.Book, "costs_little", lambda *_: None)
        for name in (
            "plugin_inside",
            "idle_cost",
            "loaded_cost",
            "calm_and_steady",
            "under_pressure",
            "odd_loads",
            "engine_frozen_and_killed",
            "sequence_limit",
            "two_api_servers",
            "data_parallel",
        ):
            monkeypatch.setattr(bed, name, lambda *_, name=name: found.append(name))
        return found

    def run(self, tools, monkeypatch: pytest.MonkeyPatch, report: Path, *only: str) -> None:
        monkeypatch.setattr(sys, "argv", ["testbed.py", str(report), *(("--only", *only) if only else ())])
        with pytest.raises(SystemExit) as end:
            tools["testbed"].main()
        assert end.value.code == 0

    def test_the_other_servers_start_when_nothing_is_measured_any_more(
        self, tools, monkeypatch, tmp_path: Path, events
    ) -> None:
        self.run(tools, monkeypatch, tmp_path / "report.md")
        order = [event for event in events if not event.startswith("exporter")]
        assert order == [
            "plugin_inside",
            "server one starts",
            "idle_cost",
            "calm_and_steady",
            "under_pressure",
            "odd_loads",
            "loaded_cost",
            "loaded_cost",
            "server limit starts",
            "server two-api starts",
            "server dp2 starts",
            "engine_frozen_and_killed",
            "server one ends",
            "3 answer",
            "sequence_limit",
            "two_api_servers",
            "data_parallel",
            "server dp2 ends",
            "server two-api ends",
            "server limit ends",
        ]
        assert "all parts in one run" in (tmp_path / "report.md").read_text()

    def test_one_part_starts_only_what_it_needs(self, tools, monkeypatch, tmp_path: Path, events) -> None:
        self.run(tools, monkeypatch, tmp_path / "report.md", "one")
        assert [event for event in events if event.startswith("server")] == ["server one starts", "server one ends"]
        events.clear()
        self.run(tools, monkeypatch, tmp_path / "report.md", "others")
        assert [event for event in events if event.endswith("starts")] == [
            "server limit starts",
            "server two-api starts",
            "server dp2 starts",
        ]
