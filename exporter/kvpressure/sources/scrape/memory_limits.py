"""Memory limits over the scrapes of all targets, so that hostile ones cost no more than honest ones.

Anybody who may start a pod decides what its endpoint returns, so each bound on one scrape has a bound on all of them:
16 scrapes of the maximum size would otherwise take 16 times its memory at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvpressure.model.reasons import CROWDED
from kvpressure.sources.base import SourceError

MAX_ENGINES: Final = 64  # of all targets of a node together, and of one page; 8 GPUs have 56 MIG instances
"""Engines of the node. Beyond: each target keeps its fair part, those of pods with a GPU first.
Shown as: `page_cut{reason="engines"}`.
"""
SMALL_PAGE_BYTES: Final = 128 * 1024  # pages up to this size wait for nobody; that of one engine has 60 KiB
LARGE_PAGES_BYTES: Final = 5 * 1024 * 1024  # of larger pages in memory at the same time: the largest, as it grows
"""Scrapes above 128 KiB in memory at once. Beyond: the scrape waits, then fails.
Shown as: `target_errors_total{reason="crowded"}`.
"""
REMEMBERED_BYTES: Final = (
    14 * 1024 * 1024
)  # of all scanners together; a page of 64 engines needs 11, with names of 100 characters 13 (each scan of more is a slow one)  # noqa: E501
"""Lines and series remembered for fast parsing, all targets. Beyond: forgotten and parsed again; results stay the same.
Shown as: process CPU.
"""
PLUGIN_LINES: Final = 16 * 1024  # of the plugin inside vLLM
"""Lines of the plugin on all scrapes. Beyond: the target's plugin lines are left out.
Shown as: `page_cut{reason="plugin"}`.
"""
PLUGIN_LINES_EACH: Final = 512  # an engine has two for each size of a batch that it has seen
SCANS: Final = 2  # pages taken apart at the same time: one thread runs at a time, each holds what it has begun
"""Scrapes parsed at once. Beyond: the scrape waits. Shown as: `target_scrape_seconds`."""
LAYOUT_BYTES: Final = (
    2 * 1024 * 1024
)  # of the series of one page while it is taken apart, at least; 8 engines have 1 MiB
"""Series of one target while it is parsed, at least. Beyond: further series are left out if others use the rest.
Shown as: `page_cut{reason="series"}`.
"""
REMEMBERED_EACH: Final = 256 * 1024  # what every scanner may have of it at least


class FairShare:
    """An amount that several users share; each may have an equal part, and what the others leave unused. Users with a
    worse ``precedence`` (a higher number) share what those before them leave.

    ``each``: minimum for every user, however many there are; ``kept``: reserved for each user below it. With both
    equal, the first cannot take all before the others get their minimum. Thread-safe.
    """

    def __init__(self, total: int, each: int = 1, kept: int = 0) -> None:
        self._total = total
        self._each = each
        self._kept = kept
        self._used: dict[object, int] = {}
        self._precedence: dict[object, int] = {}
        self._lock = threading.Lock()

    def join(self, user: object, precedence: int = 0) -> None:
        """Add ``user``, or change its precedence."""
        with self._lock:
            self._used.setdefault(user, 0)
            self._precedence[user] = precedence

    def leave(self, user: object) -> None:
        """Remove ``user``."""
        with self._lock:
            self._used.pop(user, None)
            self._precedence.pop(user, None)

    def use(self, user: object, amount: int) -> None:
        """Set the amount that ``user`` has; ignored for one that has left."""
        with self._lock:
            if user in self._used:
                self._used[user] = amount

    def allowed(self, user: object) -> int:
        """Maximum amount for ``user`` now."""
        with self._lock:
            own = self._precedence.get(user, 0)
            used = {other: max(amount, self._kept) for other, amount in self._used.items() if other is not user}
            before = sum(amount for other, amount in used.items() if self._precedence[other] < own)
            alike = [amount for other, amount in used.items() if self._precedence[other] == own]
            room = self._total - before
            return max(self._each, room // (1 + len(alike)), room - sum(alike))


class Reservation:
    """Memory reserved for one large response; nothing at first."""

    def __init__(self, pool: MemoryPool) -> None:
        self._pool = pool
        self.taken = 0

    def grow(self, amount: int, timeout: float) -> None:
        """Reserve ``amount`` more bytes. Raises ``SourceError("crowded")`` if they are not free within ``timeout``
        seconds.
        """
        if not self._pool.take(amount, timeout):
            raise SourceError(CROWDED, f"no memory left for a response of {amount} bytes")
        self.taken += amount


class MemoryPool:
    """Memory for the large responses of all targets; small ones need none."""

    def __init__(self, total: int = LARGE_PAGES_BYTES) -> None:
        self._free = total
        self._changed = threading.Condition()

    @contextmanager
    def lease(self) -> Iterator[Reservation]:
        """A reservation for one response, released at the end."""
        lease = Reservation(self)
        try:
            yield lease
        finally:
            self._give(lease.taken)

    def take(self, amount: int, timeout: float) -> bool:
        """Take ``amount`` bytes when they are free; False if not within ``timeout`` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free >= amount, timeout):
                return False
            self._free -= amount
            return True

    def _give(self, amount: int) -> None:
        with self._changed:
            self._free += amount
            self._changed.notify_all()


class ScrapeLimits:
    """Limits that all targets of one source share. ``scanning`` is held while a large page is parsed, ``scans`` for
    any.
    """

    def __init__(self) -> None:
        self.memory = MemoryPool()
        self.scanning = threading.Lock()
        self.scans = threading.Semaphore(SCANS)
        self.engines = FairShare(MAX_ENGINES)
        self.remembered = FairShare(REMEMBERED_BYTES, REMEMBERED_EACH, REMEMBERED_EACH)
        self.plugin_lines = FairShare(PLUGIN_LINES, PLUGIN_LINES_EACH)
