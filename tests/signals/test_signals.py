"""Each signal against numbers worked by hand."""

from __future__ import annotations

from itertools import accumulate

import pytest

from kvpressure.model import readings as r
from kvpressure.model.readings import AllocatorReading, GpuReading
from kvpressure.model.signals import KvSignals, LoadSignals, ProgressSignals
from kvpressure.settings.thresholds import builtin
from kvpressure.signals import batch, kv, progress, requests
from kvpressure.signals import hardware as score
from kvpressure.signals.batch import SequenceLimit
from kvpressure.signals.hardware import EngineContext, GpuWindow
from kvpressure.signals.kv import DeviceMemory
from kvpressure.signals.progress import Progress, Trend
from kvpressure.signals.requests import Baseline, LongestContext, Shape
from kvpressure.signals.window import HistogramIncrease
from tests.signals.build import FINISHED, every, histogram, window

INF = float("inf")
T = builtin()


def kv_of(rows, ever=True):
    return kv.kv_signals(window(rows), None, ever, Shape(), None, kv.HitRatio(T), T)


# --- KV cache ----------------------------------------------------------------------------------------------


def test_a_gauge_that_stays_zero_while_tokens_flow_is_not_recorded():
    rows = every(2, [{r.KV_USAGE: 0.0, r.RUNNING: 4, r.GENERATION_TOKENS: 100 * i} for i in range(5)])
    found = kv_of(rows, ever=False)
    assert found.kv_recorded is False
    assert found.kv_used_ratio is None
    assert found.kv_used_ratio_max is None


@pytest.mark.parametrize(
    ("usage", "rise", "expected"),
    [
        (0.3, 0.02, 35.0),
        (0.3, 0.01, None),
        (0.5, 0.02, 25.0),
        (0.9, 0.0, None),
        (0.9, -0.1, None),
        (0.9, None, None),
        (1.0, 0.01, 0.0),
        (0.9, 0.00011, 0.1 / 0.00011),
        (0.6, 0.00011, None),
    ],
)
def test_no_forecast_when_not_rising_nor_beyond_an_hour_nor_below_half_beyond_a_minute(usage, rise, expected):
    found = kv.seconds_to_full(usage, rise, T)
    assert found == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("seconds", "counted", "believed"), [(20, 0, 10), (24, 0, 10), (40, 0, 0), (40, 4, 4), (40, 30, 10), (40, None, 10)]
)
def test_the_counter_bears_out_what_looked_like_preemptions(seconds, counted, believed):
    """Ten went back to waiting at second 1 and are let in again from second 3 on; the counter may be 25 s late then."""
    rows = [
        {r.RUNNING: 20, r.WAITING: 0, FINISHED: 5},
        *({r.RUNNING: 10 + (i >= 2), r.WAITING: 10 - (i >= 2), FINISHED: 5} for i in range(seconds)),
    ]
    if counted is not None:
        rows = [row | {r.PREEMPTIONS: counted if i > 22 else 0} for i, row in enumerate(rows)]
    assert kv_of(every(1, rows)).preemptions_inferred == believed


def test_signs_that_were_not_borne_out_make_newer_ones_worth_nothing():
    calm = {r.RUNNING: 20, r.WAITING: 0, FINISHED: 5, r.PREEMPTIONS: 0}
    back = {r.RUNNING: 10, r.WAITING: 10, FINISHED: 5, r.PREEMPTIONS: 0}
    found = kv_of(every(1, [*[calm, back, calm] * 12]))
    assert (found.preemptions_inferred, found.preemptions_recent) == (0, 0)


@pytest.mark.parametrize(
    "after",
    [
        {r.RUNNING: 8, r.WAITING: 40, FINISHED: 16},  # they finished, others arrived
        {r.RUNNING: 8, r.WAITING: 29, FINISHED: 5},  # clients went away
        {r.RUNNING: 19, r.WAITING: 40, FINISHED: 5},  # arrivals only
    ],
)
def test_other_reasons_for_falling_running_are_no_preemptions(after):
    rows = every(1, [{r.RUNNING: 19, r.WAITING: 29, FINISHED: 5}, after])
    assert kv_of(rows).preemptions_inferred == 0


