"""Each page of ``fixtures/engine-pages`` holds the engines that its table says, with their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpressure.engines.registry import dialect
from kvpressure.model import readings as r
from kvpressure.model.readings import EngineReading, Scrape
from kvpressure.sources.scrape.scanner import parse_scrape

PAGES = Path(__file__).parents[1] / "fixtures" / "engine-pages"
EXPECTED: dict[str, dict[str, Any]] = yaml.safe_load((PAGES / "expected.yaml").read_text())
SGLANG = [
    name
    for name, page in EXPECTED.items()
    if "SGLang" in page["software"] and "engines" in page and name != "vllm-shim"
]


def scrape(name: str) -> Scrape:
    return parse_scrape((PAGES / f"{name}.prom").read_bytes(), target=name, time=0.0)


def read(engine: EngineReading, engines: int) -> dict[str, float | None]:
    """The values of the table; waiting holds the deferred ones too."""
    gauges, counters = engine.gauges, engine.counters
    deferred = gauges.get(r.WAITING_DEFERRED)
    return {
        "running": gauges.get(r.RUNNING),
        "waiting": gauges[r.WAITING] - (deferred or 0.0) if r.WAITING in gauges else None,
        "deferred": deferred or None,
        "kv_usage": gauges.get(r.KV_USAGE),
        "preemptions": counters.get(r.PREEMPTIONS),
        "prompt_tokens": counters.get(r.PROMPT_TOKENS),
        "generation_tokens": counters.get(r.GENERATION_TOKENS),
        "capacity_tokens": dialect(engine.dialect).capacity_tokens(engine, engines),
    }


def test_there_are_pages_of_sglang() -> None:
    assert len(SGLANG) == 9


@pytest.mark.parametrize("name", SGLANG)
def test_a_page_of_sglang_gives_its_engines(name: str) -> None:
    expected = EXPECTED[name]["engines"]
    page = scrape(name)
    assert page.error is None
    assert page.bad_lines == 0
    assert {engine.dialect for engine in page.engines} == {"sglang"}
    assert [engine.model_name for engine in page.engines] == [each["model_name"] for each in expected]
    for engine, wanted in zip(page.engines, expected, strict=True):
        found = read(engine, len(page.engines))
        values = {key: value for key, value in wanted.items() if key not in ("model_name", "identity")}
        assert {key: found[key] for key in values} == values
        for label, text in wanted["identity"].items():
            if label == "engine_type":
                assert page.flavour == text
            else:
                assert text in engine.engine.split("/")


def test_what_the_server_counts_for_all_ranks_is_no_rank_s() -> None:
    first, second = scrape("sglang-dp2").engines
    for engine in (first, second):
        assert r.PROMPT_TOKENS not in engine.counters
        assert r.TTFT not in engine.histograms
    assert (first.counters[r.GENERATION_TOKENS], second.counters[r.GENERATION_TOKENS]) == (90000.0, 9000.0)
    assert r.PREEMPTIONS not in second.counters


def test_tokens_of_streaming_and_other_requests_add_up() -> None:
    (engine,) = scrape("sglang-0.5.23").engines
    assert engine.counters[r.FINISHED_PREFIX + "any"] == 420.0


def test_a_prompt_token_counts_as_asked_of_the_cache_whether_it_was_there_or_not() -> None:
    (engine,) = scrape("sglang-0.5.9").engines
    counters = engine.counters
    assert (counters[r.PROMPT_TOKENS_COMPUTED], counters[r.PREFIX_HITS]) == (353100.0, 67200.0)
    assert counters[r.PREFIX_QUERIES] == 353100.0 + 67200.0
