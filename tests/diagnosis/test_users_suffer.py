"""Incidents that show in no queue, or where the numbers stay behind: each with a server that looks like it
and is well.
"""

from __future__ import annotations

import pytest

from kvpressure.advice.mitigation import explained
from kvpressure.diagnosis.diagnose import decide
from kvpressure.diagnosis.findings import EVIDENCE
from kvpressure.diagnosis.logic import Grade
from kvpressure.diagnosis.rules import TABLES
from kvpressure.model import readings as r
from kvpressure.settings.thresholds import builtin
from tests.diagnosis.servers import CONFIDENT, LIMIT, after, cycle, play

pytestmark = pytest.mark.slow

CALM = {"running": cycle(4, 5, 6), "waiting": 0.0, "kv": 0.3, "generated": 300.0, "prompt": 200.0, "finished": 1.0}
SILENT = {"running": 0.0, "waiting": 0.0, "kv": 0.0, "generated": 0.0, "prompt": 0.0, "finished": 0.0}


def test_the_first_scrapes_of_a_loaded_server_are_not_surely_idle():
    started = play(12, gpus=(0.0,), **SILENT)
    assert not started.confidently() - {"idle"}
    assert [state.diagnosis.confidence >= CONFIDENT for state in started.states[:2]] == [False, False]
    assert started.verdict == "idle"
    assert started.confidence >= CONFIDENT
    loaded = play(4, **CALM | {"running": after(1, 0.0, 12.0), "waiting": after(1, 0.0, 12.0)})
    assert "idle" not in loaded.confidently()
    assert not play(1, **CALM).confidently()
    apart = play(2, step=12.0, **SILENT | {"running": after(1, 0.0, 12.0)})
    assert "idle" not in apart.confidently()


def test_requests_that_nobody_answers_are_neither_idle_nor_healthy():
    """Clients give up before their first token: the gauges read 0, prompts are looked up in the prefix
    cache all the same.
    """
    storm = play(40, **SILENT | {"queries": 5000.0})
    assert storm.said(4) == {"unknown"}
    assert "time out" in storm.last.missing[0]
    begins = play(60, **SILENT | {"queries": after(30, 0.0, 5000.0)})
    assert begins.verdict == "unknown"
    assert "idle" not in begins.confidently(34)
    quiet = play(40, gpus=(0.0,), **SILENT | {"queries": 0.0})
    assert (quiet.verdict, quiet.confidence >= CONFIDENT) == ("idle", True)
    answered = play(40, **CALM | {"queries": 5000.0})
    assert answered.verdict == "healthy"


@pytest.mark.parametrize(
    ("change", "verdict", "confident"),
    [
        ({"generated": 1.0, "prompt": 0.0}, "unknown", False),
        ({"generated": 1.0, "prompt": 3000.0}, "compute_bound", False),
        ({"generated": 300.0}, "healthy", True),
        ({"generated": 0.0, "prompt": 4000.0, "finished": 20.0}, "healthy", True),
    ],
    ids=["hardly any tokens", "prefill starves decoding", "as ever", "embeddings"],
)
def test_running_requests_that_hardly_get_tokens_are_not_healthy(change, verdict, confident):
    said = play(60, gpus=(0.9,), **CALM | {"finished": 0.0} | change)
    assert (said.verdict, said.confidence >= CONFIDENT) == (verdict, confident)
    assert confident or "healthy" not in said.confidently(20)


def test_steps_twice_as_slow_are_not_surely_healthy_before_there_is_a_baseline():
    said = play(100, **CALM | {"token": after(50, 0.02, 0.05), "generated": after(50, 250.0, 100.0)})
    assert said.last.evidence["latency_multiplied"].value is None
    assert said.last.evidence["steps_slower"].value is True
    assert "healthy" not in said.confidently(85)
    assert play(100, **CALM | {"token": 0.02}).confidence >= CONFIDENT
    larger = play(
        100,
        **CALM
        | {"running": after(50, 5.0, 20.0), "token": after(50, 0.02, 0.05), "generated": after(50, 250.0, 400.0)},
    )
    assert larger.last.evidence["steps_slower"].value is not True, "a batch four times as large"


