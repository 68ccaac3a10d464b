"""Servers that show less, or something else, than a plain vLLM: what can be said is said, and nothing is made up."""

from __future__ import annotations

import pytest

from kvpressure.model import readings as r
from kvpressure.model.readings import EngineReading, Scrape, Snapshot
from kvpressure.pipeline.pipeline import Pipeline

FINISHED = r.FINISHED_PREFIX + "stop"


def observe(rows, args):
    """The last engine state after one page a second with the given values."""
    pipeline, state = Pipeline(), None
    gauges = (r.RUNNING, r.WAITING, r.KV_USAGE, r.WAITING_DEFERRED, r.WAITING_CAPACITY)
    for i, row in enumerate(rows):
        t = 1000.0 + i
        reading = EngineReading(
            "m",
            "0",
            {n: v for n, v in row.items() if n in gauges},
            {n: v for n, v in row.items() if n not in gauges},
        )
        page = Scrape("http://x/metrics", t, "n", "p", "vllm", args=args, engines=(reading,))
        state = pipeline.observe(Snapshot(t, pages=(page,)))
    return state.engines[0]


def rows(count=30, **rates):
    """Rows of gauges that stay and, by the names that end in ``_rate``, counters that grow by so much a second."""
    grow = {name.removesuffix("_rate"): rate for name, rate in rates.items() if name.endswith("_rate")}
    stay = {getattr(r, name.upper()): value for name, value in rates.items() if not name.endswith("_rate")}
    return [{**stay, **{COUNTERS[name]: rate * i for name, rate in grow.items()}} for i in range(count)]


COUNTERS = {"prompt": r.PROMPT_TOKENS, "generated": r.GENERATION_TOKENS, "finished": FINISHED}
EMBEDDING = {"running": 8, "waiting": 0, "kv_usage": 0.0, "prompt_rate": 4000, "generated_rate": 0, "finished_rate": 20}
PREFILL = {"prompt_rate": 20_000, "generated_rate": 5, "finished_rate": 5}
DECODE = {"running": 30, "waiting": 9, "generated_rate": 900}
LIMIT_256 = ("--max-num-seqs", "256")


@pytest.mark.parametrize(
    ("verdict", "args", "shown"),
    [
        ("kv_pressure", (), {"running": 30, "waiting": 12, "kv_usage": 0.99}),
        ("healthy", LIMIT_256, EMBEDDING),
        ("compute_bound", LIMIT_256, {"running": 4, "waiting": 20, "kv_usage": 0.3, **PREFILL}),
        ("kv_pressure", LIMIT_256, {**DECODE, "waiting_deferred": 1, "waiting_capacity": 8, "kv_usage": 0.99}),
        ("concurrency_limited", ("--max-num-seqs", "30"), {**DECODE, "kv_usage": 0.0}),
        ("unknown", (), {"finished_rate": 0}),
    ],
    ids=["gauges alone", "embeddings", "prefill only", "decode only, cache full", "kv usage not recorded", "no gauges"],
)
def test_the_verdict_on_a_server_that_shows_little(verdict, args, shown):
    assert observe(rows(**shown), args=args).diagnosis.verdict == verdict
