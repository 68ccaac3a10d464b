"""``kvpressure completion``: commands and flags for the shell, taken from the parsers themselves."""

from __future__ import annotations

import argparse
import importlib
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
  case $COMP_CWORD:${COMP_WORDS[1]} in
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


def _flags(command: str) -> list[str]:
    """Long flags of a command, as its own parser has them."""
    parser = cli.Parser(f"kvpressure {command}", "")
    importlib.import_module(f"kvpressure.cli.{command}").add_arguments(parser)
    return sorted(flag for action in parser._actions for flag in action.option_strings if flag.startswith("--"))


def _bash(shell: str) -> str:
    commands = cli.available()
    cases = "\n".join(f'    *:{command}) words="{" ".join(_flags(command))}" ;;' for command in commands)
    script = _BASH.replace("@COMMANDS@", " ".join((*commands, "version", "help"))).replace("@CASES@", cases)
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


def _fish() -> str:
    lines = []
    for command, text in cli.available().items():
        lines.append(f"complete -c kvpressure -n __fish_use_subcommand -f -a {command} -d '{text}'")
        lines += [
            f"complete -c kvpressure -n '__fish_seen_subcommand_from {command}' -l {flag[2:]}"
            for flag in _flags(command)
        ]
    return "\n".join(lines) + "\n"
