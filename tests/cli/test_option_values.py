"""Values of options: every option that checks its value refuses in the one form, with what is allowed."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

import pytest

from kvpressure.cli import COMMANDS, main
from kvpressure.toolbox.option_values import above_zero, number, whole_number

WRONG = "zz, z"


def _checked() -> Iterator[tuple[str, str]]:
    """(command, flag) of every option whose type refuses ``WRONG``."""
    for command in COMMANDS:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        importlib.import_module(f"kvpressure.cli.{command}").add_arguments(parser)
        for action in parser._actions:
            if action.option_strings and callable(action.type):
                try:
                    action.type(WRONG)
                except (argparse.ArgumentTypeError, ValueError):
                    yield command, action.option_strings[0]


@pytest.mark.parametrize(("command", "flag"), sorted(_checked()))
def test_a_wrong_value_is_refused_in_one_form(capsys: pytest.CaptureFixture[str], command: str, flag: str) -> None:
    assert main([command, f"{flag}={WRONG}"]) == 2
    out, said = capsys.readouterr()
    assert out == ""
    assert flag in said.split(": ")[1].split("/")
    assert f": '{WRONG}' is not allowed; allowed: " in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("parse", "accepted", "refused"),
    [
        (whole_number(), ["1", "8k", "8K", "1000000000"], ["0", "-1", "1.5", "1000000001", "", "x"]),
        (whole_number(0), ["0", "1"], ["-1"]),
        (whole_number(0, 65535), ["0", "65535"], ["65536", "-1"]),
        (number(5, 110), ["5", "110", "5.5"], ["4.99", "110.01", "nan", "inf", "", "x"]),
        (number(0), ["0", "1e300"], ["-0.001", "inf", "nan"]),
        (above_zero(), ["0.001", "1e9"], ["0", "-1", "nan", "inf", "1.001e9"]),
        (above_zero(1), ["0.001", "1"], ["0", "1.001", "nan", "-0.5"]),
    ],
)
def test_boundaries(parse: argparse._ActionType, accepted: list[str], refused: list[str]) -> None:
    assert callable(parse)
    for text in accepted:
        assert parse(text) >= 0
    for text in refused:
        with pytest.raises(argparse.ArgumentTypeError, match="is not allowed; allowed: "):
            parse(text)