STUCK = {"running": 6.0, "waiting": 8.0, "kv": 0.4, "generated": after(5, 300.0, 0.0), "prompt": 0.0, "finished": 0.0}


def test_a_queue_that_stayed_behind_is_no_stall_when_the_clients_are_gone():
    gone = play(60, gpus=(0.0,), page={r.PROCESS_OPEN_FDS: after(8, 60.0, 40.0), r.HTTP_PREFIX + "2xx": 90.0}, **STUCK)
    assert gone.verdict == "unknown"
    assert gone.last.conditions["metrics_frozen"] is True
    assert "stalled" not in gone.confidently()
    there = play(60, gpus=(0.0,), page={r.PROCESS_OPEN_FDS: 60.0, r.HTTP_PREFIX + "2xx": 90.0}, **STUCK)
    assert (there.verdict, there.confidence >= CONFIDENT) == ("stalled", True)
    busy = play(60, gpus=(0.97,), page={r.PROCESS_OPEN_FDS: after(8, 60.0, 40.0), r.HTTP_PREFIX + "2xx": 90.0}, **STUCK)
    assert busy.verdict == "stalled", "the GPU is at work"


@pytest.mark.parametrize(
    ("sign", "confident"),
    [
        ({}, False),
        ({"gpus": (0.0,)}, False),
        ({"gpus": (0.97,)}, True),
        ({"waiting": after(8, 8.0, 11.0)}, True),
        ({"page": {r.PROCESS_OPEN_FDS: 60.0}}, True),
    ],
    ids=["nothing else known", "idle GPU", "busy GPU", "queue grew since", "clients stay"],
)
def test_a_queue_that_only_unmoving_gauges_show_is_no_sure_stall(sign, confident):
    """A load test aborted all at once leaves running and waiting gauges behind for ever."""
    said = play(60, **STUCK | {"gpus": ()} | sign)
    assert (said.verdict, said.confidence >= CONFIDENT) == ("stalled", confident)
    assert said.last.conditions["metrics_frozen"] is (None if confident else True)


def test_blocks_in_use_with_nothing_running_are_never_called_free():
    held = play(100, **SILENT | {"running": 0.0, "waiting": 5.0, "kv": 0.995, "generated": after(3, 10.0, 0.0)})
    told = [state.diagnosis.conditions["kv_held_without_load"] for state in held.states]
    assert False not in told
    assert told[-1] is True
    queued = play(100, **CALM | {"waiting": 5.0, "kv": 0.995})
    assert queued.last.conditions["kv_held_without_load"] is not True
    idle = play(100, **SILENT | {"kv": lambda second: 0.4 + second / 1000})
    assert idle.verdict == "idle"
    assert any(
        text.startswith("KV blocks are held without requests: KV cache 50 % used") for text in idle.last.opposing
    )


def _ahead(kv) -> list[bool | None]:
    return [state.diagnosis.conditions["kv_exhaustion_ahead"] for state in play(200, **CALM | {"kv": kv}).states]


def test_a_slow_ramp_is_announced_tens_of_seconds_before_the_cache_is_full():
    told = _ahead(lambda i: min(0.2 + 0.005 * i, 0.99))
    full = next(i for i in range(200) if 0.2 + 0.005 * i >= 0.97)
    assert full - told.index(True) >= 30
    assert True not in told[:100]


@pytest.mark.parametrize(
    "kv",
    [
        lambda _: 0.85,
        lambda i: min(0.2 + 0.005 * i, 0.68),
        lambda i: 0.6 + 0.03 * (i % 8),
        lambda i: max(0.3, 0.95 - 0.01 * i),
    ],
    ids=["steady and high", "comes to a stop", "waves", "falls"],
)
def test_a_cache_that_does_not_fill_up_is_not_about_to(kv):
    assert True not in _ahead(kv)


def test_collapsed_prefix_cache_hits_are_said():
    warm = CALM | {"queries": 800.0}
    collapsed = play(120, **warm | {"cached": after(60, 0.8, 0.05), "capacity": 20_000.0})
    assert collapsed.last.evidence["prefix_cache_collapsed"].value is True
    said = "prefix cache hits collapsed: hit ratio 5 % in the last 30 s, usually 80 %"
    assert said in collapsed.last.opposing
    other_prompts = play(120, **warm | {"cached": after(60, 0.8, 0.05)})  # fewer tokens than were free
    assert other_prompts.last.evidence["prefix_cache_collapsed"].value is False
    steady = play(120, **warm | {"cached": 0.8})
    assert steady.last.evidence["prefix_cache_collapsed"].value is False
    never = play(120, **warm | {"cached": 0.05})
    assert never.last.evidence["prefix_cache_collapsed"].value is False


