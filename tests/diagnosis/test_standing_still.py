"""Engines that stand still for a reason, or only seem to: a pause, a drain, a first step, clients that gave up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpressure.advice.mitigation import plan
from kvpressure.advice.triage import steps
from kvpressure.engines.base import PAGE_SAMPLES
from kvpressure.engines.registry import log_line, public_line
from kvpressure.model import readings as r
from kvpressure.model.readings import EngineReading, GpuReading, Scrape, Snapshot
from kvpressure.pipeline.engines import ContainerTrack
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.recording.reader import Reader
from kvpressure.settings.thresholds import builtin
from kvpressure.signals.engine import EngineTracker
from kvpressure.signals.hardware import EngineContext, LogContext
from tests.diagnosis.servers import CONFIDENT, LIMIT, Value, after, play
from tests.diagnosis.test_lookalikes import container
from tests.recording.strategies import RECORDINGS

pytestmark = pytest.mark.slow

T = builtin()
REAL = RECORDINGS / "vllm-cpu-2026"


def replayed(name: str, *without: str):
    """(seconds, state) of the recording's engine, tick by tick; ``without`` some values of its pages."""
    pipeline, began = Pipeline(), None
    with Reader(REAL / f"{name}.jsonl.gz") as reader:
        for snapshot in reader:
            began = snapshot.time if began is None else began
            if without:
                pages = (
                    replace(one, page={key: one.page[key] for key in one.page if key not in without})
                    for one in snapshot.pages
                )
                snapshot = replace(snapshot, pages=tuple(pages))
            for state in pipeline.observe(snapshot).engines:
                yield snapshot.time - began, state


# --- paused ----------------------------------------------------------------------------------------------------------

PAUSED = {
    "running": 8.0,
    "waiting": 0.0,
    "kv": 0.23,
    "generated": after(40, 600.0, 0.0),
    "prompt": after(40, 300.0, 0.0),
    "finished": after(40, 2.0, 0.0),
}


@pytest.mark.parametrize("kind", ["sleep_mode", "rl_weight_update"])
def test_an_operation_in_flight_is_no_stall(kind: str) -> None:
    said = play(120, page={r.OPERATIONS_PREFIX + kind: after(40, 0.0, 1.0)}, gpus=(0.0,), **PAUSED)
    assert "stalled" not in said.said()
    assert said.last.row == "Asleep: paused"
    first = plan(said.states[-1], T).actions[0]
    assert any("/is_paused" in command for command in first.commands)
    assert all("--max-time" in command for command in first.commands), "a stopped vLLM 0.32 never answers /is_paused"
    assert not any("restart" in action.title.lower() for action in plan(said.states[-1], T).actions)


def test_healthy_is_doubted_as_soon_as_tokens_stop() -> None:
    """One step of 16 s on a real vLLM: healthy stood with confidence for 8 s, until ``no_progress`` held."""
    said = play(47, gpus=(), **PAUSED)
    assert said.confidently() == {"healthy"}
    assert not said.confidently(44)


def test_what_makes_tokens_is_not_paused() -> None:
    said = play(60, page={r.OPERATIONS_PREFIX + "sleep_mode": 1.0}, **PAUSED | {"generated": 600.0, "prompt": 300.0})
    assert said.verdict == "healthy"


def test_where_nothing_tells_the_first_action_asks_before_anything_is_killed() -> None:
    """A real vLLM paused with ``POST /pause?mode=keep``; no gauge and no log of it, and requests are not counted."""
    unseen = replayed("11-pause-keep", r.HTTP_PAUSE, r.HTTP_RESUME)
    stalled = [state for _, state in unseen if state.diagnosis.verdict == "stalled"]
    assert stalled
    for state in stalled:
        first, *others = plan(state, T).actions
        assert [command.rpartition("/")[2] for command in first.commands] == ["is_paused", "is_sleeping"]
        assert any("restart" in action.title.lower() for action in others)