@pytest.mark.parametrize("more", [0, 1])
def test_one_request_that_arrives_meanwhile_does_not_hide_preemptions(more):
    """Beside those that went back, one more waits than ``most_ratio`` allows, or two."""
    rose = 10 / T["most_ratio"] + 1 + more
    rows = every(1, [{r.RUNNING: 20, r.WAITING: 5, FINISHED: 5}, {r.RUNNING: 10, r.WAITING: 5 + rose, FINISHED: 5}])
    assert kv_of(rows).preemptions_inferred == (0 if more else 10)


def test_prefix_hit_ratio_needs_queries():
    rows = every(1, [{r.PREFIX_QUERIES: 0, r.PREFIX_HITS: 0}, {r.PREFIX_QUERIES: 200, r.PREFIX_HITS: 50}])
    assert kv_of(rows).prefix_hit_ratio == {"1": pytest.approx(0.25)}
    assert kv_of(every(1, [{r.PREFIX_QUERIES: 5, r.PREFIX_HITS: 1}] * 2)).prefix_hit_ratio == {}


# --- batch ---------------------------------------------------------------------------------------------------


def batch_of(w, limit=None):
    return batch.batch_signals(w, limit, T)


def test_the_mean_batch_under_preemption_is_that_of_the_samples():
    """One gap between two tokens of a preempted request holds the whole time that it waited."""
    gaps = {r.INTER_TOKEN: [histogram((0.1, INF), (0, 0), 0.0), histogram((0.1, INF), (700, 800), 295.0)]}
    w = window(every(10, [{r.RUNNING: 14.0}, {r.RUNNING: 16.0}]), **gaps)
    assert batch_of(w).batch_mean == pytest.approx(29.5)
    assert batch.batch_signals(w, None, T, preempting=True).batch_mean == pytest.approx(15.0)
    unseen = window(every(10, [{}, {}]), **gaps)
    assert batch.batch_signals(unseen, None, T, preempting=True).batch_mean is None


# --- load ---------------------------------------------------------------------------------------------------


def load_of(rows, configured=None, source=None):
    return batch.load_signals(window(rows), SequenceLimit(configured, source), KvSignals(), None, T)


@pytest.mark.parametrize(
    ("running", "expected"),
    [
        ([64] * 10, True),
        ([63] * 10, True),
        ([60] * 10, False),
        ([64] * 5 + [20] * 5, True),
        ([64] * 4 + [20] * 6, False),
    ],
)
def test_at_limit_in_most_of_the_recent_samples(running, expected):
    rows = every(1, [{r.RUNNING: v, r.WAITING: 5} for v in running])
    assert load_of(rows, 64, "args").running_at_limit is expected


def test_what_is_computed_when_it_is_read_is_of_the_moment_in_which_it_was_asked_for():
    rows = [{FINISHED: 6 * min(i, 7), r.RUNNING: 2, r.WAITING: 0, r.KV_USAGE: i / 100} for i in range(24)]
    begun = window(every(10, rows[:12]))
    load = batch.load_signals(begun, SequenceLimit(), KvSignals(), None, T)
    for i, row in enumerate(rows[12:], 12):
        begun.observe(1000.0 + 10 * i, row, {FINISHED: row[FINISHED]}, {})
    names = ("arrival_burst_ratio", "kv_share_held", "kv_share_at_peak")
    at_once, now = load_of(every(10, rows[:12])), batch.load_signals(begun, SequenceLimit(), KvSignals(), None, T)
    assert [getattr(load, name) for name in names] == [getattr(at_once, name) for name in names]
    assert all(getattr(load, name) != getattr(now, name) for name in names)


# --- context ------------------------------------------------------------------------------------------------


