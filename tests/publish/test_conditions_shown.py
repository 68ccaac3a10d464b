"""Conditions beside the verdict: each names its number and its threshold, on the page and in the JSON."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvpressure.advice.condition_text import standings
from kvpressure.advice.wording import words
from kvpressure.diagnosis import oom
from kvpressure.diagnosis.conditions import NAMES, Moment, evaluate
from kvpressure.diagnosis.evaluate import Answer, Grade
from kvpressure.model.signals import HostSignals, KvSignals, LoadSignals, MemorySignals, ProgressSignals, Signals
from kvpressure.model.state import EngineState, Found, Limit, State
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.diagnosis_json import diagnosis_document
from kvpressure.publish.page.render import render_page
from kvpressure.publish.page.view import ViewContext
from kvpressure.recording.reader import Reader
from kvpressure.settings.thresholds import builtin
from tests.publish.states import NOW, full_engine, unknown_engine

RECORDINGS = Path(__file__).parents[1] / "fixtures/recordings"
T = builtin()
SIGNALS = Signals(
    time=NOW,
    gpu_faults=2,
    events={"cuda_oom": 3},
    events_known=True,
    memory=MemorySignals(
        device_used_ratio=0.99,
        allocator_reserved_bytes=9.5e9,
        allocator_allocated_bytes=7e9,
        allocator_inactive_split_bytes=1.5e9,
        idle_growth_bytes_per_hour=3 * 2**30,
    ),
    kv=KvSignals(kv_used_ratio=0.4, kv_seconds_to_full=41.0, prefix_hit_ratio_recent=0.1, prefix_hit_ratio_usual=0.8),
    load=LoadSignals(in_flight=0.0),
    progress=ProgressSignals(seconds_still=75.0),
    host=HostSignals(
        memory_used_ratio=0.95, restarts_recent=4.0, last_termination_reason="OOMKilled", last_exit_code=137.0
    ),
)
SAID = {
    "memory_leak_idle": ("3.0 GiB an hour", "threshold 1.0 GiB", "memory_leak_bytes_per_hour"),
    "kv_held_without_load": (
        "40 % used with 0 requests",
        "threshold 10 %, in 2 idle periods of 60.0 s",
        "kv_held_seconds",
    ),
    "kv_exhaustion_ahead": ("40 % used, full in about 41 s", "threshold 60 s", None),
    "prefix_cache_collapsed": ("hit ratio 10 % in the last 30 s", "best in 15 minutes 80 %", None),
    "allocator_fragmentation": (
        "2.3 GiB reserved but not allocated",
        "1.4 GiB of it in split blocks (thresholds 1.9 GiB and 25 %)",
        "fragmentation_warning_bytes",
    ),
    "baseline_too_high": ("used 99 %: more than the 98 % that", "gpu_memory_utilization 90 %", "baseline_full_ratio"),
    "host_memory_near_limit": ("near its limit: 95 % used", "threshold 90 %", "host_memory_limit_ratio"),
    "host_oom_killed": ("OOMKilled, exit code 137", "4 restarts in half an hour", None),
    "gpu_out_of_memory": ("3 times", "the log shows", None),
    "crash_loop": ("4 restarts in half an hour", "crash loop: 3 or more", "crash_loop_restarts"),
    "gpu_fault": ("2 recent XID events or lost GPUs", "threshold 1", None),
    "metrics_frozen": ("has moved for 75.0 s", "threshold 8.0 s", "no_progress_seconds"),
}


def holding() -> EngineState:
    """An engine about which every condition is true."""
    engine = full_engine()
    text = oom.TRUE.format(oom_times=oom.times(SIGNALS), oom_figures=oom.figures(SIGNALS, T))
    told = {**engine.diagnosis.evidence, "gpu_out_of_memory": Found("gpu_out_of_memory", True, text)}
    return replace(
        engine,
        signals=SIGNALS,
        diagnosis=replace(engine.diagnosis, conditions=dict.fromkeys(NAMES, True), evidence=told),
        limits={"gpu_memory_utilization": Limit("gpu_memory_utilization", 0.9)},
    )


def test_every_condition_has_words() -> None:
    assert set(SAID) == set(NAMES) - {"documented_signature"} == {one.name for one in standings(holding(), T)}


@pytest.mark.parametrize("name", SAID)
def test_it_names_value_and_threshold(name: str) -> None:
    value, threshold, entry = SAID[name]
    text = next(one.text for one in standings(holding(), T) if one.name == name)
    assert value in text
    assert threshold in text
    if entry is not None:
        moved = T.override(
            {
                entry: {
                    "memory_leak_bytes_per_hour": 7e9,
                    "fragmentation_warning_bytes": 7e9,
                    "crash_loop_restarts": 9,
                    "no_progress_seconds": 11,
                }.get(entry, 0.33)
            },
            "test",
        )
        assert next(one.text for one in standings(holding(), moved) if one.name == name) != text


def test_page_and_json_show_them() -> None:
    state = State(time=NOW, engines=(holding(),))
    html = render_page(state, "node-1", "/metrics", ViewContext())
    document = diagnosis_document(state, "node-1")
    for name, (value, threshold, _) in SAID.items():
        text = document["engines"][0]["condition_texts"][name]
        assert value in text
        assert threshold in text
        assert html.count(text) == 1, "among what is also true, and not again among the others"


def test_what_does_not_hold_is_a_sentence_that_does_not_repeat_its_name() -> None:
    engine = holding()
    engine = replace(engine, diagnosis=replace(engine.diagnosis, conditions=dict.fromkeys(NAMES, False)))
    html = render_page(State(time=NOW, engines=(engine,)), "node-1", "/metrics", ViewContext())
    for one in standings(engine, T):
        assert f"<strong>{words(one.name)}</strong>: {one.text}</li>" in html
        assert not one.text.startswith(("no ", "not ")) or one.name in (
            "kv_held_without_load",
            "gpu_fault",
            "metrics_frozen",
        )
    assert "too few for a crash loop (3 or more)" in html


@pytest.mark.parametrize(
    ("progress", "value", "text"),
    [
        (ProgressSignals(work_present=True, progressing=True, tokens_flow=None, seconds_still=0.0), None, "unknown"),
        (
            ProgressSignals(work_present=True, progressing=False, tokens_flow=False, seconds_still=3.0),
            False,
            "no gauge or counter has moved for 3.0 s (frozen at 8.0 s)",
        ),
        (
            ProgressSignals(work_present=True, progressing=True, tokens_flow=True, seconds_still=0.0),
            False,
            "are moving",
        ),
        (
            ProgressSignals(work_present=False),
            False,
            "unchanged gauges and counters are normal: no requests are in flight",
        ),
    ],
)
def test_gauges_are_said_to_move_only_where_that_was_seen(
    progress: ProgressSignals, value: bool | None, text: str
) -> None:
    s = Signals(time=NOW, progress=progress)
    moment = Moment(s, Answer("unknown", Grade.GUESS), None, None, None, None, T)
    assert evaluate(moment)["metrics_frozen"] is value
    engine = replace(full_engine(), signals=s)
    engine = replace(engine, diagnosis=replace(engine.diagnosis, conditions={"metrics_frozen": value}))
    assert text in standings(engine, T)[0].text


def test_one_request_is_one_request() -> None:
    engine = replace(holding(), signals=replace(SIGNALS, load=LoadSignals(in_flight=1.0)))
    engine = replace(engine, diagnosis=replace(engine.diagnosis, conditions={"kv_held_without_load": False}))
    assert standings(engine, T)[0].text.endswith("(KV cache 40 % used, 1 request in flight)")


def test_what_is_not_known_has_no_numbers() -> None:
    texts = [one.text for one in standings(unknown_engine(), T)]
    assert all("unknown" in text for text in texts), texts
    assert len(set(texts)) == len(SAID)
    html = render_page(State(time=NOW, engines=(unknown_engine(),)), "node-1", "/metrics", ViewContext())
    assert all(text in html for text in texts)


@pytest.mark.parametrize(
    ("recording", "name", "value"),
    [
        ("incidents-fresh/FGPU1", "gpu_fault", True),  # the GPU failed, and the engine with it
        ("incidents-fresh/FOOM3", "baseline_too_high", True),  # the server ends, its GPU is still read
        ("vllm-cpu-fresh/api-stopped", "prefix_cache_collapsed", None),  # only the metrics would show it
    ],
)
def test_while_metrics_are_missing_a_condition_has_its_numbers_or_is_unknown(
    recording: str, name: str, value: bool | None
) -> None:
    pipeline, seen = Pipeline(T), []
    with Reader(RECORDINGS / f"{recording}.jsonl.gz", on_problem=lambda _: None) as reader:
        for snapshot in reader:
            for engine in pipeline.observe(snapshot).engines:
                if not engine.up and engine.diagnosis.conditions[name] == value:
                    seen += [one.text for one in standings(engine, T) if one.name == name]
    assert seen
    assert [text for text in seen if value is not None and re.search("–|unknown|^0 ", text)] == []
