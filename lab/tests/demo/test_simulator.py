"""The simulated engine: what must hold for every load, and that its behaviour is that of measured engines."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.demo.counters import Books, BucketCounts
from lab.demo.model import LLAMA_2_13B
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
    tokens = (books.prompt_tokens, books.generation_tokens, books.prefix_queries)
    requests = (books.preemptions, books.rejected_requests, *books.finished.values(), *books.http.values())
    return [*tokens, *requests, books.cpu_seconds, *(h.sum for h in histograms), *(h.total for h in histograms)]


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


# --- measured behaviour -----------------------------------------------------------------------------------------


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


# --- what is refused ---------------------------------------------------------------------------------------------


def test_what_vllm_refuses_at_start_is_refused() -> None:
    with pytest.raises(SimulationError, match="estimated maximum model length is 240"):
        SimulatedEngine(replace(SMALL, kv_pool_tokens=256), START)
    with pytest.raises(SimulationError, match="from 1 to max_num_batched_tokens"):
        SimulatedEngine(replace(SMALL, max_num_seqs=65), START)
