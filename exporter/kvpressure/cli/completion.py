"""``kvpressure completion``: commands and flags for the shell, taken from the parsers themselves."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from typing import Final

from kvpressure import cli

_EXAMPLES: Final = """\
examples:
  kvpressure completion bash > ~/.local/share/bash-completion/completions/kvpressure
  kvpressure completion zsh > ~/.kvpressure.zsh        # then: source ~/.kvpressure.zsh in ~/.zshrc, after compinit
  kvpressure completion fish > ~/.config/fish/completions/kvpressure.fish

Exit status: 0 printed, 2 the shell is not supported.
"""
_BASH: Final = """\
_kvpressure() {
  local word=${COMP_WORDS[COMP_CWORD]} words
  case $COMP_CWORD:${COMP_WORDS[1]}:${COMP_WORDS[COMP_CWORD-1]} in
    1:*) words="@COMMANDS@" ;;
@CASES@
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _kvpressure kvpressure
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this command."""
    parser.epilog = _EXAMPLES
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(options: argparse.Namespace) -> int:
    """Print the script of the shell."""
    print(_fish() if options.shell == "fish" else _bash(options.shell), end="")
    return 0


def _flags(command: str) -> dict[str, tuple[str, ...]]:
    """Long flags of a command with the words allowed after each (empty = any), as its own parser has them; the words
    for its argument under its own name.
    """
    parser = cli.Parser(f"kvpressure {command}", "")
    importlib.import_module(f"kvpressure.cli.{command}").add_arguments(parser)
    found: dict[str, tuple[str, ...]] = {}
    for action in parser._actions:
        words = tuple(action.choices or _words(action.metavar))
        found.update((flag, words) for flag in action.option_strings if flag.startswith("--"))
        if not action.option_strings and words:
            found[command] = words
    return dict(sorted(found.items()))


def _words(metavar: object) -> tuple[str, ...]:
    """Words that a setting allows: ``logfmt|json``. Capitals are placeholders."""
    text = str(metavar)
    return tuple(text.split("|")) if "|" in text and text.islower() else ()


def _cases(command: str) -> Iterator[str]:
    flags = _flags(command)
    yield from (f'    *:{command}:{flag}) words="{" ".join(words)}" ;;' for flag, words in flags.items() if words)
    yield f'    *:{command}:*) words="{" ".join(flag for flag in flags if flag != command)}" ;;'


def _bash(shell: str) -> str:
    commands = cli.available()
    cases = "\n".join(case for command in commands for case in _cases(command))
    script = _BASH.replace("@COMMANDS@", " ".join((*commands, "version", "help"))).replace("@CASES@", cases)
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


def _fish() -> str:
    lines = []
    for command, text in cli.available().items():
        lines.append(f"complete -c kvpressure -n __fish_use_subcommand -f -a {command} -d '{text}'")
        seen = f"complete -c kvpressure -n '__fish_seen_subcommand_from {command}'"
        for flag, words in _flags(command).items():
            allowed = f" -xa '{' '.join(words)}'" if words else ""
            lines.append(f"{seen}{allowed}" if flag == command else f"{seen} -l {flag[2:]}{allowed}")
    return "\n".join(lines) + "\n"
