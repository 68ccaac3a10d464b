"""Memory audit, what fits, and recommended limits."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpressure.capacity import weights
from kvpressure.capacity.kvbytes import CacheLayout, Parallel, layout
from kvpressure.capacity.load import RequestLengths, RequestLoad, stated
from kvpressure.capacity.models import named
from kvpressure.capacity.plan import (
    GpuAudit,
    LimitPlan,
    Limits,
    StatedMemory,
    audit,
    default_limits_for,
    fit,
    recommend,
    requests_that_fit,
)
from kvpressure.settings.thresholds import builtin

RECORDINGS = Path(__file__).parent.parent / "fixtures" / "recordings" / "h100"
GIB = 2**30
LLAMA_7B = named("llama-2-7b")
THRESHOLDS = builtin()


# --- audit --------------------------------------------------------------------------------------------------------

#: V0 profiled with max_model_len tokens (4096, 2048) and kept CUDA graphs outside its request.
MEASURED = [
    ("llama-2-7b-085", "llama-2-7b", 4096),
    ("opt-1.3b-019", "opt-1.3b", 2048),
]


@pytest.mark.parametrize(("recording", "model", "length"), MEASURED, ids=[row[0] for row in MEASURED])
def test_the_estimated_pool_is_what_a_real_server_had(recording: str, model: str, length: int) -> None:
    with gzip.open(RECORDINGS / f"{recording}.jsonl.gz", "rt") as stream:
        tick = next(tick for tick in map(json.loads, stream) if tick.get("gpus"))
    total = tick["gpus"][0]["memory_total_bytes"]
    args, text = tick["engines"][0]["args"], tick["engines"][0]["exposition"]
    blocks = re.search(r'num_gpu_blocks="(\d+)"', text)
    shape = named(model)
    limits = Limits(
        float(args[args.index("--gpu-memory-utilization") + 1]),
        int(args[args.index("--max-num-seqs") + 1]),
        length,
        length,
    )
    found = audit(shape, Parallel(), total, limits, StatedMemory(weights.estimated(shape)), graphs=False)
    assert layout(shape).pool_blocks(found.pool.bytes) == pytest.approx(int(blocks[1]), rel=0.01)
    measured = total * limits.gpu_memory_utilization - found.weights.bytes - int(blocks[1]) * layout(shape).block_bytes
    assert abs(found.activations.bytes + found.non_torch.bytes - measured) < 0.3e9


def test_ranks_share_the_activations_and_need_buffers_of_their_own() -> None:
    limits = default_limits_for(80 * GIB, 4096)
    one, four = (audit(LLAMA_7B, Parallel(tp), 80 * GIB, limits, StatedMemory(GIB)) for tp in (1, 4))
    assert four.activations.bytes < one.activations.bytes < 4 * four.activations.bytes
    assert (one.non_torch.bytes, four.non_torch.bytes) == (GIB // 4, GIB)
    assert audit(LLAMA_7B, Parallel(1, 2), 80 * GIB, limits, StatedMemory(GIB)).non_torch.bytes == GIB


@pytest.mark.parametrize(("gib", "tokens", "seqs"), [(24, 2048, 256), (80, 8192, 1024), (192, 16384, 1024)])
def test_defaults_follow_the_gpu(gib: int, tokens: int, seqs: int) -> None:
    assert default_limits_for(gib * GIB, 4096) == Limits(0.92, seqs, tokens, 4096)


# --- what fits ----------------------------------------------------------------------------------------------------


def audited(pool: int, length: int = 4096, tokens: int = 2048) -> GpuAudit:
    return audit(LLAMA_7B, Parallel(), 80 * GIB, Limits(0.9, 256, tokens, length), StatedMemory(GIB, pool=pool))


def test_capacity_of_a_pool() -> None:
    found = fit(layout(LLAMA_7B), audited(50 * GIB), None)
    assert found.pool_blocks == 6_400
    assert found.usable_blocks == 6_399
    assert found.capacity_tokens == 102_400
    assert found.max_concurrency == 25.0
    assert found.longest == 4096
    assert found.requests is None


def test_a_start_reserves_the_tokens_in_flight_of_hybrid_models() -> None:
    shape = named("gemma-3-27b")
    found = layout(shape)
    need = found.blocks(32_768, 2 * 8192)
    for blocks, longest in ((need + 1, 32_768), (need, 32_767)):
        memory = StatedMemory(GIB, pool=blocks * found.block_bytes)
        at = audit(shape, Parallel(), 80 * GIB, Limits(0.9, 64, 8192, 32_768), memory)
        assert fit(found, at, None).longest == pytest.approx(longest, abs=16)
        assert (fit(found, at, None).longest == 32_768) == (longest == 32_768)


def test_equal_requests_fit_as_often_as_their_blocks() -> None:
    assert requests_that_fit(layout(LLAMA_7B), 1_000, stated("100", "60"), 4096) == 100
    assert requests_that_fit(layout(LLAMA_7B), 999, stated("100", "60"), 4096) == 99
    assert requests_that_fit(layout(LLAMA_7B), 1_000, stated("100", "61"), 4096) == 90  # 161 tokens are 11 blocks


def test_unequal_requests_leave_room_for_the_long_ones() -> None:
    # 1 and 199 blocks: mean 100, deviation 99
    load = RequestLoad((RequestLengths(0, 16, 1.0), RequestLengths(0, 3_184, 1.0)))
    many = requests_that_fit(layout(LLAMA_7B), 1_100, load, 4096)
    assert many * 100 + 2.33 * many**0.5 * 99 <= 1_100 < (many + 1) * 100 + 2.33 * (many + 1) ** 0.5 * 99
    assert many == 5


LOADS = st.lists(st.tuples(st.integers(0, 3_000), st.integers(1, 1_000)), min_size=1, max_size=20).map(
    lambda rows: RequestLoad(tuple(RequestLengths(p, o, float(o)) for p, o in rows))
)


@given(LOADS, st.integers(200, 50_000))
@settings(max_examples=30)
def test_the_stated_share_of_moments_fits(load: RequestLoad, blocks: int) -> None:
    found: CacheLayout = layout(LLAMA_7B)
    many = requests_that_fit(found, blocks, load, 4096)
    costs = [found.blocks(max(1, request.total)) for request in load.requests]
    shares = [request.weight for request in load.requests]
    mean = sum(c * w for c, w in zip(costs, shares, strict=True)) / sum(shares)
    assert many * mean <= blocks + 1e-6
    if many < 30:  # below that the sum is not yet normal
        return
    chance = random.Random(1)
    moments = [sum(chance.choices(costs, shares, k=many)) <= blocks for _ in range(300)]
    assert sum(moments) >= 0.96 * len(moments)


@given(LOADS, st.integers(0, 5_000))
def test_more_memory_never_holds_fewer(load: RequestLoad, blocks: int) -> None:
    found = layout(LLAMA_7B)
    assert requests_that_fit(found, blocks, load, 4096) <= requests_that_fit(found, blocks + 50, load, 4096)


# --- recommendations ----------------------------------------------------------------------------------------------


def plan_for(
    load: RequestLoad, needed: float | None = None, gib: int = 80, model: str = "llama-3.1-8b", tp: int = 1
) -> LimitPlan | None:
    shape, parallel = named(model), Parallel(tp)
    memory = StatedMemory(weights.estimated(shape))
    return recommend(shape, parallel, layout(shape, parallel), gib * GIB, memory, load, needed, THRESHOLDS)


def test_the_documented_utilization_where_it_suffices() -> None:
    found = plan_for(stated("1500", "500"))
    assert found.gpu_memory_utilization.value == 0.7
    assert "documented" in found.gpu_memory_utilization.reason
    assert found.max_model_len.value == 3072  # 2000 tokens, a quarter more, rounded up to 1024
    assert found.max_num_batched_tokens.value == 2048
    assert found.max_num_seqs.value == found.fit.requests
    assert found.audit.limits.gpu_memory_utilization == 0.7


@pytest.mark.parametrize(
    ("prompt", "output", "known"),
    [
        ("p50=400,p95=960", "200", "up to p95"),
        ("960", "p50=200,p99.5=500", "up to p99.5"),
        ("p50=400,p95=960", "p50=200,p99=500,p100=700", "up to p95"),
    ],
)
def test_a_quantile_is_not_the_longest_request(prompt: str, output: str, known: str) -> None:
    """A max_model_len made of p95 would have vLLM refuse the longest requests, perhaps one of twenty."""
    found = plan_for(stated(prompt, output))
    assert found.max_model_len.value is None
    assert f"known {known} only" in found.max_model_len.reason
    assert found.max_num_seqs.value == found.fit.requests


def test_the_longest_request_that_is_given_bounds_the_context() -> None:
    found = plan_for(stated("p50=400,p95=960,p100=3000", "p50=200,p100=500"))
    assert found.max_model_len.value == 5120  # 3500 tokens, a quarter more, rounded up to 1024
    assert "the longest request (3500 tokens)" in found.max_model_len.reason


def test_long_context_gets_the_documented_lower_one() -> None:
    assert plan_for(stated("p50=500,p95=8000,p99=16000", "200")).gpu_memory_utilization.value == 0.6


def test_more_than_documented_only_as_far_as_needed() -> None:
    load = stated("4000", "1000")
    base = plan_for(load)
    needed = (base.fit.requests or 0) + 5
    found = plan_for(load, needed)
    assert 0.7 < found.gpu_memory_utilization.value < 0.8
    assert (found.fit.requests or 0) >= needed
    less = plan_for(load, needed - 5)
    assert less.gpu_memory_utilization.value == 0.7


def test_a_model_that_needs_the_default_gets_it() -> None:
    found = plan_for(stated("1500", "500"), gib=24)
    assert found.gpu_memory_utilization.value == 0.92
    assert "more memory" in found.gpu_memory_utilization.reason


@given(
    st.integers(1, 8_000), st.integers(1, 2_000), st.sampled_from([24, 48, 80, 192]), st.none() | st.integers(1, 300)
)
@settings(max_examples=40, deadline=None)
def test_every_plan_holds_what_it_promises(prompt: int, output: int, gib: int, needed: int | None) -> None:
    load = stated(str(prompt), str(output))
    found = plan_for(load, needed, gib)
    if found is None:
        return
    limits = found.audit.limits
    shape = named("llama-3.1-8b")
    again = audit(shape, Parallel(), gib * GIB, limits, StatedMemory(weights.estimated(shape)))
    held = fit(layout(shape), again, load)
    assert (held.requests or 0) >= limits.max_num_seqs >= (needed or 1)
    assert held.longest == limits.max_model_len


def test_the_models_own_context_is_not_exceeded() -> None:
    assert plan_for(stated("3900", "100"), model="llama-2-7b").max_model_len.value == 4096


def test_requests_end_at_max_model_len() -> None:
    assert requests_that_fit(layout(LLAMA_7B), 256, stated("100", "1000000"), 4096) == 1
