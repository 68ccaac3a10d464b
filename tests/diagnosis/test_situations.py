"""Situations as they would be told on the phone, each with the answer that ``docs/verdicts.md`` gives to who reads it.

The expected answers were written from the page, not from the program.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.diagnosis.servers import CONFIDENT, after, cycle, play

pytestmark = pytest.mark.slow

FLOW: dict[str, Any] = {"generated": 600.0, "prompt": 300.0, "finished": 2.0}
STOPPED: dict[str, Any] = {"generated": after(10, 600.0, 0.0), "prompt": 0.0, "finished": 0.0}
UNTHROTTLED = {"cpu_periods": lambda i: i * 10, "cpu_throttled_periods": lambda i: max(0, i - 60) * 9}

SITUATIONS: tuple[tuple[str, dict[str, Any], str, bool], ...] = (
    (
        "The cache is at 99 %, 40 of at most 256 requests run, and twelve have waited for seconds (question 8)",
        {"running": cycle(40, 41, 39), "waiting": 12.0, "kv": 0.99, "queue": 4.0, **FLOW},
        "kv_pressure",
        True,
    ),
    (
        "All 64 seats are taken, 30 wait, and the cache is at 60 % (question 9)",
        {
            "args": ("--max-num-seqs", "64"),
            "running": 64.0,
            "waiting": 30.0,
            "kv": 0.6,
            "queue": 8.0,
            "gpus": (0.7,),
            "length": 200.0,
            **FLOW,
            "prompt": 60.0,
        },
        "concurrency_limited",
        True,
    ),
    (
        "A queue at 40 % of the cache, ten of 256 run, nearly all tokens are prompts (question 11)",
        {
            "running": cycle(9, 10, 11),
            "waiting": 30.0,
            "kv": 0.4,
            "queue": 6.0,
            "gpus": (),
            "generated": 20.0,
            "prompt": 6000.0,
            "finished": 1.0,
        },
        "compute_bound",
        False,
    ),
    (
        "The CPU is throttled nine tenths of the time, and steps take five times as long (question 10)",
        {
            "running": cycle(4, 5, 6),
            "waiting": 0.0,
            "kv": 0.3,
            "gpus": (),
            "host": UNTHROTTLED,
            "seconds": 120,
            "token": after(60, 0.02, 0.1),
            "generated": after(60, 250.0, 50.0),
            "prompt": 100.0,
            "finished": 1.0,
        },
        "host_bound",
        True,
    ),
    (
        "Ten wait, and all ten are deferred (question 7)",
        {"running": 6.0, "waiting": 10.0, "deferred": 10.0, "kv": 0.3, "queue": 5.0, **FLOW},
        "unknown",
        False,
    ),
    (
        "Eight run and six wait, the GPU is busy, and nothing has come out for a minute (question 4)",
        {"running": 8.0, "waiting": after(12, 2.0, 6.0), "kv": 0.5, "gpus": (0.99,), "seconds": 90, **STOPPED},
        "stalled",
        True,
    ),
    (
        "Nothing runs or waits, and no token comes (question 6)",
        {"running": 0.0, "waiting": 0.0, "kv": 0.0, "generated": 0.0, "prompt": 0.0, "finished": 0.0},
        "idle",
        True,
    ),
    (
        "Nothing runs or waits by the gauges, and thousands of prompt tokens are looked up each second (question 5)",
        {
            "running": 0.0,
            "waiting": 0.0,
            "kv": 0.0,
            "generated": 0.0,
            "prompt": 0.0,
            "finished": 0.0,
            "queries": 5000.0,
        },
        "unknown",
        False,
    ),
    (
        "Tokens flow and nobody waits (question 12)",
        {"running": cycle(4, 5, 6), "waiting": 0.0, "kv": 0.3, **FLOW},
        "healthy",
        True,
    ),
    (
        "Tokens flow and nobody waits, but steps take two and a half times as long (question 12: not confident)",
        {
            "running": cycle(4, 5, 6),
            "waiting": 0.0,
            "kv": 0.3,
            "seconds": 100,
            "token": after(50, 0.02, 0.05),
            "generated": after(50, 250.0, 100.0),
            "prompt": 200.0,
            "finished": 1.0,
        },
        "healthy",
        False,
    ),
    (
        "All twelve seats are taken, the cache is at 99 %, and nobody is preempted: two limits at once (example)",
        {
            "args": ("--max-num-seqs", "12"),
            "running": 12.0,
            "waiting": 10.0,
            "kv": 0.99,
            "queue": 8.0,
            "gpus": (0.7,),
            **FLOW,
        },
        "concurrency_limited",
        False,
    ),
    (
        "The only scrape so far shows a full cache and a queue (one scrape is at most doubtful)",
        {"running": 40.0, "waiting": 12.0, "kv": 0.99, "queue": 4.0, "seconds": 1, **FLOW},
        "kv_pressure",
        False,
    ),
)


@pytest.mark.parametrize(("told", "server", "verdict", "confident"), SITUATIONS, ids=[one[0] for one in SITUATIONS])
def test_the_program_answers_what_a_reader_of_the_page_expects(
    told: str, server: dict[str, Any], verdict: str, confident: bool
) -> None:
    said = play(server.get("seconds", 60), **{name: value for name, value in server.items() if name != "seconds"})
    assert (said.verdict, said.confidence >= CONFIDENT) == (verdict, confident), told
