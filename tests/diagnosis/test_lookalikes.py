"""Servers that look like something else: what may not be said of them with confidence, and what is said instead."""

from __future__ import annotations

from diagnosis.servers import CONFIDENT, cycle, play

FULL = {"kv": cycle(0.98, 0.99, 0.985), "generated": 600.0, "prompt": 600.0, "finished": 1.0}


def test_requests_swapped_to_the_host_wait():
    """A request that V0 swaps out is not in the waiting gauge."""
    said = play(40, running=cycle(60, 62, 66), waiting=0.0, swapped=20.0, deferred=None, preemptions=2.0, **FULL)
    assert said.verdict == "kv_pressure"
    assert said.confidence >= CONFIDENT
    assert "healthy" not in said.confidently(5)
