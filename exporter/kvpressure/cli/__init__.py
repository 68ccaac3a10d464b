"""The command line: ``kvpressure COMMAND``. One module a command, imported only when it is used.

A command's module has ``add_arguments(parser)`` and ``run(args) -> int``. Exit status: 0 done, 1 the answer is bad
news (a check command), 2 usage or input error with one line, 3 a fatal failure of the environment, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NoReturn

from kvpressure import __version__

COMMANDS: Final = {
    "serve": "run the exporter",
    "diagnose": "say what is wrong with one engine, or with this node",
    "record": "write what is read to a file, to be judged again later",
    "replay": "judge a recording",
    "bundle": "write alert rules, runbooks, dashboards and reference documents",
    "capacity": "compute KV cache needs of a model and a load",
    "audit": "check a server's configuration against the prevention list",
    "mitigate": "print the mitigation plan with the values to set",
    "probe": "measure a server step by step",
    "demo": "run a simulated node",
}


_FATAL: Final = 3
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class UsageError(ValueError):
    """Wrong usage or input: one line saying what, where and what is allowed; exit status 2."""


class Parser(argparse.ArgumentParser):
    """Reports mistakes as one line through ``UsageError``; no abbreviated flags."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the whole usage."""
        raise UsageError(f"{message}; {self.prog} --help lists what is allowed")


def available() -> dict[str, str]:
    """The commands of this installation with their one-line help."""
    return {name: text for name, text in COMMANDS.items() if find_spec(f"{__name__}.{name}") is not None}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    try:
        try:
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
    """Streams that were closed before the start are None, and what is meant for one would go to the other; a locale without a dash must
    not cost the answer.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _drop_output() -> None:
    """What is still in the buffer would fail again when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    commands = available()
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help(commands), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    name = arguments[0]
    if name in ("-V", "--version"):
        print(f"kvpressure {__version__}")
        return 0
    program = f"kvpressure {name}" if name in commands else "kvpressure"
    try:
        if name not in commands:
            raise UsageError(f"unknown command {name!r}; allowed: {', '.join(commands)}")
        return _run(name, arguments[1:], commands[name])
    except ValueError as error:
        if not _is_usage_error(error):
            raise
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _run(name: str, arguments: Sequence[str], description: str) -> int:
    command = importlib.import_module(f"{__name__}.{name}")
    parser = Parser(f"kvpressure {name}", f"{description[0].upper()}{description[1:]}.")
    command.add_arguments(parser)
    status: int = command.run(parser.parse_args(arguments))
    return status


def _is_usage_error(error: ValueError) -> bool:
    """Whether ``error`` is one of the package's own errors for wrong input; others are faults of the program."""
    from kvpressure.settings import SettingsError
    from kvpressure.thresholds import ThresholdError

    return isinstance(error, UsageError | SettingsError | ThresholdError)


def _help(commands: dict[str, str]) -> str:
    width = max(map(len, commands), default=0)
    lines = ["usage: kvpressure COMMAND [options]", "", "KV-cache pressure in vLLM on Kubernetes.", "", "commands:"]
    lines += [f"  {name:<{width}}  {text}" for name, text in commands.items()]
    lines += ["", "kvpressure COMMAND --help says more; kvpressure --version prints the version."]
    return "\n".join(lines)
