"""The limits of the scheduler other than the KV cache: the token budget of a step, ``max_num_seqs`` past the batch
size that gives the most tokens, and requests that it defers for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvpressure.advice.mitigation import MitigationPlan, plan
from kvpressure.cli import main
from kvpressure.diagnosis.finding import Recent, View
from kvpressure.diagnosis.findings import Values
from kvpressure.model.signals import LoadSignals, Signals
from kvpressure.model.state import STEP_TOKENS, EngineState
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.recording.reader import Reader
from kvpressure.settings.thresholds import builtin
from tests.diagnosis.servers import CONFIDENT, after, cycle, play

pytestmark = pytest.mark.slow

ALL = Path(__file__).parents[1] / "fixtures" / "recordings"
RECORDINGS = ALL / "vllm-cpu-2026"
BUDGET_64 = RECORDINGS / "19-prefill-budget64.jsonl.gz"
T = builtin()


def replayed(path: Path, *, args: bool = True) -> Iterator[EngineState]:
    """The recording's engine, tick by tick, with or without its arguments."""
    pipeline = Pipeline()
    with Reader(path) as reader:
        for snapshot in reader:
            pages = snapshot.pages if args else tuple(replace(page, args=()) for page in snapshot.pages)
            yield from pipeline.observe(replace(snapshot, pages=pages)).engines


def flags(made: MitigationPlan) -> list[str]:
    return [flag for action in made.actions for flag in action.flags]


# --- the token budget of a step ---------------------------------------------------------------------------


@pytest.mark.parametrize(("kv", "waited_for"), [((0.98, 0.2, 0.2, 0.2), False), ((0.98, 0.5, 0.7, 0.9), True)])
def test_a_moment_of_a_full_cache_is_no_pressure_but_a_saw_tooth_is(kv: tuple[float, ...], waited_for: bool) -> None:
    said = play(120, running=20.0, waiting=9.0, kv=cycle(*kv), generated=400.0, prompt=8_000.0, finished=0.0)
    assert (said.verdict == "kv_pressure") is waited_for


