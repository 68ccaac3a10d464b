"""The simulated engine: what must hold for every load, and that its behaviour is that of measured engines."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.demo.counters import Books, BucketCounts, token_bounds
from lab.demo.model import LLAMA_2_7B, LLAMA_2_13B, OPT_1_3B, OPT_2_7B
from lab.demo.page import Page
from lab.demo.requests import EngineConfig, SimulatedRequest, SimulationError
from lab.demo.simulator import SimulatedEngine

pytestmark = pytest.mark.slow

START = 1000.0

SMALL = EngineConfig(
    LLAMA_2_13B, "small", max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, kv_pool_tokens=640
)

Shape = tuple[float, int, int]  # seconds after the one before, prompt, output

shapes = st.lists(st.tuples(st.floats(0, 2), st.integers(1, 255), st.integers(1, 200)), min_size=1, max_size=40)
configs = st.builds(
    lambda seqs, budget, pool, watermark, sync, queue: replace(
        SMALL,
        max_num_seqs=seqs,
        max_num_batched_tokens=max(seqs, budget),
        kv_pool_tokens=pool,
        watermark=watermark,
        async_scheduling=sync,
        max_num_queued_reqs=queue,
    ),
    st.integers(1, 16),
    st.integers(8, 512),
    st.integers(272, 2000),
    st.sampled_from([0.0, 0.05, 0.2]),
    st.booleans(),
    st.sampled_from([None, 0, 5]),
)


def requests(load: Sequence[Shape]) -> list[SimulatedRequest]:
    made = []
    arrival = START
    for gap, prompt, output in load:
        arrival += gap
        made.append(SimulatedRequest(arrival, prompt, output, 150))
    return made


def submitted(config: EngineConfig, load: Sequence[Shape]) -> tuple[SimulatedEngine, list[SimulatedRequest]]:
    engine = SimulatedEngine(config, START)
    sent = requests(load)
    for request in sent:
        engine.submit(request)
    return engine, sent


def drain(engine: SimulatedEngine) -> float:
    at = engine.now
    while engine.in_flight:
        at += 100
        engine.advance(at)
        assert at < START + 100_000, "does not make progress"
    return at


def counters(books: Books) -> list[float]:
    """Everything that may only grow, buckets apart."""
    histograms = [value for value in vars(books).values() if isinstance(value, BucketCounts)]
    return [
        books.preemptions,
        books.prompt_tokens,
        books.generation_tokens,
        books.prefix_queries,
        books.rejected_requests,
        *books.finished.values(),
        *books.http.values(),
        books.cpu_seconds,
        *(h.sum for h in histograms),
        *(h.total for h in histograms),
    ]


def buckets(books: Books) -> list[int]:
    return [count for value in vars(books).values() if isinstance(value, BucketCounts) for count in value.counts]


def held_blocks(engine: SimulatedEngine) -> int:
    """Blocks of all running requests, counted one by one from their lengths."""
    size = engine.config.block_size
    tokens = [
        request.computed if request in engine._prefilling else request.base + engine._batch.steps
        for request in engine._running.values()
    ]
    return sum(-(-count // size) for count in tokens)


# --- properties -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(configs, shapes, st.floats(0.01, 0.7))
def test_invariants_hold_at_every_moment(config: EngineConfig, load: Sequence[Shape], pause: float) -> None:
    engine, sent = submitted(config, load)
    before = counters(engine.books) + buckets(engine.books)
    at = START
    for _ in range(60):
        at += pause
        engine.advance(at)
        assert 0 <= engine.free_blocks <= engine.usable_blocks
        assert engine.running <= config.max_num_seqs
        assert engine.running == engine.decoding + len(engine._prefilling)
        if engine._step is None:  # blocks of a step in flight are taken before its tokens count
            assert held_blocks(engine) == engine.usable_blocks - engine.free_blocks
        now = counters(engine.books) + buckets(engine.books)
        assert all(new >= old for old, new in zip(before, now, strict=True))
        before = now
        books = engine.books
        assert len(sent) == engine.in_flight + sum(books.finished.values()) + books.rejected_requests


@settings(max_examples=60, deadline=None)
@given(configs, shapes)
def test_every_request_is_answered_and_booked_once(config: EngineConfig, load: Sequence[Shape]) -> None:
    engine, sent = submitted(config, load)
    drain(engine)
    books = engine.books
    served = [request for request in sent if request.finish_reason is not None]
    assert len(served) + books.rejected_requests == len(sent)
    assert engine.free_blocks == engine.usable_blocks
    assert (books.running, books.waiting, books.kv_usage) == (0, 0, 0.0)
    assert [r.outputs for r in served] == [min(r.output_tokens, 150, 256 - r.prompt_tokens) for r in served]
    assert books.prompt_tokens == sum(r.prompt_tokens for r in served)
    assert books.generation_tokens == sum(r.outputs for r in served)
    assert books.first_token.total == books.e2e.total == books.http["2xx"] == len(served)
    assert books.inter_token.total == sum(r.outputs - 1 for r in served)
    assert books.preemptions == sum(r.preemptions for r in served) == books.request_preemptions.sum


@settings(max_examples=40, deadline=None)
@given(configs, shapes)
def test_littles_law(config: EngineConfig, load: Sequence[Shape]) -> None:
    """The sum of all gaps between tokens is the time that requests spent decoding, preempted time included."""
    engine, _ = submitted(config, load)
    drain(engine)
    assert engine.books.inter_token.sum == pytest.approx(engine.books.decode.sum, rel=1e-9, abs=1e-5)
    whole = engine.books.queue.sum + engine.books.prefill.sum + engine.books.decode.sum
    assert engine.books.queue.sum + engine.books.inference.sum == pytest.approx(whole, rel=1e-9, abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(configs, shapes)
def test_leaping_over_equal_steps_changes_nothing(config: EngineConfig, load: Sequence[Shape]) -> None:
    leaping, _ = submitted(config, load)
    walking, _ = submitted(config, load)
    walking._leap_length = lambda _to: 0
    for at in (START + 1.5, START + 7, START + 60):
        leaping.advance(at)
        walking.advance(at)
        assert counters(leaping.books) == pytest.approx(counters(walking.books), rel=1e-9, abs=1e-6)
        assert leaping.books.kv_usage == walking.books.kv_usage
        mine, other = leaping.work_until(at), walking.work_until(at)
        assert mine.kernel_seconds == pytest.approx(other.kernel_seconds, abs=1e-6)
        assert mine.dram_seconds == pytest.approx(other.dram_seconds, abs=1e-6)
        assert mine.joules == pytest.approx(other.joules, rel=1e-3)


@settings(max_examples=40, deadline=None)
@given(configs, shapes, st.floats(0.01, 3))
def test_the_pace_of_advancing_changes_nothing(config: EngineConfig, load: Sequence[Shape], pause: float) -> None:
    once, _ = submitted(config, load)
    often, _ = submitted(config, load)
    end = START + 40
    at = START
    while at < end:
        at = min(end, at + pause)
        often.advance(at)
    once.advance(end)
    assert counters(often.books) == pytest.approx(counters(once.books), rel=1e-9, abs=1e-6)
    assert (often.books.running, often.books.waiting) == (once.books.running, once.books.waiting)


@given(st.floats(0.001, 0.5), st.floats(1e-6, 0.01), st.integers(1, 300), st.integers(1, 9))
def test_a_ramp_counts_like_its_values(first: float, slope: float, steps: int, times: int) -> None:
    at_once, singly = BucketCounts((0.01, 0.025, 0.05, 0.1, 0.5, 1.0)), BucketCounts((0.01, 0.025, 0.05, 0.1, 0.5, 1.0))
    at_once.observe_ramp(first, slope, steps, times)
    for step in range(steps):
        singly.observe(first + slope * step, times)
    assert at_once.total == singly.total == sum(at_once.counts)
    assert at_once.sum == pytest.approx(singly.sum)
    # A value that stands exactly on a bound may fall on either side of it by rounding.
    assert all(abs(a - b) <= times for a, b in zip(at_once.counts, singly.counts, strict=True))


def test_work_grows_with_the_requests_and_not_with_the_time() -> None:
    """A calm day costs seconds: a handful of events a request, while the engine makes thousands of steps."""
    engine = SimulatedEngine(EngineConfig(LLAMA_2_13B, "calm"), START)
    events = 0
    schedule, leap = engine._schedule, engine._leap

    def counted_schedule() -> object:
        nonlocal events
        events += 1
        return schedule()

    def counted_leap(steps: int) -> None:
        nonlocal events
        events += 1
        leap(steps)

    engine._schedule = counted_schedule
    engine._leap = counted_leap
    draw = random.Random(7)
    arrival = START
    for _ in range(500):
        arrival += draw.expovariate(1.0)
        engine.submit(SimulatedRequest(arrival, draw.randint(50, 1000), draw.randint(50, 400), 1024))
    engine.advance(START + 10_000)
    assert engine.in_flight == 0
    assert engine.books.iteration.total > 15_000
    assert events < 6 * 500


# --- measured behaviour -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "running", "kv_tokens", "milliseconds"),
    [
        (LLAMA_2_13B, 100, 42_416, 46.6),
        (LLAMA_2_13B, 1, 500, 19.8),
        (LLAMA_2_7B, 100, 90_500, 44.9),
    ],
)
def test_step_law(model: object, running: int, kv_tokens: int, milliseconds: float) -> None:
    assert model.decode_ms(running, kv_tokens) == pytest.approx(milliseconds, abs=0.1)


def test_a_full_cache_of_13b_steps_in_46_ms_at_92_percent_utilization() -> None:
    engine = SimulatedEngine(EngineConfig(LLAMA_2_13B, "chat", max_num_seqs=100), START)
    for _ in range(100):
        engine.submit(SimulatedRequest(START, 205, 212, 1024))
    engine.advance(START + 9.3)
    assert engine.books.kv_usage > 0.96
    assert engine.books.running == 100
    books, work = engine.books.inter_token, engine.work_until(engine.now)
    total, count = books.sum, books.total
    engine.advance(START + 9.5)
    step = (books.sum - total) / (books.total - count)
    assert step == pytest.approx(0.046, abs=0.0005)
    done = engine.work_until(engine.now).since(work)
    assert done.kernel_seconds / done.step_seconds == pytest.approx(0.92, abs=0.01)


def test_kv_bytes_and_pools_fit_the_gpu() -> None:
    """Weights and the pool together are what 0.9 of the GPU leaves, for every model of the table."""
    for model in (LLAMA_2_13B, LLAMA_2_7B, OPT_2_7B, OPT_1_3B):
        used = model.weight_bytes + model.kv_pool_tokens * model.kv_bytes_per_token
        assert 0.85 < used / 68_416_438_272 < 0.9, model.name


def offline_burst(max_num_seqs: int) -> tuple[SimulatedEngine, float]:
    """2 000 requests of conversation lengths at once, as the measured runs did."""
    engine = SimulatedEngine(EngineConfig(LLAMA_2_13B, "burst", max_num_seqs=max_num_seqs), START)
    draw = random.Random(1).lognormvariate
    for _ in range(2000):
        prompt, output = int(draw(4.4, 1.25)), int(draw(4.9, 1.0))
        engine.submit(SimulatedRequest(START, min(1024, max(4, prompt)), min(1000, max(4, output)), 1024))
    at = START
    while engine.in_flight:
        at += 1
        engine.advance(at)
    return engine, at - START


def quantile_bound(histogram: BucketCounts, quantile: float) -> float:
    seen = 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        seen += count
        if seen >= histogram.total * quantile:
            return bound
    raise AssertionError("empty histogram")


def test_overcommitting_13b_costs_latency_and_not_throughput() -> None:
    """Measured: max_num_seqs 96 -> 256: 1 875 -> 2 068 tokens/s, 9 -> 1 632 preemptions, TPOT p99 54 -> 174 ms."""
    (fits, fits_seconds), (over, over_seconds) = offline_burst(96), offline_burst(256)
    fits_rate, over_rate = (e.books.generation_tokens / s for e, s in ((fits, fits_seconds), (over, over_seconds)))
    assert fits_rate == pytest.approx(1875, rel=0.1)
    assert over_rate == pytest.approx(2068, rel=0.1)
    assert fits.books.preemptions < 50
    assert 1000 < over.books.preemptions < 2500
    calm, pressed = (quantile_bound(e.books.per_output_token, 0.99) for e in (fits, over))
    assert 2 <= pressed / calm <= 5


# --- when things are booked -------------------------------------------------------------------------------------


def under_pressure(config: EngineConfig) -> SimulatedEngine:
    """Eight requests that fit at first and outgrow the cache."""
    engine = SimulatedEngine(replace(config, kv_pool_tokens=1296, max_num_seqs=16), START)
    for _ in range(12):
        engine.submit(SimulatedRequest(START, 90, 150, 150))
    return engine


def watch(engine: SimulatedEngine, seconds: float) -> list[tuple[float, int, int, int]]:
    """``(seconds, running, waiting, counted preemptions)`` twenty times a second."""
    rows = []
    for tick in range(int(seconds * 20)):
        engine.advance(START + tick / 20)
        rows.append((tick / 20, engine.books.running, engine.books.waiting, engine.books.preemptions))
    return rows


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_the_preemption_counter_lags_without_async_scheduling(async_scheduling: bool) -> None:
    engine = under_pressure(replace(SMALL, async_scheduling=async_scheduling, max_num_batched_tokens=2048))
    rows = watch(engine, 8)
    seen = next(time for (_, r0, w0, _), (time, r1, w1, _) in pairwise(rows) if r1 < r0 and w1 > w0)
    counted = next(time for time, _, _, preemptions in rows if preemptions)
    if async_scheduling:
        assert counted == seen
    else:
        assert counted > seen + 0.5  # only when the victim gets its next token


def test_the_whole_prompt_is_booked_at_the_first_token() -> None:
    engine = SimulatedEngine(replace(SMALL, max_num_batched_tokens=64), START)
    engine.submit(SimulatedRequest(START, 250, 4, 4))
    lumps = set()
    for tick in range(100):
        engine.advance(START + tick / 100)
        lumps.add(engine.books.prompt_tokens)
        if engine.books.iteration.total == 0:
            assert engine.books.prompt_tokens == 0  # four steps of prompt chunks have no output
    assert lumps == {0, 250}
    assert engine.books.iteration.counts[token_bucket(engine, 256)] == 1


def token_bucket(engine: SimulatedEngine, bound: float) -> int:
    return engine.books.iteration.bounds.index(bound)


def test_gauges_freeze_between_steps_and_in_a_stall() -> None:
    engine = SimulatedEngine(SMALL, START)
    engine.submit(SimulatedRequest(START, 50, 100, 100))
    engine.advance(START + 1)
    page = Page(engine, START)
    frozen = page.render()
    engine.stall()
    engine.submit(SimulatedRequest(START + 2, 50, 100, 100))
    engine.advance(START + 60)
    still = page.render()
    assert [line for line in still.splitlines() if line.startswith("vllm:")] == [
        line for line in frozen.splitlines() if line.startswith("vllm:")
    ]
    assert engine.in_flight == 2
    engine.resume(START + 60)
    engine.advance(START + 90)
    assert engine.in_flight == 0
    assert quantile_bound(engine.books.inter_token, 1.0) == 80  # the one gap of a minute


def test_a_step_with_a_preemption_admits_nobody_and_the_victim_comes_first() -> None:
    engine = under_pressure(replace(SMALL, max_num_batched_tokens=2048))
    at = START
    while not engine.books.preemptions:
        at += 0.01
        engine.advance(at)
    numbers = [request.number for request in engine._waiting]
    assert numbers == sorted(numbers)
    assert engine._waiting[0].preemptions == 1
    assert engine._waiting[0].number == max(engine._running) + 1  # it was the newest


def test_head_of_the_queue_blocks_below_a_full_cache() -> None:
    """A prompt is admitted only whole: usage stays below 1 while it waits."""
    engine = SimulatedEngine(replace(SMALL, kv_pool_tokens=416, max_num_seqs=16, max_num_batched_tokens=512), START)
    engine.submit(SimulatedRequest(START, 180, 60, 60))
    engine.submit(SimulatedRequest(START, 240, 5, 5))
    engine.submit(SimulatedRequest(START, 16, 5, 5))
    engine.advance(START + 0.5)
    books = engine.books
    assert (books.running, books.waiting) == (1, 2)
    assert books.kv_usage < 0.65
    assert books.preemptions == 0


def test_a_watermark_keeps_blocks_free_on_admission() -> None:
    def preemptions(watermark: float) -> int:
        engine = under_pressure(replace(SMALL, watermark=watermark, max_num_batched_tokens=2048))
        drain(engine)
        return engine.books.preemptions

    assert preemptions(0.3) < preemptions(0.0)


def test_limits_of_the_queue_and_of_the_context_are_answered_not_queued() -> None:
    engine = SimulatedEngine(replace(SMALL, max_num_queued_reqs=1, max_num_seqs=1), START)
    engine.submit(SimulatedRequest(START, 256, 1, 1))
    for _ in range(3):
        engine.submit(SimulatedRequest(START, 10, 5, 5))
    drain(engine)
    assert engine.books.http == {"2xx": 1, "4xx": 1, "5xx": 2}
    assert engine.books.rejected_requests == 2


def test_a_starved_cpu_lengthens_steps_and_time_outside_the_engine() -> None:
    def run(host_factor: float) -> tuple[float, float]:
        engine = SimulatedEngine(SMALL, START)
        engine.host_factor = host_factor
        engine.submit(SimulatedRequest(START, 50, 100, 100))
        drain(engine)
        books = engine.books
        return books.decode.sum, books.e2e.sum - books.queue.sum - books.inference.sum

    calm, starved = run(1), run(50)
    gap = (0.44 + 0.0304) / 1000
    assert starved[0] == pytest.approx(calm[0] + 99 * 49 * gap, rel=0.01)
    assert calm[1] == pytest.approx(0.008, abs=1e-6)
    assert starved[1] == pytest.approx(0.4, abs=1e-6)


# --- what is refused ---------------------------------------------------------------------------------------------


def test_what_vllm_refuses_at_start_is_refused() -> None:
    with pytest.raises(SimulationError, match="estimated maximum model length is 240"):
        SimulatedEngine(replace(SMALL, kv_pool_tokens=256), START)
    with pytest.raises(SimulationError, match="from 1 to max_num_batched_tokens"):
        SimulatedEngine(replace(SMALL, max_num_seqs=65), START)


def test_requests_out_of_order_are_refused() -> None:
    engine = SimulatedEngine(SMALL, START)
    engine.submit(SimulatedRequest(START + 2, 5, 5, 5))
    with pytest.raises(SimulationError, match="in order"):
        engine.submit(SimulatedRequest(START + 1, 5, 5, 5))


def test_token_bounds_end_within_the_context() -> None:
    assert token_bounds(2048)[-3:] == (500.0, 1000.0, 2000.0)
    assert token_bounds(1) == (1.0,)
