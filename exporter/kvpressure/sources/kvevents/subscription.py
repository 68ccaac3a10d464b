"""Follows the KV events of one engine: what was lost is asked for again, or said."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from time import monotonic, thread_time, time
from typing import Final

from kvpressure.kvevents.contents import CONNECTING, FLOOD, GAP, LATE, SILENT, SILENT_SECONDS, Contents
from kvpressure.model.isolation import FailureLog
from kvpressure.model.readings import CacheReading
from kvpressure.model.reasons import DNS, INTERNAL, REFUSED, RESET, TIMEOUT, UNREACHABLE
from kvpressure.sources.base import SourceError, reason_of
from kvpressure.sources.kvevents.addresses import Address
from kvpressure.sources.kvevents.decoding import decode
from kvpressure.sources.kvevents.zmtp import SUBSCRIBE_ALL, Peer

_RETRY_SECONDS: Final = 5.0
_REST_SECONDS: Final = 0.25  # fifty batches a second cost half, taken twelve at once: code and data stay in the caches
_MINUTE: Final = 60.0
_CPU_SECONDS: Final = 6.0  # a minute, of all engines
_BEGIN_CPU_SECONDS: Final = 2.0  # more for each engine once: ten thousand batches that are replayed take one
_REPLAY_SECONDS: Final = 5.0  # between two answers; the engine looks ten times a second, or once a step
_END: Final = -1
_FAILURES: Final = {
    socket.gaierror: DNS,
    UnicodeError: DNS,
    TimeoutError: TIMEOUT,
    ConnectionRefusedError: REFUSED,
    ConnectionError: RESET,
}

_failures: Final = FailureLog()
_one_at_a_time: Final = threading.Lock()  # what is decoded takes several times the memory of a message


class CpuMinute:
    """CPU seconds that all subscriptions took in this minute."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = 0.0
        self._used: dict[object, float] = {}

    def allows(self, subscription: object, seconds: float) -> bool:
        """Whether a subscription that took so many seconds more may go on: not the one that took most where all took
        too much, and none where they took twice that.
        """
        with self._lock:
            if monotonic() - self._began > _MINUTE:
                self._began, self._used = monotonic(), {}
            self._used[subscription] = mine = self._used.get(subscription, 0.0) + seconds
            taken = sum(self._used.values())
            most = _CPU_SECONDS if mine == max(self._used.values()) else 2 * _CPU_SECONDS
            return taken <= most


_minute: Final = CpuMinute()