def test_the_longest_context_forgets_after_five_minutes():
    longest = LongestContext(300)
    totals = [0, 16_000, 16_100, 16_200]
    for t, total, count in zip((0, 1, 200, 302), totals, range(4), strict=True):
        w = window([(float(t), {r.PROMPT_TOKENS: total})], **{r.TTFT: [histogram((1.0, INF), (count, count), 0)]})
        longest.observe(w.last)
    assert longest.maximum() == 100


@pytest.mark.parametrize(
    ("increments", "expected"),
    [
        ((40, 0, 0, 40, 0), True),
        ((40, 30, 20, 10, 0), False),
        ((0, 0, 80, 0, 0), False),
        ((76, 0, 0, 4, 0), False),
        ((10, 0, 0, 5, 0), None),
    ],
)
def test_bimodal_prompts(increments, expected):
    rising = tuple(map(float, accumulate(increments)))
    increase = HistogramIncrease((100.0, 500.0, 1000.0, 5000.0, INF), rising, 1.0, rising[-1])
    assert increase.increments == increments
    assert requests.bimodal_prompts(increase, T) is expected


# --- latency ------------------------------------------------------------------------------------------------


def test_baseline_is_unknown_at_first_and_learns_only_from_calm_moments():
    base = Baseline(T)
    for i in range(5):
        base.learn(1000 + 30 * i, True, {"ttft": 0.2})
    assert base.value("ttft") is None
    base.learn(1150, True, {"ttft": 0.2})
    assert base.value("ttft") == pytest.approx(0.2)
    for i in range(100):
        base.learn(1200 + 30 * i, False, {"ttft": 60.0})
    assert base.value("ttft") == pytest.approx(0.2)


def answers(seconds: float, tokens: float):
    """Ten answers of so many tokens in a minute; the first token takes 0.1 s."""
    sums = {r.E2E: seconds, r.TTFT: 0.1, r.REQUEST_OUTPUT: tokens}
    return window(
        every(30, [{FINISHED: 0.0}, {FINISHED: 10.0}]),
        **{
            name: [histogram((1e4, INF), (0, 0), 0), histogram((1e4, INF), (10, 10), 10 * one)]
            for name, one in sums.items()
        },
    )


def test_whole_answers_are_compared_with_answers_of_the_same_length():
    """Speculation that no longer helps makes each token slower; longer answers take longer, and nothing is wrong."""
    base, usual = Baseline(T), answers(2.1, 100)
    for i in range(6):
        requests.latency_signals(usual, base, False, {}, T)
        base.learn(30 * i, True, {"e2e": 2.1}, requests.WholeAnswers(2.1, 0.1, 100))
    longer = requests.latency_signals(answers(20.1, 1000), base, False, {}, T)
    assert longer.baseline_ratios["e2e"] == pytest.approx(1.0)
    slower = requests.latency_signals(answers(8.1, 100), base, False, {}, T)
    assert slower.baseline_ratios["e2e"] == pytest.approx(8.1 / 2.1)
    assert slower.e2e["0.95"] / slower.usual["e2e"] == pytest.approx(8.1 / 2.1)


@pytest.mark.parametrize(
    ("phase", "usual", "harmful"),
    [("ttft", 0.1, 3.5), ("inter_token", 0.03, 0.12), ("queue", 0.01, 6.0)],
)
def test_what_can_raise_an_alert_is_never_learned_as_usual(phase: str, usual: float, harmful: float):
    """Two hours and a half of it, as when everybody's first token takes 3.5 s instead of 0.1 s."""
    base = Baseline(T)
    for i in range(300):
        base.learn(30 * i, True, {phase: usual if i < 6 else harmful})
    assert base.value(phase) == pytest.approx(usual)


# --- progress -----------------------------------------------------------------------------------------------


def test_rates_fall_back_to_the_old_gauge():
    found = progress.throughput_signals(window(every(1, [{r.GENERATION_RATE: 123.0, r.RUNNING: 3}] * 3)), Trend(T))
    assert found.generation_tokens_per_second == 123.0


