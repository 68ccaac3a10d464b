"""What the table of a dialect can ask of the scanner beyond one series a value: sums, shared series,
repeated ranks, configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from kvpressure.engines import registry
from kvpressure.engines.base import EngineDialect, PageKind
from kvpressure.engines.series import Family, gauge, table
from kvpressure.model import readings as r
from kvpressure.model.readings import EngineReading, Scrape
from kvpressure.sources.scrape.scanner import parse_scrape

PAGE = """\
ranked_running{model_name="m",rank="0",worker="0",priority=""} 5
ranked_running{model_name="m",rank="0",worker="1",priority=""} 5
ranked_running{model_name="m",rank="0",worker="0",priority="high"} 3
ranked_running{model_name="m",rank="1",worker="2"} 7
ranked_prealloc{model_name="m",rank="0"} 2
ranked_transfer{model_name="m",rank="0"} 4
ranked_tokens_total{model_name="m",streaming="true"} 100
ranked_tokens_total{model_name="m",streaming="false"} 11
ranked_first_seconds_bucket{model_name="m",streaming="true",le="1.0"} 3
ranked_first_seconds_bucket{model_name="m",streaming="true",le="+Inf"} 4
ranked_first_seconds_sum{model_name="m",streaming="true"} 2.5
ranked_first_seconds_bucket{model_name="m",streaming="false",le="1.0"} 1
ranked_first_seconds_bucket{model_name="m",streaming="false",le="+Inf"} 1
ranked_first_seconds_sum{model_name="m",streaming="false"} 0.5
ranked_config_info{rank="1",pages="9",colour="red"} 1
"""


def identify(labels: Mapping[str, str]) -> tuple[str | None, str | None]:
    part = labels.get("priority", "") != ""  # the total has the empty one
    return None if part else labels.get("model_name"), labels.get("rank")


RANKED = EngineDialect(
    name="ranked",
    title="Ranked",
    samples=table(
        "ranked",
        (
            Family("gauge", ("running",), r.RUNNING, copies=("worker",)),
            Family("gauge", ("prealloc",), r.WAITING_DEFERRED, join="sum"),
            Family("gauge", ("transfer",), r.WAITING_DEFERRED, join="sum"),
            Family("counter", ("tokens",), r.GENERATION_TOKENS, per_model=True, join="sum", copies=("streaming",)),
            Family("histogram", ("first_seconds",), r.TTFT, per_model=True, join="sum", copies=("streaming",)),
            Family("config", ("config_info",)),
            gauge(r.KV_CAPACITY, "capacity"),
        ),
        ("ranked_",),
    ),
    identify=identify,
    config_labels=frozenset({"pages"}),
    page_kind=lambda _text, engines, _page: PageKind(f"{len(engines)} ranks"),
)
"""Repeats gauges by worker, splits by priority and streaming, and has counters of the server as a whole."""


@pytest.fixture
def ranked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``RANKED`` beside the dialects of the package."""
    tables = (registry.dialects, registry.samples, registry.log_words)
    monkeypatch.setitem(registry._WHERE, "ranked", f"{__name__}:RANKED")
    for made_once in tables:
        made_once.cache_clear()
    yield
    monkeypatch.undo()
    for made_once in tables:
        made_once.cache_clear()


def scrape(text: str = PAGE) -> Scrape:
    return parse_scrape(text, target="t", time=0.0)


def engines(text: str = PAGE) -> dict[str, EngineReading]:
    return {engine.engine: engine for engine in scrape(text).engines}


@pytest.mark.usefixtures("ranked")
def test_repeated_gauges_count_once_and_parts_of_a_total_not_at_all() -> None:
    assert {name: engine.gauges[r.RUNNING] for name, engine in engines().items()} == {"0": 5.0, "1": 7.0}


@pytest.mark.usefixtures("ranked")
def test_families_of_one_name_add_up() -> None:
    assert engines()["0"].gauges[r.WAITING_DEFERRED] == 6.0
    assert r.WAITING_DEFERRED not in engines()["1"].gauges


@pytest.mark.usefixtures("ranked")
def test_series_of_the_server_hold_for_every_engine_and_their_parts_add_up() -> None:
    for engine in engines().values():
        assert engine.counters[r.GENERATION_TOKENS] == 111.0
        first = engine.histograms[r.TTFT]
        assert (first.bounds, first.counts, first.sum, first.count) == ((1.0, float("inf")), (4.0, 5.0), 3.0, 5.0)


@pytest.mark.usefixtures("ranked")
def test_histograms_with_other_buckets_lose_their_buckets_and_nothing_else() -> None:
    first = engines(PAGE.replace('streaming="false",le="1.0"', 'streaming="false",le="2.0"'))["0"].histograms[r.TTFT]
    assert (first.bounds, first.counts, first.sum, first.count) == ((), (), 3.0, 5.0)


@pytest.mark.usefixtures("ranked")
def test_configuration_is_of_the_engine_it_names() -> None:
    assert engines()["1"].cache_config == {"pages": "9"}
    assert engines()["0"].cache_config == {}


@pytest.mark.usefixtures("ranked")
def test_the_page_is_described_by_its_dialect() -> None:
    assert (scrape().dialect, scrape().flavour) == ("ranked", "2 ranks")
    assert {engine.dialect for engine in scrape().engines} == {"ranked"}


def test_a_failed_page_keeps_what_discovery_took_the_server_for() -> None:
    assert parse_scrape(None, target="t", time=0.0, error="refused", dialect="vllm").dialect == "vllm"
    shown = parse_scrape('vllm:num_requests_running{model_name="m"} 1\n', target="t", time=0.0, dialect="other")
    assert shown.dialect == "vllm"
