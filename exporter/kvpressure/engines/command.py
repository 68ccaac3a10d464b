"""Shared by all dialects: how much of a container's command line is read, and the result."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from kvpressure.model.arguments import EngineArgs
from kvpressure.model.frozen import frozen

MAX_WORDS: Final = 1024  # of a command line
MAX_WORD: Final = 16384  # characters of one of them, which may be a script
MAX_CHARACTERS: Final = 32768  # of all of them
CUT: Final = "$(kvpressure.cut)"
"""Placeholder for the rest: a reference that nothing resolves, so that the result never counts as complete."""


_TAG: Final = re.compile(r"v?(\d{1,3}\.\d{1,3}\.\d{1,3}(?:[.+-]?(?:rc|post|dev)\d{1,9})?)(?=[+_-]|$)")


@frozen
class Node:
    """A command line's place in an engine of several nodes. ``address``: the leader's IP address or the first part of
    its name, which the command lines of all its nodes share; "" = not visible. ``leads``: None = not visible.
    """

    address: str
    leads: bool | None


@frozen
class Command:
    """A parsed command line. ``starts_server``: it names the engine's server. ``certain``: it was understood that this
    container starts it; else only its text says so, or a branch that may be taken. ``others``: arguments of further
    servers that it starts. ``node``: None = it shows one node only.
    """

    args: EngineArgs
    starts_server: bool
    certain: bool = False
    others: Sequence[EngineArgs] = ()
    node: Node | None = None


def either(ways: Sequence[EngineArgs]) -> EngineArgs:
    """The arguments of a server that is started in one of several ways: unknown where they differ."""
    names = frozenset().union(*(args.values for args in ways))
    same = {name for name in names if len({args.values.get(name) for args in ways}) == 1}
    return EngineArgs(
        {name: ways[0].values[name] if name in same else None for name in names}, names, False, ways[0].env
    )


@frozen
class Endpoints:
    """Metrics endpoints of a server with its arguments. ``serves`` False: a worker of one served elsewhere; None: its
    node rank is set, but not visible. ``port_each``: each data-parallel rank serves its own, on consecutive ports;
    ``ranks``: number of such ranks in the container, None = unknown. ``metrics`` False: all arguments are visible and
    do not switch metrics on.
    """

    serves: bool | None = True
    port_each: bool = False
    ranks: int | None = None
    metrics: bool = True


def on_first_node(args: EngineArgs) -> bool | None:
    """Whether a multi-node server is on the first node; None = its rank is set, but not visible."""
    rank = args.integer("node_rank")
    if rank is None:
        return None if "node_rank" in args.explicit else True
    return rank <= 0


@frozen
class Host:
    """A program that runs the engine inside and publishes its metrics. ``port`` None: none as configured, unless a
    port named ``port_name`` is declared ("" = no such name). ``asked``: the pod sets the port, else it is the
    default. ``every_pod``: workers of a group publish too. ``path``: of its metrics, "" = the server's own.
    """

    title: str
    port: int | None
    every_pod: bool = False
    path: str = ""
    port_name: str = ""
    asked: bool = False


def host_at(title: str, asked: int | None, default: int | None, path: str = "", port_name: str = "") -> Host:
    """The program at the port that the pod sets (``asked``), else at its default."""
    return Host(title, default if asked is None else asked, path=path, port_name=port_name, asked=asked is not None)


def dynamo(argv: Sequence[str], env: Mapping[str, str]) -> Host | None:
    """NVIDIA Dynamo's worker around an engine; None without it."""
    if not any(re.search(r"dynamo\.(?:vllm|sglang)\b", word) for word in argv):
        return None
    text = env.get("DYN_SYSTEM_PORT", "")
    return host_at("NVIDIA Dynamo", port_number(text), None, port_name="" if text else "system")


def port_number(text: str) -> int | None:
    """A port as digits; None for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else None


def bounded(argv: Sequence[str], characters: int = MAX_CHARACTERS) -> list[str]:
    """The part of a command line that is read: ``argv`` itself if short, else what fits and ``CUT`` for the rest."""
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


def mentions(names: Collection[str], argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether a command line, or a variable it may use, contains one of ``names``: it might start their server."""
    words = [*map(str, argv)]
    if any("$" in word for word in words):
        words += env.values()
    return any(name in word for word in words for name in names)


def version_in_tag(server: str, name: str, tag: str) -> str | None:
    """Version of ``server`` from the tag of an image named after it; the log, if read, takes precedence."""
    found = _TAG.match(tag) if server in name else None
    return found[1] if found else None
