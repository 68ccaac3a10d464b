"""Windows: resets, gaps, order, clock steps, thinning and quantiles, with numbers worked by hand."""

from __future__ import annotations

import tracemalloc
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.model import readings as r
from kvpressure.model.readings import Histogram
from kvpressure.signals.window import (
    FINE_SECONDS,
    LONG_SECONDS,
    MAX_NAMES,
    EngineWindow,
    History,
    histogram_increase,
    slope,
)
from tests.signals.build import every, histogram, window

INF = float("inf")


def test_a_counter_that_falls_began_anew_and_loses_nothing():
    w = window(every(1, [{r.PREEMPTIONS: v} for v in (90, 100, 3, 8)]))
    assert w.increase(r.PREEMPTIONS, 60) == (18.0, 3.0)  # 10 + (restart at 0) 3 + 5


def test_a_counter_that_appears_later_counts_from_where_it_appeared():
    w = window(every(1, [{}, {r.PREEMPTIONS: 7}, {r.PREEMPTIONS: 9}]))
    assert w.increase(r.PREEMPTIONS, 60) == (2.0, 1.0)


def test_a_clock_that_steps_back_far_begins_a_new_window():
    w = window(every(1, [{r.PREEMPTIONS: v} for v in (1, 2, 3)], start=10_000))
    assert w.observe(5_000, {}, {r.PREEMPTIONS: 4}, {})
    assert w.increase(r.PREEMPTIONS, 60) is None
    assert w.observe(5_001, {}, {r.PREEMPTIONS: 6}, {})
    assert w.increase(r.PREEMPTIONS, 60) == (2.0, 1.0)


