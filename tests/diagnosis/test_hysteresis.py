"""The published verdict: how long it stands over what is found now."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.diagnosis.diagnose import VerdictHysteresis
from kvpressure.diagnosis.logic import Answer, Grade
from kvpressure.model.state import VERDICTS
from kvpressure.settings.thresholds import load
from tests.diagnosis.servers import play
from tests.recording.strategies import replayed

T = load(None)
APART = T["kv_recent_seconds"]


def published(course: list[tuple[float, str]]) -> list[str]:
    """What is published at each (time, verdict found)."""
    settled = VerdictHysteresis()
    return [settled.observe(t, Answer(verdict, Grade.STRONG), T).verdict for t, verdict in course]


@pytest.mark.parametrize(("apart", "at_once"), [(1, False), (APART, False), (APART + 0.1, True), (60, True)])
def test_samples_far_apart_need_no_second_one(apart: float, at_once: bool) -> None:
    found = published([(0, "idle"), (apart, "kv_pressure"), (2 * apart, "kv_pressure")])
    assert found == ["idle", "kv_pressure" if at_once else "idle", "kv_pressure"]


@given(st.lists(st.sampled_from(VERDICTS), min_size=1, max_size=60))
def test_a_verdict_found_for_sixteen_seconds_is_always_the_published_one(names: list[str]) -> None:
    assert published([*enumerate(names), *((1000 + t, "compute_bound") for t in range(17))])[-1] == "compute_bound"


def test_what_nobody_finds_any_more_does_not_stand_because_the_others_disagree() -> None:
    course = [(0.0, "healthy"), *((float(t), ("idle", "compute_bound")[t % 2]) for t in range(1, 13))]
    assert published(course)[int(APART)] == "healthy"
    assert published(course)[int(APART) + 1] != "healthy"


def test_pressure_with_a_queue_is_left_after_its_own_time_only() -> None:
    assert published([(0, "kv_pressure"), (APART + 1, "compute_bound")]) == ["kv_pressure", "kv_pressure"]
    assert published([(0, "kv_pressure"), (APART + 1, "idle")]) == ["kv_pressure", "idle"]


def test_a_row_that_is_not_found_any_more_gives_way() -> None:
    settled = VerdictHysteresis()
    rows = [
        settled.observe(
            t, Answer("kv_pressure", Grade.CERTAIN, row="KV pressure: full" if t else "KV pressure: a"), T
        ).row
        for t in range(20)
    ]
    assert rows.index("KV pressure: full") == T["recent_window_seconds"] + 1


def test_doubt_lasts_until_the_verdict_is_found_again() -> None:
    """A burst ends at a full cache: first nobody waits, then nothing is in flight, and pressure still stands."""
    settled = VerdictHysteresis()
    calm = Answer("healthy", Grade.STRONG, opposing=("kv_near_full", "waited_recently"))
    found = [
        Answer("kv_pressure", Grade.CERTAIN),
        calm,
        Answer("idle", Grade.STRONG),
        Answer("kv_pressure", Grade.CERTAIN),
    ]
    said = [settled.observe(float(t), answer, T) for t, answer in enumerate(found)]
    assert [answer.verdict for answer in said] == ["kv_pressure"] * 4
    assert [answer.grade for answer in said] == [Grade.CERTAIN, Grade.DOUBTFUL, Grade.DOUBTFUL, Grade.CERTAIN]


def test_an_engine_that_goes_on_is_not_called_stalled_with_confidence() -> None:
    settled = VerdictHysteresis()
    said = [
        settled.observe(t, Answer(found, Grade.STRONG), T) for t, found in enumerate(("stalled", "healthy", "stalled"))
    ]
    assert [(answer.verdict, answer.grade) for answer in said] == [
        ("stalled", Grade.STRONG),
        ("stalled", Grade.DOUBTFUL),
        ("stalled", Grade.STRONG),
    ]


def test_a_sample_that_comes_a_little_early_does_not_cost_another_second() -> None:
    """A real vLLM that was resumed: 2.9 s after the first page of it came the fourth."""
    assert published([(0, "healthy"), *((t, "compute_bound") for t in (1, 2, 3, 3.9))])[-1] == "compute_bound"


def test_a_clock_that_steps_back_publishes_nothing_early() -> None:
    assert published([(1000, "healthy"), (10, "idle")]) == ["healthy", "healthy"]


def test_unknown_is_not_found_sooner() -> None:
    assert published([(0, "healthy"), (APART + 1, "unknown"), (2 * APART + 2, "unknown")]) == [
        "healthy",
        "healthy",
        "unknown",
    ]


def test_what_no_longer_holds_speaks_against_a_verdict_that_is_held() -> None:
    """A stopped engine goes on: for some seconds it is still called stalled, and progress is no reason for that."""
    progress = "requests made progress in the last"
    said = (engine.diagnosis for state in replayed("vllm-cpu-fresh/engine-stopped") for engine in state.engines)
    found = [diagnosis for diagnosis in said if diagnosis.verdict == "stalled"]
    assert len(found) > 5
    assert not any(progress in " ".join(diagnosis.supporting) for diagnosis in found)
    assert any(progress in " ".join(diagnosis.opposing) for diagnosis in found)


@pytest.mark.slow
def test_a_queue_that_comes_and_goes_at_a_nearly_full_cache_is_one_verdict() -> None:
    """Usage 0.94 and 0.96, waiting 5 and 0, alternating every 10 s."""
    said = play(
        600,
        running=30.0,
        waiting=lambda second: 0.0 if second // 10 % 2 else 5.0,
        kv=lambda second: 0.96 if second // 10 % 2 else 0.94,
        generated=600.0,
        prompt=300.0,
        finished=2.0,
    )
    assert len([verdict for verdict, _ in groupby(s.diagnosis.verdict for s in said.states[20:])]) == 1
    assert "healthy" not in said.confidently()