@pytest.mark.parametrize(
    ("pauses", "resumes", "started", "paused"),
    [
        (5.0, 4.0, 1.0, True),  # paused before the first scrape
        (after(40, 2.0, 3.0), 2.0, 1.0, True),
        (after(40, 2.0, 3.0), after(80, 2.0, 3.0), 1.0, False),
        (after(40, 3.0, 4.0), after(40, 2.0, 3.0), 1.0, True),  # went on and paused again between two scrapes
        (1.0, 1.0, 1.0, False),
        (after(45, 1.0, 0.0), 0.0, after(45, 1.0, 45.0), False),  # started anew
        (after(45, 1.0, None), None, None, False),  # several API servers, which do not tell when they started
    ],
)
def test_the_last_request_to_pause_or_to_go_on_counts(
    pauses: Value, resumes: Value, started: Value, paused: bool
) -> None:
    page = {r.HTTP_PAUSE: pauses, r.HTTP_RESUME: resumes, r.PROCESS_START: started}
    assert (play(120, page=page, gpus=(0.0,), **PAUSED).last.row == "Asleep: paused") is paused


@pytest.mark.parametrize(
    ("engine", "lines", "paused"),
    [
        ("vllm", ('(APIServer pid=7) INFO:     10.0.0.9:1 - "POST /pause?mode=keep HTTP/1.1" 200 OK',), True),
        ("vllm", ('INFO:     10.0.0.9:1 - "POST /sleep HTTP/1.1" 200 OK',), True),
        (
            "vllm",
            ('INFO: 1 - "POST /pause HTTP/1.1" 200 OK', 'INFO: 1 - "POST /resume HTTP/1.1" 200 OK'),
            False,
        ),
        ("vllm", ('INFO:     10.0.0.9:1 - "POST /pause HTTP/1.1" 404 Not Found',), None),
        ("vllm", ('INFO:     10.0.0.9:1 - "POST /pauses HTTP/1.1" 200 OK',), None),
        ("sglang", ('[2026-11-01 10:00:00] INFO:     1 - "POST /pause_generation HTTP/1.1" 200 OK',), True),
    ],
)
def test_the_log_tells_of_a_pause_and_of_its_end(engine: str, lines: tuple[str, ...], paused: bool | None) -> None:
    track = ContainerTrack(T, "ns", "chat-0", "vllm")
    for number, line in enumerate(lines):
        kept = public_line(line)  # as recorded, it tells the same
        for text in (line, kept):
            track.take_line(float(number), log_line("ns", "chat-0", "vllm", text, engine))
        assert "10.0.0.9" not in kept
    assert track.told[0] is paused


def test_more_ends_than_pauses_leave_it_to_the_log() -> None:
    """``/wake_up?tags=weights`` and ``/wake_up?tags=kv_cache`` end one ``/sleep``: which came last is not counted."""
    tracker, reading = EngineTracker(T), EngineReading("m", "0", {r.RUNNING: 5.0, r.WAITING: 0.0})
    page = {r.HTTP_PAUSE: 5.0, r.HTTP_RESUME: 8.0}
    tracker.observe(Scrape("t", 60.0, "ns", "chat-0", "vllm", engines=(reading,), page=page), reading)
    for told in ((True, 50.0), (None, 0.0)):
        around = EngineContext(60.0, log=LogContext(known=True, told=told))
        assert tracker.signals(around, tracker.kv_signals(around), None).progress.paused is told[0]


@pytest.mark.parametrize(("tokens_until", "paused"), [(60.0, True), (250.0, False)])
def test_a_pause_whose_end_is_not_in_the_log_ends_with_tokens(tokens_until: float, paused: bool) -> None:
    """Requests in flight end after ``mode=wait``; tokens minutes later show that the line of ``/resume`` was lost."""
    tracker = EngineTracker(T)
    for second in range(400):
        tokens = 100.0 * min(second, tokens_until)
        reading = EngineReading("m", "0", {r.RUNNING: 5.0, r.WAITING: 0.0}, {r.GENERATION_TOKENS: tokens})
        tracker.observe(Scrape("t", float(second), "ns", "chat-0", "vllm", engines=(reading,)), reading)
    around = EngineContext(400.0, log=LogContext(known=True, told=(True, 50.0)))
    assert tracker.signals(around, tracker.kv_signals(around), None).progress.paused is paused


