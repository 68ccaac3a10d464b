"""``/api/v1/diagnosis`` is what its schema says, field by field, also for the simulated node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from kvpressure.model.state import VERDICTS, State
from kvpressure.publish.diagnosis_json import diagnosis_document
from kvpressure.publish.links import Links
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
    assert [list(VERDICTS)] == [one["enum"] for one in objects(SCHEMA) if "host_bound" in one.get("enum", ())]


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
