"""Shell completion knows every command and flag; misspelt commands, flags and words name the nearest one."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from kvpressure import __version__
from kvpressure.cli import COMMANDS, main


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def completed(typed: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What bash offers for the last word of ``typed``."""
    words = typed.split(" ")
    text = (
        f"{script('bash', capsys)}\nCOMP_WORDS=({' '.join(f'{word!r}' for word in words)})\nCOMP_CWORD={len(words) - 1}\n_kvpressure\nprintf"  # noqa: E501
        ' "%s\\n" "${COMPREPLY[@]}"\n'
    )
    found = subprocess.run(["bash", "--norc"], input=text, text=True, capture_output=True, check=True)
    assert not found.stderr
    return found.stdout.split()


def test_bash_completes_commands_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(completed("kvpressure ", capsys)) == {*COMMANDS, "version", "help"}
    assert completed("kvpressure dia", capsys) == ["diagnose"]
    assert completed("kvpressure audit --base", capsys) == ["--baseline"]
    assert "--engine.target" in completed("kvpressure serve --engine.ta", capsys)


def test_bash_completes_the_words_that_an_option_or_a_command_allows(capsys: pytest.CaptureFixture[str]) -> None:
    assert completed("kvpressure capacity --format ", capsys) == ["text", "json", "markdown", "csv"]
    assert completed("kvpressure serve --log.format j", capsys) == ["json"]
    assert completed("kvpressure completion ", capsys) == ["bash", "zsh", "fish"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_know_them_too(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert all(command in text for command in COMMANDS)
    assert "write-baseline" in text
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True)


def test_a_misspelt_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnoze"]) == 2
    assert "did you mean diagnose?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["diagnose", "--exportr", "http://x"], "unrecognized arguments: --exportr; did you mean --exporter?"),
        (["serve", "--log.leevl=debug"], "unrecognized arguments: --log.leevl; did you mean --log.level?"),
        (["serve", "--zzz"], "unrecognized arguments: --zzz; kvpressure serve --help lists the options"),
        (
            ["demo", "--scenario", "stal"],
            "--scenario: 'stal' is not allowed; did you mean stall?; allowed: kv_pressure, ",
        ),
        (["completion", "bsh"], "shell: 'bsh' is not allowed; did you mean bash?; allowed: bash, zsh, fish"),
        (["serve", "--log.level", "debg"], "--log.level: 'debg' is not allowed; did you mean debug?; allowed: debug, "),
        (["serve", "--log.level", "7"], "--log.level: '7' is not allowed; allowed: debug, info, warning or error"),
    ],
)
def test_a_misspelt_flag_or_word_names_the_nearest(
    typed: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvpressure {typed[0]}: {said}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("word", ["version", "--version", "-V"])
def test_the_version(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    assert capsys.readouterr().out == f"kvpressure {__version__}\n"
