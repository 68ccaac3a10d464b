"""Servers that look like something else: what may not be said of them with confidence, and what is said instead."""

from __future__ import annotations

import pytest

from kvpressure.diagnosis import diagnose, rules
from kvpressure.model import readings as r
from tests.diagnosis.servers import CONFIDENT, LIMIT, after, cycle, play

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def as_designed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with the grades they are designed with: a made-up server holds their boundaries, and cannot lift the cap on
    rows that no real recording has shown.
    """
    monkeypatch.setattr(diagnose, "TABLES", rules.DESIGNED)


FULL = {"kv": cycle(0.98, 0.99, 0.985), "generated": 600.0, "prompt": 600.0, "finished": 1.0}


def test_requests_that_are_pushed_out_and_come_back_at_once_are_no_health():
    """The queue is empty in every sample, because what is preempted is let in again within a second."""
    said = play(60, running=cycle(40, 41, 42), waiting=0.0, preemptions=3.0, **FULL)
    assert (said.verdict, said.last.stage) == ("kv_pressure", "thrashing")
    assert said.confidently(5) <= {"kv_pressure"}


def test_preemptions_of_a_while_ago_without_a_queue_are_not_pressure():
    said = play(60, running=40.0, waiting=0.0, preemptions=after(20, 3.0, 0.0), **FULL | {"kv": after(20, 0.98, 0.5)})
    assert said.verdict == "healthy"
    said = play(45, running=40.0, waiting=0.0, preemptions=after(20, 3.0, 0.0), **FULL)
    assert said.verdict == "healthy"
    assert said.confidence < CONFIDENT, "the cache is still full"


@pytest.mark.parametrize(
    ("args", "gpus", "prompt"),
    [(LIMIT, (0.95,), 3000.0), (LIMIT, (0.5,), 800.0), ((), (0.5,), 800.0), (("--max-num-seqs", "6"), (0.95,), 3000.0)],
)
def test_a_queue_that_is_all_deferred_is_neither_the_limit_nor_the_gpu(args, gpus, prompt):
    """All LoRA slots are taken: six run, ten wait, and the rest of the machine has nothing to do with it."""
    load = {"running": 6.0, "waiting": 10.0, "kv": 0.3, "generated": 300.0, "finished": 2.0, "queue": 3.0}
    said = play(60, args=args, gpus=gpus, deferred=10.0, prompt=prompt, **load)
    assert said.verdict == "unknown"
    assert "deferred" in said.last.missing[0]
    assert not said.confidently(5)
    mixed = play(60, args=args, gpus=(0.95,), deferred=4.0, prompt=prompt, **load)
    assert mixed.verdict != "unknown", "six others wait for something else"


@pytest.mark.parametrize("told", [{"computed": 450.0}, {"hits": 0.95}], ids=["counted", "by the hit ratio"])
def test_cached_prompts_take_no_prefill(told):
    """Chat with 95 % of its prompts in the prefix cache: 9 000 prompt tokens a second, of which 450 are computed."""
    cached = {"running": cycle(16, 17, 18, 19), "waiting": 10.0, "kv": 0.4, "generated": 600.0, "deferred": None}
    cached |= {"prompt": 9000.0, "finished": 3.0, "length": 3000.0, "queue": 3.0}
    said = play(60, gpus=(0.7,), **cached, **told)
    assert said.last.evidence["prefill_dominates"].value is False
    assert "450 prompt tokens/s computed" in said.last.evidence["prefill_dominates"].text
    assert "compute_bound" not in said.said(5)
    untold = play(60, gpus=(0.7,), **cached).last  # of the cache
    assert untold.evidence["prefill_dominates"].value is True


WAITS_FOR_ROOM = {"running": 7.0, "waiting": 6.0, "generated": 250.0, "finished": 0.1, "length": 9000.0, "queue": 30.0}


@pytest.mark.parametrize("args", [LIMIT, ()], ids=["limit known", "limit not known"])
@pytest.mark.parametrize("prompt", [1000.0, 3000.0])
def test_a_queue_behind_a_prompt_that_may_not_fit_is_nothing_to_be_sure_of(args, prompt):
    """The cache is 70 % full and the head of the queue needs 40 % of it. It has never been seen: it waits."""
    said = play(60, args=args, kv=0.70, prompt=prompt, **WAITS_FOR_ROOM)
    assert not said.confidently(20)
    roomy = play(60, args=args, kv=0.20, prompt=3000.0, **WAITS_FOR_ROOM | {"running": cycle(5, 7, 9)})
    assert roomy.last.evidence["any_prompt_fits"].value is True
    assert roomy.confidence >= CONFIDENT


@pytest.mark.parametrize(
    ("kv", "length", "verdict", "confident"),
    [(0.70, 40_000.0, "kv_pressure", True), (0.60, 50_000.0, "kv_pressure", True), (0.70, 3000.0, "unknown", False)],
)
def test_prompts_that_do_not_fit_are_pressure_at_any_level_when_requests_wait_for_capacity(
    kv, length, verdict, confident
):
    load = WAITS_FOR_ROOM | {"kv": kv, "length": length, "prompt": 500.0, "finished": 0.5}
    said = play(60, gpus=(0.7,), **load)
    assert (said.verdict, said.confidence >= CONFIDENT) == (verdict, confident)
    untold = play(60, gpus=(0.7,), deferred=None, **load)  # an older server
    assert untold.verdict == "unknown", "it does not say what they wait for, and below 75 % it is seldom room"


def test_one_long_prompt_in_ten_may_be_the_one_that_blocks():
    said = play(
        80,
        gpus=(0.7,),
        kv=0.70,
        prompt=500.0,
        **WAITS_FOR_ROOM | {"finished": 1.0, "length": cycle(*[1000.0] * 9, 45_000.0)},
    )
    assert (said.verdict, said.confidence >= CONFIDENT) == ("kv_pressure", False)
    assert said.last.evidence["mean_prompt_blocked"].value is False


RAG = {
    "running": cycle(50, 55, 60),
    "waiting": 20.0,
    "kv": 0.3,
    "generated": 300.0,
    "prompt": 3000.0,
    "finished": 10.0,
    "queue": 5.0,
}
WATTS = {"power_limit_watts": 700.0}


@pytest.mark.parametrize(
    ("gpus", "gpu", "at_most"),
    [
        ((), {}, 0.6),
        ((0.3,), {}, 0.4),
        ((0.7,), WATTS | {"power_watts": 350.0}, 0.4),
        ((0.95,), {}, 0.85),
        ((0.95,), WATTS | {"power_watts": 650.0}, 0.85),
        ((0.95,), {"tensor_activity_ratio": 0.45, "dram_activity_ratio": 0.2}, 0.85),
        ((0.95,), {"tensor_activity_ratio": 0.1, "dram_activity_ratio": 0.2}, 0.4),
    ],
)
def test_many_prompt_tokens_are_compute_bound_only_if_the_gpu_says_so_too(gpus, gpu, at_most):
    said = play(60, gpus=gpus, gpu=gpu, **RAG)
    assert (said.verdict, said.confidence) == ("compute_bound", pytest.approx(at_most))
    assert said.confidently(5) <= ({"compute_bound"} if at_most >= CONFIDENT else set())
    decodes = play(60, gpus=gpus, gpu=gpu, **RAG | {"generated": 2000.0, "prompt": 2000.0, "finished": 8.0})
    sure = at_most >= CONFIDENT and gpu != {}  # utilization alone makes nobody sure
    assert decodes.confidently(5) == ({"compute_bound"} if sure else set())


BUSY_UNITS = {"tensor_activity_ratio": 0.1, "dram_activity_ratio": 0.75, "sm_activity_ratio": 0.8}


@pytest.mark.parametrize(
    ("args", "values"),
    [
        (LIMIT, {"running": cycle(58, 60, 62), "waiting": 1.0, "kv": 0.4, "generated": 2000.0, "prompt": 4000.0}),
        (LIMIT, {"running": 64.0, "waiting": 2.0, "kv": 0.3, "generated": 2000.0, "prompt": 2000.0}),
        (LIMIT, {"running": 60.0, "waiting": 1.0, "kv": 0.85, "generated": 400.0, "prompt": 4000.0}),
        (("--max-num-seqs", "64"), {"running": 64.0, "waiting": 2.0, "kv": 0.3, "generated": 2000.0, "prompt": 2000.0}),
    ],
)
@pytest.mark.parametrize("gpu", [{}, BUSY_UNITS])
def test_the_moment_between_two_steps_is_no_queue(args, values, gpu):
    """In every sample one or two of sixty wait, each for some milliseconds."""
    said = play(60, args=args, gpu=gpu, finished=8.0, queue=0.015, **values)
    assert (said.verdict, said.confidence >= CONFIDENT) == ("healthy", True)
    assert said.confidently(5) == {"healthy"}
    assert "compute_bound" not in said.confidently(), "not even before anybody told how long they wait"
    assert play(60, args=args, gpu=gpu, finished=8.0, queue=3.0, **values).verdict != "healthy", (
        "who waits seconds is in a queue"
    )
    assert play(60, args=args, gpu=gpu, finished=8.0, queue=0.015, **values | {"waiting": 12.0}).verdict != "healthy"


def container(throttled=0.0, used=0.3, pressure=None):
    """A container of four cores; totals grow by the second."""
    return {
        "restarts": 0,
        "cpu_limit_cores": 4.0,
        "cpu_usage_seconds": lambda i: i * 4.0 * used,
        "cpu_periods": lambda i: i * 10,
        "cpu_throttled_periods": lambda i: int(i * 10 * throttled),
        "cpu_pressure_some_ratio": pressure,
    }


FINE = {
    "running": 30.0,
    "waiting": 0.0,
    "kv": 0.3,
    "generated": 1200.0,
    "prompt": 1000.0,
    "finished": 3.0,
    "token": 0.025,
}


@pytest.mark.parametrize("host", [container(throttled=0.3), container(used=0.98), container(pressure=0.8)])
def test_a_short_cpu_is_a_verdict_where_requests_wait_and_a_gpu_does(host):
    assert play(60, gpus=(0.7,), host=host, **FINE).verdict == "healthy"
    for gpus in ((), (0.4,)):
        assert not play(60, gpus=gpus, host=host, **FINE).confidently(5) & {"host_bound"}, "a GPU or nobody is harmed"
    said = play(60, gpus=(0.4,), host=host, **FINE | {"waiting": 20.0, "queue": 4.0})
    assert (said.verdict, said.confidence >= CONFIDENT) == ("host_bound", True)


def test_an_idle_pod_is_idle_however_throttled():
    assert play(30, gpus=(0.0,), host=container(throttled=0.3), running=0.0, waiting=0.0, kv=0.0).verdict == "idle"


LEFT = {
    "running": 20.0,
    "waiting": 0.0,
    "kv": after(60, 0.6, 0.99),
    "generated": after(60, 600.0, 0.0),
    "prompt": after(60, 300.0, 0.0),
    "finished": after(60, 1.0, 0.0),
    "gpus": (after(60, 0.9, 0.0),),
}
SERVER = {r.PROCESS_CPU_SECONDS: lambda i: 0.3 * i}


@pytest.mark.parametrize(
    "page",
    [{}, SERVER | {r.PROCESS_OPEN_FDS: 60.0, "http:2xx": lambda i: float(min(i, 60))}],
    ids=["several API servers", "a gateway keeps its connections"],
)
def test_gauges_that_may_be_left_over_page_nobody(page):
    """Incident TEL1 without the descriptors that tell: all clients aborted, the gauges stay for ever."""
    said = play(160, page=page, **LEFT)
    assert "stalled" not in said.confidently()
    assert said.last.missing


def test_one_client_that_aborts_leaves_a_gauge_behind():
    said = play(160, page=SERVER | {r.PROCESS_OPEN_FDS: after(60, 40.0, 39.0)}, **LEFT | {"running": 1.0, "kv": 0.05})
    assert (said.verdict, said.last.conditions["metrics_frozen"]) == ("unknown", True)
    assert said.confidence < CONFIDENT


@pytest.mark.parametrize(
    "sign",
    [
        {"waiting": after(60, 0.0, 5.0)},
        {"gpus": (after(60, 0.9, 1.0),)},
        {"gpus": ()},
        {"page": SERVER | {r.PROCESS_OPEN_FDS: after(70, 60.0, 75.0)}},
    ],
    ids=["a queue", "a busy GPU", "no GPU seen", "clients come"],
)
def test_a_hang_is_a_stall_within_half_a_minute(sign):
    said = play(110, **LEFT | sign)
    assert "stalled" in said.confidently(60 + 30)


def test_kernels_are_compiled_for_the_first_request():
    one = {"running": after(20, 0.0, 1.0), "waiting": 0.0, "kv": 0.002}
    said = play(120, generated=after(70, 0.0, 40.0), gpus=(after(70, 0.0, 0.6),), **one)
    assert "stalled" not in said.said()
    assert said.verdict == "healthy"
    assert "stalled" in play(160, gpus=(0.0,), **one).said(), "not for ever"


def test_an_engine_that_sleeps_is_not_stalled():
    said = play(60, asleep=1.0, running=0.0, waiting=3.0, kv=0.0, gpus=(0.0,))
    assert said.said(2) == {"unknown"}
    assert "asleep" in said.last.missing[0]
    assert play(60, asleep=1.0, running=0.0, waiting=0.0, kv=0.0, gpus=(0.0,)).verdict == "idle"
    assert play(60, asleep=0.0, running=0.0, waiting=3.0, kv=0.0, gpus=(0.0,)).verdict == "stalled"


def test_a_grammar_that_compiles_is_the_host():
    values = dict.fromkeys(("waiting", "deferred"), after(40, 0.0, 5.0)) | {"running": after(40, 4.0, 0.0)}
    values |= dict.fromkeys(("generated", "prompt"), after(40, 200.0, 0.0))
    values |= {"kv": after(40, 0.1, 0.0), "gpus": (after(40, 0.7, 0.0),)}
    used = container() | {"cpu_usage_seconds": lambda i: min(i, 40) * 1.0 + max(0, i - 40) * 3.95}
    said = play(140, host=used, **values)
    assert (said.verdict, said.confidence >= CONFIDENT) == ("host_bound", True)
    assert "stalled" not in said.said()
    assert play(40 + 85, **values).verdict == "unknown", "remote KV blocks, or a grammar: nobody tells"


SIX = {"running": 6.0, "waiting": 0.0, "kv": 0.1, "generated": 300.0, "prompt": 600.0, "finished": 1.0}
NOTHING = {"running": 0.0, "waiting": 0.0, "kv": 0.0}


@pytest.mark.parametrize(
    ("args", "others"),
    [(("--max-num-seqs", "256", "--data-parallel-size", "8"), [NOTHING] * 7), (LIMIT, []), ((), [])],
    ids=["seven ranks without work", "an engine on one of eight", "arguments not known"],
)
def test_gpus_that_do_nothing_are_not_averaged_in(args, others):
    said = play(60, args=args, others=others, gpus=(0.95, *[0.0] * 7), **SIX)
    assert (said.verdict, said.confidence >= CONFIDENT) == ("healthy", True)
    assert said.last.documented_signature["gpu_utilization_low"] is False
    assert said.last.evidence["gpu_starved"].value is not True


def test_a_starved_engine_beside_a_busy_one_is_not_known_to_be_starved():
    two = ("--max-num-seqs", "256", "--data-parallel-size", "2")
    said = play(60, args=two, others=[SIX], gpus=(0.1, 0.95), **SIX)
    assert said.last.evidence["gpu_starved"].value is None
    assert play(60, args=two, others=[SIX], gpus=(0.1, 0.08), **SIX).last.evidence["gpu_starved"].value is True
    sharded = ("--max-num-seqs", "256", "-tp", "2")
    assert play(60, args=sharded, gpus=(0.1, 0.95), **SIX).last.evidence["gpu_starved"].value is False, (
        "one of them works hard"
    )
    assert play(60, args=sharded, gpus=(0.1, 0.08), **SIX).verdict == "host_bound"


def test_a_busy_gpu_of_another_engine_saturates_nobody():
    queue = SIX | {"waiting": 10.0, "queue": 4.0, "prompt": 6000.0}
    said = play(60, args=("--max-num-seqs", "256", "-dp", "2"), others=[SIX], gpus=(0.3, 0.95), **queue)
    assert said.last.evidence["gpu_saturated"].value is None
    assert not said.confidently(5)
    both = play(60, args=("--max-num-seqs", "256", "-dp", "2"), others=[SIX], gpus=(0.9, 0.95), **queue)
    assert both.last.evidence["gpu_saturated"].value is True


def test_the_smaller_of_both_limits_of_the_batch_binds():
    load = {"waiting": 15.0, "kv": 0.2, "generated": 900.0, "prompt": 900.0, "finished": 1.0, "queue": 20.0}
    said = play(60, args=("--max-num-seqs", "256", "--max-num-active-seqs", "16"), running=16.0, **load)
    assert (said.verdict, said.states[-1].signals.load.max_num_seqs_source) == ("concurrency_limited", "args")
    assert said.confidence >= CONFIDENT
    assert said.states[-1].limits["max_num_seqs"].value == 16
    larger = ("--max-num-seqs", "16", "--max-num-active-seqs", "64")
    assert play(2, args=larger, running=1.0, waiting=0.0, kv=0.2).states[-1].limits["max_num_seqs"].value == 16


@pytest.mark.parametrize(
    "args", [LIMIT, (), ("--config", "/c.yaml")], ids=["below it", "unknown", "a file nobody reads"]
)
def test_a_batch_that_stands_still_below_its_limit_makes_nobody_sure_of_the_gpu(args):
    """Some other limit may hold it: stages of a pipeline, slots of a connector, a proxy. Where the limit is unknown,
    the level at which it stands is taken for it, which it reaches by definition.
    """
    load = {"waiting": 30.0, "kv": 0.3, "generated": 600.0, "prompt": 6000.0, "finished": 2.0, "queue": 8.0}
    said = play(120, args=args, running=16.0, **load)
    assert not said.confidently(30)
    assert args or said.verdict == "compute_bound"
    moves = play(120, args=args, running=cycle(16.0, 12.0, 14.0), **load)
    assert moves.confidently(30) == {"compute_bound"}, "nothing holds it"


@pytest.mark.parametrize("every", [10, 70])
@pytest.mark.parametrize("kv", [0.85, 0.98])
def test_clients_that_give_up_together_and_come_back_are_no_preemptions(kv, every):
    """Their requests leave running, those that they send again wait for a sample, and nothing finishes."""
    retries = {
        "running": lambda i: 32.0 if i % every == 5 else 40.0,
        "waiting": lambda i: 8.0 if i % every == 5 else 0.0,
        "finished": lambda i: 0.0 if i % every in (4, 5, 6) else 3.0,
        "kv": kv,
        "generated": 900.0,
        "prompt": 900.0,
        "queue": 0.3,
    }
    said = play(200, **retries)
    assert "kv_pressure" not in said.confidently(), "the counter of preemptions has not moved"
    if every == 10:
        assert said.said(40) == {"healthy"}, "the counter bore none of the earlier ones out"
    late = after(60, 0.0, 2.0)
    assert play(100, preemptions=late, **retries | {"kv": 0.98}).confidently(80) == {"kv_pressure"}, "it bears them out"


COMPUTES = {
    "power_watts": 680.0,
    "power_limit_watts": 700.0,
    "tensor_activity_ratio": 0.75,
    "dram_activity_ratio": 0.3,
    "sm_activity_ratio": 0.97,
}
EMBEDS = {
    "kv": 0.0,
    "generated": 0.0,
    "prompt": 60_000.0,
    "finished": 200.0,
    "queue": 0.6,
    "length": 300.0,
    "output": 0.0,
}
READS = {
    "kv": 0.4,
    "generated": 400.0,
    "prompt": 20_000.0,
    "finished": 8.0,
    "queue": 6.0,
    "length": 500.0,
    "output": 50.0,
}
DECODES = READS | {"generated": 2000.0, "prompt": 2000.0}


@pytest.mark.parametrize(
    "gpu", [COMPUTES, WATTS | {"power_watts": 680.0}, {}], ids=["profiling", "power", "utilization alone"]
)
@pytest.mark.parametrize("load", [EMBEDS, READS], ids=["an embedding server", "prompts"])
def test_a_limit_that_is_reached_on_a_saturated_gpu_is_nothing_to_be_sure_of(load, gpu):
    """More requests at once would not be served faster: no raise is recommended."""
    said = play(60, args=("--max-num-seqs", "64"), gpus=(1.0,), gpu=gpu, running=64.0, waiting=50.0, **load)
    assert said.verdict == "concurrency_limited"
    assert not said.confidently(5)
    assert said.last.opposing
    assert not any(state.limits["max_num_seqs"].recommended for state in said.states)


@pytest.mark.parametrize(
    ("load", "gpu"),
    [
        (READS, {"tensor_activity_ratio": 0.1, "dram_activity_ratio": 0.2}),
        (READS, WATTS | {"power_watts": 300.0}),
        (DECODES, {"tensor_activity_ratio": 0.1, "dram_activity_ratio": 0.7}),
        (DECODES, WATTS | {"power_watts": 450.0}),
        (DECODES, {}),
    ],
)
def test_a_limit_that_is_reached_on_a_gpu_that_could_do_more_is_the_limit(load, gpu):
    said = play(60, args=("--max-num-seqs", "64"), gpu=gpu, running=64.0, waiting=50.0, **load)
    assert said.confidently(5) == {"concurrency_limited"}
    assert said.states[-1].limits["max_num_seqs"].recommended == 120  # with a quarter of the cache to spare


def test_gauges_left_over_beside_a_busy_neighbour_page_nobody():
    """The GPU is time-sliced and the other pod keeps it busy, or the other of two ranks, whose GPU is not known."""
    left = LEFT | {"gpus": (0.9,)}
    assert "stalled" in play(160, **left).confidently(60), "alone on the GPU it computes, and nothing comes out"
    said = play(160, neighbour=True, **left)
    assert "stalled" not in said.confidently()
    assert said.last.evidence["gpu_idle"].value is None
    two = ("--max-num-seqs", "256", "-dp", "2")
    ranks = play(160, args=two, others=[SIX], **LEFT | {"gpus": (after(60, 0.9, 0.0), 0.9)})
    assert "stalled" not in ranks.confidently()


@pytest.mark.parametrize("gpu", [{}, COMPUTES], ids=["utilization", "profiling"])
def test_a_gpu_that_a_neighbour_saturates_says_nothing_of_this_engine(gpu):
    load = {"running": cycle(4, 5, 6), "waiting": 15.0, "kv": 0.1, "generated": 40.0, "prompt": 400.0}
    load |= {"finished": 0.3, "queue": 6.0, "length": 1000.0}
    said = play(90, gpus=(0.98,), gpu=gpu, neighbour=True, **load)
    assert not said.confidently(5)
    assert said.last.evidence["gpu_saturated"].value is None
    assert play(90, gpus=(0.98,), gpu=gpu, **load).confidently(5) == {"compute_bound"}


def test_a_gpu_with_neighbours_that_does_little_does_little_for_each():
    said = play(60, gpus=(0.1,), neighbour=True, **SIX)
    assert [said.last.evidence[name].value for name in ("gpu_starved", "gpu_saturated", "gpu_utilization_low")] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(("own", "leaks"), [(None, None), (38.0, False), (lambda i: 30.0 + 0.02 * i, True)])
def test_what_a_neighbour_allocates_is_no_leak_of_an_idle_engine(own, leaks):
    grows = {"used": lambda i: 40.0 + 0.02 * i, "step": 10.0, "gpus": (0.5,)}
    assert play(150, neighbour=True, own=own, **grows, **NOTHING).last.conditions["memory_leak_idle"] is leaks
    assert play(150, **grows, **NOTHING).last.conditions["memory_leak_idle"] is True, "alone on the GPU"


@pytest.mark.parametrize(("own", "high"), [(None, None), (36.0, False), (60.0, True)])
def test_what_a_neighbour_holds_is_not_above_this_engines_share(own, high):
    share = {"args": (*LIMIT, "--gpu-memory-utilization", "0.45"), "used": 72.0}
    assert play(10, neighbour=True, own=own, **share, **SIX).last.conditions["baseline_too_high"] is high
    assert play(10, **share, **SIX).last.conditions["baseline_too_high"] is True, "alone on the GPU"


def connected(role):
    return (*LIMIT, "--kv-transfer-config", f'{{"kv_connector":"NixlConnector","kv_role":"{role}"}}')


LORA = (*LIMIT, "--enable-lora", "--max-loras", "1")
# vLLM before 0.20 does not tell who is deferred
OLD = {"deferred": None, "waiting": 20.0, "finished": 3.0, "queue": 4.0, "kv": 0.35}
FETCHES = OLD | {"running": cycle(28, 30, 33), "generated": 800.0, "prompt": 8000.0, "length": 2500.0}
ADAPTERS = OLD | {"running": cycle(5, 6, 7), "generated": 300.0, "prompt": 3000.0, "length": 1000.0}


@pytest.mark.parametrize("gpu", [{}, BUSY_UNITS, COMPUTES], ids=["utilization", "memory busy", "tensor units busy"])
@pytest.mark.parametrize(
    ("args", "load"),
    [
        (connected("kv_consumer"), FETCHES),
        (connected("kv_both"), FETCHES),
        (LORA, ADAPTERS),
        (("--kv-transfer-config.kv_role", "kv_consumer"), FETCHES),
    ],
)
def test_who_may_wait_for_something_else_makes_nobody_sure_of_the_gpu(args, load, gpu):
    """Requests that wait for KV blocks from elsewhere or for the slot of an adapter, on a server that does
    not tell them apart.
    """
    said = play(60, args=args, gpu=gpu, **load)
    assert not said.confidently(5)
    assert said.last.evidence["queue_for_capacity"].value is None
    assert "LoRA slot" in said.last.missing[0]
    short_cpu = play(60, args=args, gpu=gpu, host=container(throttled=0.4), gpus=(0.4,), **load)
    assert not short_cpu.confidently(5), "nor the host"
    told = play(60, args=args, gpu=COMPUTES, **load | {"deferred": 0.0, "computed": 8000.0})  # that none waits for it
    assert told.confidently(5) == {"compute_bound"}


@pytest.mark.parametrize(
    ("role", "told", "prefills"),
    [
        ("kv_consumer", {}, None),
        ("kv_consumer", {"computed": 100.0}, False),
        ("kv_both", {}, None),
        ("kv_producer", {}, True),
    ],
)
def test_prompts_that_another_server_computed_are_no_prefill(role, told, prefills):
    assert play(40, args=connected(role), **FETCHES | told).last.evidence["prefill_dominates"].value is prefills


@pytest.mark.parametrize("args", [connected("kv_consumer"), LORA])
def test_a_full_cache_is_one_whatever_else_requests_may_wait_for(args):
    said = play(60, args=args, **OLD | FULL | {"running": cycle(60, 62, 66), "finished": 3.0})
    assert said.confidently(5) == {"kv_pressure"}


def test_a_cache_beside_one_server_takes_no_confidence_away():
    """LMCache loads within the step and serves one server: no request waits for its blocks, and nobody pulls them."""
    beside = (*LIMIT, "--kv-transfer-config", '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}')
    assert "compute_bound" in play(60, args=beside, gpu=COMPUTES, **FETCHES).confidently(5)
    short_cpu = play(60, args=beside, host=container(throttled=0.4), **FETCHES | {"gpus": (0.4,)})
    assert short_cpu.confidently(5) == {"host_bound"}
    long = OLD | FULL | {"running": 1.0, "waiting": 8.0, "finished": 0.05}
    long |= {"length": 60000.0, "generated": 30.0, "prompt": 600.0}
    assert play(60, args=beside, **long).confidently(5) == {"kv_pressure"}


@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
def test_blocks_that_wait_to_be_pulled_are_nothing_to_cut_the_batch_for(role):
    """An instance that prefills: what it has computed stays in its cache until the one that decodes has it."""
    holds = OLD | {"kv": 0.99, "waiting": 40.0, "generated": 3.0, "prompt": 8000.0, "length": 2500.0, "output": 1.0}
    holds |= {"gpus": (0.3,)}
    said = play(120, args=connected(role), running=cycle(0, 1, 0), **holds)
    assert not said.confidently(5)
    assert "pulled" in said.last.missing[0]
    assert not any(state.limits["max_num_seqs"].recommended for state in said.states)
    for args, known in ((connected("kv_producer"), False), (LIMIT, True)):
        last = play(60, args=args, running=cycle(20, 22), **holds).states[-1]
        assert (last.limits["max_num_seqs"].recommended is not None) is known


def test_requests_whose_blocks_are_on_their_way_page_nobody_for_a_stall():
    flow = dict.fromkeys(("generated", "prompt"), after(40, 200.0, 0.0))
    gone = {"running": after(40, 4.0, 0.0), "waiting": after(40, 0.0, 12.0), "kv": after(40, 0.1, 0.3), **flow}
    gone |= {"deferred": None, "gpus": (after(40, 0.7, 0.0),)}
    assert "stalled" not in play(100, args=connected("kv_consumer"), **gone).confidently()
    assert "stalled" in play(100, args=LORA, **gone).confidently(), "nothing runs, so every slot is free"


KEPT_FREE = {
    "running": cycle(25, 26, 27),
    "waiting": 15.0,
    "kv": cycle(0.885, 0.89, 0.895),
    "generated": 900.0,
    "prompt": 900.0,
    "finished": 1.0,
    "length": 1000.0,
    "queue": 20.0,
}


def test_a_watermark_lowers_the_level_of_a_full_cache():
    """What this tool advises itself: --watermark 0.1. Nobody is admitted from 90 % on."""
    said = play(60, args=(*LIMIT, "--watermark", "0.1"), **KEPT_FREE)
    assert (said.verdict, said.confidence >= CONFIDENT) == ("kv_pressure", True)
    assert "full at 87 %" in said.last.evidence["kv_full"].text
    assert not play(60, args=(), **KEPT_FREE).confidently(5) - {"kv_pressure"}, "arguments not known"
    assert play(60, args=(*LIMIT, "--watermark", "0.1"), **KEPT_FREE | {"kv": 0.3}).verdict != "kv_pressure"


def test_a_small_model_at_its_usual_speed_is_not_surely_host_bound():
    """It keeps a tenth of the GPU busy and nobody waits: once its own normal is known, nothing is wrong."""
    small = {"running": 4.0, "waiting": 0.0, "kv": 0.02, "generated": 900.0, "prompt": 500.0, "finished": 3.0}
    small |= {"gpus": (0.10,)}
    assert not play(120, step=5.0, token=0.004, **small).confidently(90)
    slower = play(150, step=5.0, token=after(110, 0.004, 0.04), **small | {"generated": after(110, 900.0, 200.0)})
    assert slower.confidently(140) == {"host_bound"}


def test_a_full_cache_that_makes_nobody_wait_is_nothing_to_be_sure_of():
    brief = FULL | {"running": cycle(58, 60, 62), "waiting": 1.0, "queue": 0.02, "finished": 8.0}
    said = play(60, **brief)
    assert (said.verdict, said.confidence >= CONFIDENT) == ("kv_pressure", False)
    assert play(60, **brief | {"queue": 3.0}).confidence >= CONFIDENT
    assert play(60, **brief, preemptions=1.0).confidence >= CONFIDENT


@pytest.mark.parametrize("args", [LIMIT, ()])
def test_where_the_room_is_not_known_half_a_cache_leaves_doubt(args):
    load = WAITS_FOR_ROOM | {"capacity": 0.0, "prompt": 3000.0}
    assert not play(60, args=args, kv=0.70, **load).confidently(20)
    assert play(60, args=args, kv=0.30, **load | {"running": cycle(5, 7, 9)}).confidently(20) == {"compute_bound"}


def test_a_cpu_that_stops_most_of_the_time_is_the_cause_before_any_normal_is_known():
    light = FINE | {"running": 6.0, "generated": 200.0}
    assert play(40, gpus=(0.4,), host=container(throttled=0.8), **light).confidently(20) == {"host_bound"}
    assert not play(40, gpus=(0.4,), host=container(throttled=0.3), **light).confidently(20)
    assert not play(40, gpus=(), host=container(throttled=0.8), **light).confidently(20), "it may compute on the CPU"
    calm = play(120, step=5.0, gpus=(0.4,), host=container(throttled=0.8), **light)
    assert not calm.confidently(100), "it has always been like that, and nobody waits"
