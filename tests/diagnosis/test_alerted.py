"""What alerts read beside conditions: true at the threshold, false below it, unknown without the number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvpressure.diagnosis.conditions import documented
from kvpressure.diagnosis.finding import FROZEN_ROWS, Recent, View
from kvpressure.diagnosis.findings import Gathered, Values
from kvpressure.diagnosis.logic import Answer, Grade
from kvpressure.model.signals import (
    BatchSignals,
    ComputeSignals,
    ContextSignals,
    LatencySignals,
    LoadSignals,
    MemorySignals,
    ProgressSignals,
    RequestSignals,
    Signals,
    ThroughputSignals,
    TransferSignals,
)
from kvpressure.settings.thresholds import builtin

T = builtin()
FLOOR, SEVERAL = T["ttft_floor_seconds"], T["batch_collapse_min_requests"]


def slow(p95: float, usual: float | None, finished: float | None = 1.0) -> dict[str, Any]:
    """Signals of an engine with this p95 to the first token, usually that."""
    latency = LatencySignals(ttft={"0.95": p95}, usual={} if usual is None else {"ttft": usual})
    return {"latency": latency, "requests": RequestSignals(requests_finished_per_second=finished)}


def waits(seconds: float | None, in_flight: float, before: bool = True) -> dict[str, Any]:
    wait = RequestSignals(wait_estimated_seconds=seconds, waited_before=before)
    return {"requests": wait, "load": LoadSignals(in_flight=in_flight)}


def loses(failed: float | None, more: float | None = None, finished: float | None = 1.0) -> dict[str, Any]:
    found = RequestSignals(failed_ratio=failed, abandoned_more_ratio=more, requests_finished_per_second=finished)
    return {"requests": found}


def without_progress(seconds: float, **more: Any) -> dict[str, Any]:
    stuck = ProgressSignals(work_present=True, seconds_without_progress=seconds, **more)
    return {"progress": stuck, "load": LoadSignals(waiting=64.0)}


def exchanges(**transfers: float) -> dict[str, Any]:
    """A decode server with these transfers."""
    return {"load": LoadSignals(has_peer=True, kv_role="kv_consumer"), "transfers": TransferSignals(**transfers)}


NO_FAULT = dict.fromkeys(
    ("transfers_failed_ratio", "leases_expired_ratio", "loads_stuck_seconds", "prompts_computed_ratio"), 0.0
)


def drafts(a_step: float | None, usual: float | None) -> dict[str, Any]:
    """Speculative decoding with so many output tokens a step, and usually so many accepted drafts."""
    flow = ThroughputSignals(speculates=True, step_output_tokens=a_step, drafts_accepted_usual=usual)
    return {"throughput": flow}


MINUTES = 2 * T["prefill_patience_seconds"] - T["alert_page_for_seconds"]  # the alert waits for the rest
LONG = T["alert_ticket_for_seconds"] - T["alert_page_for_seconds"]
PRESSURE, DOUBTED = Answer("kv_pressure", Grade.LIKELY), Answer("kv_pressure", Grade.DOUBTFUL)
CASES = [
    ("slow", slow(FLOOR, FLOOR / 2), True),
    ("slow", slow(FLOOR, FLOOR), False),
    ("slow", slow(FLOOR, None), True),
    ("slow", slow(FLOOR, 0.1, finished=0.0), None),
    ("slow_badly", slow(FLOOR, FLOOR / 4), True),
    ("slow_badly", slow(FLOOR, FLOOR / 2), False),
    ("slow_badly", slow(FLOOR, None, finished=None), None),
    ("slow_badly", waits(T["wait_page_seconds"], SEVERAL), True),
    ("slow_badly", waits(T["wait_page_seconds"] - 1, SEVERAL), None),
    ("slow_badly", waits(T["wait_page_seconds"], SEVERAL - 1), False),
    ("slow_badly", waits(None, 0.0), False),
    ("slow_badly", waits(None, 3.0), None),
    ("losing_requests", loses(T["rejected_warning_ratio"]), True),
    ("losing_requests", loses(None, T["rejected_critical_ratio"]), True),
    ("losing_requests", loses(None), False),
    ("losing_requests", loses(None, None, None), None),
    ("losing_requests", loses(1.0, None, None), True),
    ("losing_requests_badly", loses(T["rejected_critical_ratio"]), True),
    ("losing_requests_badly", loses(0.05, 0.4), False),
    ("losing_requests_badly", loses(None, T["most_ratio"]), True),
    ("stuck", without_progress(MINUTES), True),
    ("stuck", without_progress(MINUTES - 1), False),
    ("stuck", {"progress": ProgressSignals(work_present=False)}, False),
    ("stuck", {}, None),
    ("transfer_slow", exchanges(transfer_slowdown=T["latency_multiplied_ratio"]), True),
    ("transfer_slow", exchanges(transfer_slowdown=1.99), False),
    ("transfer_slow", {}, None),
    ("answers_suspect", exchanges(read_after_expiry=1.0), True),
    ("answers_suspect", exchanges(read_after_expiry=0.0), False),
    ("answers_suspect", exchanges(), None),
    ("answers_suspect", {"load": LoadSignals(has_peer=False)}, False),
    ("kv_transfers_failing", exchanges(transfers_failed_ratio=T["rejected_warning_ratio"]), True),
    ("kv_transfers_failing", exchanges(leases_expired_ratio=T["rejected_warning_ratio"]), True),
    ("kv_transfers_failing", exchanges(loads_stuck_seconds=T["wait_page_seconds"]), True),
    ("kv_transfers_failing", exchanges(prompts_computed_ratio=T["most_ratio"]), True),
    ("kv_transfers_failing", exchanges(**NO_FAULT), False),
    ("kv_transfers_failing", exchanges(transfer_slowdown=9.0, **NO_FAULT), False),
    ("drafts_rejected", drafts(2.5, 2.25), True),
    ("drafts_rejected", drafts(2.51, 2.25), False),
    ("drafts_rejected", drafts(1.0, None), True),
    ("drafts_rejected", drafts(2.5, None), None),
    ("drafts_rejected", drafts(None, 2.25), None),
    ("drafts_rejected", {"throughput": ThroughputSignals(speculates=False)}, False),
]


def found(
    name: str, answer: Answer = PRESSURE, up: bool = True, stage: str | None = None, **signals: Any
) -> tuple[bool | None, str]:
    """The finding about an engine with these signals, and its sentence."""
    values = Values(View(Signals(time=0.0, **signals), Recent(()), T, 9))
    values["page_fresh"] = up
    values.fresh.answer, values.fresh.stage = answer, stage
    one = Gathered(values)[name]
    return one.value, one.text


@pytest.mark.parametrize(("name", "signals", "expected"), CASES)
def test_a_finding_holds_from_its_threshold_on(name: str, signals: dict[str, Any], expected: bool | None) -> None:
    value, text = found(name, **signals)
    assert value is expected
    assert (": unknown (" in text) == (expected is None)


def test_an_estimated_wait_counts_unless_the_queue_is_young_or_nobody_waits() -> None:
    """Sixty-four wait, none runs, stalled with confidence 0.6."""
    long, unknown = waits(T["wait_page_seconds"], 64.0), Answer("unknown", Grade.GUESS)
    assert found("slow_badly", Answer("stalled", Grade.DOUBTFUL), **long)[0] is True
    assert found("slow_badly", Answer("stalled", Grade.GUESS, FROZEN_ROWS[0]), **long)[0] is not True
    assert found("slow_badly", unknown, **long)[0] is True
    assert found("slow_badly", unknown, **waits(T["wait_page_seconds"], 64.0, before=False))[0] is None
    assert found("slow_badly", Answer("idle", Grade.LIKELY), **long)[0] is None


@pytest.mark.parametrize(
    ("answer", "more", "after"),
    [
        (Answer("stalled", Grade.DOUBTFUL, "No progress: queue of unknown cause"), {}, MINUTES),
        (Answer("kv_pressure", Grade.CERTAIN), {}, MINUTES),
        (Answer("unknown", Grade.GUESS, "Deferred requests: deferred"), {}, MINUTES),
        (Answer("stalled", Grade.STRONG), {"ever_produced": False}, MINUTES),  # kernels may be compiled
        # what explains it has a bound
        (Answer("unknown", Grade.GUESS, "No progress: long prefill, as usual here"), {}, LONG),
        (Answer("compute_bound", Grade.DOUBTFUL, "Long prefill: long prefill"), {}, LONG),
        (Answer("stalled", Grade.DOUBTFUL, FROZEN_ROWS[1]), {}, LONG),
        # it was told to, or no request is left
        (Answer("unknown", Grade.GUESS, "Asleep: paused"), {}, None),
        (Answer("unknown", Grade.GUESS, FROZEN_ROWS[0]), {}, None),
    ],
)
def test_requests_that_get_nothing_are_stuck_whatever_the_verdict(
    answer: Answer, more: dict[str, Any], after: float | None
) -> None:
    """Certainty decides how soon somebody is woken, not whether."""
    if after is None:
        assert found("stuck", answer, **without_progress(1e5, **more))[0] is None
        return
    assert found("stuck", answer, **without_progress(after, **more))[0] is True
    assert found("stuck", answer, **without_progress(after - 1, **more))[0] is False


def test_a_confident_stall_is_stuck_at_once() -> None:
    short = without_progress(T["stalled_seconds"])
    assert found("stuck", Answer("stalled", Grade.LIKELY), **short)[0] is True
    assert found("stuck", Answer("stalled", Grade.DOUBTFUL), **short)[0] is False


@pytest.mark.parametrize(
    ("stage", "harmful"),
    [("saturated", True), ("thrashing", True), ("failing", True), ("building", False), (None, False)],
)
def test_kv_pressure_is_a_ticket_above_the_stage_building(stage: str | None, harmful: bool) -> None:
    assert found("kv_pressure", DOUBTED, stage=stage)[0] is harmful


def documented_numbers(answer: Answer = DOUBTED, **signals: Any) -> dict[str, float]:
    """What alerts with a documented threshold read of an engine with these signals."""
    view = View(Signals(time=0.0, **signals), Recent(()), T, 9)
    view.answer = answer
    return documented(view)


def in_gpus(*demands: tuple[float, float | None]) -> MemorySignals:
    return MemorySignals(gpu_demands=demands)


QUEUE, LOADED = LoadSignals(waiting=1.0, in_flight=SEVERAL, concurrency_ratio=0.5), LoadSignals(in_flight=SEVERAL)
UNUSED = BatchSignals(batch_p95=2.0, batch_collapse_ratio=T["most_ratio"])
LEVEL = T["memory_critical_ratio"]
ALLOCATOR = MemorySignals(allocator_reserved_bytes=4e9, allocator_allocated_bytes=1e9)
DOCUMENTED = [
    ("concurrency", {"load": QUEUE}, 0.5),
    ("concurrency", {"load": replace(QUEUE, waiting=0.0)}, None),
    ("concurrency", {"load": replace(QUEUE, waiting=None)}, None),
    ("batch", {"load": LOADED, "batch": UNUSED}, 2.0),
    ("batch", {"load": replace(LOADED, in_flight=SEVERAL - 1), "batch": UNUSED}, None),
    ("batch", {"load": LOADED, "batch": replace(UNUSED, batch_collapse_ratio=T["most_ratio"] - 0.01)}, None),
    ("context", {"load": QUEUE, "context": ContextSignals(context_spike_ratio=9.0)}, 9.0),
    ("context", {"context": ContextSignals(context_spike_ratio=9.0)}, None),
    ("fragmentation", {"memory": ALLOCATOR}, 3e9),
    ("fragmentation", {"memory": replace(ALLOCATOR, allocator_inactive_split_bytes=0.0)}, None),
    ("memory_critical", {"memory": in_gpus((0.5, 0.2), (0.95, LEVEL - 0.01), (0.99, LEVEL))}, 0.95),
    ("memory_critical", {"memory": in_gpus((0.95, None))}, 0.95),
    ("memory_critical", {"memory": in_gpus((0.95, LEVEL))}, None),
    ("memory_warning", {"memory": in_gpus((0.95, T["memory_warning_ratio"]))}, None),
]


@pytest.mark.parametrize(("name", "signals", "expected"), DOCUMENTED)
def test_a_documented_number_counts_where_its_conditions_hold(
    name: str, signals: dict[str, Any], expected: float | None
) -> None:
    assert documented_numbers(**signals).get(name) == expected
    assert documented_numbers(PRESSURE, **signals) == {}  # its own alert says more
    assert documented_numbers(Answer("healthy", Grade.CERTAIN), **signals).get(name) == expected


def test_the_documented_signature_counts_under_load_while_the_verdict_is_in_doubt() -> None:
    met = {
        "memory": MemorySignals(device_used_ratio=0.95),
        "compute": ComputeSignals(gpu_utilization=0.1),
        "batch": BatchSignals(batch_p95=1.0),
        "progress": ProgressSignals(work_present=True),
    }
    assert "signature" in documented_numbers(load=LOADED, **met)
    assert "signature" not in documented_numbers(load=replace(LOADED, in_flight=1.0), **met)
    assert "signature" not in documented_numbers(Answer("healthy", Grade.LIKELY), load=LOADED, **met)
    assert "signature" not in documented_numbers(load=LOADED, **{**met, "batch": BatchSignals(batch_p95=9.0)})


def test_nothing_is_said_from_a_page_that_is_stale() -> None:
    holding = [(name, signals) for name, signals, expected in CASES if expected]
    assert {found(name, up=False, **signals)[0] for name, signals in holding} == {None}
