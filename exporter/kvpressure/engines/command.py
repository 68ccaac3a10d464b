"""What every dialect shares about the command line of a container: how much of it is looked at, and what
reading it gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvpressure.model.arguments import EngineArgs
from kvpressure.model.frozen import frozen

MAX_WORDS: Final = 1024  # of a command line that are looked at
MAX_WORD: Final = 16384  # characters of one of them, which may be a script
MAX_CHARACTERS: Final = 32768  # of all of them
CUT: Final = "$(kvpressure.cut)"
"""Stands for what is longer: a reference that nothing resolves, so that nothing is taken for complete."""


@frozen
class Command:
    """A command line as read once. ``starts_server``: it names the engine's server. ``other_program``: all that it runs
    is known to be no server of this engine; any other program may start one.
    """

    args: EngineArgs
    starts_server: bool
    other_program: bool


@frozen
class Endpoints:
    """Which metrics endpoints a server with its arguments has. ``serves`` False: it is a worker of one served
    elsewhere; None: its arguments give its place among the nodes, but not visibly. ``port_each``: each data-parallel
    rank serves one of its own on consecutive ports; ``ranks``: how many ranks of the container do, None = unknown.
    ``metrics`` False: its arguments, all of which are visible, do not switch its metrics on.
    """

    serves: bool | None = True
    port_each: bool = False
    ranks: int | None = None
    metrics: bool = True


def on_first_node(args: EngineArgs) -> bool | None:
    """Whether a server that spans nodes is on the first of them; None = its rank is given, but not visible."""
    rank = args.integer("node_rank")
    if rank is None:
        return None if "node_rank" in args.explicit else True
    return rank <= 0


@frozen
class Host:
    """A program that runs the engine inside and publishes its metrics. ``port``: None = it publishes none as it is set
    up, unless a port is declared under ``port_name``, "" = that name says nothing. ``asked``: the pod sets the port,
    else it is the default. ``every_pod``: workers of a group publish too. ``path``: of its metrics, "" = the server's
    own.
    """

    title: str
    port: int | None
    every_pod: bool = False
    path: str = ""
    port_name: str = ""
    asked: bool = False


def bounded(argv: Sequence[str], characters: int = MAX_CHARACTERS) -> list[str]:
    """The part of a command line that is looked at: ``argv`` itself if it is short, else what fits and
    ``CUT`` for the rest.
    """
    kept: list[str] = []
    for item in argv:
        word = str(item)
        if len(kept) == MAX_WORDS - 1 or characters <= len(CUT):
            return [*kept, CUT]
        most = min(MAX_WORD, characters)
        if len(word) > most:
            head = word[: most - len(CUT) - 1]
            last = max(head.rfind(blank) for blank in " \t\n")  # no part of a word, which may be a secret
            word = f"{head[: max(last, 0)]} {CUT}".lstrip()
        kept.append(word)
        characters -= len(word)
    return kept
