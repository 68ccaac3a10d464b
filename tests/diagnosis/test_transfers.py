"""Transfers of KV blocks between servers, and speculation: what is said of public threads, of pairs of pages
(``tests/fixtures/transfers``) and of situations (``tests/fixtures/kv-2026``), played as pages through the pipeline.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpressure.advice.mitigation import plan
from kvpressure.model import readings as r
from kvpressure.model.readings import EngineReading, Histogram, Scrape, Snapshot
from kvpressure.model.state import EngineState
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.recording.reader import Reader
from kvpressure.settings.thresholds import builtin
from kvpressure.sources.scrape.scanner import parse_scrape

pytestmark = pytest.mark.slow

FIXTURES = Path(__file__).parents[1] / "fixtures"
THREADS = yaml.safe_load((FIXTURES / "transfers" / "threads.yaml").read_text(encoding="utf-8"))
PAIRS = yaml.safe_load((FIXTURES / "transfers" / "pages.yaml").read_text(encoding="utf-8"))
SITUATIONS = yaml.load(  # labelled by somebody who had not seen the rules
    (FIXTURES / "kv-2026" / "situations.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader
)
COUNTED = re.compile(r"\w+_(total|sum|count|bucket)\b")
STEP = 5
T = builtin()


def pages(case: dict[str, Any]) -> Iterator[str]:
    """The page of a case's server, every few seconds."""
    totals = dict.fromkeys(case["page"], 0.0)
    server = case["server"]
    labels = 'model_name="m",engine="0"' if server == "vllm" else 'model_name="m"'
    for phase, seconds in enumerate(case["phases"]):
        for _ in range(0, seconds, STEP):
            for name, value in case["page"].items():
                now = value[phase] if isinstance(value, list) else value
                totals[name] = totals[name] + now * STEP if COUNTED.match(name) else now
            yield "".join(
                f"{server}:{name.rstrip('}')}{',' if '{' in name else '{'}{labels}}} {value}\n"
                for name, value in totals.items()
            )


def played(scrapes: Iterator[Scrape], words: str) -> list[EngineState]:
    """The states of the only engine of these pages."""
    pipeline, args = Pipeline(), tuple(words.split())
    return [
        pipeline.observe(Snapshot(page.time, pages=(replace(page, args=args, namespace="n", pod="p-0"),))).engines[0]
        for page in scrapes
    ]


def between(first: EngineReading, last: EngineReading, share: float) -> EngineReading:
    """A reading between two: counters and histograms as if all had risen evenly, gauges of the later one."""

    def mixed(before: float | None, after: float | None) -> float:
        return (before or 0.0) + share * ((after or 0.0) - (before or 0.0))

    def histogram(name: str, after: Histogram) -> Histogram:
        before = first.histograms.get(name, Histogram())
        counts = tuple(map(mixed, before.counts or [0.0] * len(after.counts), after.counts))
        return replace(after, counts=counts, sum=mixed(before.sum, after.sum), count=mixed(before.count, after.count))

    return replace(
        last,
        counters={name: mixed(first.counters.get(name), value) for name, value in last.counters.items()},
        histograms={name: histogram(name, value) for name, value in last.histograms.items()},
    )


def pair(path: str, healthy_seconds: float = 1800.0) -> Iterator[Scrape]:
    """Five minutes as they were on the whole up to the first page, then the minute to the second."""
    first, last = (
        parse_scrape(
            gzip.decompress((FIXTURES / path.format(at)).read_bytes()), target="http://a:8000/metrics", time=0.0
        )
        for at in ("t0", "t60")
    )
    (before,), (after,) = first.engines, last.engines
    start = between(before, before, 1.0)
    nothing = EngineReading(before.model_name, before.engine)
    for second in range(-300, 0, STEP):
        calm = between(nothing, start, 1.0 + second / healthy_seconds)
        yield replace(first, time=1000.0 + second, engines=(calm,))
    for second in range(0, 61, STEP):
        yield replace(last, time=1000.0 + second, engines=(between(before, after, second / 60),))


def said_of(case: dict[str, Any]) -> tuple[list[EngineState], int]:
    """The states, and from which on the last phase lasts."""
    if "pages" in case:
        return played(pair(case["pages"]), case["args"]), 300 // STEP
    scrapes = (
        parse_scrape(text, target="http://a:8000/metrics", time=1000.0 + STEP * i) for i, text in enumerate(pages(case))
    )
    return played(scrapes, case["args"]), sum(case["phases"][:-1]) // STEP


