"""How often an engine is asked: fast under load, seldom when calm, and never at much cost to it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.model import readings as r
from kvpressure.model.readings import EngineReading, Scrape
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.recording.reader import Reader
from kvpressure.sources.scrape.scrape_interval import (
    BUSY_SHARE,
    CALM_INTERVAL,
    CALM_SHARE,
    COST_PAGES,
    FAILING_INTERVAL,
    SLOWEST_INTERVAL,
    WORKING_INTERVAL,
    ScrapeInterval,
)

RECORDING = Path(__file__).parents[2] / "fixtures/recordings/vllm-cpu/d_kv_pressure.jsonl.gz"


def page(running=0.0, waiting=0.0, kv=0.0, tokens=None, cost=0.001, error=None, engine="0"):
    gauges = {r.RUNNING: running, r.WAITING: waiting, r.KV_USAGE: kv}
    counters = {} if tokens is None else {r.GENERATION_TOKENS: tokens}
    engines = () if error else (EngineReading("m", engine, gauges=gauges, counters=counters),)
    return Scrape("t", 0.0, engines=engines, error=error, duration_seconds=cost)


def fetches(pace, until, pages, start=0.0):
    """Ask every second from ``start``; the times at which a page was fetched."""
    times = []
    now = start
    while now < until:
        if pace.due(now):
            pace.started(now)
            pace.observe(pages(now), now)
            times.append(now)
        now += 1.0
    return times


def calm_pace():
    """A pace that has been calm since long."""
    pace = ScrapeInterval(1.0)
    fetches(pace, 100, lambda t: page(running=2, kv=0.1, tokens=t))
    return pace


class TestPace:
    def test_the_first_minute_is_fast_then_every_two_seconds(self) -> None:
        times = fetches(ScrapeInterval(1.0), 121, lambda t: page(running=2, kv=0.3, tokens=t))
        assert times[:60] == [float(t) for t in range(60)]
        assert {b - a for a, b in pairwise(times[60:])} == {CALM_INTERVAL}

    @pytest.mark.parametrize(
        "sign",
        [{"kv": 0.51}, {"waiting": 1}, {"running": 2, "tokens": 5}, {"running": 2, "kv": 0.51, "tokens": 300}],
        ids=["cache", "queue", "no tokens", "both"],
    )
    def test_a_sign_of_load_speeds_up_at_once_for_a_minute(self, sign) -> None:
        pace = calm_pace()
        loud = fetches(pace, 106, lambda _: page(**sign), 100.0)[-1]
        times = fetches(pace, 200, lambda t: page(running=2, kv=0.1, tokens=1000 + t), loud + 1)
        assert times[:59] == [loud + 1 + i for i in range(59)]
        assert times[-1] - times[-2] == CALM_INTERVAL

    def test_a_sign_that_the_next_page_does_not_confirm_speeds_up_for_a_look(self) -> None:
        times = fetches(calm_pace(), 140, lambda t: page(running=2, waiting=float(t == 105), tokens=1000 + t), 100.0)
        assert times == [101, 103, 105, 106, 107, 108, *range(110, 140, 2)]

    def test_a_cache_that_fills_within_a_minute_speeds_up_long_before_it_is_half_full(self) -> None:
        times = fetches(
            calm_pace(), 140, lambda t: page(running=8, kv=min(1.0, 0.1 + max(0.0, t - 104) * 0.02), tokens=t), 100.0
        )
        rising = [t for t in times if t > 106]
        assert {b - a for a, b in pairwise(rising)} == {1.0}
        slow = fetches(calm_pace(), 140, lambda t: page(running=8, kv=0.1 + max(0.0, t - 104) * 0.002, tokens=t), 100.0)
        assert {b - a for a, b in pairwise(slow)} == {CALM_INTERVAL}

    def test_every_engine_of_a_page_counts(self) -> None:
        pace = calm_pace()
        both = Scrape("t", 0.0, engines=(*page(kv=0.1).engines, *page(kv=0.9, engine="1").engines))
        pace.observe(both, 100.0)
        assert pace.interval(100.0) == 1.0

    def test_a_slower_interval_is_kept(self) -> None:
        pace = ScrapeInterval(10.0)
        assert pace.interval(0.0) == 10.0
        fetches(pace, 200, lambda t: page(running=2, tokens=t))
        assert pace.interval(200.0) == 10.0

    def test_a_page_that_is_cheap_to_get_and_dear_to_read_is_read_seldom(self) -> None:
        pace = ScrapeInterval(1.0)
        pace.due(0.0)
        for _ in range(5):
            pace.observe(page(cost=0.005, waiting=9.0), 1.0, scan_seconds=0.4)
        assert pace.interval(2.0) == SLOWEST_INTERVAL

    @given(st.lists(st.floats(0.0, 5.0), min_size=COST_PAGES, max_size=20), st.booleans(), st.booleans())
    def test_the_share_of_the_engines_time_is_bounded(self, costs, busy, works) -> None:
        pace = ScrapeInterval(1.0)
        pace.due(0.0)
        for cost in costs:
            pace.observe(page(cost=cost, kv=0.6 * busy, running=float(works)), 10.0)
        interval = pace.interval(11.0 if busy else 1000.0)
        cheapest = min(costs[-COST_PAGES:])
        share = BUSY_SHARE if busy else CALM_SHARE
        slowest = max(WORKING_INTERVAL, 1.0 if busy else CALM_INTERVAL) if works else SLOWEST_INTERVAL
        assert interval <= slowest
        assert cheapest / interval <= share * 1.0001 or interval == slowest

    @pytest.mark.parametrize("sign", [{"running": 12.0}, {"waiting": 12.0}], ids=["running", "waiting"])
    def test_slow_answers_of_a_loaded_server_leave_no_long_gap(self, sign) -> None:
        """Twelve running and twelve waiting requests make every answer late, the first one too."""
        times = fetches(ScrapeInterval(1.0), 300, lambda t: page(cost=0.8, tokens=t, **sign))
        assert times[:COST_PAGES] == [float(t) for t in range(COST_PAGES)]
        assert max(b - a for a, b in pairwise(times)) <= WORKING_INTERVAL
        busy = fetches(ScrapeInterval(1.0), 300, lambda t: page(cost=0.8, tokens=t, kv=0.9, **sign))
        assert max(b - a for a, b in pairwise(busy)) <= WORKING_INTERVAL

    def test_a_first_page_that_shows_no_request_is_followed_by_fast_ones_however_slow_it_was(self) -> None:
        times = fetches(ScrapeInterval(1.0), 60, lambda t: page(cost=2.0, running=8.0 * (t > 0), tokens=t))
        assert times[:COST_PAGES] == [float(t) for t in range(COST_PAGES)]
        idle = fetches(ScrapeInterval(1.0), 60, lambda _: page(cost=2.0))
        assert idle[COST_PAGES] - idle[COST_PAGES - 1] > CALM_INTERVAL, "a dear page with nothing to see"


def first_pressure(pace: ScrapeInterval | None) -> float:
    """Seconds into a recorded incident of a real vLLM at which the verdict is KV pressure, scraped at this pace."""
    pipeline = Pipeline()
    with Reader(RECORDING) as reader:
        begin = None
        for snapshot in reader:
            begin = snapshot.time if begin is None else begin
            asked = pace is None or pace.due(snapshot.time)
            pages = snapshot.pages if asked else ()
            for found in pages if pace is not None else ():
                pace.started(snapshot.time)
                pace.observe(found, snapshot.time)
            for engine in pipeline.observe(replace(snapshot, pages=pages)).engines:
                if engine.diagnosis.verdict == "kv_pressure" and engine.diagnosis.confidence >= 0.7:
                    return snapshot.time - begin
    raise AssertionError("never")


@pytest.mark.parametrize("since", [0, 3])
def test_pressure_is_found_hardly_later_than_by_asking_every_second(since: int) -> None:
    """``since``: seconds from the last page to the beginning of the incident."""
    with Reader(RECORDING) as reader:
        begin = next(iter(reader)).time
    calm = ScrapeInterval(1.0)
    fetches(calm, begin - since, lambda _: page(), begin - since - 121)
    assert calm.interval(begin) == CALM_INTERVAL
    assert first_pressure(calm) - first_pressure(None) <= CALM_INTERVAL


class TestFailing:
    @pytest.mark.fault(
        "engines",
        "engine not listening",
        "`engine_up` 0, its other series absent",
        '`target_errors_total{reason="refused"}`',
        "next successful scrape; a failing target is retried at least every 5 s",
    )
    def test_a_target_that_fails_is_asked_less_often_and_at_once_again_when_it_works(self) -> None:
        pace = ScrapeInterval(1.0)
        times = fetches(pace, 60, lambda _: page(error="refused"))
        assert times[:4] == [0, 1, 2, 4]
        assert {b - a for a, b in pairwise(times[6:])} == {FAILING_INTERVAL}
        assert FAILING_INTERVAL <= 5, "it is seen soon when it comes back"
        pace.observe(page(running=2, waiting=1), 60.0)
        assert pace.interval(60.0) == 1.0

    def test_one_or_two_failures_change_nothing(self) -> None:
        pace = ScrapeInterval(1.0)
        times = fetches(pace, 30, lambda t: page(tokens=t, running=1, error="timeout" if t % 3 else None))
        assert times == [float(t) for t in range(30)]
        calm = calm_pace()
        calm.observe(page(error="refused"), 100.0)
        assert calm.interval(100.0) == CALM_INTERVAL

    @pytest.mark.fault(
        "engines",
        "engine stopped (SIGSTOP), or killed and restarted",
        "as above; counters continue from their last values",
        '`target_errors_total{reason="timeout"}`, `"refused"`',
        "next successful scrape, retried every 5 s at least however slow it was",
    )
    def test_a_slow_engine_that_fails_is_seen_soon_when_it_comes_back(self) -> None:
        """Its answers took 0.6 s, so it was asked every 12 s; after a timeout it stayed down for as long."""
        pace = ScrapeInterval(1.0)
        fetches(pace, 100, lambda t: page(tokens=t, cost=0.6))
        assert pace.interval(100.0) == SLOWEST_INTERVAL
        pace.observe(page(error="timeout"), 100.0)
        assert pace.interval(100.0) == FAILING_INTERVAL

    @pytest.mark.attack("answers in tiny chunks that cost CPU and then fail", "at most 1.5 % of a core for each target")
    @pytest.mark.writer(
        "anyone who may start a pod on the node",
        "a scrape that costs CPU and then fails",
        "at most 1.5 % of a core for each target",
        "failed scrapes count towards the same CPU share, and failing targets are scraped less often",
    )
    def test_failures_that_cost_cpu_take_no_more_than_their_share(self) -> None:
        """Twenty-four pages of tiny chunks took two thirds of a core."""
        pace = ScrapeInterval(1.0)
        pace.due(0.0)
        pace.observe(page(error="too_large"), 0.0, scan_seconds=0.1)
        assert pace.interval(1.0) >= 0.1 / BUSY_SHARE


@pytest.mark.attack(
    "new engine names on every scrape", "one a minute after the first 64; those that left are forgotten"
)
def test_engines_that_left_the_page_are_forgotten() -> None:
    """600 pages of new names added 48 MiB."""
    pace = ScrapeInterval(1.0)
    for second in range(100):
        names = (EngineReading("m", f"{second}-{n}", {r.RUNNING: 1.0}, {r.GENERATION_TOKENS: 1.0}) for n in range(64))
        pace.observe(Scrape("t", 0.0, engines=tuple(names)), float(second))
    assert max(len(pace._peak), len(pace._tokens)) <= 64
