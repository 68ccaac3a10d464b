"""Text on a terminal: wrapped to its width, coloured unless NO_COLOR is set; in a pipe as it is."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.toolbox import terminal

TEXT = """\
VERDICT  KV PRESSURE (thrashing), confidence 0.95: the KV cache is full; requests are queueing for it or being preempted
  for:      preemptions: 38 in the last minute by vLLM's counter, 21 inferred from queue movement
           by hand: kubectl logs -n inference pod/vllm-0 --since=2h | grep -iE 'kv|cache|cuda|oom|alloc|memory'
  7 ok   Can the metrics be scraped?"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, **environment: str) -> str:
    for name in ("NO_COLOR", "TERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", stream)
    terminal.show(TEXT)
    return stream.getvalue()


def test_a_pipe_gets_the_text_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, io.StringIO(), COLUMNS="60") == f"{TEXT}\n"


def test_a_terminal_gets_its_width_and_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, Terminal(), COLUMNS="60")
    assert text.startswith("\x1b[31mVERDICT  KV PRESSURE")
    assert "\x1b[32m  7 ok   Can the metrics be scraped?" in text
    lines = re.sub(r"\x1b\[\d+m", "", text).splitlines()
    assert all(len(line) <= 60 or "by hand: " in line for line in lines)
    assert "            counter, 21 inferred from queue movement" in lines
    assert " ".join(" ".join(lines).split()) == " ".join(TEXT.split())


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colour_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    assert "\x1b" not in shown(monkeypatch, Terminal(), COLUMNS="60", **environment)


@given(st.text(st.characters(codec="ascii", exclude_categories=["Cc"])), st.integers(40, 200))
def test_no_word_is_lost(line: str, width: int) -> None:
    assert " ".join(terminal.wrapped(line, width)).split() == line.split()
