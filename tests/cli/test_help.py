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
