"""What alerts read beside conditions: true at the threshold, false below it, unknown without the number."""

from __future__ import annotations

from typing import Any

import pytest

from kvpressure.diagnosis.evaluate import Answer, Grade
from kvpressure.diagnosis.finding import Recent, View
from kvpressure.diagnosis.findings import Gathered, Values
from kvpressure.model.signals import BatchSignals, LatencySignals, LoadSignals, RequestSignals, Signals
from kvpressure.settings.thresholds import builtin

T = builtin()
FLOOR, OFTEN = T["ttft_floor_seconds"], T["latency_critical_ratio"]


def slow(p95: float, ratio: float | None, finished: float | None = 1.0, phase: str = "ttft") -> dict[str, Any]:
    """Signals of a phase with this p95 and this multiple of its baseline."""
    ratios = {} if ratio is None else {phase: ratio}
    latency = LatencySignals(baseline_ratios=ratios, slow_p95={phase: p95}, slow_ratios=ratios)
    return {"latency": latency, "requests": RequestSignals(requests_finished_per_second=finished)}


def waits(seconds: float | None, in_flight: float | None) -> dict[str, Any]:
    return {"requests": RequestSignals(wait_measured_seconds=seconds), "load": LoadSignals(in_flight=in_flight)}


def fails(ratio: float | None, finished: float | None = 1.0) -> dict[str, Any]:
    return {"requests": RequestSignals(requests_failed_ratio=ratio, requests_finished_per_second=finished)}


PRESSURE, DOUBTED = Answer("kv_pressure", Grade.LIKELY), Answer("kv_pressure", Grade.DOUBTFUL)
CASES = [
    ("ttft_high", slow(FLOOR, T["latency_multiplied_ratio"]), True),
    ("ttft_high", slow(FLOOR - 0.1, 9.0), False),
    ("ttft_high", slow(FLOOR, 1.9), False),
    ("ttft_high", slow(FLOOR, None), None),
    ("ttft_high", slow(FLOOR, 9.0, finished=0.0), None),
    ("ttft_very_high", slow(FLOOR, OFTEN), True),
    ("ttft_very_high", slow(FLOOR, OFTEN - 0.1), False),
    ("inter_token_high", slow(T["inter_token_floor_seconds"], 2.0, phase="inter_token"), True),
    ("queue_time_very_high", slow(T["ttft_floor_seconds"], 4.0, phase="queue"), True),
    ("ttft_always_slow", slow(FLOOR, None), True),
    ("ttft_always_slow", slow(FLOOR, 3.0), False),
    ("ttft_always_slow", slow(T["objective_ttft_seconds"], OFTEN), True),
    ("ttft_always_slow", slow(FLOOR, None, finished=None), None),
    ("ttft_always_slow", slow(60.0, None, phase="queue"), False),
    ("inter_token_always_slow", slow(T["inter_token_floor_seconds"], None, phase="inter_token"), True),
    ("inter_token_always_slow", slow(60.0, OFTEN, phase="inter_token"), False),
    ("inter_token_always_slow", slow(60.0, None), False),
    ("wait_too_long", waits(T["wait_page_seconds"], 1.0), True),
    ("wait_too_long", waits(T["wait_page_seconds"] - 1, 1.0), False),
    ("wait_too_long", waits(None, 0.0), False),
    ("wait_too_long", waits(None, 3.0), None),
    ("requests_failing", fails(T["rejected_warning_ratio"]), True),
    ("requests_failing", fails(None), False),
    ("requests_failing", fails(None, None), None),
    ("requests_failing_much", fails(T["rejected_warning_ratio"]), False),
    ("several_in_flight", {"load": LoadSignals(in_flight=T["batch_collapse_min_requests"])}, True),
    ("several_in_flight", {"load": LoadSignals(in_flight=1.0)}, False),
    ("several_in_flight", {}, None),
    ("batch_underused", {"batch": BatchSignals(batch_collapse_ratio=T["most_ratio"])}, True),
    ("batch_underused", {}, None),
]


def found(name: str, answer: Answer = PRESSURE, up: bool = True, **signals: Any) -> tuple[bool | None, str]:
    """The finding about an engine with these signals, and its sentence."""
    values = Values(View(Signals(time=0.0, **signals), Recent(()), T, 9))
    values["page_fresh"] = up
    values.fresh.answer = answer
    one = Gathered(values)[name]
    return one.value, one.text


@pytest.mark.parametrize(("name", "signals", "expected"), CASES)
def test_a_finding_holds_from_its_threshold_on(name: str, signals: dict[str, Any], expected: bool | None) -> None:
    value, text = found(name, **signals)
    assert value is expected
    assert (": unknown (" in text) == (expected is None)


def test_only_a_confident_verdict_that_asks_for_action_names_a_cause() -> None:
    causes = ("kv_pressure", "concurrency_limited", "compute_bound", "host_bound", "stalled")
    assert all(found("cause_named", Answer(verdict, Grade.LIKELY))[0] for verdict in causes)
    assert found("cause_named", DOUBTED)[0] is False
    assert not any(
        found("cause_named", Answer(verdict, Grade.CERTAIN))[0] for verdict in ("healthy", "idle", "unknown")
    )
    assert (found("verdict_confident")[0], found("verdict_confident", DOUBTED)[0]) == (True, False)


def test_nothing_is_said_from_a_page_that_is_stale() -> None:
    holding = [(name, signals) for name, signals, expected in CASES if expected]
    assert {found(name, up=False, **signals)[0] for name, signals in holding} == {None}
