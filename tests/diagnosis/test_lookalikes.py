"""Servers that look like something else: what may not be said of them with confidence, and what is said instead."""

from __future__ import annotations

import pytest

from diagnosis.servers import CONFIDENT, LIMIT, after, cycle, play

FULL = {"kv": cycle(0.98, 0.99, 0.985), "generated": 600.0, "prompt": 600.0, "finished": 1.0}


def test_requests_swapped_to_the_host_wait():
    """A request that V0 swaps out is not in the waiting gauge."""
    said = play(40, running=cycle(60, 62, 66), waiting=0.0, swapped=20.0, deferred=None, preemptions=2.0, **FULL)
    assert said.verdict == "kv_pressure"
    assert said.confidence >= CONFIDENT
    assert "healthy" not in said.confidently(5)


def test_requests_that_are_pushed_out_and_come_back_at_once_are_no_health():
    """The queue is empty in every sample, because what is preempted is let in again within a second."""
    said = play(60, running=cycle(40, 41, 42), waiting=0.0, preemptions=3.0, **FULL)
    assert (said.verdict, said.last.stage) == ("kv_pressure", "thrashing")
    assert said.confidently(5) <= {"kv_pressure"}


def test_preemptions_of_a_while_ago_without_a_queue_are_not_pressure():
    said = play(60, running=40.0, waiting=0.0, preemptions=after(20, 3.0, 0.0), **FULL | {"kv": after(20, 0.98, 0.5)})
    assert said.verdict == "healthy"
    said = play(45, running=40.0, waiting=0.0, preemptions=after(20, 3.0, 0.0), **FULL)
    assert said.verdict == "healthy"
    assert said.confidence < CONFIDENT, "the cache is still full"


@pytest.mark.parametrize(("args", "cards", "prompt"), [(LIMIT, (0.95,), 3000.0), (LIMIT, (0.5,), 800.0), ((), (0.5,), 800.0),
                                                       (("--max-num-seqs", "6"), (0.95,), 3000.0)])
def test_a_queue_that_is_all_deferred_is_neither_the_limit_nor_the_gpu(args, cards, prompt):
    """All LoRA slots are taken: six run, ten wait, and the rest of the machine has nothing to do with it."""
    said = play(60, args=args, cards=cards, running=6.0, waiting=10.0, deferred=10.0, kv=0.3, generated=300.0, prompt=prompt,
                finished=2.0, queue=3.0)
    assert said.verdict == "unknown"
    assert "deferred" in said.last.missing[0]
    assert not said.confidently(5)
    mixed = play(60, args=args, cards=(0.95,), running=6.0, waiting=10.0, deferred=4.0, kv=0.3, generated=300.0,
                 prompt=prompt, finished=2.0, queue=3.0)
    assert mixed.verdict != "unknown", "six others wait for something else"


@pytest.mark.parametrize("told", [{"computed": 450.0}, {"hits": 0.95}], ids=["counted", "by the hit ratio"])
def test_cached_prompts_take_no_prefill(told):
    """Chat with 95 % of its prompts in the prefix cache: 9 000 prompt tokens a second, of which 450 are computed."""
    cached = {"running": cycle(16, 17, 18, 19), "waiting": 10.0, "kv": 0.4, "generated": 600.0, "prompt": 9000.0,
              "finished": 3.0, "length": 3000.0, "queue": 3.0, "deferred": None}
    said = play(60, cards=(0.7,), **cached, **told)
    assert said.last.evidence["prefill_dominates"].value is False
    assert "450 of the prompt's computed" in said.last.evidence["prefill_dominates"].text
    assert "compute_bound" not in said.said(5)
    assert play(60, cards=(0.7,), **cached).last.evidence["prefill_dominates"].value is True, "nothing is told of the cache"
