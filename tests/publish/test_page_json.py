"""``/api/v1/diagnosis`` is what its schema says, field by field, also for the simulated node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from lab.demo.source import DemoSource

from kvpressure.model.readings import Snapshot
from kvpressure.model.state import State
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.diagnosis_json import diagnosis_document
from kvpressure.publish.links import Links
from kvpressure.publish.page.history import PageHistory
from kvpressure.publish.page.view import ViewContext
from tests.publish.states import NOW, full_state, unknown_engine

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/diagnosis.schema.json").read_text())
CHECK = Draft202012Validator(SCHEMA)


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if "type" in schema or "enum" in schema:
            yield schema
        for value in schema.values():
            yield from objects(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from objects(value)


def test_the_schema_is_one_and_leaves_nothing_open_or_unexplained() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    for one in objects(SCHEMA):
        if one.get("type") == "object":
            assert "additionalProperties" in one
        for name, field in one.get("properties", {}).items():
            assert field.get("description"), name


@pytest.mark.parametrize(
    "state",
    [full_state(), State(time=NOW), State(time=NOW, engines=(unknown_engine(up=False), unknown_engine()))],
    ids=["full", "empty", "unknown"],
)
def test_documents_follow_it(state: State) -> None:
    for links in (Links(), Links("https://r.example", "https://g.example")):
        document = json.loads(
            json.dumps(diagnosis_document(state, "node-1", ViewContext(links=links)), allow_nan=False)
        )
        assert [error.message for error in CHECK.iter_errors(document)] == []


def test_the_simulated_node_follows_it_with_plan_and_history() -> None:
    clock = iter(range(1_700_000_000, 1_700_001_000))
    now = [0.0]

    def tick() -> float:
        return now[0]

    now[0] = float(next(clock))
    source, pipeline, history = DemoSource(None, clock=tick, cycle_seconds=60.0), Pipeline(), PageHistory()
    for _ in range(30):
        now[0] = float(next(clock))
        reading = source.read()
        snapshot = Snapshot(
            time=now[0],
            gpus=tuple(reading.gpus or ()),
            pages=tuple(reading.pages or ()),
            containers=tuple(reading.containers or ()),
            owners=tuple(reading.owners or ()),
            logs=tuple(reading.logs or ()),
            targets=tuple(reading.targets or ()),
        )
        state = pipeline.observe(snapshot)
        history.observe(snapshot, state)
    document = json.loads(json.dumps(diagnosis_document(state, "demo", ViewContext(history=history)), allow_nan=False))
    assert [error.message for error in CHECK.iter_errors(document)] == []
    chat = next(engine for engine in document["engines"] if engine["pod"] == "chat-13b-0")
    assert chat["verdict"] == "kv_pressure"
    assert [step["number"] for step in chat["triage"]] == list(range(1, 9))
    assert any(
        flag.startswith("--max-num-seqs ") for action in chat["mitigation"]["actions"] for flag in action["flags"]
    )
    assert chat["history"]["series"]["kv_used_ratio_max"][-1] > 0.9
    assert document["headline"].startswith("3 engines: 1 KV pressure")


@pytest.mark.parametrize(
    "break_it",
    [
        lambda d: d.pop("node"),
        lambda d: d.update(extra=1),
        lambda d: d["engines"][0].update(verdict="fine"),
        lambda d: d["engines"][0]["triage"][0].update(finding="ok"),
        lambda d: d["gpus"][0].update(power_watts="500"),
    ],
)
def test_the_schema_notices_what_is_wrong(break_it: Any) -> None:
    document = json.loads(json.dumps(diagnosis_document(full_state(), "node-1")))
    break_it(document)
    assert not CHECK.is_valid(document)
