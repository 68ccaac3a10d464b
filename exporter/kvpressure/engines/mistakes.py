"""Mistakes in a command line that somebody states: options and values that the server refuses to start with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvpressure.engines.registry import named_by
from kvpressure.errors import shown
from kvpressure.model.arguments import WITH_VALUE

_NO_VALUE: Final = "True"  # how an option without a value is read
_SERVERS_CHOICE: Final = ("auto", "none", "-1")
_EXAMPLES: Final = {"gpu_memory_utilization": "0.9", "watermark": "0.1"}


@dataclass(frozen=True, slots=True)
class Mistake:
    """What is wrong, what is allowed, and the option that was probably meant, "" = none."""

    what: str
    allowed: str
    meant: str = ""


def mistake(argv: Sequence[str]) -> Mistake | None:
    """The first mistake; None without any. A name that resembles no known option is none: a release may have it."""
    server = named_by(argv)
    args = server.read_command(argv, {}).args
    for name, meant in server.options.misspelt(args.explicit).items():
        what = f"{server.flag(name)} is not an option of {server.title}"
        return Mistake(what, f"options of {server.title}", server.flag(meant))
    for name in WITH_VALUE:
        value = args.values.get(name)
        if value == _NO_VALUE:
            return Mistake(f"{server.flag(name)} has no value", f"{server.flag(name)} VALUE")
        left = value is None or value.lower() in _SERVERS_CHOICE or set("${") & set(value)  # left to server or shell
        if getattr(args, name) is None and not left:
            return Mistake(
                f"the value {shown(value)} of {server.flag(name)} cannot be read",
                f"a value that {server.title} accepts, such as {_EXAMPLES.get(name, '8192')}",
            )
    return None