# --- one long step ---------------------------------------------------------------------------------------------------

ON_CPU = {
    "running": 1.0,
    "waiting": 0.0,
    "gpus": (),
    "kv": lambda i: 0.05 if i % 70 < 1 else 0.2 + 0.001 * max(0, i % 70 - 45),
    "generated": lambda i: 4.0 if i % 70 >= 45 else 0.0,
    "prompt": lambda i: 4000.0 if i % 70 == 45 else 0.0,
    "finished": lambda i: 1.0 if i % 70 == 69 else 0.0,
}


def test_a_step_of_a_model_on_the_cpu_takes_longer_than_a_stall():
    """4 000 tokens of a prompt take 45 s, in which no gauge moves."""
    busy = container(used=0.98) | {"cpu_limit_cores": 32.0, "cpu_usage_seconds": lambda i: 31.4 * i}
    said = play(220, host=busy, **ON_CPU)
    assert "stalled" not in said.said(70)
    assert any("CPU" in reason for state in said.states for reason in state.diagnosis.missing)
    rests = busy | {"cpu_usage_seconds": lambda i: 3.0 * i}
    first = ON_CPU | {"generated": lambda i: 4.0 if i < 70 or i % 70 >= 45 else 0.0}
    assert "stalled" in play(112, host=rests, **first).said(70), "the CPU rests, and no silence ever ended with output"
    assert "stalled" not in play(220, host=rests, **ON_CPU).said(150), "two as long ended with output"
    hangs = play(
        180, host=busy, **ON_CPU | {"generated": after(60, 4.0, 0.0), "prompt": 0.0, "finished": 0.0, "kv": 0.2}
    )
    assert (hangs.states[140].diagnosis.verdict, hangs.verdict) == ("unknown", "stalled"), "not for ever"


WHOLE = {
    "running": after(40, 2.0, 1.0),
    "waiting": after(40, 0.0, 3.0),
    "kv": after(40, 0.01, 0.6),
    "deferred": None,
    "generated": after(40, 30.0, 0.0),
    "prompt": after(40, 100.0, 0.0),
    "finished": after(40, 1.0, 0.0),
    "gpus": (after(40, 0.5, 1.0),),
}


@pytest.mark.parametrize(
    ("args", "kind"),
    [(LIMIT, {"swapped": 0.0}), ((*LIMIT, "--no-enable-chunked-prefill"), {})],
    ids=["V0", "not chunked"],
)
def test_a_prompt_that_is_computed_as_a_whole_is_no_stall(args, kind):
    """128k tokens: all of its blocks are there at once, and the first token comes 45 s later."""
    said = play(85, args=args, **WHOLE | kind)
    assert "stalled" not in said.said()
    assert "computed as a whole" in said.last.missing[0]
    assert play(85, **WHOLE).verdict == "stalled", "by chunks it would show that it moves"
    assert play(140, args=args, **WHOLE | kind).verdict == "stalled", "not for ever"
    assert play(85, args=args, **WHOLE | kind | {"gpus": (after(40, 0.5, 0.0),)}).verdict == "stalled", (
        "nothing computes"
    )
    assert play(85, args=args, **WHOLE | kind | {"running": 2.0, "kv": 0.3}).verdict == "stalled", "nothing was let in"


def test_a_prompt_that_starves_decoding_is_seen_by_its_blocks() -> None:
    """Two run and get 0.4 tokens/s for ten minutes, while usage rises by 0.08 % a second."""
    flow = {"generated": after(60, 25.0, 0.4), "prompt": after(60, 10.0, 0.0), "finished": after(60, 0.2, 0.0)}
    load = {"running": after(60, 1.0, 2.0), "waiting": 0.0, "kv": lambda second: 0.2 + max(0, second - 60) * 0.0008}
    said = play(660, args=("--max-num-seqs", "8"), gpus=(1.0,), **load, **flow)
    assert said.verdict == "compute_bound"
    assert said.said(100) == {"compute_bound"}


