"""``--help`` of every command: examples that the command itself accepts."""

from __future__ import annotations

import importlib
import re
import shlex

import pytest

from kvpressure.cli import COMMANDS, Parser, main
from kvpressure.errors import InputError
from tests.helpers.command import Capsys


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_can_be_given(command: str, capsys: Capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    examples = re.findall(rf"^.*?\bkvpressure {command}\b(.*)$", text[text.index("\nexamples:") :], re.MULTILINE)
    assert examples
    parser = Parser(f"kvpressure {command}", COMMANDS[command])
    importlib.import_module(f"kvpressure.cli.{command}").add_arguments(parser)
    for example in examples:
        own = re.split(r" (?:#|\||>|&&)", example)[0]
        try:
            parser.parse_args(shlex.split(own))
        except InputError as error:
            pytest.fail(f"{own.strip()}: {error}")


@pytest.mark.parametrize("width", ["60", "100"])
@pytest.mark.parametrize("command", COMMANDS)
def test_help_keeps_options_whole_and_wraps_prose(
    command: str, width: str, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if re.search(r"(?:\w|(?<!\S)-)-$", line)] == [], "an option broken at its hyphen"
    start = next(number for number, line in enumerate(lines) if "Exit status:" in line)
    assert max(len(line) for line in lines[start:]) <= int(width)


def test_the_help_of_serve_begins_with_what_most_need(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    first_screen = "\n".join(capsys.readouterr().out.splitlines()[:40])
    assert first_screen.startswith("usage: kvpressure serve [setting ...]\n\nRun the exporter.")
    for option in ("--config", "--engine.target", "--web.listen-address", "--thresholds", "--record.directory"):
        assert f"\n  {option} " in first_screen
