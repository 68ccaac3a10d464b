"""Which things get a place in a table that is full: by claim, then in fair shares of namespaces and pods.

Order by name would let whoever names a pod ``aaa`` push out the pods of others.
"""

from __future__ import annotations

from collections import defaultdict
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
    size: Callable[[T], int] = lambda _: 1,
) -> tuple[list[T], list[T]]:
    """(the items that fit into ``room``, those left out), each with the best claims first.

    Among equal claims namespaces take turns, and so do the pods of a namespace; the items of one pod keep their order.
    With sizes, whoever has taken least so far has the next turn, so that small things come before large ones.
    """
    by_precedence: dict[Precedence, list[T]] = defaultdict(list)
    for item in items:
        by_precedence[precedence(item)].append(item)
    kept: list[T] = []
    left_out: list[T] = []
    for _, alike in sorted(by_precedence.items()):
        of_pods = _in_turn(alike, place, size)
        for item in _in_turn(of_pods, lambda item: place(item)[:1], size):
            fits = size(item) <= room
            room -= size(item) if fits else 0
            (kept if fits else left_out).append(item)
    return kept, left_out


def _in_turn(items: Iterable[T], owner: Callable[[T], tuple[str, ...]], size: Callable[[T], int]) -> list[T]:
    """The items by what their owner has taken with each of them; then by owner."""
    taken: dict[tuple[str, ...], int] = defaultdict(int)
    keyed = []
    for item in items:
        name = owner(item)
        taken[name] += size(item)
        keyed.append((taken[name], name, item))
    return [item for *_, item in sorted(keyed, key=lambda entry: entry[:2])]
