"""Misspelt commands, flags and words name the nearest one."""

from __future__ import annotations

import pytest

from kvpressure import __version__
from kvpressure.cli import main
from tests.helpers.command import Capsys


def test_a_misspelt_command_names_the_nearest(capsys: Capsys) -> None:
    assert main(["diagnoze"]) == 2
    assert "did you mean diagnose?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["diagnose", "--exportr", "http://x"], "unrecognized arguments: --exportr; did you mean --exporter?"),
        (["serve", "--log.leevl=debug"], "unrecognized arguments: --log.leevl; did you mean --log.level?"),
        (["serve", "--zzz"], "unrecognized arguments: --zzz; kvpressure serve --help lists the options"),
        (["serve", "--log.level", "debg"], "--log.level: 'debg' is not allowed; did you mean debug?; allowed: debug, "),
        (["serve", "--log.level", "7"], "--log.level: '7' is not allowed; allowed: debug, info, warning or error"),
    ],
)
def test_a_misspelt_flag_or_word_names_the_nearest(typed: list[str], said: str, capsys: Capsys) -> None:
    assert main(typed) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvpressure {typed[0]}: {said}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("word", ["version", "--version", "-V"])
def test_the_version(word: str, capsys: Capsys) -> None:
    assert main([word]) == 0
    assert capsys.readouterr().out == f"kvpressure {__version__}\n"