def test_pressure_ends_half_a_minute_after_its_last_sign_although_the_limit_keeps_a_queue():
    said = play(
        180,
        args=("--max-num-seqs", "16"),
        running=16.0,
        waiting=10.0,
        kv=after(60, 0.99, 0.85),
        preemptions=after(60, 2.0, 0.0),
        generated=300.0,
        prompt=100.0,
        finished=0.5,
        queue=5.0,
    )
    verdicts = [state.diagnosis.verdict for state in said.states]
    assert "kv_pressure" in verdicts[50:60]
    assert "kv_pressure" not in verdicts[60 + 30 + 20 :]
    assert verdicts[-1] == "concurrency_limited"


def test_preemptions_that_the_counter_has_yet_to_learn_of_are_believed_while_the_preempted_wait():
    """Long outputs: twelve run, one after the other is pushed out, nobody finishes, vLLM counts none of them."""
    said = play(
        100,
        running=lambda i: max(5.0, 12.0 - max(0, i - 20) // 4),
        waiting=lambda i: 12.0 - max(5.0, 12.0 - max(0, i - 20) // 4),
        kv=cycle(0.96, 0.98, 0.99),
        generated=80.0,
        prompt=0.0,
        finished=0.0,
        preemptions=0.0,
    )
    assert said.last.evidence["preempting"].value is True
    assert {state.diagnosis.verdict for state in said.states[40:]} == {"kv_pressure"}
    stages = [state.diagnosis.stage for state in said.states[40:]]
    assert "building" not in stages


def test_the_cache_limit_is_not_below_what_runs_in_half_of_it():
    said = play(60, **CALM | {"running": 24.0, "kv": 0.5, "length": 5000.0, "output": 1000.0, "finished": 2.0})
    assert said.states[-1].signals.load.concurrency_ratio <= 0.55
    full = play(60, **CALM | {"running": 24.0, "kv": 0.99, "length": 5000.0, "output": 1000.0, "finished": 2.0})
    assert full.states[-1].signals.load.concurrency_ratio >= 0.95


def test_a_slow_incident_does_not_become_its_own_baseline():
    """Token latency creeps from 30 ms to 400 ms over half an hour and stays there for an hour; nobody ever waits."""
    creeping = play(600, step=10.0, **CALM | {"token": lambda i: min(0.4, 0.03 * 1.015 ** max(0, i - 60))})
    assert creeping.last.evidence["latency_multiplied"].value is True
    assert "healthy" not in creeping.confidently(400)
    busier = play(600, step=10.0, **CALM | {"token": after(60, 0.012, 0.04)})
    assert busier.last.evidence["latency_multiplied"].value is False, "still quick enough for anybody: the new normal"


def test_deferred_requests_at_a_full_cache_of_a_decode_server_are_named():
    transfer = (*LIMIT, "--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}')
    full = play(
        60, args=transfer, running=cycle(30, 31, 32), waiting=9.0, deferred=9.0, kv=0.996, generated=500.0, finished=1.0
    )
    assert (full.verdict, full.confidence >= CONFIDENT) == ("kv_pressure", False)
    assert "KV blocks of another server" in full.last.missing[0]
    roomy = play(
        60, args=transfer, running=cycle(30, 31, 32), waiting=9.0, deferred=9.0, kv=0.4, generated=500.0, finished=1.0
    )
    assert roomy.verdict == "unknown"


def test_arguments_that_the_batch_contradicts_may_be_outdated():
    said = play(
        60,
        args=("--max-num-seqs", "64"),
        gpus=(0.7,),
        running=8.0,
        waiting=10.0,
        kv=0.3,
        generated=300.0,
        prompt=100.0,
        finished=1.0,
        queue=5.0,
        length=400.0,
        page={},
    )
    assert said.verdict == "concurrency_limited"
    assert not said.confidently(20)
    assert "outdated" in said.last.missing[0]


SLOW_PREFILL = {"running": 1.0, "waiting": 0.0, "kv": 0.2, "generated": 0.0, "queue": 0.1}


def _prompts_of(seconds: int, until: int = 10_000):
    """One request at a time, whose prompt takes so long; its tokens and its end come in one second."""

    def ends(i: int) -> bool:
        return i % seconds == seconds - 1 and i < until

    return {
        "prompt": lambda i: 128_000.0 if ends(i) else 0.0,
        "finished": lambda i: 1.0 if ends(i) else 0.0,
        "prefill": float(seconds),
    }


def test_silence_as_long_as_a_prompt_usually_takes_is_no_stall():
    """One client sends prompts of 128k tokens to a small GPU: no token for 77 s at a time, and nothing is stuck."""
    said = play(320, **SLOW_PREFILL | _prompts_of(77))
    assert "stalled" not in said.confidently(154)
    hung = play(320, **SLOW_PREFILL | _prompts_of(77, until=160))
    assert "stalled" in hung.confidently(300), "half as long again as usual"
    assert "stalled" in play(140, **SLOW_PREFILL | _prompts_of(2, until=80)).confidently(105), (
        "prompts take two seconds"
    )


def test_deferred_requests_that_fill_the_limit_are_named():
    """VLLM counts requests that it skipped in the queue against the limit: four run, the cache is empty,
    nobody gets in.
    """
    full = {"running": 4.0, "waiting": 60.0, "deferred": 60.0, "kv": 0.2, "generated": 4.0, "prompt": 2000.0}
    stuck = full | {"waiting": 80.0, "finished": 0.0, "queue": 60.0}
    said = play(60, args=("--max-num-seqs", "64"), gpus=(0.99,), **stuck)
    assert said.verdict == "unknown"
    assert "may count against it" in said.last.missing[0]
    for other in ({"deferred": 20.0}, {"deferred": 0.0}, {"finished": 2.0}):
        assert play(60, args=("--max-num-seqs", "64"), gpus=(0.99,), **stuck | other).verdict == "compute_bound"


def test_health_is_not_sure_while_scrapes_fail():
    for grade, failing in ((Grade.CERTAIN, False), (Grade.DOUBTFUL, True)):
        rest = {"page_young": True, "server_at_rest": True, "gpu_idle": True}
        facts = dict.fromkeys(EVIDENCE, False) | {"page_fresh": True, "scrape_failing": failing} | rest
        assert decide(TABLES, facts).verdict == "idle"
        assert decide(TABLES, facts).grade == grade
    for grade, failing in ((Grade.STRONG, False), (Grade.DOUBTFUL, True)):
        flowing = facts | {"tokens_flow": True, "work_present": True, "scrape_failing": failing}
        assert decide(TABLES, flowing).verdict == "healthy"
        assert decide(TABLES, flowing).grade == grade


def test_a_short_cpu_does_not_explain_a_queue_of_prompts_nor_steps_as_fast_as_ever():
    contended = {"cpu_pressure_some_ratio": 0.8}
    prompts = CALM | {"waiting": 5.0, "queue": 6.0, "generated": 5.0, "prompt": 3000.0}
    assert play(60, gpus=(), host=contended, **prompts).verdict == "compute_bound"
    assert play(60, gpus=(), host=contended, **prompts | {"prompt": 20.0}).verdict == "host_bound"
    assert play(100, gpus=(), host=contended, **CALM | {"token": 0.02}).verdict == "healthy"
    slower = CALM | {"token": after(50, 0.02, 0.1), "generated": after(50, 250.0, 50.0)}
    assert play(100, gpus=(), host=contended, **slower).verdict == "host_bound"
    throttled = {"cpu_periods": lambda i: i * 10, "cpu_throttled_periods": lambda i: max(0, i - 50) * 9}
    assert "host_bound" in play(100, gpus=(), host=throttled, **slower).confidently(80)
    assert not play(100, gpus=(), host=throttled, **CALM | {"token": 0.02}).confidently(80) & {"host_bound"}


def test_time_lost_outside_the_engine_is_the_host():
    outside = CALM | {"outside": 14.0}
    assert play(60, gpus=(), **outside).verdict == "host_bound"
    assert not play(60, gpus=(), **outside).confidently(5)
    assert play(60, gpus=(), **CALM | {"outside": 1.0}).verdict == "healthy"
    short = CALM | {"finished": 40.0, "queue": 0.0, "inference": 0.06, "outside": 0.1}
    assert play(60, gpus=(), **short).verdict == "healthy", "a beam search: each step of it is a request"
    assert play(60, gpus=(), **short | {"running": cycle(5.0, 0.0)}).verdict == "host_bound", "the engine lacks work"
    rarely = play(20, step=60.0, gpus=(), **short | {"running": cycle(5.0, 0.0)})
    assert rarely.verdict == "host_bound", "one sample in half a minute does not tell whether it has work"
    full = play(60, gpus=(), page={r.PROCESS_CPU_SECONDS: float}, **short)
    assert full.last.row == "Host bound: API server", "it uses a whole core"


def test_requests_that_wait_for_tokens_outside_the_engine_are_the_host():
    """Images are prepared in front of the engine: 30 s to the first token of two requests a second, five in flight."""
    slow = CALM | {"finished": 2.0, "queue": 0.0, "prefill": after(300, 0.5, 30.0)}
    said = play(500, gpus=(), absent=(r.QUEUE, r.E2E, r.INFERENCE), **slow)
    assert said.verdict == "host_bound"
    assert not said.confidently(400)
    inside = slow | {"running": after(300, 5.0, 65.0)}
    running = play(500, gpus=(), absent=(r.QUEUE, r.E2E, r.INFERENCE), **inside)
    assert (running.verdict, running.last.row) == ("unknown", "Tokens flow: slow"), "they run, and users wait 30 s"
    assert explained(running.states[-1], builtin()).cause == "slow, cause not found"
    few = slow | {"finished": 0.05}
    assert play(500, gpus=(), absent=(r.QUEUE, r.E2E, r.INFERENCE), **few).verdict == "healthy", "one request at a time"
    young = play(100, gpus=(), absent=(r.QUEUE, r.E2E, r.INFERENCE), **slow | {"prefill": 30.0})
    assert young.verdict == "healthy", "what was in flight before is unknown"


CROWDED = {"running": 20.0, "waiting": after(20, 0.0, 12.0), "kv": after(20, 0.5, 0.99), "queue": 2.0, "finished": 1.0}


def test_a_full_cache_with_many_waiting_is_pressure_within_three_seconds():
    flow = {"generated": 300.0, "prompt": 100.0}
    said = play(60, **CROWDED | flow)
    first = next(i for i, state in enumerate(said.states) if state.diagnosis.verdict == "kv_pressure")
    assert first <= 22
    for well in ({"waiting": after(20, 0.0, 1.0)}, {"waiting": lambda i: 12.0 * (i == 20)}):
        assert "kv_pressure" not in play(24, **CROWDED | flow | well).confidently()
    assert "kv_pressure" not in play(24, **CROWDED | flow | {"kv": after(20, 0.5, 0.7)}).said()
    deferred = CROWDED | flow | {"deferred": after(20, 0.0, 12.0)}
    assert "kv_pressure" not in play(24, **deferred).confidently()


def test_pressure_is_not_entered_again_while_nobody_waits():
    calmer = {
        "running": after(40, 40.0, 20.0),
        "waiting": after(40, 10.0, 0.0),
        "preemptions": after(40, 2.0, 0.0),
        "kv": lambda i: 0.99 if i < 40 else 0.6 if i < 50 else 0.85,
        "queue": 4.0,
        "generated": 300.0,
        "prompt": 100.0,
        "finished": 1.0,
    }
    said = [state.diagnosis.verdict for state in play(100, **calmer).states]
    left = next(i for i in range(40, 100) if said[i] != "kv_pressure")
    assert left <= 60
    assert "kv_pressure" not in said[left:]


def test_health_is_not_sure_while_many_wait():
    assert play(60, **CALM | {"waiting": after(55, 0.0, 9.0)}).confidence < CONFIDENT
    assert play(60, **CALM | {"waiting": cycle(0.0, 0.0, 0.0, 1.0)}).confidence >= CONFIDENT
