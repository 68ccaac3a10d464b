"""What one engine, GPU or container holds or raises leaves metrics, page and JSON of the others as they are."""

from __future__ import annotations

import html
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvpressure.diagnosis.diagnose import Diagnoser
from kvpressure.model.isolation import MAX_COUNTED, STAGES, Failure, Guard
from kvpressure.model.readings import Discovered, Snapshot
from kvpressure.model.state import TargetState
from kvpressure.pipeline import pipeline as pipeline_module
from kvpressure.pipeline.engines import Engines, GpuTrack
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish import collector, diagnosis_json
from kvpressure.publish.page import render as page
from kvpressure.publish.page import view
from kvpressure.signals.batch import StepWindow
from kvpressure.signals.engine import EngineTracker
from kvpressure.signals.hardware import ContainerWindow
from tests.helpers.three_engines import BAD, PODS, TICKS, Shown, T, assert_innocent, snapshot

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed() -> Shown:
    return Shown()


def test_the_undisturbed_node_shows_everything_and_no_failure(undisturbed: Shown) -> None:
    assert undisturbed.failures() == {}
    assert undisturbed.document["failures"] == []
    assert_innocent(undisturbed, undisturbed)
    assert len(undisturbed.of(BAD)[0]) == len(undisturbed.of(PODS[0])[0])


def raising(real: Callable[..., Any], bad: Callable[..., bool], error: Exception) -> Callable[..., Any]:
    def instead(*args: Any, **kwargs: Any) -> Any:
        if bad(*args):
            raise error
        return real(*args, **kwargs)

    return instead


def first_try(one: Any, *_: Any) -> bool:
    """Whether it is the bad one, an engine, GPU or container, which is not known to have failed."""
    return one.failure is None and BAD in str(one.key if hasattr(one, "key") else one.reading)


def described(kind: type) -> Callable[..., bool]:
    return lambda one, *_: isinstance(one, kind) and BAD in str(one)


def tracks_bad(tracker: Any, *_: Any) -> bool:
    return tracker.page is not None and tracker.page.pod == BAD


WHO = {
    "engine": f"n/{BAD}/m/0",
    "gpu": f"GPU-{BAD}",
    "container": f"n/{BAD}/vllm",
    "target": f"http://{BAD}/metrics",
    "source": BAD,
    "node": "gpus",
}

# What is made to raise, by stage: for which of its calls, and which kind of subject is then said to have failed.
TICK_PLACES = {
    "take in engine": (EngineTracker, "observe", lambda _, *given: given[0].pod == BAD, "engine"),
    "take in steps": (StepWindow, "observe", lambda _, stats: stats.pod == BAD, "engine"),
    "take in target": (Engines, "observe", lambda _, *given: given[1].pod == BAD, "target"),
    "take in gpu": (GpuTrack, "observe", lambda _, *given: BAD in given[1].uuid, "gpu"),
    "take in container": (ContainerWindow, "observe", lambda _, *given: given[1].pod == BAD, "container"),
    "gpus of engine": (pipeline_module, "_gpus_of", lambda track, _: track.key.pod == BAD, "engine"),
    "kv signals": (EngineTracker, "kv_signals", tracks_bad, "engine"),
    "signals": (EngineTracker, "signals", tracks_bad, "engine"),
    "container": (ContainerWindow, "throttled_ratio", lambda window: window.last.pod == BAD, "container"),
}
RENDER_PLACES = {
    "metrics engine": (collector, "add_engine", lambda _, one: one.key.pod == BAD and one.failure is None, "engine"),
    "metrics engine twice": (collector, "add_engine", lambda _, one: one.key.pod == BAD, "engine"),
    "metrics gpu": (collector, "_memory", lambda one, *_: BAD in one.reading.uuid, "gpu"),
    "metrics gpu once": (collector, "_memory", first_try, "gpu"),
    "metrics container": (collector, "_add_container", lambda _, one: one.reading.pod == BAD, "container"),
    "metrics owner": (collector, "_add_owner", lambda _, one: one.pod == BAD, "gpu"),
    "metrics discovered": (collector, "_add_discovered", lambda _, one: one.pod == BAD, "container"),
    "metrics target": (collector, "_add_target", lambda _, one: BAD in one.target, "target"),
    "metrics source": (collector, "_add_source", lambda _, name, __: name == BAD, "source"),
    "metrics counts": (collector, "_add_gpu_counts", lambda *_: True, "node"),
    "view": (view, "engine_view", first_try, "engine"),
    "view twice": (view, "engine_view", lambda one, *_: one.key.pod == BAD, "engine"),
    "rank": (view, "rank", lambda one: one.key.pod == BAD, "engine"),
    "anchor": (view, "_anchor", lambda key: key.pod == BAD, "engine"),
    "headline": (view, "verdict_in_words", lambda one: one.key.pod == BAD, "engine"),
    "page article": (page, "_load", first_try, "engine"),
    "page article twice": (page, "_load", lambda one: one.key.pod == BAD, "engine"),
    "json engine": (diagnosis_json, "_engine", lambda one: first_try(one.state), "engine"),
    "json engine twice": (diagnosis_json, "_engine", lambda one: one.state.key.pod == BAD, "engine"),
    "json gpu": (diagnosis_json, "_gpu", first_try, "gpu"),
    "json container": (diagnosis_json, "_container", first_try, "container"),
    "json discovered": (diagnosis_json, "_fields", described(Discovered), "container"),
    "json target": (diagnosis_json, "_fields", described(TargetState), "target"),
    "json source": (diagnosis_json, "_source", lambda one: one.name == BAD, "source"),
}
PLACES: dict[str, tuple[Any, str, Callable[..., bool], str, str]] = {
    **{f"tick: {place}": (*where, "tick") for place, where in TICK_PLACES.items()},
    **{f"render: {place}": (*where, "render") for place, where in RENDER_PLACES.items()},
}


