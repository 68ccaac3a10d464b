"""Which things get a place in a table that is full: by claim, then in fair shares of namespaces and pods.

Order by name would let whoever names a pod ``aaa`` push out the pods of others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import TypeVar

T = TypeVar("T")
Place = tuple[str, str]
"""Namespace and pod."""


class Precedence(IntEnum):
    """How good a claim to a place is, the best first. ``ASKS_GPU`` is no more than the pod's own word."""

    NAMED = 0  # by the user, in a setting
    HAS_GPU = 1  # according to the kubelet or the driver
    ASKS_GPU = 2  # running, and its specification asks for a GPU
    SERVES = 3  # running, with an engine
    RUNS = 4
    WAITS = 5  # to be started
    NOT_KNOWN = 6  # of a pod that no source has listed
    ENDED = 7


def admitted(
    items: Iterable[T],
    room: int,
    precedence: Callable[[T], Precedence],
    place: Callable[[T], Place],
) -> tuple[list[T], list[T]]:
    """(the first ``room`` items, those left out), each with the best claims first.

    Among equal claims namespaces take turns, and so do the pods of a namespace; the items of one pod keep their order.
    """
    by_precedence: dict[Precedence, list[T]] = defaultdict(list)
    for item in items:
        by_precedence[precedence(item)].append(item)
    ordered = [
        item
        for _, alike in sorted(by_precedence.items())
        for item in _in_turn(_in_turn(alike, place), lambda item: place(item)[:1])
    ]
    return ordered[:room], ordered[room:]


def _in_turn(items: Iterable[T], owner: Callable[[T], tuple[str, ...]]) -> list[T]:
    """The items by how many their owner has before each of them; then by owner."""
    taken: Counter[tuple[str, ...]] = Counter()
    keyed = []
    for item in items:
        name = owner(item)
        taken[name] += 1
        keyed.append((taken[name], name, item))
    return [item for *_, item in sorted(keyed, key=lambda entry: entry[:2])]