def test_counters_under_ever_new_names_are_forgotten_and_those_that_stay_are_not():
    w = window([])
    for i in range(3):
        w.observe(i, {}, {"stays": 10.0 if i == 0 else 3.0, "gone": 1.0} if i < 2 else {"stays": 3.0}, {})
    for i in range(3, 60):
        w.observe(i, {}, {"stays": 3.0, **{f"finished:{i}-{j}": 1.0 for j in range(MAX_NAMES // 8)}}, {})
    assert w.gauge("none") is None
    assert w.last is not None
    assert w.last.counters["stays"] == 13.0
    assert len(w._counters._last) <= 2 * MAX_NAMES


def increase(bounds, counts, total):
    return histogram_increase(histogram(bounds, (0.0,) * len(bounds), 0.0), histogram(bounds, counts, total))


def test_quantiles_never_exceed_what_sum_and_count_allow():
    bounds = (100.0, 200.0, 500.0, 1000.0, INF)
    prompts = increase(bounds, (0, 0, 1000, 1000, 1000), 300_000.0)  # 200 to 400 tokens, as likely each
    assert prompts.quantiles((0.5,))[0] == pytest.approx(300)
    assert prompts.quantiles((0.95,))[0] == pytest.approx(390)
    upper = increase(bounds, (0, 0, 1000, 1000, 1000), 450_000.0)  # 400 to 500
    assert upper.quantiles((0.05,))[0] == pytest.approx(405)
    assert increase(bounds, (0, 0, 1, 1, 1), 300.0).quantiles((0.99,))[0] == pytest.approx(300), (
        "a single one is the sum"
    )
    few = increase(bounds, (19, 19, 19, 19, 20), 2000.0)
    assert few.quantiles((0.99,))[0] == 1000, "the last bucket has no upper end"
    assert increase(bounds, (19, 19, 20, 20, 20), 260.0).quantiles((1.0,))[0] <= 260


def test_bounds_that_change_leave_sum_and_count():
    increase = histogram_increase(histogram((1.0, INF), (1, 2), 3), histogram((2.0, INF), (4, 5), 9))
    assert increase.bounds == ()
    assert (increase.sum, increase.count) == (6.0, 3.0)
    assert increase.quantiles((0.5,)) == []


def test_bounds_that_change_leave_the_window_with_the_samples_before():
    """The counts at both ends stay equal meanwhile."""
    w, old = EngineWindow(), histogram((1.0, INF), (0.0, 0.0), 0.0)
    new, last = (histogram((2.0, INF), (n, n), n) for n in (0.0, 5.0))
    for second, counted in enumerate([old] * 10 + [new] * 10 + [last] * 43):
        w.observe(second, {}, {}, {r.TTFT: counted})
        found = w.observed(r.TTFT, 50.0)
    assert found is not None
    assert found[0].bounds == (2.0, INF)


def test_a_histogram_that_restarts_keeps_what_it_saw_before():
    bounds = (1.0, INF)
    w = window(
        every(1, [{}, {}, {}]),
        **{r.TTFT: [histogram(bounds, (5, 8), 20), histogram(bounds, (6, 10), 24), histogram(bounds, (1, 2), 3)]},
    )
    found = w.observed(r.TTFT, 60)
    assert found is not None
    assert found[0].count == 4  # 2 before the restart, 2 after
    assert found[0].sum == pytest.approx(7)
    assert found[0].increments == (2, 2)


def test_history_thins_with_age_but_keeps_the_last_minute_whole():
    history: History[float] = History()
    for t in range(2000):
        history.append(float(t), float(t))
    recent = history.since(1999 - FINE_SECONDS)
    assert len(recent) >= FINE_SECONDS
    assert len([*history]) < 200
    everything = list(history)
    assert everything == sorted(everything)
    assert everything[0] >= 1999 - 930 - 15


@given(st.lists(st.floats(0.01, 400), min_size=1, max_size=300))
def test_history_is_bounded_and_ordered_for_any_spacing(gaps):
    history: History[float] = History()
    for t in accumulate(gaps):
        history.append(t, t)
    items = list(history)
    assert items == sorted(items)
    assert [*history][-1] == items[-1]
    assert items[-1] - items[0] <= 930 + 400


def test_slope_is_least_squares_and_needs_three_points():
    assert slope([(0, 0.0), (10, 0.5)]) is None
    assert slope([(0, 0.0), (10, 0.1), (20, 0.2)]) == pytest.approx(0.01)
    assert slope([(5, 1.0), (5, 2.0), (5, 3.0)]) is None


def test_swapped_requests_wait_everywhere():
    both = window([(0.0, {r.RUNNING: 4, r.WAITING: 1, r.SWAPPED: 2}), (1.0, {r.RUNNING: 4, r.WAITING: 0})])
    assert both.waiting(60.0) == [3, 0]
    assert [sample.in_flight for sample in both.history] == [7, 4]


def test_what_the_page_does_not_tell_is_not_counted_as_none():
    """Running requests alone are no load: how many wait besides is not known."""
    lacking = window([(0.0, {r.RUNNING: 4, r.SWAPPED: 2}), (1.0, {r.RUNNING: 4}), (2.0, {r.WAITING: 1})])
    assert [sample.waiting for sample in lacking.history] == [None, None, 1]
    assert [sample.in_flight for sample in lacking.history] == [None, None, None]
    assert [sample.requests for sample in lacking.history] == [None, None, None]


def test_the_samples_of_a_busy_engine_take_little_memory():
    """All histograms change in each second. Kept as they come, a full window takes twice as much."""
    window, names, bounds = EngineWindow(), [f"name{number}" for number in range(14)], (*map(float, range(20)), INF)
    tracemalloc.start()
    for second in map(float, range(int(LONG_SECONDS) + 60)):
        counts = [second + bucket for bucket in range(21)]
        histograms = {name: Histogram(bounds, tuple(counts), second / 3, counts[-1]) for name in names[:10]}
        window.observe(second, dict.fromkeys(names[:6], second), dict.fromkeys(names, second + 0.5), histograms)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 600 * 1024


@pytest.mark.parametrize(
    "given",
    [
        Histogram((1.0, INF), (2.0, 3.0), 4.5, 3.0),
        Histogram((1.0, INF), (2.0, 2.0**32), 4.5, 2.0**32),
        Histogram((1.0, INF), (2.0, 3.5), 4.5, 3.5),
        Histogram((1.0, INF), (2.0, 3.0), 4.5, 4.0),
        Histogram((1.0, INF), (2.0, 3.0), None, 3.0),
        Histogram((), (), 4.5, 3.0),
    ],
)
def test_an_older_sample_keeps_the_histogram_as_it_was(given):
    window = EngineWindow()
    for second in (1.0, 2.0):
        window.observe(second, {}, {}, {r.E2E: given})
    older = next(iter(window.history)).histogram(r.E2E)
    assert older is not None
    assert (older.bounds, [*older.counts], older.sum, older.count) == (
        given.bounds,
        [*given.counts],
        given.sum,
        given.count,
    )