def test_long_prefills_from_the_first_minute_are_no_stall() -> None:
    """A prompt of 100 s every two minutes, three tokens each."""

    def turn(second: int) -> int:
        return second % 120

    said = play(
        600,
        args=("--max-num-seqs", "8"),
        gpus=(1.0,),
        running=lambda second: 1.0 if turn(second) < 103 else 0.0,
        waiting=0.0,
        kv=lambda second: 0.1 + min(turn(second), 100) * 0.005 if turn(second) < 103 else 0.0,
        generated=lambda second: 1.0 if 100 <= turn(second) < 103 else 0.0,
        prompt=lambda second: 50_000.0 if turn(second) == 100 else 0.0,
        finished=lambda second: 1.0 if turn(second) == 103 else 0.0,
    )
    assert "stalled" not in said.confidently()


def test_blocks_that_stop_rising_are_a_stall() -> None:
    flow = {"generated": after(60, 50.0, 0.0), "prompt": after(60, 50.0, 0.0), "finished": after(60, 0.5, 0.0)}
    load = {"running": 2.0, "waiting": 3.0, "kv": lambda second: 0.2 + min(second, 120) * 0.001}
    said = play(400, gpus=(1.0,), **load, **flow)
    assert said.confidently(200) == {"stalled"}


# --- rest ------------------------------------------------------------------------------------------------------------

QUIET = {"running": 0.0, "waiting": 0.0, "kv": 0.0, "generated": 0.0, "prompt": 0.0, "finished": 0.0}


def served(until: int) -> dict[str, Value]:
    """Five requests at a time until a second, then nothing that a gauge shows."""
    busy = {"running": 5.0, "kv": 0.1, "generated": 100.0, "prompt": 50.0, "finished": 1.0}
    return QUIET | {name: after(until, value, 0.0) for name, value in busy.items()}


def descriptors(second: int) -> float:
    """Five clients, none from 30 to 59, and five again whose requests no step has counted yet."""
    return 35.0 if 30 <= second < 60 else 40.0


def test_a_long_first_step_behind_connected_clients_is_not_idle() -> None:
    said = play(90, gpus=(), page={r.PROCESS_OPEN_FDS: descriptors}, **served(30))
    assert said.states[58].diagnosis.verdict == "idle"
    assert said.states[58].diagnosis.confidence >= CONFIDENT
    assert "idle" not in said.confidently(60)
    assert said.verdict == "unknown"
    assert said.last.row == "Idle: clients stay connected"


def test_what_stays_open_for_longer_than_a_step_is_no_client_that_waits() -> None:
    """A gateway keeps its connections, or a file was opened: rest is learnt anew, and until then idle is doubted."""
    said = play(300, gpus=(), page={r.PROCESS_OPEN_FDS: descriptors}, **served(30))
    assert (said.verdict, said.confidence >= CONFIDENT) == ("idle", False)
    said = play(90, gpus=(0.0,), page={r.PROCESS_OPEN_FDS: descriptors}, **served(30))
    assert (said.verdict, said.confidence >= CONFIDENT) == ("idle", False)


@pytest.mark.parametrize(("gpus", "sure"), [((0.0,), True), ((0.9,), False), ((), False)])
def test_the_gpu_is_a_second_witness(gpus: tuple[float, ...], sure: bool) -> None:
    said = play(60, gpus=gpus, **QUIET)
    assert (said.verdict, said.confidence >= CONFIDENT) == ("idle", sure)


def test_a_level_that_load_does_not_raise_shows_no_rest() -> None:
    """Thirty clients are connected all the time; one more descriptor of something else teaches nothing."""
    noisy = {r.PROCESS_OPEN_FDS: lambda second: 66.0 if second % 10 == 3 else 65.0}
    said = play(90, gpus=(), page=noisy, **served(40) | {"running": after(40, 30.0, 0.0)})
    assert "idle" not in said.confidently()


# --- work that is thrown away ----------------------------------------------------------------------------------------