def test_diagnose_and_mitigate_raise_the_step_budget(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("diagnose", "mitigate"):
        main([command, str(BUDGET_64)])
        said = capsys.readouterr().out
        assert said.index("Raise max_num_batched_tokens") < said.index("--max-num-batched-tokens 2048")
        assert "--max-num-seqs 7" in said.split("--max-num-batched-tokens 2048")[-1]


def test_small_steps_show_the_budget_without_arguments_but_not_surely() -> None:
    states = list(replayed(BUDGET_64, args=False))
    assert not [state for state in states if state.diagnosis.confidence >= CONFIDENT]
    assert (states[-1].diagnosis.verdict, states[-1].diagnosis.stage) == ("concurrency_limited", STEP_TOKENS)
    made = plan(states[-1], T)
    assert flags(made) == []
    assert "2048" in made.actions[0].text


FULL_STEPS = {
    "running": cycle(20, 24, 28),
    "waiting": 30.0,
    "kv": 0.3,
    "generated": 400.0,
    "prompt": 20_080.0,  # 5 steps a second of 4 096 tokens
    "steps": 5.0,
    "token": 0.2,
    "finished": 2.0,
    "queue": 8.0,
}
LARGE = ("--max-num-seqs", "256", "--max-num-batched-tokens", "4096")
SLOW = {"token": after(60, 0.05, 0.2), "generated": after(60, 400.0, 100.0), "prompt": after(60, 400.0, 20_380.0)}
PEAK = {"tensor_activity_ratio": 0.8, "dram_activity_ratio": 0.5, "sm_activity_ratio": 0.9}
BELOW = {"tensor_activity_ratio": 0.1, "dram_activity_ratio": 0.3, "sm_activity_ratio": 0.4}


@pytest.mark.parametrize(
    ("gpu", "change", "value"),
    [
        (BELOW, {}, 8192.0),
        (PEAK, {}, None),
        ({}, {}, None),
        (BELOW, SLOW, None),
        (BELOW, {"prompt": 6_000.0}, None),
        (BELOW, {"steps": 0.0}, None),
    ],
    ids=["GPU below its peak", "at its peak", "activity unknown", "full steps are slow", "steps not full", "no steps"],
)
def test_a_large_budget_is_raised_only_where_the_gpu_has_time_left(gpu, change, value) -> None:
    said = play(100, args=LARGE, gpu=gpu, **FULL_STEPS | change)
    assert (said.last.stage == STEP_TOKENS) is (value is not None)
    assert said.states[-1].limits["max_num_batched_tokens"].recommended == value


@pytest.mark.parametrize(
    ("gpu", "change", "stage"),
    [(BELOW, {}, STEP_TOKENS), (PEAK, {}, None), ({}, {}, None), (BELOW, {"steps": 0.0}, None)],
    ids=["GPU below its peak", "at its peak", "activity unknown", "no steps"],
)
def test_full_steps_are_seen_without_arguments_where_the_gpu_has_time_left(gpu, change, stage) -> None:
    """Each step takes what the budget leaves room for, or waiting prompts would fill it."""
    said = play(60, args=(), gpu=gpu, **FULL_STEPS | change)
    assert (said.last.stage, said.confidently(20) & {"concurrency_limited"}) == (stage, set())


def test_the_limit_on_requests_comes_first() -> None:
    reached = play(60, args=("--max-num-seqs", "28", *LARGE[2:]), gpu=BELOW, **FULL_STEPS | {"running": 28.0})
    assert (reached.verdict, reached.last.stage) == ("concurrency_limited", None)


def test_another_engine_raises_its_own_limit() -> None:
    state = list(replayed(BUDGET_64))[-1]
    made = plan(replace(state, dialect="sglang"), T)
    assert flags(made) == ["--chunked-prefill-size 2048", "--max-running-requests 7"]


# --- a limit that nobody tells ----------------------------------------------------------------------------


HIDDEN = {"kv": 0.004, "generated": 25.0, "prompt": 20.0, "finished": 0.2, "queue": 300.0}


@pytest.mark.parametrize(
    ("running", "waiting", "limit"),
    [
        (1.0, 1470.0, 1.0),
        (cycle(2, 2, 1), 90.0, 2.0),
        (1.0, 3.0, None),
        (cycle(9, 12, 15), 90.0, None),
        (2.0, lambda second: 200.0 - 3.2 * second, 2.0),
        (cycle(256, 254, 249, 246), 400.0, 256.0),
    ],
    ids=["one of hundreds", "few of many", "few of few", "no maximum", "a queue that drains", "many finish in a step"],
)
def test_a_maximum_that_comes_back_is_a_limit_and_a_small_one_only_where_many_wait(running, waiting, limit) -> None:
    said = play(60, args=(), running=running, waiting=waiting, **HIDDEN)
    assert said.states[-1].signals.load.max_num_seqs == limit
    assert (said.verdict == "concurrency_limited") is (limit is not None)


def test_a_default_that_arguments_may_have_changed_limits_nothing() -> None:
    """VLLM V0 admits 256 by default; this one had a limit of 128, and its arguments are not seen."""
    states = list(replayed(ALL / "h100" / "llama-2-7b-043.jsonl.gz", args=False))
    assert {s.signals.load.max_num_seqs for s in states} <= {None, 127.0, 128.0}
    assert all("default" not in s.signals.load.limits for s in states)


@pytest.mark.parametrize("kv", [0.004, 0.99], ids=["the cause is unknown", "the cache is full"])
def test_where_arguments_are_hidden_the_last_of_what_is_missing_says_what_to_type(kv: float) -> None:
    said = play(60, args=(), running=cycle(9, 12, 15), waiting=90.0, **HIDDEN | {"kv": kv})
    assert said.last.missing[-1].endswith("--engine.target '…;args=--max-num-seqs N'")
    assert not any("--engine.target" in text for text in play(60, args=LARGE, waiting=90.0, **HIDDEN).last.missing)


def test_another_limit_than_the_stated_one_is_named_and_doubted() -> None:
    said = play(60, args=LARGE[:2], running=32.0, waiting=40.0, **HIDDEN | {"kv": 0.1})
    assert (said.verdict, said.last.row) == (
        "concurrency_limited",
        "Undecided: another limit than the one read",
    )
    assert not said.confidently()
    assert flags(plan(said.states[-1], T)) == []


# --- blocks, by what is left ------------------------------------------------------------------------------


CHANGES = {
    "at the limit": {"running": 30.0},
    "near the limit": {"running": cycle(30, 16, 20)},
    "queue empties": {"waiting": cycle(12, 12, 0)},
    "cache empty": {"kv": 0.3},
    "steps full": {"prompt": 20_000.0},
    "steps not counted": {"steps": 0.0},
    "deferred": {"deferred": 12.0},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_cache_is_left_only_where_all_else_is_known(change) -> None:
    saw = {"running": cycle(8, 7, 9), "waiting": 12.0, "kv": cycle(0.6, 0.7, 0.65), "generated": 90.0}
    load = saw | {"prompt": 9_000.0, "steps": 10.0, "token": 0.1, "finished": 9.0, "queue": 2.0}
    args = ("--max-num-seqs", "32", "--max-num-batched-tokens", "2048")
    assert play(45, args=args, **load).confidently(30) == {"kv_pressure"}
    assert "KV pressure: no other limit" not in {s.diagnosis.row for s in play(45, args=args, **load | change).states}


def test_requests_that_all_go_back_to_wait_at_a_full_cache_are_no_stall_at_first() -> None:
    """All 18 were preempted, the GPU is busy; a restart would lose what the cache holds."""
    fallen = {"running": after(60, 18.0, 0.0), "waiting": after(60, 0.0, 18.0), "kv": after(60, 0.9, 1.0)}
    flow = {"generated": after(60, 500.0, 0.0), "prompt": after(60, 300.0, 0.0), "finished": after(60, 1.0, 0.0)}
    said = play(60 + 130, **fallen, **flow)
    assert said.said(65) >= {"kv_pressure"}
    assert not [s for s in said.states[60 : 60 + 50] if s.diagnosis.verdict == "stalled"]
    assert said.verdict == "stalled"


# --- past the batch size that gives the most tokens -------------------------------------------------------

CROSSED = {
    "running": after(300, 90.0, 96.0),
    "waiting": after(300, 0.0, 20.0),
    "kv": 0.3,
    "generated": after(300, 2000.0, 520.0),
    "token": after(300, 0.045, 0.185),
    "prompt": 500.0,
    "finished": after(300, 8.0, 2.0),
    "queue": after(300, 0.01, 9.0),
    "length": 200.0,
}


def test_a_limit_past_the_peak_of_throughput_is_not_raised() -> None:
    said = play(600, args=("--max-num-seqs", "96"), **CROSSED)
    assert said.verdict == "concurrency_limited"
    assert "concurrency_limited" not in said.confidently(325), "steps are slower at once, throughput after a minute"
    for state in said.states[345:]:
        assert state.limits["max_num_seqs"].recommended is None
    made = plan(said.states[-1], T)
    assert not [action for action in made.actions if action.title.startswith("Raise")]
    assert flags(made) == ["--max-num-seqs 90"]
    assert {"steps_slower", "throughput_fell"} <= {
        name for name, fact in said.last.evidence.items() if fact.text in said.last.opposing
    }


def test_a_limit_is_not_raised_where_twice_the_batch_gave_no_more_tokens() -> None:
    flat = {"running": after(300, 48.0, 96.0), "generated": 2000.0, "token": after(300, 0.024, 0.048)}
    said = play(420, args=("--max-num-seqs", "96"), **CROSSED | flat | {"finished": 8.0})
    assert (said.verdict, said.confidently(345)) == ("concurrency_limited", set())
    made = plan(said.states[-1], T)
    assert flags(made) == ["--max-num-seqs 48"]
    assert said.last.evidence["past_peak"].text in said.last.opposing


def test_a_limit_on_the_way_up_is_raised() -> None:
    steady = CROSSED | {"generated": after(300, 2000.0, 2100.0), "token": 0.045, "finished": 8.0}
    said = play(600, args=("--max-num-seqs", "96"), **steady)
    assert said.confidently(330) == {"concurrency_limited"}
    assert flags(plan(said.states[-1], T)) == ["--max-num-seqs 220"]


# --- deferred for ever ------------------------------------------------------------------------------------

DEFERRED = {
    "running": after(200, 12.0, 0.0),
    "waiting": after(200, 0.0, 8.0),
    "deferred": after(200, 0.0, 8.0),
    "kv": after(200, 0.3, 0.05),
    "generated": after(200, 600.0, 0.0),
    "prompt": after(200, 300.0, 0.0),
    "finished": after(200, 1.0, 0.0),
}
OFFLOADING = ("--kv-transfer-config", '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}')


@pytest.mark.parametrize("args", [(), OFFLOADING], ids=["plain", "offloading"])
@pytest.mark.parametrize("gpus", [(), (0.0,)], ids=["GPU unknown", "GPU idle"])
def test_requests_deferred_without_progress_are_stalled_after_a_bounded_time(args, gpus) -> None:
    said = play(200 + 180, args=("--max-num-seqs", "64", *args), gpus=gpus, **DEFERRED)
    assert said.said(225) >= {"unknown", "stalled"}
    assert said.confidently(200 + 120) == {"stalled"}
    assert "deferred" in said.last.missing[0]


def test_deferred_requests_while_others_run_are_not_stalled() -> None:
    served = play(400, **DEFERRED | {"running": 12.0, "kv": 0.3, "generated": 600.0, "finished": 1.0})
    assert "stalled" not in served.said()


# --- healthy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "waited", "many"),
    [([], None, None), ([0.0], None, None), ([0.0] * 3, False, False), ([30.0], True, True), ([1.0] * 3, True, False)],
)
def test_an_empty_queue_is_known_from_several_samples(samples, waited, many) -> None:
    """After a gap of 11 s one page without a queue was "nobody waits", while 12 waited before and after it. Samples
    that are seldom count, however far apart (tests/pipeline/test_time.py).
    """
    signals = Signals(time=1000.0, load=LoadSignals(running=12.0, waiting=0.0))
    values = Values(View(signals, Recent(samples), T, 9))
    assert (values["waited_recently"], values["many_waited_recently"]) == (waited, many)


def test_a_few_that_wait_briefly_are_healthy_and_the_row_says_so() -> None:
    calm = {"running": cycle(58, 60, 62), "kv": 0.4, "generated": 2000.0, "finished": 8.0, "queue": 0.015}
    said = play(60, waiting=1.0, **calm)
    assert (said.verdict, said.confidence >= CONFIDENT) == ("healthy", True)
    assert said.last.row.endswith("few wait, and briefly")
    assert play(60, waiting=0.0, **calm).last.row.endswith("nobody waits")


def test_a_healthy_verdict_that_is_only_held_has_no_row_and_no_confidence() -> None:
    """Its last row would contradict the evidence: "nobody waits" beside 30 that wait."""
    load = {"running": after(60, 20.0, 60.0), "waiting": after(60, 0.0, 30.0), "kv": 0.3}
    said = play(75, args=("--max-num-seqs", "60"), **load, generated=2000.0, finished=8.0)
    held = [state.diagnosis for state in said.states[60:] if state.diagnosis.verdict == "healthy"]
    assert "" in {found.row for found in held}
    assert not [found for found in held if "nobody" in found.row or found.confidence >= CONFIDENT]
    assert said.verdict == "concurrency_limited"
