"""Texts that cost a careless reader of scripts more than they are long, and how to time it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

UNITS: Final = (
    *("$", "$a", "$(", "$((", "$((a", '$("', "(", ")", "((", "a=(", "{", "}", "${", "${a", "${a[@]", "${a["),
    *("${a-", "${a:-", '${a:-"', "${a:-`", "${a:-$(", "`"),
    *("${a:-'", "a=('", "'", "'\"", "\"'", '"$(', '"${a:-', "\\", '\\"', "\\'", "a=", "a=$a;", "a+=$a;", 'A="'),
    *(";", "&", "|", "<<<", "<(", ">(", "$(a", "$(a)", "$$(a)", "$@", '"$@"', "${@}"),
    *('"', "$1", "a", "é", "[", "]", "client.", "api_key", "api_key=", "token='\\", "[[", "://", "://a", "a@"),
    *("sk-", "eyJaaaaaaaa.", "hf_", "--user=", "a.", "a-"),
    *("vllm.entrypoint", "api_server/", "serve.", "--a", "--a=", "--no-"),
    *("`a ", "\\\n", "a=b ", "export a=b\n", "b && ", "b || ", "\n", "\n\n \n", " ", "\t"),
    *("# ", "\n#", "<<E ", "<<E\n"),
    *("<<-'E'\n", "cat <<E\nx\n", "2>&1 ", "> ", "eval ", 'eval "', "eval 'eval ", "sh -c ", "sh -c '", "-c "),
    *("bash -c -o ", "if ", "fi;", "for a in ", "vllm ", "vllm \t ", "vllm serv ", "-n -1.", "\x00", "--api-key "),
    *("api_key: '", "'prompt': [", "bearer ", "basic a/", "a:b ", "-u a:", "-----BEGIN "),
    "-----BEGIN PRIVATE KEY-----",
    "secret_key ",
)
"""What is repeated."""

OPENINGS: Final = ("", "vllm serve m --port ", 'eval "', "${a:-", "cat <<E\n")
"""What stands before it."""


def repeated(opening: str, unit: str, size: int) -> str:
    """A text of ``size`` characters."""
    return (opening + unit * (size // len(unit) + 1))[:size]


def cost(action: Callable[[], object], times: int = 3) -> float:
    """Seconds of CPU that ``action`` takes in this thread, the least of a few times."""
    best = float("inf")
    for _ in range(times):
        began = time.thread_time()
        action()
        best = min(best, time.thread_time() - began)
    return best


REFERENCE_SECONDS: Final = 0.009
"""What ``_reference`` takes on the machine on which the bounds in seconds were set, while it was quiet."""


def _reference() -> int:
    return sum(len(f"{number}".split("7")) for number in range(50_000))


def slowness() -> float:
    """How many times slower than that machine this one is just now, other work on its cores included; at least 1."""
    return max(1.0, cost(_reference) / REFERENCE_SECONDS)


def within(seconds: float, action: Callable[[], object]) -> bool:
    """Whether ``action`` takes less CPU than that where this machine is quiet. Asked again where it seems not to."""
    return cost(action, 1) < seconds or any(cost(action) < seconds * slowness() for _ in range(3))


def superlinear(
    action: Callable[[str], object], make: Callable[[int], str], size: int, quick: float = 0.004
) -> str | None:
    """How the cost grows from ``size`` to four times that, when it is more than the text does; None otherwise.

    What takes less than ``quick`` seconds at four times the size is not told from noise and is cheap enough.
    """
    texts = [make(size), make(2 * size), make(4 * size)]
    longer = max(4.0, len(texts[2]) / len(texts[0]))
    longest = cost(partial(action, texts[2]), 1)
    if longest < quick or longest < 1.5 * longer * cost(partial(action, texts[0]), 1):
        return None
    for _ in range(3):  # asked again: other work may fall into one of the three alone
        costs = [cost(partial(action, text)) for text in texts]
        if costs[2] < 2 * longer * max(costs[0], quick / 2):
            return None
    return (
        " ".join(f"{len(text)}: {1000 * one:.1f} ms" for text, one in zip(texts, costs, strict=True))
        + f" of {texts[0][:40]!r}"
    )
