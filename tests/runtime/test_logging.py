"""Log lines: one record is one line, whatever is in it."""

from __future__ import annotations

import json
import logging
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.runtime.logging import LineFormatter, configure, with_fields

PAIR = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|[^ "]*)(?: |$)')


def record(message: str, error: BaseException | None = None) -> logging.LogRecord:
    info = (type(error), error, error.__traceback__) if error else None
    return logging.LogRecord("kvpressure.x", logging.WARNING, "f.py", 1, message, (), info)


def parse(line: str) -> dict[str, str]:
    return {name: json.loads(value) if value.startswith('"') else value for name, value in PAIR.findall(line)}


@given(st.text(max_size=80))
def test_any_message_is_one_line_that_reads_back(message: str) -> None:
    for form, read in (("logfmt", parse), ("json", json.loads)):
        line = LineFormatter(form).format(record(message.replace("%", "%%")))
        assert len(line.splitlines()) == 1
        assert read(line)["msg"] == message.replace("%", "%%")
        assert read(line)["level"] == "warning"


def test_a_traceback_is_a_field() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        line = LineFormatter("logfmt").format(record("failed", error))
    assert "\n" not in line
    assert "two\nlines" in parse(line)["trace"]


@pytest.mark.parametrize(("level", "seen"), [("debug", True), ("info", True), ("warning", False)])
def test_the_level_counts(level: str, seen: bool, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        configure(level, "logfmt")
        logging.getLogger("kvpressure.test").info("hello there")
        sys.stderr.flush()
        assert ('msg="hello there"' in capsys.readouterr().err) is seen
    finally:
        root.handlers[:], root.level = before


def test_fields_are_pairs_of_their_own_and_a_number_stays_one_also_where_it_is_zero() -> None:
    told = record("target down")
    told.__dict__.update(with_fields(target="http://a b", reason="refused", engine="", confidence=0.0))
    line = LineFormatter("logfmt").format(told)
    assert line.endswith('msg="target down" target="http://a b" reason=refused confidence=0.0')
    assert json.loads(LineFormatter("json").format(told))["confidence"] == 0.0
