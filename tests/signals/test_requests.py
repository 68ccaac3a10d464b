"""Requests that finish, fail or wait: rates over five minutes, against numbers worked by hand."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kvpressure.model import readings as r
from kvpressure.model.signals import LatencySignals, RequestSignals
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


def of(built: EngineWindow, times: LatencySignals | None = None) -> RequestSignals:
    return requests.request_signals(
        built, requests.finished_per_second(built), times or LatencySignals(), requests.Lost(), T
    )


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
        assert found({FINISHED: 0.0, name: 0.0}, {FINISHED: 300.0, name: 100.0}).requests_failed_ratio == 0.25

    @pytest.mark.parametrize("name", [REFUSED, HTTP_5XX, ERROR])
    def test_all_fail_where_none_finishes_also_without_a_counter_of_finished_ones(self, name: str) -> None:
        assert found({FINISHED: 7.0, name: 0.0}, {FINISHED: 7.0, name: 100.0}).requests_failed_ratio == 1.0
        assert found({name: 0.0}, {name: 100.0}).requests_failed_ratio == 1.0

    def test_counts_of_the_same_requests_are_not_added(self) -> None:
        first = {FINISHED: 0.0, ERROR: 0.0, HTTP_5XX: 0.0, REFUSED: 0.0}
        last = {FINISHED: 300.0, ERROR: 100.0, HTTP_5XX: 90.0, REFUSED: 10.0}
        assert found(first, last).requests_failed_ratio == 0.25

    def test_refusals_of_different_reasons_are_different_requests(self) -> None:
        full, tokens = REFUSED, r.REJECTED_PREFIX + "max_num_queued_tokens"
        last = {FINISHED: 300.0, full: 60.0, tokens: 40.0, HTTP_5XX: 90.0}
        assert found(dict.fromkeys(last, 0.0), last).requests_failed_ratio == 0.25

    def test_a_counter_that_appears_with_the_first_failure_counts_from_zero(self) -> None:
        assert found({FINISHED: 0.0}, {FINISHED: 300.0, REFUSED: 100.0}).requests_failed_ratio == 0.25

    def test_refusals_with_4xx_are_no_failures(self) -> None:
        assert found({FINISHED: 0.0, HTTP_4XX: 0.0}, {FINISHED: 1.0, HTTP_4XX: 900.0}).requests_failed_ratio is None

    @pytest.mark.parametrize(("factor", "known"), [(1.0, True), (0.99, False)])
    def test_fewer_than_the_least_rate_are_isolated_faults(self, factor: float, known: bool) -> None:
        failed = factor * T["failed_min_per_second"] * 300
        assert (found({ERROR: 0.0}, {ERROR: failed}).requests_failed_ratio is not None) is known


class TestSlow:
    @pytest.mark.parametrize(("factor", "phases"), [(1.0, {"ttft"}), (0.99, set())])
    def test_nothing_is_slow_where_too_few_finish_for_a_quantile(self, factor: float, phases: set[str]) -> None:
        few = window(every(300, [{FINISHED: 0.0}, {FINISHED: 300 * factor * ENOUGH}]))
        assert slow_phases(requests.finished_per_second(few), {"ttft": T["ttft_floor_seconds"]}, {}, T).keys() == phases

    def test_a_first_token_many_times_slower_than_usual_is_slow_below_its_floor(self) -> None:
        many, seconds = 1.0, T["objective_ttft_seconds"]
        assert seconds < T["ttft_floor_seconds"]
        multiple = T["latency_critical_ratio"]
        assert slow_phases(many, {"ttft": seconds}, {"ttft": multiple}, T) == {"ttft": seconds}
        assert slow_phases(many, {"ttft": seconds}, {"ttft": 0.99 * multiple}, T) == {}
        assert slow_phases(many, {"ttft": 0.99 * seconds}, {"ttft": multiple}, T) == {}
        assert slow_phases(many, {"queue": seconds}, {"queue": multiple, "ttft": multiple}, T) == {}


def queue(waiting: float, finished: float = 0.0, ticks: int = TICKS, since: int = 0) -> list[dict[str, float]]:
    """Ticks of five seconds with a queue from tick ``since`` on and so many finished at the last."""
    return [
        {r.RUNNING: 1.0, r.WAITING: waiting if tick >= since else 0.0, FINISHED: finished * (tick == ticks - 1)}
        for tick in range(ticks)
    ]


class TestWait:
    def test_where_nothing_finishes_it_is_the_queue_at_one_request_in_five_minutes(self) -> None:
        assert of(window(every(5, queue(4)))).wait("kv_pressure", False) == 1200

    @pytest.mark.parametrize(("factor", "seconds"), [(0.5, 4 / (0.5 * ENOUGH)), (1.0, None)])
    def test_it_follows_the_finish_rate_until_quantiles_are_reliable(self, factor: float, seconds: float) -> None:
        rows = every(5, queue(4, finished=300 * factor * ENOUGH))
        wait = of(window(rows)).wait_estimated_seconds
        assert wait == (None if seconds is None else pytest.approx(seconds))

    def test_the_longest_queue_of_five_minutes_counts(self) -> None:
        rows = queue(4)
        rows[-1][r.WAITING] = 0.0
        assert of(window(every(5, rows))).wait_estimated_seconds == 1200

    def test_it_needs_five_minutes_of_history(self) -> None:
        short = of(window(every(5, queue(4, ticks=TICKS - 1))))
        assert (short.wait_estimated_seconds, short.waited_before) == (None, None)

    def test_nobody_waits(self) -> None:
        none = of(window(every(5, queue(0))))
        assert (none.wait_estimated_seconds, none.waited_before) == (None, False)

    @pytest.mark.parametrize("verdict", ["stalled", "idle"])
    def test_no_estimate_where_the_queue_does_not_move(self, verdict: str) -> None:
        assert of(window(every(5, queue(4)))).wait(verdict, False) is None

    def test_no_estimate_from_frozen_gauges(self) -> None:
        still = of(window(every(5, queue(4))))
        assert still.wait("kv_pressure", True) is None
        assert still.wait("kv_pressure", None) == 1200

    def test_with_an_unknown_verdict_only_a_queue_of_five_minutes_counts(self) -> None:
        old, young = (of(window(every(5, queue(4, since=n)))) for n in (0, 1))
        assert (old.wait("unknown", False), young.wait("unknown", False)) == (1200, None)
        assert young.wait("kv_pressure", False) == 1200

    def test_without_a_baseline_the_slow_quantiles_are_the_wait_while_requests_wait(self) -> None:
        slow = LatencySignals(slow_p95={"ttft": 40.0, "queue": 35.0, "inter_token": 90.0})
        rows = queue(4, finished=300 * ENOUGH)
        many = window(every(5, rows))
        assert of(many, slow).wait("unknown", False) == 40
        for phase in ("ttft", "queue"):
            known = LatencySignals(slow_p95=slow.slow_p95, slow_ratios={phase: 3.0})
            assert of(many, known).wait("unknown", False) is None
        other = LatencySignals(slow_p95=slow.slow_p95, slow_ratios={"inter_token": 3.0})
        assert of(many, other).wait("unknown", False) == 40
        assert of(many, LatencySignals(slow_p95={"inter_token": 90.0})).wait("unknown", False) is None
        rows[-1][r.WAITING] = 0.0
        assert of(window(every(5, rows)), slow).wait("unknown", False) is None
