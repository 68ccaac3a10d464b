"""The one order of engines: who is in most trouble."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpressure.model.state import CALM, VERDICTS, Diagnosis, EngineState
from kvpressure.publish.collector import ORDER, fine, rank, trouble, worst_first
from tests.publish.states import full_engine, full_signals


def engine(
    verdict: str, waiting: float | None = 0, up: bool = True, conditions: tuple[str, ...] = (), pod: str = "chat-0"
) -> EngineState:
    signals = full_signals()
    signals = replace(signals, load=replace(signals.load, waiting=waiting))
    diagnosis = Diagnosis(verdict, 1.0, None, 0.0, conditions=dict.fromkeys(conditions, True))
    return replace(full_engine(pod), diagnosis=diagnosis, signals=signals, up=up)


def test_a_longer_queue_comes_first_and_a_worse_verdict_before_any_queue() -> None:
    worst = [
        engine("stalled", None),
        engine("kv_pressure", 1e9),
        engine("kv_pressure", 3),
        engine("kv_pressure", 2),
        engine("kv_pressure", 2, up=False),
        engine("host_bound", 1e9),
        engine("idle", 0),
        engine("of a later release", 0),
    ]
    assert sorted(worst, key=trouble, reverse=True) == worst
    assert len(set(map(trouble, worst))) == len(worst)


def test_trouble_is_the_rank_and_a_share_of_the_queue() -> None:
    assert [trouble(engine(verdict)) for verdict in reversed(ORDER)] == list(range(1, len(VERDICTS) + 1))
    assert trouble(engine("kv_pressure", 3)) == rank(engine("kv_pressure")) + 3 / 4
    assert trouble(engine("kv_pressure", None)) == trouble(engine("kv_pressure", 3, up=False)) == 8
    assert trouble(engine("of a later release")) == 0
    assert trouble(engine("idle", -1)) == 1, "a length that cannot be"


@pytest.mark.parametrize("verdict", VERDICTS)
def test_fine_is_a_calm_verdict_without_a_serious_condition(verdict: str) -> None:
    assert fine(engine(verdict)) is (verdict in CALM)
    assert fine(engine(verdict, conditions=("kv_exhaustion_ahead",))) is (verdict in CALM)
    assert not fine(engine(verdict, conditions=("gpu_fault",)))


def test_trouble_comes_before_all_that_is_fine() -> None:
    leaking = engine("idle", conditions=("memory_leak_idle",), pod="leaking")
    best_first = [engine("idle"), engine("healthy"), leaking, engine("unknown", up=False), engine("stalled")]
    assert sorted(best_first, key=worst_first) == best_first[::-1]


def test_equal_trouble_is_in_the_order_of_names() -> None:
    backwards = [engine("unknown", pod=name) for name in "cba"]
    assert sorted(backwards, key=worst_first) == backwards[::-1]