@pytest.mark.fault(
    "web",
    "rendering fails for one subject",
    "that subject is unknown; the rest is served",
    "`isolated_failures_total`",
    "next tick",
)
@pytest.mark.writer(
    "anyone who may start a pod on the node",
    "absurd values, impossible counts, overflowing floats",
    "their own engine becomes `unknown`; every other engine stays published",
    "ceilings for every kind of value; each engine is processed in isolation",
)
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_anywhere_costs_its_subject_alone_and_is_said(
    place: str, undisturbed: Shown, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, name, bad, kind, stage = PLACES[place]
    who = WHO[kind]
    monkeypatch.setattr(owner, name, raising(getattr(owner, name), bad, RecursionError("a token: hunter2")))
    with caplog.at_level(logging.ERROR):
        shown = Shown()
    assert_innocent(shown, undisturbed)
    assert set(shown.document) == set(undisturbed.document)
    assert set(shown.document["sources"]) >= set(PODS) - {BAD}
    assert shown.failures()[kind, who, stage] >= 1
    lines = [
        record.getMessage() for record in caplog.records if who in record.getMessage() and stage in record.getMessage()
    ]
    assert len(lines) == 1
    assert "RecursionError" in lines[0]
    assert "hunter2" not in caplog.text
    assert stage in STAGES
    shown.state = replace(shown.state)  # as the next tick: what failed in the metrics, too, is known by now
    assert Failure(kind, who, stage, "resources").text in html.unescape(shown.get("/").decode())
    failures = json.loads(shown.get("/api/v1/diagnosis"))["failures"]
    assert (kind, who, stage) in {(one["kind"], one["name"], one["stage"]) for one in failures}


@pytest.mark.fault(
    "engines",
    "a defect of the exporter in handling one engine",
    "that engine's verdict is `unknown` with the stage and reason",
    "`isolated_failures_total{kind,name,stage,reason}`, one log line",
    "next scrape",
)
@pytest.mark.parametrize("place", ["take in engine", "take in steps", "take in target", "kv signals", "signals"])
def test_an_engine_that_failed_is_unknown_with_the_reason_and_without_any_value(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, bad, _ = TICK_PLACES[place]
    pipeline = Pipeline()
    for i in range(1, TICKS):
        pipeline.observe(snapshot(i))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raising(getattr(owner, name), bad, ValueError()))
        state = pipeline.observe(snapshot(TICKS))
    engine = next(engine for engine in state.engines if engine.key.pod == BAD)
    assert engine.failure is not None
    assert (engine.failure.stage, engine.failure.reason) == ("tick", "value")
    assert (engine.diagnosis.verdict, engine.diagnosis.confidence, engine.counters, engine.reading) == (
        "unknown",
        0.0,
        {},
        None,
    )
    assert engine.signals.flat() == type(engine.signals)(time=state.time).flat()
    assert engine.up  # its metrics were read: it is not the engine that is down
    assert engine.failure.text in engine.diagnosis.missing
    recovered = pipeline.observe(snapshot(TICKS + 1))
    again = next(engine for engine in recovered.engines if engine.key.pod == BAD)
    assert again.failure is None
    assert again.signals.load.running == 4.0


@pytest.mark.parametrize("place", ["metrics engine", "view", "page article", "json engine"])
def test_an_engine_that_cannot_be_rendered_is_shown_without_values(
    place: str, undisturbed: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, bad, _ = RENDER_PLACES[place]
    monkeypatch.setattr(owner, name, raising(getattr(owner, name), bad, ValueError("x")))
    shown = Shown()
    names = {line.partition("{")[0] for line in undisturbed.of(BAD)[0]} - {
        line.partition("{")[0] for line in shown.of(BAD)[0]
    }
    assert ("kvpressure_requests_running" in names) is (place == "metrics engine")
    article = next(part for part in shown.parts if f"{BAD}, engine" in part)
    assert ("kvpressure itself failed" in article) is (place in ("view", "page article"))
    assert ("<dt>Running</dt><dd>4</dd>" in article) is (place not in ("view", "page article"))
    entry = next(entry for entry in shown.document["engines"] if entry["pod"] == BAD)
    if place in ("view", "json engine"):
        assert entry["failure"] == {"stage": "render", "reason": "value"}
        assert (entry["verdict"], entry["counters"], entry["limits"]) == ("unknown", {}, {})
        assert entry["signals"]["running"] is None
    else:
        assert entry["failure"] is None
        assert entry["signals"]["running"] == 4.0


def test_an_engine_whose_diagnosis_raised_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What made it raise may be in its history, and half of the tick may be in it."""
    pipeline = Pipeline()
    for i in range(1, TICKS):
        pipeline.observe(snapshot(i))
    with monkeypatch.context() as patch:
        patch.setattr(EngineTracker, "signals", raising(EngineTracker.signals, tracks_bad, ValueError()))
        pipeline.observe(snapshot(TICKS))
    state = pipeline.observe(Snapshot(T + TICKS + 1))  # nothing new is read
    assert [engine.failure is not None for engine in state.engines] == [
        engine.key.pod == BAD for engine in state.engines
    ]
    state = pipeline.observe(snapshot(TICKS + 2))
    assert [engine.failure for engine in state.engines] == [None] * 3
    rates = {engine.key.pod: engine.signals.throughput.generation_tokens_per_second for engine in state.engines}
    assert rates.pop(BAD) is None
    assert None not in rates.values()


def test_an_engine_that_is_down_and_failed_on_is_not_called_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline()
    pipeline.observe(snapshot(1))
    refused = replace(snapshot(2), pages=tuple(replace(one, engines=(), error="refused") for one in snapshot(2).pages))
    monkeypatch.setattr(EngineTracker, "signals", raising(EngineTracker.signals, lambda *_: True, ValueError()))
    for state in (pipeline.observe(refused), pipeline.observe(Snapshot(T + 3))):
        assert [(engine.up, engine.failure is not None) for engine in state.engines] == [(False, True)] * 3


def test_a_failed_engine_whose_scrapes_stop_is_not_called_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline()
    with monkeypatch.context() as patch:
        patch.setattr(EngineTracker, "observe", raising(EngineTracker.observe, lambda *_: True, ValueError()))
        pipeline.observe(snapshot(1))
    assert [engine.up for engine in pipeline.observe(Snapshot(T + 3)).engines] == [True] * 3
    assert [engine.up for engine in pipeline.observe(Snapshot(T + 60)).engines] == [False] * 3


def test_failures_are_counted_and_logged_within_bounds(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard("tick")

    def fail(_: object) -> None:
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR):
        for n in range(3 * MAX_COUNTED):
            for _ in range(2):
                guard.each("engine", [n], lambda n: f"n/p{n}\n\x1b[31m/m/0", fail)
    assert len(guard.counts) == MAX_COUNTED + 1
    assert sum(guard.counts.values()) == 6 * MAX_COUNTED
    assert len(caplog.records) == MAX_COUNTED
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_what_is_not_an_error_of_the_work_is_not_held_back() -> None:
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guard("tick").each("engine", [1], str, stop)


def test_a_diagnosis_that_raises_costs_its_engine_alone(undisturbed: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    """The diagnoser knows no engine: the third call of each tick's three is made to fail."""
    calls = iter(range(10_000))
    monkeypatch.setattr(
        Diagnoser, "diagnose", raising(Diagnoser.diagnose, lambda *_: next(calls) % 3 == PODS.index(BAD), KeyError("x"))
    )
    shown = Shown()
    assert_innocent(shown, undisturbed)
    assert shown.failures() == {("engine", f"n/{BAD}/m/0", "tick"): TICKS}