@pytest.mark.parametrize("case", [*THREADS, *PAIRS, *SITUATIONS], ids=lambda case: case["what"][:60])
def test_it_is_told_as_labelled(case: dict[str, Any]) -> None:
    states, begin = said_of(case)
    found, made = states[-1].diagnosis, plan(states[-1], T)
    values = {name: (found.beside.get(name) or found.evidence[name]).value for name in case.get("finding", ())}
    assert values == case.get("finding", {})
    assert found.verdict in case["right"], found.row
    for state in states[begin + 20 // STEP :]:
        if state.diagnosis.confidence >= T["confident"]:
            assert state.diagnosis.verdict not in case["wrong"], state.diagnosis.row
    text = [f"{action.title}. {action.text} {' '.join(action.flags)}" for action in made.actions]
    assert "act" not in case or re.search(case["act"], text[0], re.IGNORECASE), made
    assert "never" not in case or not re.search(case["never"], " ".join(text)), made


PUSH, PREFILL = THREADS[2], THREADS[0]


def changed(case: dict[str, Any], page: dict[str, Any], **rest: Any) -> dict[str, Any]:
    """The case with these samples; ``None`` takes one away."""
    samples = {name: value for name, value in (case["page"] | page).items() if value is not None}
    return case | rest | {"page": samples}


def test_a_server_that_tells_no_stages_is_named_too_and_alerts_after_a_bounded_time() -> None:
    """As vLLM before 0.32: all that waits is deferred."""
    untold = dict.fromkeys((name for name in PUSH["page"] if "fetch_by_stage" in name), None)
    states, begin = said_of(changed(PUSH, untold, phases=[240, 40, 200]))
    assert {state.diagnosis.verdict for state in states[begin + 10 :]} == {"transfer_bound"}
    assert states[-1].diagnosis.published["stuck"] is True


@pytest.mark.parametrize(
    ("page", "args", "verdict"),
    [
        ({"num_requests_running": [6, 4, 4]}, PUSH["args"], "stalled"),
        ({}, PUSH["args"].replace("NixlPushConnector", "OffloadingConnector").replace("consumer", "both"), "stalled"),
    ],
    ids=["what runs stands still too", "a tier, no peer"],
)
def test_a_standstill_that_no_peer_explains_is_one_of_the_engine(page, args, verdict) -> None:
    names = [name for name in PUSH["page"] if name.startswith("nixl")] if "Offloading" in args else []
    states, _ = said_of(changed(PUSH, page | dict.fromkeys(names), args=args, phases=[240, 40, 120]))
    assert states[-1].diagnosis.verdict == verdict


def test_what_is_counted_by_rank_is_told_by_request() -> None:
    states, _ = said_of(PREFILL)
    expired = states[-1].signals.transfers.leases_expired_ratio
    assert expired == pytest.approx(1.6 / 8 * 80 / 300, rel=0.1)


@pytest.mark.parametrize(("failed", "fails"), [(0.0, False), (0.011, True), (0.0099, False)])
def test_one_transfer_in_a_hundred_that_fails_is_a_finding(failed: float, fails: bool) -> None:
    page = {"nixl_num_failed_transfers_total": failed, "nixl_xfer_time_seconds_count": 1.0 - failed}
    states, _ = said_of(changed(PUSH, page, phases=[240]))
    assert states[-1].diagnosis.conditions["transfer_failing"] is fails
    assert states[-1].diagnosis.published["kv_transfers_failing"] is (True if fails else None)


def test_a_stage_is_a_transfer_and_mebibytes_become_bytes() -> None:
    stage = '{model_name="m",tp_rank="0",stage="prefill_transfer_kv_cache"}'
    parts = (("count", 9, stage), ("sum", 0.45, stage), ("sum", 7, stage.replace("transfer_kv_cache", "forward")))
    text = "".join(f"sglang:per_stage_req_latency_seconds_{part}{labels} {value}\n" for part, value, labels in parts)
    text += 'sglang:kv_transfer_total_mb_sum{model_name="m",tp_rank="0"} 64\n'
    (engine,) = parse_scrape(text, target="", time=0.0).engines
    assert engine.counters == {r.TRANSFERS: 9.0, r.TRANSFER_SECONDS: 0.45, r.TRANSFER_BYTES: 64 * 2.0**20}


def test_a_real_pair_tells_answers_that_may_be_wrong_and_a_peer_that_was_killed() -> None:
    pipeline, seen = Pipeline(), dict[str, list[EngineState]]()
    with Reader(FIXTURES / "transfers" / "nixl-pair-0.32.jsonl.gz") as recording:
        for snapshot in recording:
            for engine in pipeline.observe(snapshot).engines:
                seen.setdefault(engine.key.pod[-5:], []).append(engine)
    prefill, decode = seen["18100"], seen["18200"]
    suspect = [engine.diagnosis.conditions["answers_suspect"] for engine in prefill]
    assert list(dict.fromkeys(value for value in suspect if value is not None)) == [False, True]
    assert max(engine.signals.transfers.read_after_expiry or 0.0 for engine in prefill) == 6.0
    failing = [engine.diagnosis.conditions["transfer_failing"] for engine in decode]
    assert list(dict.fromkeys(value for value in failing if value is not None)) == [False, True]
    assert "kv_pressure" not in {engine.diagnosis.verdict for engine in (*prefill, *decode)}
