"""Steps that the plugin counts, and its allocator figures, through window and pipeline."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.model import readings as r
from kvpressure.model.readings import AllocatorReading, EngineReading, Scrape, Snapshot, StepStats
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.settings.thresholds import builtin
from kvpressure.signals.batch import MAX_ENTRIES, StepWindow

GB = 10**9


def told(
    t: float, sizes: dict[int, int], started: float = 0.0, exact: bool = True, kv_max: float | None = None
) -> StepStats:
    steps, tokens = sum(sizes.values()), sum(size * count for size, count in sizes.items())
    return StepStats("ns", "p", "0", started, t, steps, tokens, exact, kv_max=kv_max, sizes=dict(sizes))


class TestWindow:
    @pytest.mark.slow
    @given(st.lists(st.dictionaries(st.integers(1, 50), st.integers(0, 20), max_size=4), min_size=1, max_size=90))
    def test_quantiles_are_those_of_a_list_of_the_last_minutes_steps(self, seconds) -> None:
        window, counts = StepWindow(builtin()), Counter({1: 5})
        window.observe(told(0.0, counts))
        for t, more in enumerate(seconds, 1):
            counts.update(more)
            window.observe(told(float(t), counts))
        now = float(len(seconds))
        steps = sorted(size for more in seconds[-60:] for size, n in more.items() for _ in range(n))
        lately = [size for more in seconds[-30:] for size, n in more.items() for _ in range(n)]
        if not steps:
            assert window.quantiles(now, 0.5) is None
            return
        assert window.quantiles(now, 0.5, 0.95, 1.0) == [
            steps[max(0, -(-len(steps) // 2) - 1)],
            steps[-(-95 * len(steps) // 100) - 1],
            steps[-1],
        ]
        assert window.mean(now, 30.0) == (pytest.approx(sum(lately) / len(lately)) if lately else None)

    @pytest.mark.parametrize(
        "after",
        [told(3.0, {4: 20}, started=2.5), told(3.0, {4: 5}), told(3.0, {4: 20}, exact=False)],
        ids=["new process", "counts went back", "another API server"],
    )
    def test_a_restart_begins_anew(self, after: StepStats) -> None:
        window = StepWindow(builtin())
        for stats in (told(1.0, {4: 5}), told(2.0, {4: 10}), after):
            window.observe(stats)
        assert window.quantiles(3.0, 0.5) is None

    def test_a_silent_plugin_is_not_believed(self) -> None:
        window = StepWindow(builtin())
        window.observe(told(1.0, {4: 5}))
        window.observe(told(2.0, {4: 10}, kv_max=0.9))
        assert (window.quantiles(2.0 + builtin()["stale_page_seconds"], 0.5), window.kv_max(9.0, 10.0)) == (
            [4.0],
            0.9,
        )
        assert window.quantiles(2.1 + builtin()["stale_page_seconds"], 0.5) is None

    def test_the_same_report_again_changes_nothing(self) -> None:
        window = StepWindow(builtin())
        for stats in (told(1.0, {4: 5}), told(2.0, {4: 10}), told(2.0, {4: 10}), told(3.0, {4: 10, 8: 5})):
            window.observe(stats)
        assert (window.quantiles(3.0, 0.5, 0.95), window.mean(3.0, 30.0)) == ([4.0, 8.0], 6.0)


def states(snapshots: list[Snapshot]):
    pipeline = Pipeline()
    return [pipeline.observe(snapshot) for snapshot in snapshots]


def snapshot(t: float, running: float = 8.0, **kinds: Any) -> Snapshot:
    gauges = {r.RUNNING: running, r.WAITING: 0.0, r.KV_USAGE: 0.3}
    reading = EngineReading("m", "0", gauges, {r.GENERATION_TOKENS: 100.0 * t}, {})
    return Snapshot(t, pages=(Scrape("t", t, "ns", "p", engines=(reading,)),), **kinds)


class TestThroughThePipeline:
    def test_batch_and_kv_maximum_are_those_of_the_steps(self) -> None:
        sizes = Counter({7: 1})
        told_by_second = []
        for t in range(1, 41):
            sizes.update({3: 90, 12: 10})
            told_by_second.append(told(float(t), sizes, kv_max=0.99))
        *_, last = states([snapshot(stats.written, steps=(stats,)) for stats in told_by_second])
        signals = last.engines[0].signals
        assert (signals.batch.batch_p50, signals.batch.batch_p95, signals.batch.batch_p99) == (3.0, 12.0, 12.0)
        assert signals.batch.batch_mean == pytest.approx(3.9)
        assert (signals.kv.kv_used_ratio, signals.kv.kv_used_ratio_max) == (0.3, 0.99)

    def test_steps_of_another_engine_or_pod_are_not_taken(self) -> None:
        def other(t: float) -> tuple[StepStats, ...]:
            known = told(t, {99: int(t)})
            return (
                StepStats("ns", "q", "0", 0, t, 1, 1, True, sizes=known.sizes),
                StepStats("ns", "p", "1", 0, t, 1, 1, True, sizes=known.sizes),
            )

        *_, last = states([snapshot(float(t), steps=other(t)) for t in range(1, 41)])
        assert last.engines[0].signals.batch.batch_p95 == 8.0, "that of the pages"

    @pytest.mark.parametrize(
        ("reserved", "split", "fragmented"),
        [
            (2 * GB, 2 * GB, True),
            (2 * GB - 1, 2 * GB - 1, False),
            (8 * GB, 2 * GB, True),
            (8 * GB, 2 * GB - 1, False),
            (8 * GB, 0, False),
            (8 * GB, None, True),
        ],
        ids=["2 GB", "below 2 GB", "a quarter is split", "less is split", "cached activations", "split not known"],
    )
    def test_fragmentation_of_a_worker(self, reserved: int, split: int | None, fragmented: bool) -> None:
        worker = AllocatorReading("ns", "p", 0, 10 * GB, 10 * GB + reserved, split)
        [state] = states([snapshot(1.0, allocator=(worker,))])
        memory = state.engines[0].signals.memory
        assert (memory.allocator_reserved_bytes, memory.allocator_allocated_bytes) == (10 * GB + reserved, 10 * GB)
        assert state.engines[0].diagnosis.conditions["allocator_fragmentation"] is fragmented


@pytest.mark.attack("new batch sizes on every report of the plugin", "a bounded window")
def test_a_step_window_of_new_sizes_every_second_is_bounded() -> None:
    """32 000 batch sizes a report, 256 reports kept: 101 MiB for 27 pages."""
    window = StepWindow(builtin())
    for second in range(120):
        sizes = dict.fromkeys(range(1, 4001), 1 + second)
        window.observe(StepStats("ns", "p", "0", 1.0, 1000.0 + second, 4000 * second, 1, True, None, sizes))
    assert sum(len(increase.sizes) for increase in window._increases) <= MAX_ENTRIES
    assert window.quantiles(1119.0, 0.5) is not None
