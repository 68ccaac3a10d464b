"""Servers that show less, or something else, than a plain vLLM: what can be said is said, and nothing is made up.

Numbers follow what vLLM books (vllm/v1/metrics): prompts in one lump at the first token, inter-token latency per
decoding request and step.
"""

from __future__ import annotations

import pytest

from kvpressure.model import readings as r
from kvpressure.model.readings import EngineReading, Histogram, Scrape, Snapshot
from kvpressure.pipeline.pipeline import Pipeline

FINISHED = r.FINISHED_PREFIX + "stop"
INF = float("inf")


def observe(rows, *, args=("--max-num-seqs", "256"), config=None, histograms=None, step=1.0):
    """The last engine state after one page a second with the given values."""
    pipeline, state = Pipeline(), None
    gauges = (r.RUNNING, r.WAITING, r.KV_USAGE, r.WAITING_DEFERRED, r.WAITING_CAPACITY, r.GENERATION_RATE)
    for i, row in enumerate(rows):
        t = 1000.0 + i * step
        reading = EngineReading(
            "m",
            "0",
            {n: v for n, v in row.items() if n in gauges},
            {n: v for n, v in row.items() if n not in gauges},
            histograms[i] if histograms else {},
            config or {},
        )
        page = Scrape("http://x/metrics", t, "n", "p", "vllm", args=args, engines=(reading,))
        state = pipeline.observe(Snapshot(t, pages=(page,)))
    return state.engines[0]


def test_gauges_alone_of_a_full_server():
    """No counters, no histograms, no GPU, no arguments: the cache is full and requests wait."""
    engine = observe([{r.RUNNING: 30, r.WAITING: 12, r.KV_USAGE: 0.99}] * 20, args=())
    assert engine.diagnosis.verdict == "kv_pressure"
    assert engine.signals.batch.batch_mean is None
    assert engine.signals.throughput.generation_tokens_per_second is None
    assert any("GPU" in text for text in engine.diagnosis.missing)


def test_an_embedding_server_is_healthy_without_a_generated_token():
    rows = [
        {
            r.RUNNING: 8,
            r.WAITING: 0,
            r.KV_USAGE: 0.0,
            r.PROMPT_TOKENS: 4000 * i,
            r.GENERATION_TOKENS: 0,
            FINISHED: 20 * i,
        }
        for i in range(30)
    ]
    engine = observe(rows)
    assert engine.diagnosis.verdict == "healthy"
    assert engine.signals.kv.kv_used_ratio == 0.0


def test_a_prefill_only_server_with_a_queue_is_compute_bound():
    """Disaggregated prefill: prompts flow, each request yields one token, the cache has room."""
    rows = [
        {
            r.RUNNING: 4,
            r.WAITING: 20,
            r.KV_USAGE: 0.3,
            r.PROMPT_TOKENS: 20_000 * i,
            r.GENERATION_TOKENS: 5 * i,
            FINISHED: 5 * i,
        }
        for i in range(30)
    ]
    assert observe(rows).diagnosis.verdict == "compute_bound"


def test_a_decode_only_server_that_waits_for_remote_kv_is_not_under_pressure():
    """All who wait are deferred: their blocks arrive over the network."""
    rows = [
        {
            r.RUNNING: 30,
            r.WAITING: 9,
            r.WAITING_DEFERRED: 9,
            r.WAITING_CAPACITY: 0,
            r.KV_USAGE: 0.98,
            r.PROMPT_TOKENS: 0,
            r.GENERATION_TOKENS: 900 * i,
        }
        for i in range(30)
    ]
    engine = observe(rows)
    assert engine.diagnosis.verdict != "kv_pressure"


def test_a_decode_only_server_whose_cache_is_full_is_under_pressure():
    rows = [
        {
            r.RUNNING: 30,
            r.WAITING: 9,
            r.WAITING_DEFERRED: 1,
            r.WAITING_CAPACITY: 8,
            r.KV_USAGE: 0.99,
            r.PROMPT_TOKENS: 0,
            r.GENERATION_TOKENS: 900 * i,
        }
        for i in range(30)
    ]
    assert observe(rows).diagnosis.verdict == "kv_pressure"


def test_speculative_decoding_does_not_inflate_the_batch():
    """Eight requests, three accepted tokens a step of 50 ms: 480 tokens/s, yet eight requests decode."""
    bounds = (0.1, INF)
    histograms = [{r.INTER_TOKEN: Histogram(bounds, (160.0 * i,) * 2, 8.0 * i, 160.0 * i)} for i in range(40)]
    rows = [{r.RUNNING: 8, r.WAITING: 0, r.KV_USAGE: 0.2, r.GENERATION_TOKENS: 480 * i} for i in range(40)]
    engine = observe(rows, histograms=histograms)
    assert engine.signals.batch.batch_mean == pytest.approx(8.0)
    assert engine.diagnosis.verdict == "healthy"


def test_several_api_servers_split_the_counts_but_not_the_mean_batch():
    """Four processes book each step up to four times: the ratio of counts is wrong, the latency sum is right."""
    histograms = [
        {r.INTER_TOKEN: Histogram((), (), 12.0 * i, 240.0 * i), r.ITERATION_TOKENS: Histogram((), (), 0.0, 80.0 * i)}
        for i in range(40)
    ]
    rows = [{r.RUNNING: 12, r.WAITING: 0, r.KV_USAGE: 0.2, r.GENERATION_TOKENS: 240 * i} for i in range(40)]
    assert observe(rows, histograms=histograms).signals.batch.batch_mean == pytest.approx(12.0)


def test_kv_that_is_not_recorded_leaves_the_limit_to_speak():
    """LLMServingSim's second run: 128 of 128 running, a queue, the KV gauge constantly 0."""
    rows = [{r.RUNNING: 128, r.WAITING: 140, r.KV_USAGE: 0.0, r.GENERATION_TOKENS: 2000 * i} for i in range(30)]
    engine = observe(rows, args=("--max-num-seqs", "128"))
    assert engine.diagnosis.verdict == "concurrency_limited"
    assert engine.signals.kv.kv_used_ratio is None
    assert "KV usage" in engine.diagnosis.missing


def test_a_page_without_vllm_gauges_says_what_is_missing():
    engine = observe([{FINISHED: 0}] * 10, args=())
    assert engine.diagnosis.verdict == "unknown"
    assert "running and waiting requests" in engine.diagnosis.missing


def test_the_old_throughput_gauge_stands_in_for_counters():
    rows = [{r.RUNNING: 3, r.WAITING: 0, r.KV_USAGE: 0.2, r.GENERATION_RATE: 120.0}] * 10
    engine = observe(rows)
    assert engine.diagnosis.verdict == "healthy"
    assert engine.signals.throughput.generation_tokens_per_second == 120.0


@pytest.mark.parametrize("step", [0.25, 1.0, 5.0, 10.0])
def test_the_verdict_does_not_depend_on_how_often_pages_come(step):
    rows = [{r.RUNNING: 40, r.WAITING: 30, r.KV_USAGE: 0.985, r.GENERATION_TOKENS: 1000 * i * step} for i in range(40)]
    assert observe(rows, step=step).diagnosis.verdict == "kv_pressure"
