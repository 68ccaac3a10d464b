"""The command line: ``kvpressure COMMAND``. One module per command, imported only when used.

A command's module has ``add_arguments(parser)`` and ``run(args) -> int``. Exit status: 0 done, 1 the result is bad
news (of a check), 2 usage or input error with one line, 3 a fatal failure of the environment, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from kvpressure import __version__, redaction
from kvpressure.errors import InputError, nearest, shown
from kvpressure.printable import visible_streams

COMMANDS: Final = {
    "serve": "run the exporter",
    "discover": (
        "list the servers of this host, or the containers of a node, a namespace or a file: the engine that each runs,"
        " or why it is not scraped"
    ),
    "diagnose": "find what limits one engine, or each engine of this node",
    "top": "show engines in a live table, the worst first",
    "record": "record scrapes and readings in a file, for a later diagnosis",
    "replay": "diagnose a recording",
    "bundle": "write alert rules, runbooks, dashboards and reference documents",
    "capacity": "compute KV cache needs of a model and a load",
    "audit": "check a server's configuration against the prevention checklist",
    "mitigate": "print the mitigation plan with the values to set",
    "probe": "find KV cache leaks with test requests",
}


_FATAL: Final = 3
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help that wraps prose, but neither options at a line's end nor examples."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = []
        for block in text.split("\n\n"):
            prose = all(line[:1].strip() and not line.endswith(":") for line in block.splitlines())
            lines = self._split_lines(block, width - len(indent)) if prose else block.splitlines()
            filled.append("\n".join(indent + line for line in lines))
        return "\n\n".join(filled)


class Parser(argparse.ArgumentParser):
    """Reports mistakes as one line through ``InputError``, with the nearest option or value; no abbreviated flags."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, formatter_class=_Help)
        self.color = False  # newer Pythons colour their help: control sequences of somebody else

    def error(self, message: str) -> NoReturn:
        """Raise ``InputError`` instead of printing the whole usage."""
        flags = {flag for action in self._actions for flag in action.option_strings}
        unknown = _unknown_arguments(message.split()[2:]) if message.startswith("unrecognized arguments") else []
        message = f"unrecognized arguments: {' '.join(unknown)}" if unknown else message
        for flag in unknown:
            if flag.startswith("-") and (near := nearest(flag, flags)):
                raise InputError(f"{message}; did you mean {near}?")
        message = re.sub(r"^argument (?=\S+: )", "", message)
        message = re.sub(r"ignored explicit argument .*", "takes no value", message, flags=re.DOTALL)
        raise InputError(message if "; allowed: " in message else f"{message}; {self.prog} --help lists the options")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            allowed = [str(choice) for choice in action.choices]
            near = nearest(str(value), allowed)
            meant = f"; did you mean {near}?" if near else ""
            raise argparse.ArgumentError(action, f"{shown(value)} is not allowed{meant}; allowed: {', '.join(allowed)}")


def _unknown_arguments(words: list[str]) -> list[str]:
    """Unknown arguments for an error: what follows an option may be its value, and a secret."""
    first = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    options = (word.partition("=")[0] for word in words[first:] if word.startswith("-"))
    return [redaction.value(" ".join(words[:first])), *options] if first else [*options]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    try:
        try:
            with visible_streams():
                return _dispatch(arguments)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output (head, less) has seen enough
        _drop_output()
        return 0
    except OSError as error:
        if error.errno not in _NO_ROOM or error.filename is not None:
            raise
        _drop_output()
        print(f"kvpressure: the output cannot be written: {error.strerror}", file=sys.stderr)
        return _FATAL


def _open_streams() -> None:
    """Open streams that were closed before the start, because output for one would go to another file; and keep a
    limited encoding from failing the output.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _drop_output() -> None:
    """Redirect standard output to nowhere: flushing its buffer at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    name = arguments[0]
    if name in ("-V", "--version", "version"):
        print(f"kvpressure {__version__}")
        return 0
    program = f"kvpressure {name}" if name in COMMANDS else "kvpressure"
    try:
        if name not in COMMANDS:
            near = nearest(name, COMMANDS)
            meant = f"did you mean {near}?" if near else f"allowed: {', '.join(COMMANDS)}"
            raise InputError(f"unknown command {shown(name)}; {meant}")
        return _run(name, arguments[1:], COMMANDS[name])
    except InputError as error:
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _run(name: str, arguments: Sequence[str], description: str) -> int:
    command = importlib.import_module(f"{__name__}.{name}")
    parser = Parser(f"kvpressure {name}", f"{description[0].upper()}{description[1:]}.")
    command.add_arguments(parser)
    status: int = command.run(parser.parse_args(arguments))
    return status


def _help() -> str:
    width = max(map(len, COMMANDS))
    about = "Find out why an inference server is slow: KV cache, batch limit, compute, host or a stall."
    lines = ["usage: kvpressure COMMAND [options]", "", about, "", "commands:"]
    lines += [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    lines += ["", "kvpressure COMMAND --help shows its options; kvpressure version prints the version."]
    return "\n".join(lines)
