"""Prompts that are computed without being counted: vLLM books a prompt at its first token."""

from __future__ import annotations

import pytest

from tests.diagnosis.servers import after, play

pytestmark = pytest.mark.slow


def test_a_prompt_that_starves_decoding_is_seen_by_its_blocks() -> None:
    """Two run and get 0.4 tokens/s for ten minutes, while usage rises by 0.08 % a second."""
    flow = {"generated": after(60, 25.0, 0.4), "prompt": after(60, 10.0, 0.0), "finished": after(60, 0.2, 0.0)}
    load = {"running": after(60, 1.0, 2.0), "waiting": 0.0, "kv": lambda second: 0.2 + max(0, second - 60) * 0.0008}
    said = play(660, args=("--max-num-seqs", "8"), gpus=(1.0,), **load, **flow)
    assert said.verdict == "compute_bound"
    assert said.said(100) == {"compute_bound"}


def test_long_prefills_from_the_first_minute_are_no_stall() -> None:
    """A prompt of 100 s every two minutes, three tokens each."""

    def turn(second: int) -> int:
        return second % 120

    said = play(
        600,
        args=("--max-num-seqs", "8"),
        gpus=(1.0,),
        running=lambda second: 1.0 if turn(second) < 103 else 0.0,
        waiting=0.0,
        kv=lambda second: 0.1 + min(turn(second), 100) * 0.005 if turn(second) < 103 else 0.0,
        generated=lambda second: 1.0 if 100 <= turn(second) < 103 else 0.0,
        prompt=lambda second: 50_000.0 if turn(second) == 100 else 0.0,
        finished=lambda second: 1.0 if turn(second) == 103 else 0.0,
    )
    assert "stalled" not in said.confidently()


def test_blocks_that_stop_rising_are_a_stall() -> None:
    flow = {"generated": after(60, 50.0, 0.0), "prompt": after(60, 50.0, 0.0), "finished": after(60, 0.5, 0.0)}
    load = {"running": 2.0, "waiting": 3.0, "kv": lambda second: 0.2 + min(second, 120) * 0.001}
    said = play(400, gpus=(1.0,), **load, **flow)
    assert said.confidently(200) == {"stalled"}
