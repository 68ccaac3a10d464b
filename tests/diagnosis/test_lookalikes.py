"""Servers that look like something else: what may not be said of them with confidence, and what is said instead."""

from __future__ import annotations

from diagnosis.servers import CONFIDENT, after, cycle, play

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
