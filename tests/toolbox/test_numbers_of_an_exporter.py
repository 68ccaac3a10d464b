"""An exporter that answers with numbers that no exporter publishes: each command reads on without them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvpressure.cli import main
from tests.helpers.command import Capsys
from tests.helpers.three_engines import Shown
from tests.toolbox.conftest import ServeJson

pytestmark = pytest.mark.live

PATH = "/api/v1/diagnosis"
HUGE = "1" + "0" * 400
VALUES = (HUGE, f"-{HUGE}", "1e999", "-1e999", "1e308", "-1e308", "NaN", "true", '"7"', '"' + HUGE + '"', "null", "[1]")
COMMANDS = (
    ["mitigate", "--exporter", "{}"],
    ["diagnose", "--exporter", "{}"],
    ["diagnose", "--exporter", "{}", "--format", "json"],
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of each number in a JSON document, and of one more name in each map of numbers."""
    keys = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    for key, item in keys:
        if isinstance(item, int | float) and not isinstance(item, bool):
            yield value, key
        else:
            yield from places(item)


def with_text(document: Any, text: str) -> bytes:
    """The document as JSON, with ``text`` in place of each "@"."""
    return json.dumps(document).replace('"@"', text).encode()


@pytest.fixture(scope="module")
def published() -> bytes:
    return Shown().get(PATH)


def answers_in_order(capsys: Capsys, command: list[str], address: str) -> None:
    status = main([word.format(address) for word in command])
    said = capsys.readouterr()
    assert status in (0, 1, 2)
    assert "Traceback" not in said.out + said.err
    assert not any(word in said.out.lower().split() for word in ("nan", "inf", "-inf")), said.out
    if status == 2:
        assert said.err.count("\n") == 1, said.err


@pytest.mark.attack(
    "an exporter whose JSON has `10**400`, `1e999`, `NaN`, booleans or texts as numbers", "read on without these values"
)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_number_of_an_exporter_ends_a_command(
    command: list[str], published: bytes, capsys: Capsys, serve_json: ServeJson
) -> None:
    answers: dict[str, bytes] = {}
    address = serve_json(answers)
    for text in VALUES:
        document = json.loads(published)
        for container, key in list(places(document)):
            container[key] = "@"
        answers[PATH] = with_text(document, text)
        answers_in_order(capsys, command, address)


def test_a_quantile_that_is_no_rank_is_left_out(published: bytes, capsys: Capsys, serve_json: ServeJson) -> None:
    document = json.loads(published)
    for engine in document["engines"]:
        engine["verdict"] = "kv_pressure"
        engine["signals"] |= {
            f"{name}:{rank}": 900.0
            for name in ("prompt_quantiles", "output_quantiles")
            for rank in ("x", "nan", "1e999", "0", "-0.5", "0.95")
        }
    answers_in_order(capsys, COMMANDS[0], serve_json({PATH: document}))
