"""Mistakes in a command line that somebody states: options that the server refuses to start with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvpressure.engines.base import EngineDialect
from kvpressure.engines.registry import default, dialects
from kvpressure.model.arguments import WITH_VALUE

_NO_VALUE: Final = "True"  # how an option without a value is read


@dataclass(frozen=True, slots=True)
class Mistake:
    """What is wrong, what is allowed, and the option that was probably meant, "" = none."""

    what: str
    allowed: str
    meant: str = ""


def named_by(argv: Sequence[str]) -> EngineDialect:
    """The dialect whose server a command line names, else the default one."""
    return next((one for one in dialects() if one.may_start(argv, {}) and one.names_server(argv)), default())


def mistake(argv: Sequence[str]) -> Mistake | None:
    """The first mistake; None without any. A name that resembles no known option is none: a release may have it."""
    server = named_by(argv)
    args = server.read_command(argv).args
    for name, meant in server.misspelt(args.explicit).items():
        what = f"{server.flag(name)} is not an option of {server.title}"
        return Mistake(what, f"options of {server.title}", server.flag(meant))
    for name in WITH_VALUE:
        if args.values.get(name) == _NO_VALUE:
            return Mistake(f"{server.flag(name)} has no value", f"{server.flag(name)} VALUE")
    return None
