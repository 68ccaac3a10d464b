"""What ``serve`` logs: one line a change, with fields of its own, and nothing while nothing changes."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from kvpressure.model.readings import EngineKey, Scrape, Snapshot
from kvpressure.model.state import State, TargetState
from kvpressure.runtime.changes import ChangeLog
from kvpressure.runtime.logging import LineFormatter, with_fields
from tests.publish.states import NOW, full_engine, unknown_engine

ENGINE = full_engine()
HEALTHY = replace(ENGINE, diagnosis=replace(ENGINE.diagnosis, verdict="healthy", stage=None))


def logged(caplog: pytest.LogCaptureFixture, *ticks: tuple[Snapshot, State]) -> list[dict[str, str]]:
    """The lines of these ticks as JSON, without time and logger."""
    caplog.set_level(logging.DEBUG)
    follow = ChangeLog()
    for snapshot, state in ticks:
        follow(snapshot, state)
    lines = [json.loads(LineFormatter("json").format(record)) for record in caplog.records]
    return [{name: line[name] for name in line if name not in ("ts", "logger")} for line in lines]


def tick(up: bool, error: str | None = None) -> tuple[Snapshot, State]:
    target = "http://10.0.0.5:8000/metrics"
    page = Scrape(target=target, time=NOW, error=error)
    return Snapshot(time=NOW, pages=(page,)), State(time=NOW, targets=(TargetState(target, up, None, 0),))


def seen(*engines: object) -> tuple[Snapshot, State]:
    return Snapshot(time=NOW), State(time=NOW, engines=engines)


def test_a_target_that_goes_down_and_comes_back_is_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    up, down = tick(True), tick(False, "refused")
    target = "http://10.0.0.5:8000/metrics"
    assert logged(caplog, up, up, down, down, up) == [
        {"level": "info", "msg": "target up", "target": target},
        {"level": "warning", "msg": "target down", "target": target, "reason": "refused"},
        {"level": "info", "msg": "target up", "target": target},
    ]


def test_a_target_that_is_down_from_the_start_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = logged(caplog, tick(False, "refused"))
    assert (line["level"], line["msg"], line["reason"]) == ("warning", "target down", "refused")


def test_engines_found_and_lost_and_their_verdicts_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    lines = logged(caplog, seen(HEALTHY), seen(HEALTHY), seen(ENGINE), seen())
    assert [line["msg"] for line in lines] == ["engine found", "verdict changed", "verdict changed", "engine lost"]
    assert {line["pod"] for line in lines} == {"chat-0"}
    trouble = lines[2]
    assert (trouble["level"], trouble["before"], trouble["verdict"]) == ("warning", "healthy", "kv_pressure")
    assert (trouble["stage"], trouble["confidence"]) == ("saturated", 0.9)


def test_what_never_answered_as_an_engine_is_neither_found_nor_lost(caplog: pytest.LogCaptureFixture) -> None:
    silent = replace(unknown_engine(up=False), key=EngineKey("", "10.0.0.5:8000", "", "0"))
    assert logged(caplog, seen(silent), seen(silent), seen()) == []


def test_an_engine_that_goes_down_is_not_found_again(caplog: pytest.LogCaptureFixture) -> None:
    lines = logged(caplog, seen(HEALTHY), seen(unknown_engine(up=False)), seen(HEALTHY))
    assert [(line["msg"], line.get("verdict", "")) for line in lines] == [
        ("engine found", ""),
        ("verdict changed", "healthy"),
        ("verdict changed", "unknown"),
        ("verdict changed", "healthy"),
    ]


def test_fields_are_pairs_of_their_own_in_logfmt() -> None:
    record = logging.LogRecord("kvpressure.x", logging.INFO, "f.py", 1, "target down", (), None)
    record.__dict__.update(with_fields(target="http://a b", reason="refused", engine=""))
    line = LineFormatter("logfmt").format(record)
    assert line.endswith('msg="target down" target="http://a b" reason=refused')


def test_a_number_is_a_number_in_json_also_where_it_is_zero() -> None:
    record = logging.LogRecord("kvpressure.x", logging.INFO, "f.py", 1, "verdict changed", (), None)
    record.__dict__.update(with_fields(confidence=0.0))
    assert json.loads(LineFormatter("json").format(record))["confidence"] == 0.0
    assert LineFormatter("logfmt").format(record).endswith("confidence=0.0")
