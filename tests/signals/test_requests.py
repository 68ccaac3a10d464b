"""Requests that finish, fail or wait: rates over five minutes, against numbers worked by hand."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvpressure.model import readings as r
from kvpressure.model.signals import LatencySignals, LoadSignals, RequestSignals, Signals
from kvpressure.settings.thresholds import builtin
from kvpressure.signals import requests
from kvpressure.signals.requests import slow_phases
from kvpressure.signals.window import EngineWindow
from tests.signals.build import FINISHED, every, window

T = builtin()
LENGTH, ABORT, ERROR, ANY = (r.FINISHED_PREFIX + reason for reason in ("length", "abort", "error", "any"))
REFUSED, HTTP_4XX, HTTP_5XX = r.REJECTED_PREFIX + "queue_full", r.HTTP_PREFIX + "4xx", r.HTTP_PREFIX + "5xx"
ENOUGH = T["latency_min_finished_per_second"]
TICKS = 61  # five minutes of ticks of five seconds, both ends


def of(built: EngineWindow, usual: float | None = None) -> RequestSignals:
    lost = requests.Lost()
    return requests.request_signals(built, lost, requests.ended(built, lost), usual, T)


def found(*rows: Mapping[str, float]) -> RequestSignals:
    return of(window(every(300 / (len(rows) - 1), rows)))


class TestFinished:
    def test_it_counts_every_reason_but_abort_and_error(self) -> None:
        last = {FINISHED: 30.0, LENGTH: 60.0, ABORT: 900.0, ERROR: 900.0}
        assert found(dict.fromkeys(last, 0.0), last).requests_finished_per_second == pytest.approx(90 / 300)

    def test_an_engine_that_gives_no_reasons_counts_all(self) -> None:
        assert found({ANY: 0.0}, {ANY: 30.0}).requests_finished_per_second == pytest.approx(0.1)

    def test_it_is_unknown_where_nothing_is_counted_and_after_one_scrape(self) -> None:
        assert found({r.RUNNING: 1.0}, {r.RUNNING: 1.0}).requests_finished_per_second is None
        one = of(window(every(1, [{FINISHED: 7.0}])))
        assert one == RequestSignals()
        assert of(EngineWindow()) == RequestSignals()


class TestFailed:
    @pytest.mark.parametrize("name", [REFUSED, HTTP_5XX, ERROR])
    def test_each_kind_of_failure_counts_beside_what_finishes(self, name: str) -> None:
        assert found({FINISHED: 0.0, name: 0.0}, {FINISHED: 300.0, name: 100.0}).failed_ratio == 0.25

    @pytest.mark.parametrize("name", [REFUSED, HTTP_5XX, ERROR])
    def test_all_fail_where_none_finishes_also_without_a_counter_of_finished_ones(self, name: str) -> None:
        assert found({FINISHED: 7.0, name: 0.0}, {FINISHED: 7.0, name: 100.0}).failed_ratio == 1.0
        assert found({name: 0.0}, {name: 100.0}).failed_ratio == 1.0

    def test_counts_of_the_same_requests_are_not_added(self) -> None:
        first = {FINISHED: 0.0, ERROR: 0.0, HTTP_5XX: 0.0, REFUSED: 0.0}
        last = {FINISHED: 300.0, ERROR: 100.0, HTTP_5XX: 90.0, REFUSED: 10.0}
        assert found(first, last).failed_ratio == 0.25

    def test_refusals_of_different_reasons_are_different_requests(self) -> None:
        full, tokens = REFUSED, r.REJECTED_PREFIX + "max_num_queued_tokens"
        last = {FINISHED: 300.0, full: 60.0, tokens: 40.0, HTTP_5XX: 90.0}
        assert found(dict.fromkeys(last, 0.0), last).failed_ratio == 0.25

    def test_a_counter_that_appears_with_the_first_failure_counts_from_zero(self) -> None:
        assert found({FINISHED: 0.0}, {FINISHED: 300.0, REFUSED: 100.0}).failed_ratio == 0.25

    def test_refusals_with_4xx_are_no_failures(self) -> None:
        assert found({FINISHED: 0.0, HTTP_4XX: 0.0}, {FINISHED: 1.0, HTTP_4XX: 900.0}).failed_ratio is None

    @pytest.mark.parametrize(("factor", "known"), [(1.0, True), (0.99, False)])
    def test_fewer_than_the_least_rate_are_isolated_faults(self, factor: float, known: bool) -> None:
        failed = factor * T["failed_min_per_second"] * 300
        assert (found({ERROR: 0.0}, {ERROR: failed}).failed_ratio is not None) is known


class TestAbandoned:
    """Aborts of a server that counts clients that hang up: 100 of 400 requests."""

    def lost(self, usual: float | None, aborted: float = 100.0, waiting: float = 0.0) -> RequestSignals:
        rows = [{FINISHED: 0.0, r.WAITING: waiting}, {FINISHED: 300.0, ABORT: aborted, r.WAITING: waiting}]
        return of(window(every(300, rows)), usual)

    def test_those_above_the_usual_share_are_lost(self) -> None:
        assert self.lost(0.05).requests_lost_ratio == pytest.approx(0.2)
        assert self.lost(0.25).requests_lost_ratio is None

    def test_a_few_more_than_usual_are_chance(self) -> None:
        least = T["rejected_critical_ratio"]
        assert self.lost(0.25 - 1.01 * least).requests_lost_ratio == pytest.approx(1.01 * least)
        assert self.lost(0.25 - 0.99 * least).requests_lost_ratio is None

    def test_without_a_usual_share_they_count_only_while_requests_wait(self) -> None:
        assert self.lost(None).requests_lost_ratio is None
        assert self.lost(None, waiting=5.0).requests_lost_ratio == pytest.approx(0.25)

    def test_the_usual_share_is_not_learned_from_an_incident(self) -> None:
        baseline = requests.Baseline(T)
        for i in range(200):
            baseline.learn(30.0 * i, True, {}, None, {requests.ABANDONED: 0.02 if i < 6 else 0.87})
        assert baseline.value(requests.ABANDONED) == pytest.approx(0.02)


def latency(usual: float | None = None, finished: float = 1.0, waiting: float = 0.0, **p95: float) -> Signals:
    """One phase or several with this p95, all with the same baseline, and five requests in flight."""
    return Signals(
        0.0,
        latency=LatencySignals(
            usual={} if usual is None else dict.fromkeys(p95, usual),
            **{phase: {"0.95": seconds} for phase, seconds in p95.items()},
        ),
        requests=RequestSignals(requests_finished_per_second=finished),
        load=LoadSignals(waiting=waiting, in_flight=T["batch_collapse_min_requests"]),
    )


class TestSlow:
    OFTEN, TWICE = T["latency_critical_ratio"], T["latency_multiplied_ratio"]

    @pytest.mark.parametrize(("factor", "slow"), [(1.0, True), (0.99, False)])
    def test_nothing_is_slow_where_too_few_finish_for_a_quantile(self, factor: float, slow: bool) -> None:
        found = slow_phases(latency(finished=factor * ENOUGH, ttft=T["ttft_floor_seconds"]), T)
        assert bool(found) is slow

    @pytest.mark.parametrize(
        ("phase", "least"),
        [
            ("ttft", T["objective_ttft_seconds"]),
            ("inter_token", T["inter_token_floor_seconds"]),
            ("queue", T["ttft_floor_seconds"]),
            ("e2e", T["ttft_floor_seconds"]),
        ],
    )
    def test_a_phase_is_slow_at_twice_its_usual_value_and_its_floor(self, phase: str, least: float) -> None:
        assert slow_phases(latency(least / self.TWICE, **{phase: least}), T)
        assert slow_phases(latency(least / self.TWICE, **{phase: 0.99 * least}), T) == []
        assert slow_phases(latency(1.01 * least / self.TWICE, **{phase: least}), T) == []

    @pytest.mark.parametrize(
        ("phase", "least"),
        [("ttft", T["ttft_floor_seconds"]), ("inter_token", T["inter_token_floor_seconds"])],
    )
    def test_badly_at_four_times_and_the_floor_of_the_page(self, phase: str, least: float) -> None:
        (one,) = slow_phases(latency(least / self.OFTEN, **{phase: least}), T)
        assert one.badly
        assert not any(
            slow.badly for slow in slow_phases(latency(0.99 * least / self.OFTEN, **{phase: 0.99 * least}), T)
        )
        assert not any(slow.badly for slow in slow_phases(latency(1.01 * least / self.OFTEN, **{phase: least}), T))

    def test_whole_answers_are_a_ticket_at_most(self) -> None:
        (one,) = slow_phases(latency(1.0, e2e=100.0), T)
        assert (one.badly, one.multiple) == (False, 100.0)

    def test_the_queue_is_part_of_the_first_token(self) -> None:
        assert [slow.phase for slow in slow_phases(latency(0.01, ttft=41.0, queue=40.0), T)] == ["ttft"]

    def test_without_a_baseline_it_is_slow_from_its_floor_on(self) -> None:
        for phase, floor in (("ttft", "ttft_floor_seconds"), ("inter_token", "inter_token_floor_seconds")):
            assert slow_phases(latency(**{phase: T[floor]}), T)[0].usual is None
            assert slow_phases(latency(**{phase: 0.99 * T[floor]}), T) == []
        assert slow_phases(latency(e2e=60.0), T) == []

    def test_without_a_baseline_it_is_badly_slow_where_several_wait_long(self) -> None:
        long = T["wait_page_seconds"]
        assert slow_phases(latency(ttft=long, waiting=1.0), T)[0].badly
        assert not slow_phases(latency(ttft=long), T)[0].badly
        assert not slow_phases(latency(ttft=0.99 * long, waiting=1.0), T)[0].badly
        assert not slow_phases(latency(inter_token=long, waiting=1.0), T)[0].badly


def queue(waiting: float, finished: float = 0.0, ticks: int = TICKS, since: int = 0) -> list[dict[str, float]]:
    """Ticks of five seconds with a queue from tick ``since`` on and so many finished at the last."""
    return [
        {r.RUNNING: 1.0, r.WAITING: waiting if tick >= since else 0.0, FINISHED: finished * (tick == ticks - 1)}
        for tick in range(ticks)
    ]


class TestWait:
    def test_where_nothing_finishes_it_is_the_five_minutes_that_are_seen(self) -> None:
        assert of(window(every(5, queue(4)))).wait_estimated_seconds == 300

    @pytest.mark.parametrize(("factor", "seconds"), [(0.5, 4 / (0.5 * ENOUGH)), (1.0, None)])
    def test_it_follows_the_finish_rate_until_quantiles_are_reliable(self, factor: float, seconds: float) -> None:
        rows = every(5, queue(4, finished=300 * factor * ENOUGH))
        wait = of(window(rows)).wait_estimated_seconds
        assert wait == (None if seconds is None else pytest.approx(seconds))

    def test_the_longest_queue_of_five_minutes_counts(self) -> None:
        rows = queue(4)
        rows[-1][r.WAITING] = 0.0
        assert of(window(every(5, rows))).wait_estimated_seconds == 300

    def test_it_needs_five_minutes_of_history(self) -> None:
        short = of(window(every(5, queue(4, ticks=TICKS - 1))))
        assert (short.wait_estimated_seconds, short.waited_before) == (None, None)

    def test_nobody_waits(self) -> None:
        none = of(window(every(5, queue(0))))
        assert (none.wait_estimated_seconds, none.waited_before) == (None, False)
