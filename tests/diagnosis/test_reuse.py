"""Prompts computed again after their KV blocks were evicted: where this harms users it is KV pressure, and a low hit
ratio alone is not. The labels are what an engineer would say of the situation; they were made before the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from kvpressure.advice.mitigation import explained, plan
from kvpressure.advice.triage import steps
from kvpressure.model.signals import CacheSignals, MemorySignals
from kvpressure.model.state import State
from kvpressure.settings.thresholds import builtin
from tests.diagnosis.servers import CONFIDENT, Played, Value, play

pytestmark = pytest.mark.slow

STEP = 5.0  # seconds between scrapes
MINUTES = 12

# Coding agents on vLLM 0.33: sessions are parked during tool calls, evicted, and prefilled again
AGENT: Mapping[str, Value] = {
    "running": 2.0, "waiting": 0.0, "kv": 0.33, "capacity": 667_000.0, "finished": 0.1, "length": 110_000.0,
    "output": 400.0, "prompt": 11_000.0, "generated": 40.0, "hits": 0.04, "computed": 10_560.0, "prefill": 7.0,
    "inference": 17.0, "token": 0.02,
}  # fmt: skip


def events(again: float = 0.0, *gain: float) -> Mapping[str, Value]:
    """Tokens per second of blocks stored again, and what 1.5, 2, 4 and 8 times the memory would keep."""
    kept = zip(("1.5", "2", "4", "8"), gain or (0.0,) * 4, strict=True)
    ages = {"kv_again_age": again * 40, "kv_again_gap": again * 60}
    return {"kv_seen": 1.0, "kv_again": again, **ages, **{f"kv_gain:{factor}": value for factor, value in kept}}


# Of blocks that were stored, nearly all had been there before; four times the memory would have kept them
LOST = events(9_500.0, 300.0, 2_200.0, 9_000.0, 9_400.0)
RESIDENCY: Mapping[str, Value] = {"idle": 40.0, "gap": 39.0}  # reused up to the age at which blocks are evicted

CALM: Mapping[str, Value] = {
    "running": 5.0, "waiting": 0.0, "kv": 0.3, "capacity": 400_000.0, "finished": 1.0, "generated": 200.0,
    "prompt": 500.0, "hits": 0.0, "prefill": 0.2, "inference": 5.0, "token": 0.02,
}  # fmt: skip
NEVER_REPEATED: Mapping[str, Mapping[str, Value]] = {
    "single questions": {},
    "labels": {"output": 3.0, "generated": 60.0, "finished": 20.0, "prompt": 9_000.0, "length": 450.0},
    "translation": {"length": 900.0, "output": 1_000.0, "generated": 1_000.0, "prompt": 900.0},
    "reasoning": {"output": 6_000.0, "generated": 1_800.0, "finished": 0.3, "prompt": 300.0, "inference": 120.0},
    "completion": {"finished": 15.0, "length": 2_000.0, "output": 20.0, "prompt": 30_000.0},
    "retrieval": {"length": 8_000.0, "prompt": 8_000.0, "prefill": 0.8},
    "shared instructions": {"length": 1_500.0, "prompt": 1_500.0, "hits": 0.3},
    "summaries": {"length": 30_000.0, "finished": 0.3, "prompt": 9_000.0, "prefill": 2.4},
    "batch at night": {"running": 60.0, "kv": 0.7, "finished": 8.0, "generated": 3_000.0, "prompt": 6_000.0},
    "one user": {"running": 1.0, "kv": 0.02, "finished": 0.05, "generated": 30.0, "prompt": 60.0},
}


def falling(before: float, then: float) -> Value:
    """From one value to the other in the third quarter of the time, as more sessions come than the cache holds."""
    return lambda i: before + (then - before) * min(1.0, max(0.0, (i * STEP / 60 - 6) / 3))


def played(minutes: int = MINUTES, **values: Value) -> Played:
    return play(round(minutes * 60 / STEP), step=STEP, **values)


@pytest.mark.parametrize("name", NEVER_REPEATED)
@pytest.mark.parametrize("seen", [events(), {}], ids=["with events", "without"])
def test_a_workload_that_never_repeats_a_prompt_is_healthy(name, seen):
    said = played(**{**CALM, **NEVER_REPEATED[name], **seen})
    assert (said.verdict, said.confidence >= CONFIDENT) == ("healthy", True)


SITUATIONS: Mapping[str, tuple[Mapping[str, Value], str, str | None]] = {
    "sessions lost, by events": (LOST, "kv_pressure", "reuse"),
    "hits were high before": (
        {"hits": falling(0.9, 0.04), "computed": falling(1_100.0, 10_560.0), "prefill": falling(0.7, 7.0)},
        "kv_pressure",
        "reuse",
    ),
    "reuse up to the age of eviction": (RESIDENCY, "kv_pressure", "reuse"),
    "nothing says whether prompts repeat": ({}, "unknown", None),
    "long documents, nothing in common": ({"hits": 0.0, "computed": 11_000.0}, "healthy", None),
    "long documents, by events": (events(), "healthy", None),
    "sessions that fit": ({**events(), "hits": 0.95, "computed": 550.0, "prefill": 0.4}, "healthy", None),
    "lost, and nobody is harmed": (
        {**CALM, "computed": 500.0, **events(400.0, 50.0, 300.0, 390.0, 400.0)},
        "healthy",
        None,
    ),
    "a tenth is computed again": (events(1_000.0, 100.0, 500.0, 900.0, 1_000.0), "healthy", None),
    "prefill saturates the GPU": (
        {**LOST, "running": 4.0, "waiting": 6.0, "kv": 0.6, "queue": 20.0, "prefill": 12.0},
        "kv_pressure",
        "reuse",
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_reuse_that_is_lost_is_kv_pressure(name):
    values, verdict, stage = SITUATIONS[name]
    said = played(**{**AGENT, **values})
    assert (said.verdict, said.last.stage) == (verdict, stage)
    assert verdict != "unknown" or said.confidence < CONFIDENT


def test_the_plan_says_what_more_memory_gives_and_lowers_no_limit():
    said = played(**{**AGENT, **LOST}, args=("--max-num-seqs", "256", "--gpu-memory-utilization", "0.85")).states[-1]
    more, routing, _ = plan(said, builtin()).actions
    assert "now 4 %, with more KV memory (predicted) 1.5 ×: 7 %, 2 ×: 24 %, 4 ×: 86 %, 8 ×: 89 %" in more.text
    assert "2 668 000 tokens (4 ×)" in more.text
    assert "--gpu-memory-utilization (now 0.85)" in more.text
    assert "replica" in routing.title
    pool = replace(said, signals=replace(said.signals, memory=MemorySignals(kv_pool_bytes=40 * 2**30)))
    assert "a KV tier in host memory of 120 GiB for each GPU (hit ratio 86 %)" in plan(pool, builtin()).actions[0].text
    assert {limit.recommended for limit in said.limits.values()} == {None}
    assert explained(said, builtin()).cause.startswith("prompts are computed again")
    assert said.diagnosis.published["reuse_lost"] is True
    assert said.diagnosis.published["kv_pressure"] is False, "InferenceKVCachePressure has another first action"


@pytest.mark.parametrize(
    "args",
    [
        ("--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}'),
        ("--kv-offloading-size", "40", "--kv-offloading-backend", "lmcache"),
    ],
    ids=["decode", "tier"],
)
def test_what_may_have_been_loaded_was_not_lost(args):
    said = played(**{**AGENT, **LOST}, args=args).states[-1]
    assert said.diagnosis.holds("prefill_repeated") is None
    assert said.signals.kv.prefix_hit_ratio.keys() == {"1"}


@pytest.mark.parametrize(
    ("complete", "why"),
    [
        ({}, "no KV events are read"),
        ({"gap": 0.0}, "KV events are incomplete (gap)"),
        ({"": 1.0}, "too few blocks were evicted so far, or some come from a tier"),
    ],
)
def test_what_more_memory_gives_is_unknown_for_a_reason(complete, why):
    said = played(**{**AGENT, **RESIDENCY}, args=("--max-num-seqs", "256")).states[-1]
    said = replace(said, signals=replace(said.signals, cache=CacheSignals(events_complete=complete)))
    assert f"with more KV memory unknown, because {why}" in plan(said, builtin()).actions[0].text
    answers = [answer for step in steps(said, State(1.0, engines=(said,)), builtin()) for answer in step.answers]
    assert any(why in answer for answer in answers) == ("gap" in complete)


def test_seconds_without_events_do_not_count():
    quiet = {name: lambda i, rate=rate: 0.0 if 9 * 60 <= i * STEP < 10 * 60 else rate for name, rate in LOST.items()}
    kv = played(**{**AGENT, **quiet}).states[-1].signals.kv
    assert kv.prefill_repeated_ratio == pytest.approx(0.9, abs=0.001)
    assert kv.prefix_hit_ratio["4"] == pytest.approx(0.858, abs=0.001)


def test_reuse_is_measured_and_predicted():
    kv = played(**{**AGENT, **LOST}).states[-1].signals.kv
    assert kv.prefix_hit_ratio == pytest.approx({"1": 0.04, "1.5": 0.067, "2": 0.24, "4": 0.858, "8": 0.895}, abs=0.001)
    assert kv.prefill_repeated_ratio == pytest.approx(0.9, abs=0.001)
    assert (kv.kv_working_set_tokens, kv.reuse_seconds) == (4 * 667_000, pytest.approx({"eviction": 40, "reuse": 100}))
    preempted = played(**{**AGENT, **LOST, "preemptions": 0.05}).states[-1].signals.kv
    assert preempted.prefill_repeated_ratio == pytest.approx((9_500 - 0.05 * 110_400) / 10_560, abs=0.01)
    assert preempted.prefix_hit_ratio["4"] == pytest.approx(0.04 + (9_000 - 0.05 * 110_400) / 11_000, abs=0.01)
    assert preempted.prefix_hit_ratio["2"] == pytest.approx(0.04, abs=0.001), "its blocks came back by preemption"
    assert played(**AGENT).states[-1].signals.kv.reuse_seconds_estimated == pytest.approx({"eviction": 42.2}, abs=0.5)