class Subscription:
    """The events of an engine (``of``: target and name), read in a thread of its own until ``close``. ``addresses``: of
    the events, and where what was lost is sent again (``None`` = nowhere).
    """

    def __init__(self, of: tuple[str, str], addresses: tuple[Address, Address | None]) -> None:
        self.addresses = addresses
        self.capacity_tokens: float | None = None  # of the engine's cache; None = unknown
        self.done = 0.0, 0.0  # tokens computed and requests finished, by the page
        self._of = of
        self._contents = Contents()
        self._trouble = CONNECTING
        self._last: int | None = None  # sequence number of the last batch, -1 = none was sent; None = unknown
        self._last_time = 0.0
        self._before: tuple[int | None, float, tuple[float, float]] = None, monotonic(), self.done
        self._checked = False  # whether the process that sends is the one that sent the last batch
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._peers: list[Peer] = []  # connected now
        self._used = _BEGIN_CPU_SECONDS  # of the thread, so far
        threading.Thread(target=self._run, name="kv-events", daemon=True).start()

    def reading(self) -> CacheReading:
        """What is known now."""
        now, contents = time(), self._contents
        with self._lock:
            contents.set_capacity(self.capacity_tokens)
            silent = self._silent(now)
            reason = self._trouble or contents.reason or (SILENT if silent else "")
            adapters, salts = ({}, {}) if reason else contents.holders.shares(now)
            counters = {} if reason else contents.counters()
            resident = contents.reuse.resident * (contents.block_size or 0)
        return CacheReading(*self._of, now, reason, adapters, salts, resident, counters)

    def _silent(self, now: float) -> bool:
        """Whether blocks were filled a minute ago, and no batch came since. Each request may leave one block partly
        filled, so that it has no event.
        """
        last, _, before = self._before
        tokens, requests = (done - then for done, then in zip(self.done, before, strict=True))
        if last != self._last or tokens <= requests * (self._contents.block_size or 0):
            self._before = self._last, monotonic(), self.done
            if not self._trouble:
                self._contents.take(now, ())
        return monotonic() - self._before[1] > SILENT_SECONDS

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        for peer in tuple(self._peers):
            peer.close()

    @contextmanager
    def _connected(self, address: Address) -> Iterator[Peer]:
        """A connection that ``close`` ends."""
        with closing(Peer(address, self._pay)) as peer:
            self._peers.append(peer)
            try:
                if self._closed.is_set():
                    raise SourceError(RESET)
                yield peer
            finally:
                self._peers.remove(peer)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._follow()
            except SourceError as error:
                self._trouble = error.reason
            except (OSError, UnicodeError) as error:
                self._trouble = reason_of(error, _FAILURES, UNREACHABLE)
            except Exception as error:
                self._trouble = INTERNAL
                _failures.add(f"KV events of {self._of[0]}", "read", error)
            self._closed.wait(_MINUTE if self._trouble == FLOOD else _RETRY_SECONDS)

    def _follow(self) -> None:
        self._checked = False
        with self._connected(self.addresses[0]) as live:
            live.greet(b"SUB", None)
            live.send(SUBSCRIBE_ALL)
            self._catch_up()
            self._trouble = ""
            while not self._closed.is_set():
                if not live.pending():
                    self._closed.wait(_REST_SECONDS)
                self._take(*live.batch())

    def _take(self, number: int, payload: bytes | bytearray) -> None:
        """Take a batch as it is sent."""
        known = self._last is not None
        if self._last is not None and number > self._last + 1:
            self._catch_up()
        if self._last is None or number > self._last + 1 or (number <= self._last and not self._checked):
            self._begin("" if number == 0 else GAP if known else LATE)
        elif number <= self._last:
            return  # was replayed
        self._checked = True
        self._apply(number, payload)

    def _catch_up(self) -> None:
        """Take what the replay endpoint still has since the last batch, or all of it if the engine restarted. Without
        an answer, what comes next is taken for what it is.
        """
        replay, starts = self.addresses[1], (0,) if self._last is None else (max(self._last, 0), 0)
        try:
            self._checked = replay is not None and any(self._replayed(replay, start) for start in starts)
        except (SourceError, OSError) as error:
            if isinstance(error, SourceError) and error.reason == FLOOD:
                raise

    def _replayed(self, replay: Address, start: int) -> bool:
        """Take what is sent again from a number on. False if that is not the last batch, as it must be above 0."""
        begun = start > 0
        with self._connected(replay) as peer:
            peer.greet(b"DEALER", _REPLAY_SECONDS)
            peer.send(b"", start.to_bytes(8))
            number, payload = peer.batch()
            if begun:
                if number != self._last or decode(payload)[0] != self._last_time:
                    return False
                number, payload = peer.batch()
            elif number == _END:
                self._begin("")
                self._last = -1  # nothing was sent yet
            while number != _END:
                if not begun or number != (self._last or 0) + 1:
                    self._begin("" if number == 0 else GAP if begun else LATE)
                self._apply(number, payload)
                begun = True
                number, payload = peer.batch()
        return True

    def _begin(self, reason: str) -> None:
        with self._lock:
            self._contents.begin(reason)

    def _apply(self, number: int, payload: bytes | bytearray) -> None:
        self._last = number
        try:
            with _one_at_a_time:
                sent, events = decode(payload)
                with self._lock:
                    self._contents.take(min(sent, time()), events)
                self._last_time = sent
        except SourceError as error:
            self._begin(error.reason)

    def _pay(self) -> None:
        """Bound the CPU that the events may take. A subscriber that only reads slower makes the engine keep them."""
        before, self._used = self._used, max(self._used, thread_time())
        if not _minute.allows(self, self._used - before):
            self._last = None
            self._begin(FLOOD)
            raise SourceError(FLOOD)