def followed(rows, **histograms):
    w, p = window(rows, **histograms), Progress(T)
    for sample in w.history:
        p.observe(sample)
    return w, p


def test_a_filling_cache_moves_without_useful_progress():
    w, p = followed(
        every(5, [{r.RUNNING: 1, r.WAITING: 9, r.KV_USAGE: 0.1 * i, r.GENERATION_TOKENS: 10} for i in range(6)])
    )
    found = progress.progress_signals(w, p, ProgressSignals(), T)
    assert found.seconds_without_progress == 25
    assert found.seconds_still == 0


def test_progress_is_unknown_without_counters_and_absent_without_work():
    found = progress.progress_signals(*followed(every(5, [{r.RUNNING: 3}] * 6)), ProgressSignals(), T)
    assert found.progressing is None
    idle = followed(every(5, [{r.RUNNING: 0, r.WAITING: 0, r.GENERATION_TOKENS: 4}] * 6))
    found = progress.progress_signals(*idle, ProgressSignals(), T)
    assert found.work_present is False
    assert found.seconds_without_progress is None


# --- memory and host -----------------------------------------------------------------------------------------

GIB = 2**30


def gpu(used, total=80 * GIB, **more):
    return GpuReading("GPU-1", 0, "nvidia", memory_used_bytes=used, memory_total_bytes=total, **more)


def test_demand_is_used_memory_without_the_empty_part_of_the_pool():
    assert kv.demand_ratio(gpu(72 * GIB), [40.0 * GIB]) == pytest.approx(0.4)
    assert kv.demand_ratio(gpu(72 * GIB), [20.0 * GIB, 10.0 * GIB]) == pytest.approx(42 / 80)
    assert kv.demand_ratio(gpu(72 * GIB), [20.0 * GIB, None]) is None
    assert kv.demand_ratio(gpu(72 * GIB), []) == pytest.approx(0.9)
    assert kv.demand_ratio(gpu(30 * GIB), [40.0 * GIB]) == 0.0, "the pool's size is of another moment"
    assert kv.demand_ratio(gpu(None), [1.0]) is None


def test_idle_growth_needs_ten_minutes_and_ends_with_work():
    device = DeviceMemory(T)
    for i in range(25):
        device.observe(30.0 * i, 10.0 * GIB + i * 2**20, idle=True)
    assert device.idle_growth_per_hour() == pytest.approx(120 * 2**20)
    device.observe(800.0, 11.0 * GIB, idle=False)
    assert device.idle_growth_per_hour() is None


def test_fragmentation_figures_come_from_the_worst_rank():
    ranks = [AllocatorReading("n", "p", 0, 10, 12, 1), AllocatorReading("n", "p", 1, 10, 20, 5)]
    found = kv.memory_signals(KvSignals(), EngineContext(0.0, allocator=ranks), DeviceMemory(T))
    assert (found.allocator_reserved_bytes, found.allocator_allocated_bytes) == (20, 10)


# --- score --------------------------------------------------------------------------------------------------


def score_of(kv_max=0.95, waiting=5.0, **gpu_fields):
    track = GpuWindow()
    track.observe(1.0, gpu(72 * GIB, **gpu_fields))
    load = LoadSignals(in_flight=waiting + 3, waiting=waiting, concurrency_ratio=0.5)
    pressing = score.Pressing(KvSignals(kv_used_ratio_max=kv_max), load)
    return score.compute_signals(window([(1.0, {})]), [track], score.SharedGpus(), pressing, T)


def test_a_starved_gpu_is_the_hosts_doing_not_the_memorys():
    assert score_of(tensor_activity_ratio=0.01, dram_activity_ratio=0.02).score_compute_factor == 0.0
    assert score_of(tensor_activity_ratio=0.0, dram_activity_ratio=0.0).score_compute_factor == 0.0
    assert score_of(power_watts=100, power_limit_watts=700).score_compute_factor == 0.0


