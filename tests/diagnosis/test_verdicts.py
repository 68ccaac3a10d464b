"""Verdicts, conditions, signature and advice: each rule at its boundary."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.advice import limits as advice
from kvpressure.diagnosis import conditions
from kvpressure.diagnosis.conditions import NAMES, Ahead, HeldCache
from kvpressure.diagnosis.diagnose import decide
from kvpressure.diagnosis.finding import Recent, View
from kvpressure.diagnosis.findings import ROWS, Gathered, Values
from kvpressure.diagnosis.logic import Answer, Grade
from kvpressure.diagnosis.rules import TABLES
from kvpressure.model.signals import Signals
from kvpressure.model.state import SIGNATURE_CONDITIONS, STAGES, STEP_TOKENS, VERDICTS
from kvpressure.settings.thresholds import builtin

T = builtin()


def signals(**values) -> Signals:
    """Signals with the given fields set, wherever they belong."""
    base = Signals(time=values.pop("time", 1000.0))
    groups = {}
    for name, value in values.items():
        if name in {item.name for item in fields(Signals)}:
            groups[name] = value
            continue
        owner = next(
            item.name
            for item in fields(Signals)
            if hasattr(getattr(base, item.name), "__dataclass_fields__")
            and name in getattr(base, item.name).__dataclass_fields__
        )
        groups[owner] = replace(groups.get(owner, getattr(base, owner)), **{name: value})
    return replace(base, **groups)


FLOWING = {
    "fresh_seconds": 0.0,
    "work_present": True,
    "tokens_flow": True,
    "tokens_recently": True,
    "seconds_without_progress": 0.0,
    "prompt_tokens_per_second": 100.0,
    "generation_tokens_per_second": 900.0,
}
PRESSURE = {
    **FLOWING,
    "running": 40.0,
    "waiting": 30.0,
    "in_flight": 70.0,
    "kv_used_ratio": 0.98,
    "kv_used_ratio_recent_max": 0.99,
    "kv_used_ratio_max": 0.99,
    "running_at_limit": False,
    "max_num_seqs": 256.0,
    "max_num_seqs_source": "args",
}


def judge(queue=None, samples=10, **values) -> Answer:
    s = signals(**values)
    waiting = [s.load.waiting] * samples if queue is None and s.load.waiting is not None else queue or []
    return decide(TABLES, Values(View(s, Recent(waiting), T, samples)))


@pytest.mark.parametrize(
    ("peak", "verdict"), [(0.97, "kv_pressure"), (0.9699, "kv_pressure"), (0.80, "kv_pressure"), (0.799, "unknown")]
)
def test_below_full_the_queue_alone_is_weaker_evidence(peak, verdict):
    found = judge(**PRESSURE | {"kv_used_ratio": peak, "kv_used_ratio_recent_max": peak})
    assert found.verdict == verdict
    assert (found.grade >= Grade.LIKELY) == (peak >= 0.97)


def test_reached_limit_with_a_full_cache_and_no_preemption_is_still_the_limit():
    """Scenario o of the live captures: max_num_seqs 8, usage climbs to 0.97, nothing is preempted."""
    found = judge(**PRESSURE | {"running_at_limit": True, "preemptions_counted": 0.0, "preemptions_inferred": 0.0})
    assert found.verdict == "concurrency_limited"


@pytest.mark.parametrize("source", ["args", "log", "default", "observed"])
def test_two_limits_at_once_are_both_said_and_neither_with_confidence(source):
    found = judge(**PRESSURE | {"running_at_limit": True, "max_num_seqs_source": source})
    if source == "observed":
        assert found.verdict == "kv_pressure", "nothing says that the limit is one"
        return
    assert (found.verdict, found.row) == ("concurrency_limited", "Concurrency limited: limit and cache reached at once")
    assert found.grade < Grade.LIKELY
    assert "do not raise it" in found.missing[0]
    pushed = {"max_num_seqs_source": source, "preemptions_counted": 9.0, "preemptions_recent": 9.0}
    assert judge(**PRESSURE | {"running_at_limit": True} | pushed).verdict == "kv_pressure"


def test_preemptions_alone_are_enough_when_nothing_else_is_recorded_but_not_with_confidence():
    found = judge(fresh_seconds=0.0, preemptions_counted=24.0)
    assert found.verdict == "kv_pressure"
    assert found.grade < Grade.LIKELY
    assert found.missing


@pytest.mark.parametrize(
    ("stuck", "verdict"), [(7.9, "healthy"), (8.0, "unknown"), (19.9, "unknown"), (20.0, "stalled")]
)
def test_no_progress_is_suspicious_first_and_a_stall_later(stuck, verdict):
    load = {"running": 4.0, "waiting": 0.0, "in_flight": 4.0}
    found = judge(**FLOWING | load | dict.fromkeys(("seconds_without_progress", "seconds_still"), stuck))
    assert found.verdict == verdict
    if verdict in ("unknown", "stalled"):
        assert found.inputs == ("GPU activity", "CPU use"), "what can be given"
    if verdict == "unknown":
        text, *inputs = found.missing
        assert tuple(inputs) == found.inputs
        assert "a verdict follows after {stalled_seconds} without progress" in text


def test_a_queue_in_less_than_half_of_the_samples_is_no_queue():
    few = PRESSURE | {"waiting": 2.0}
    found = judge(queue=[2, 0, 0, 0, 2], **few)
    assert (found.verdict, found.row) == ("kv_pressure", "KV pressure: full, some just began to wait")
    assert found.grade < Grade.LIKELY
    assert judge(queue=[2, 0, 0, 0, 2], **few | {"kv_used_ratio": 0.7}).verdict == "healthy"
    assert judge(queue=[2, 0, 0, 2, 2], **few).grade >= Grade.LIKELY


@pytest.mark.parametrize(("age", "verdict"), [(15.0, "kv_pressure"), (15.1, "unknown"), (None, "unknown")])
def test_old_numbers_describe_another_moment(age, verdict):
    found = judge(**PRESSURE | {"fresh_seconds": age})
    assert found.verdict == verdict
    if verdict == "unknown":
        assert found.grade is Grade.NOTHING
        assert found.missing


def test_unknown_says_what_is_missing():
    found = judge(fresh_seconds=0.0, samples=1)
    assert found.verdict == "unknown"
    assert "rates, which need a second scrape" in found.missing
    assert "KV usage" in found.missing


@pytest.mark.parametrize(("finished", "trickles"), [(5.0, False), (0.0, True), (None, True)])
def test_a_finished_request_counts_as_a_token_because_embeddings_generate_none(finished, trickles):
    load = signals(running=4.0, waiting=0.0, generation_tokens_per_running=0.0, finished_per_second=finished)
    assert Values(View(load, Recent([0.0]), T, 10))["tokens_trickle"] is trickles


RATIOS = ("kv_used_ratio", "kv_used_ratio_recent_max", "gpu_utilization", "cpu_used_ratio", "cpu_throttled_ratio")
MOST = {
    "waiting": 100,
    "running": 300,
    "fresh_seconds": 60,
    "seconds_without_progress": 300,
    "preemptions_counted": 1000,
}
FLAGS = ("work_present", "tokens_flow", "running_at_limit")
LEVELS = st.sampled_from(["profiling", "power", "utilization_weak", "none"])


@given(
    st.fixed_dictionaries(
        {
            name: st.none() | st.floats(0, most)
            for name, most in (dict.fromkeys((*RATIOS, "power_ratio"), 1) | MOST).items()
        }
        | {name: st.none() | st.booleans() for name in FLAGS}
        | {"activity_level": LEVELS}
    )
)
def test_whatever_is_missing_an_answer_comes_and_never_claims_pressure_without_evidence_of_it(values):
    found = judge(**values)
    assert found.verdict in VERDICTS
    waiting = [] if values["waiting"] is None else [values["waiting"]] * 10
    facts = Values(View(signals(**values), Recent(waiting), T, 10))
    assert not [name for name in found.supporting if facts[name] is None], "what is unknown is no evidence"
    said = Gathered(facts, tuple(ROWS)).values()
    texts = [(one.value, one.text) for one in said]
    assert not [text for value, text in texts if value is None and not re.search(r"unknown \(.+\)$", text)]
    assert not [text for value, text in texts if value is not None and re.search("unknown|, ,|: $", text)]
    assert found.stage is None or found.stage in STAGES
    assert found.verdict != "kv_pressure" or found.stage not in (None, STEP_TOKENS)
    if found.verdict == "kv_pressure":
        near_full = (values["kv_used_ratio_recent_max"] or 0) >= T["kv_near_full_ratio"]
        assert near_full or (values["preemptions_counted"] or 0) >= T["preemptions_min"]
    if found.grade is Grade.NOTHING:
        assert found.verdict == "unknown"


# --- conditions ---------------------------------------------------------------------------------------------


NO_SCRAPE = Answer("unknown", Grade.NOTHING)
KILLED = {"restarts": 1.0, "restarts_recent": None, "last_termination_reason": "OOMKilled", "last_exit_code": 137.0}


def evaluate(answer=None, held=None, utilization=None, **values):
    view = View(signals(**values), Recent([]), T, 10, utilization)
    view.held, view.answer = held, answer or Answer("healthy", Grade.STRONG)
    found = Values(view)
    found["page_fresh"] = True
    return {name: found[name] for name in NAMES}


@pytest.mark.parametrize(
    ("values", "name", "expected"),
    [
        ({"memory_used_ratio": 0.9}, "host_memory_near_limit", True),
        ({"memory_used_ratio": 0.899}, "host_memory_near_limit", False),
        (KILLED | {"restarts_recent": 1.0}, "host_oom_killed", True),
        (KILLED | {"restarts_recent": 0.0}, "host_oom_killed", False),
        (KILLED | {"restarts_recent": 1.0, "last_termination_reason": "Error"}, "host_oom_killed", False),
        ({"events": {"cuda_oom": 1}, "events_known": True}, "gpu_out_of_memory", True),
        ({"events": {}, "events_known": True}, "gpu_out_of_memory", False),
        ({"events": {}, "events_known": False}, "gpu_out_of_memory", None),
        ({"restarts": 3.0, "restarts_recent": 3.0}, "crash_loop", True),
        ({"restarts": 9.0, "restarts_recent": 2.0}, "crash_loop", False),
        ({"restarts": 9.0, "restarts_recent": 2.0, "restarts_all_known": False}, "crash_loop", None),
        ({"restarts": 9.0, "restarts_recent": 3.0, "restarts_all_known": False}, "crash_loop", True),
        ({"restarts": 9.0, "restarts_recent": None, "restarts_all_known": False}, "crash_loop", None),
        ({"restarts": 2.0, "restarts_recent": None, "restarts_all_known": False}, "crash_loop", False),
        (KILLED | {"restarts_all_known": False}, "host_oom_killed", None),
        (KILLED | {"terminated_seconds_ago": 1800.0}, "host_oom_killed", True),
        (KILLED | {"terminated_seconds_ago": 1801.0}, "host_oom_killed", False),
        ({"gpu_faults": 1}, "gpu_fault", True),
        ({"gpu_faults": 0}, "gpu_fault", False),
        ({"gpu_faults": 0, "kernel_faults": 1, "restarts_recent": 0.0, **FLOWING}, "gpu_fault", False),
        ({"gpu_faults": 0, "kernel_faults": 1, "restarts_recent": 1.0, **FLOWING}, "gpu_fault", True),
        ({"gpu_faults": 0, "kernel_faults": 1, "answer": NO_SCRAPE}, "gpu_fault", True),
        ({"gpu_faults": 0, "kernel_faults": 1, "answer": NO_SCRAPE, "gpus_of_others": True}, "gpu_fault", None),
        ({"gpu_faults": 0, "kernel_faults": 1, **FLOWING}, "gpu_fault", None),
        ({"gpu_faults": 0, "restarts_recent": 1.0, "answer": NO_SCRAPE}, "gpu_fault", False),
        ({"idle_growth_bytes_per_hour": 2.0**30}, "memory_leak_idle", True),
        ({"idle_growth_bytes_per_hour": 2.0**30 - 1}, "memory_leak_idle", False),
    ],
)
def test_conditions_at_their_boundaries(values, name, expected):
    assert evaluate(**values)[name] is expected


def test_baseline_is_too_high_only_above_the_configured_share():
    assert evaluate(utilization=0.9, own_used_ratio=0.97)["baseline_too_high"] is False
    assert evaluate(utilization=0.5, own_used_ratio=0.97)["baseline_too_high"] is True
    assert evaluate(utilization=0.92, own_used_ratio=0.95)["baseline_too_high"] is False
    assert evaluate(utilization=0.92, own_used_ratio=0.98)["baseline_too_high"] is False
    assert evaluate(utilization=0.92, own_used_ratio=0.981)["baseline_too_high"] is True, "reachable at vLLM's default"
    assert evaluate(utilization=0.98, own_used_ratio=0.99)["baseline_too_high"] is None


def test_cache_held_without_load_needs_two_idle_stretches():
    held = HeldCache()
    assert held.observe(0, 0.0, 0.4, T) is None
    assert held.observe(60, 0.0, 0.4, T) is None  # held once: the gauge may be left over
    assert held.observe(61, 5.0, 0.6, T) is None
    assert held.observe(70, 0.0, 0.4, T) is None
    assert held.observe(130, 0.0, 0.4, T) is True
    assert held.observe(140, 0.0, 0.0, T) is False


def test_a_gauge_that_still_moves_while_idle_is_not_left_over():
    """A KV connector keeps the blocks of finished requests: the engine still steps, and its gauge with it."""
    moving = HeldCache()
    said = [moving.observe(t, False, 0.4 + 0.001 * (t // 20), T) for t in range(0, 140, 10)]
    assert said[:6] == [None] * 6
    assert said[-1] is True
    late = HeldCache()
    assert [late.observe(t, False, 0.45 if t < 20 else 0.4, T) for t in range(0, 3600, 10)] == [None] * 360, (
        "the last step's value came late, and none after it"
    )
    assert moving.observe(150, True, 0.5, T) is None
    assert moving.observe(160, False, 0.4, T) is None, "again from the beginning"


def test_a_forecast_is_taken_back_only_well_above_its_threshold():
    """The forecast of a ramp that is not even swings around its threshold; one that never went below says nothing."""

    def said(forecasts: list[float | None], verdict: str = "healthy") -> list[bool | None]:
        ahead = Ahead()
        return [
            ahead.observe(signals(time=float(t), kv_used_ratio=0.8, kv_seconds_to_full=seconds), verdict, T)
            for t, seconds in enumerate(forecasts)
        ]

    assert said([50.0] * 12 + [90.0] * 9)[10:] == [True] * 11
    assert said([50.0] * 12 + [121.0])[-1] is False
    assert said([50.0] * 12 + [None, 90.0])[-2:] == [False, False]
    assert True not in said([90.0] * 60)
    assert True not in said([50.0] * 60, "kv_pressure")


# --- the documented signature -------------------------------------------------------------------------------

DOCUMENTED = {
    "work_present": True,
    "device_used_ratio": 0.92,
    "gpu_utilization": 0.35,
    "batch_p95": 1.0,
    "baseline_ratios": {"e2e": 3.0},
    "throughput_flat": True,
}


def test_the_signature_as_written():
    view = View(signals(**DOCUMENTED), Recent([]), T, 10)
    values = {row.name.removeprefix(conditions.PREFIX): row.find(view) for row in conditions.SIGNATURE}
    assert tuple(values) == SIGNATURE_CONDITIONS
    assert all(values.values())
    assert conditions.met(view) is True


@pytest.mark.parametrize(
    ("change", "name", "expected"),
    [
        ({"device_used_ratio": 0.85}, "gpu_memory_high", False),
        ({"device_used_ratio": 0.851}, "gpu_memory_high", True),
        ({"gpu_utilization": 0.6}, "gpu_utilization_low", False),
        ({"gpu_utilization": 0.599}, "gpu_utilization_low", True),
        ({"work_present": False}, "gpu_utilization_low", False),
        ({"gpu_utilization": None}, "gpu_utilization_low", None),
        ({"batch_p95": 2.0}, "batch_collapsed", True),
        ({"batch_p95": 3.0}, "batch_collapsed", False),
        ({"baseline_ratios": {}}, "latency_rising", None),
        ({"work_present": False}, "throughput_flat", False),
    ],
)
def test_each_documented_condition_at_its_boundary(change, name, expected):
    view = View(signals(**DOCUMENTED | change), Recent([]), T, 10)
    assert ROWS[f"{conditions.PREFIX}{name}"].find(view) is expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((True, True, False, False, None), None),
        ((True, False, False, False, None), False),
        ((None, None, True, True, True), True),
        ((None, None, False, False, True), None),
    ],
)
def test_met_is_most_of_five_whatever_the_unknown_ones_are(values, expected):
    assert conditions.most(values) is expected


# --- advice -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fits", "expected"), [(None, None), (24.9, None), (31.9, None), (32.1, 32), (47.9, 47), (60.1, 60), (200.0, 60)]
)
def test_a_limit_that_binds_is_raised_to_what_fits_and_to_twice_what_is_asked_for_at_most(fits, expected):
    """None where the smallest documented cut would undo it."""
    share = None if fits is None else 0.75 / fits
    known = {"kv_share_held": share, "kv_share_at_peak": share, "output_mean": 200.0, "in_flight": 30.0}
    assert advice.max_num_seqs(signals(max_num_seqs=24.0, **known), "concurrency_limited", T) == expected
    assert advice.max_num_seqs(signals(**known), "concurrency_limited", T) is None
    grows = {**known, "output_mean": None}
    assert advice.max_num_seqs(signals(max_num_seqs=24.0, **grows), "concurrency_limited", T) is None


@pytest.mark.parametrize(
    ("in_flight", "limit", "expected"), [(24.0, 64.0, 7), (24.0, None, 7), (6.0, 64.0, None), (24.0, 7.0, None)]
)
def test_a_larger_step_budget_comes_with_a_limit_to_what_fits(in_flight, limit, expected):
    """A real vLLM, 24 prompts of 600 to 900 tokens: with the budget alone, KV pressure was next."""
    s = signals(kv_share_held=0.1, kv_share_at_peak=0.1, output_mean=8.0, in_flight=in_flight, max_num_seqs=limit)
    assert advice.max_num_seqs(s, "concurrency_limited", T, "step_tokens") == expected


def test_less_device_memory_is_advised_only_when_allocations_fail():
    assert advice.gpu_memory_utilization(signals(), 0.92, False, "unknown", T) is None
    assert advice.gpu_memory_utilization(signals(), 0.92, True, "unknown", T) == 0.7
    assert advice.gpu_memory_utilization(signals(context_spike_ratio=3.0), 0.92, True, "unknown", T) == 0.6
    for burst, target in ((2.9, 0.7), (3.0, 0.6)):
        assert advice.gpu_memory_utilization(signals(arrival_burst_ratio=burst), 0.92, True, "unknown", T) == target
    assert advice.gpu_memory_utilization(signals(), 0.5, True, "unknown", T) is None


@pytest.mark.parametrize(
    ("share", "used", "target"),
    [
        (0.25, 0.25, 0.7),
        (0.25, 0.44, 0.7),
        (0.25, 0.46, None),
        (0.25, None, None),
        (0.7, 0.5, None),
        (None, 0.25, None),
    ],
)
def test_a_full_cache_gets_the_memory_that_no_program_on_the_gpu_uses(
    share: float | None, used: float | None, target: float | None
) -> None:
    known = signals(device_used_ratio=used)
    assert advice.gpu_memory_utilization(known, share, False, "kv_pressure", T) == target
    assert advice.gpu_memory_utilization(known, share, False, "healthy", T) is None


def followed(*steps: tuple[float, float | None, str]) -> list[float | None]:
    longest = advice.LongestRequest()
    return [longest.observe(t, tokens, verdict) for t, tokens, verdict in steps]


def test_the_longest_request_is_that_of_an_hour_and_an_incident_does_not_shorten_it():
    hour = 3600.0
    assert followed(
        (0.0, 9000.0, "healthy"), (60.0, 500.0, "healthy"), (hour, 500.0, "healthy"), (hour + 61.0, 500.0, "healthy")
    ) == [9000, 9000, 9000, 500], "calm: forgotten after an hour"
    assert followed(
        (0.0, 9000.0, "healthy"),
        (60.0, 500.0, "kv_pressure"),
        (hour + 61.0, None, "kv_pressure"),
        (hour + 62.0, 9500.0, "kv_pressure"),
        (hour + 70.0, 400.0, "stalled"),
        (2 * hour + 200.0, None, "unknown"),
        (2 * hour + 201.0, 300.0, "idle"),
    ) == [9000, 9000, 9000, 9500, 9500, 9500, 300], "not calm: held, and raised only"
