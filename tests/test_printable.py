"""Names that a terminal or a browser would obey are shown as what they are: alone, on the page and in every
command's output.
"""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.cli import main
from kvpressure.printable import visible, visible_lines
from kvpressure.sources.scrape.scanner import Scanner

OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")
HOSTILE = "m\x1b]0;owned\x07\x1b[2J\u202eevil\u2066\x9b31m\u200b\u2028\r"
FORGED = "fine\nkv_pressure: none, all is well"


@given(st.text())
def test_nothing_obeyed_is_left_and_all_else_stays(text: str) -> None:
    shown = visible(text)
    assert not any(unicodedata.category(char) in OBEYED for char in shown)
    assert visible(shown) == shown
    kept = "".join(char for char in text if unicodedata.category(char)[0] in "LNPSM" or char == " ")
    assert all(char in shown for char in kept)


@given(st.text())
def test_lines_and_tabs_of_reports_stay(text: str) -> None:
    assert visible_lines(text).count("\n") == text.count("\n")
    assert "\x1b" not in visible_lines(text)


def page(name: str) -> str:
    label = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    labels = f'engine="0",model_name="{label}"'
    return (
        f"vllm:num_requests_running{{{labels}}} 9\nvllm:num_requests_waiting{{{labels}}} 90\n"
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.99\nvllm:generation_tokens_total{{{labels}}} 5\n"
    )


def test_a_name_is_read_as_one_visible_line() -> None:
    [engine] = Scanner().scan(page(FORGED + HOSTILE)).engines
    assert engine.model_name == visible(FORGED + HOSTILE)
    assert engine.model_name.startswith("fine\\nkv_pressure")


@pytest.mark.attack(
    "escape sequences, bidirectional controls and line breaks in names", "shown as `\\\\x1b`, `\\\\u202e`, `\\\\n`"
)
@pytest.mark.writer(
    "anyone whose model name, label or log line is printed",
    "escape sequences, bidirectional controls, line breaks",
    "nothing: they are shown as `\\x1b`, `\\u202e`, `\\n`",
    "one filter at the names, one at standard output and error, one in the page's templates",
)
@pytest.mark.parametrize(
    "command",
    [
        "diagnose {file}",
        "diagnose {file} --format json",
        "replay {file}",
        "replay {file} --format json",
        "mitigate {file}",
        "audit {file}",
    ],
)
def test_no_command_prints_what_a_terminal_obeys(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.jsonl"
    header = {"format": "kvpressure-recording", "version": 1, "interval_seconds": 1, "node": HOSTILE}
    entry = {
        "target": f"http://a:8000/{HOSTILE}",
        "namespace": "ns",
        "pod": f"p{HOSTILE}{FORGED}",
        "args": ["vllm", "serve", HOSTILE, "--max-num-seqs", HOSTILE],
        "exposition": page(HOSTILE + FORGED),
    }
    log = {"namespace": "ns", "pod": "p", "container": "c", "line": f"CUDA out of memory {HOSTILE}{FORGED}"}
    ticks = [{"t": float(t), "engines": [entry], "logs": [log]} for t in range(30)]
    file.write_text("\n".join(map(json.dumps, [header, *ticks])) + "\n")
    main(command.format(file=file).split())
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        left = {char for char in text if unicodedata.category(char) in OBEYED} - {"\n", "\t"}
        assert not left
        assert not any(line.lstrip().startswith("kv_pressure: none") for line in text.splitlines())
    assert printed.out or printed.err


def test_errors_are_visible_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"\x1b[2J{HOSTILE}"]) == 2
    assert "\x1b" not in capsys.readouterr().err