@pytest.mark.parametrize(("watts", "expected"), [(420, 1.0), (490, 1.0), (560, 0.5), (630, 0.0), (700, 0.0)])
def test_power_between_decode_and_prefill(watts, expected):
    assert score_of(power_watts=watts, power_limit_watts=700).score_compute_factor == pytest.approx(expected)


@pytest.mark.parametrize(("used", "expected"), [(0.3, 1.0), (0.6, 1.0), (0.7, 0.5), (0.8, 0.0), (0.95, 0.0)])
def test_utilization_is_the_last_and_weak_evidence(used, expected):
    found = score_of(utilization_ratio=used)
    assert found.activity_level == "utilization_weak"
    assert found.score_compute_factor == pytest.approx(expected)


@pytest.mark.parametrize(("kv_max", "expected"), [(0.85, 0.0), (0.875, 0.5), (0.9, 1.0), (1.0, 1.0)])
def test_memory_factor_ramps_between_the_documented_levels(kv_max, expected):
    assert score.memory_factor(KvSignals(kv_used_ratio_max=kv_max), None, T) == pytest.approx(expected)


def test_the_score_is_absent_when_a_factor_is_not_known():
    assert score_of().memory_high_compute_low_score is None  # no activity at all
    assert score_of(kv_max=None, utilization_ratio=0.3).memory_high_compute_low_score is None


def test_idle_scores_zero_and_load_without_a_queue_scores_its_share():
    assert score.demand_factor(KvSignals(), LoadSignals(in_flight=0.0)) == 0.0
    assert score.demand_factor(KvSignals(), LoadSignals(in_flight=4.0, waiting=0.0, concurrency_ratio=0.4)) == 0.4
    assert score.demand_factor(KvSignals(), LoadSignals(in_flight=4.0, waiting=1.0)) == 1.0
    assert score.demand_factor(KvSignals(), LoadSignals()) is None


@pytest.mark.parametrize(("fds", "expected"), [(82, False), (70, False), (58, True), (34, True), (None, None)])
def test_clients_that_went_away_close_their_connections(fds, expected):
    """Live captures: 34 descriptors when idle, 82 with 48 clients."""

    def row(open_fds, tokens):
        page = {} if open_fds is None else {r.PROCESS_OPEN_FDS: open_fds}
        return {r.RUNNING: 48, r.WAITING: 0, r.GENERATION_TOKENS: tokens, **page}

    w, p = followed(every(1, [row(82 if fds else None, 1), row(82 if fds else None, 2), row(fds, 2), row(fds, 2)]))
    assert progress.progress_signals(w, p, ProgressSignals(), T).connections_dropped is expected


@pytest.mark.parametrize(
    ("gauges", "expected"),
    [
        ({r.RUNNING: 0, r.WAITING: 0}, False),
        ({r.RUNNING: 1, r.WAITING: 0}, True),
        ({r.RUNNING: 1}, True),
        ({r.WAITING: 1}, True),
        ({r.RUNNING: 0}, None),
        ({r.WAITING: 0}, None),
        ({}, None),
        ({r.RUNNING: 0, r.SWAPPED: 0}, None),
    ],
)
def test_no_work_is_known_only_if_both_gauges_are(gauges, expected):
    assert progress.work_present(window([(0.0, gauges)]).last) is expected


@pytest.mark.parametrize(
    ("processes", "reserved", "expected"),
    [
        ([70], [66], 4),
        ([70, 72], [66, 66], 5),
        ([70], [70], 0),
        ([], [66], None),
        ([70], [], None),
        ([70], [66, 66], None),
        ([70, 72], [66], None),
        ([70], [None], None),
        ([70], [71], None),
    ],
)
def test_context_is_known_only_where_each_gpu_has_its_worker_and_both_sides_tell(processes, reserved, expected):
    ranks = [AllocatorReading("n", "p", i, reserved_bytes=size) for i, size in enumerate(reserved)]
    assert kv.outside_torch(processes, ranks) == expected