def test_a_server_that_ends_requests_unanswered_refuses_them() -> None:
    """A real vLLM drains: 675 requests end as ``abort`` within 4 s, beside 29 that are answered."""
    states = [state for second, state in replayed("23-drain") if 26 <= second < 38]
    for state in states:
        found = state.diagnosis
        assert (found.verdict, found.row) == ("unknown", "Requests refused: aborted by the server")
        assert "another server" in plan(state, T).summary
        assert (state.signals.requests.requests_lost_ratio or 0.0) > T["rejected_critical_ratio"]


def test_clients_that_cancel_at_will_are_no_failures() -> None:
    """Half of the answers of an editor's completions are cancelled; nobody waits."""
    calm = {"running": 2.0, "waiting": 0.0, "kv": 0.1, "generated": 100.0, "prompt": 100.0, "finished": 3.0}
    said = play(90, page={r.HTTP_GENERATED: lambda second: 6.0 * second}, **calm)
    assert said.states[-1].signals.requests.given_up_ratio == pytest.approx(0.5)
    assert said.states[-1].signals.requests.requests_lost_ratio is None


GIVES_UP = {"running": 10.0, "waiting": 30.0, "kv": 0.99, "generated": 600.0, "prompt": 300.0, "preemptions": 2.0}


@pytest.mark.parametrize(("answers", "given_up"), [(6.0, 1.0), (1.0, 0.0)])
def test_answers_that_clients_do_not_wait_for_are_named_and_count_as_lost(answers: float, given_up: float) -> None:
    """6 HTTP requests a second are answered with 2xx, and hardly one of them is finished by the engine."""
    finished = 1.0 if given_up == 0.0 else 0.0
    said = play(90, page={r.HTTP_GENERATED: lambda second: answers * second}, **GIVES_UP | {"finished": finished})
    assert said.verdict == "kv_pressure"
    assert said.states[-1].signals.requests.given_up_ratio == given_up
    assert bool(said.states[-1].signals.requests.requests_lost_ratio) == bool(given_up)
    told = plan(said.states[-1], T)
    assert ("thrown away" in told.summary) == bool(given_up)
    assert any("retries" in action.title for action in told.actions) == bool(given_up)
    assert any("give up" in text for text in said.last.supporting) == bool(given_up)


@pytest.mark.parametrize(
    ("handler", "status", "name"),
    [
        ("/v1/chat/completions", "2xx", r.HTTP_GENERATED),
        ("/v1/chat/completions", "500", "http:5xx"),
        ("/v1/models", "200", "http:2xx"),
        ("/v1/completions", "odd", None),
        ("/pause", "2xx", r.HTTP_PAUSE),
        ("/sleep", "200", r.HTTP_PAUSE),
        ("/wake_up", "2xx", r.HTTP_RESUME),
        ("/pause", "4xx", "http:4xx"),
        ("/is_paused", "2xx", "http:2xx"),
    ],
)
def test_requests_are_told_apart_by_what_they_ask_for(handler: str, status: str, name: str | None) -> None:
    family = PAGE_SAMPLES["http_requests_total"].family
    assert family.canonical_for({"handler": handler, "status": status}) == name


# --- what a GPU shows of a server that does not answer ----------------------------------------------------------------


def test_gpu_readings_live_without_the_page() -> None:
    """Workers hang before the weights: the page is refused, four GPUs are at 99 % and 90 of 400 W."""
    pipeline = Pipeline()
    for t in range(40):
        gpus = tuple(
            GpuReading(f"GPU-{n}", n, "nvidia", utilization_ratio=0.99, power_watts=90.0, power_limit_watts=400.0)
            for n in range(4)
        )
        refused = Scrape(
            "http://10.0.0.5:8000/metrics", 1000.0 + t, "ns", "chat-0", gpus=[g.uuid for g in gpus], error="refused"
        )
        state = pipeline.observe(Snapshot(1000.0 + t, gpus=gpus, pages=(refused,)))
    found = state.engines[0].signals.compute
    assert (found.gpu_utilization, found.power_ratio) == (pytest.approx(0.99), pytest.approx(0.225))
    assert "99" in " ".join(answer for answer in steps(state.engines[0], state, T)[2].answers)
