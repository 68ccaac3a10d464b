"""Follows the KV events of one engine: what was lost is asked for again, or said."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from time import monotonic, thread_time, time
from typing import Final

from kvpressure.kvevents.contents import CONNECTING, FLOOD, GAP, LATE, Contents
from kvpressure.model.isolation import FailureLog
from kvpressure.model.readings import CacheReading
from kvpressure.model.reasons import INTERNAL, PROTOCOL
from kvpressure.sources.base import SourceError
from kvpressure.sources.kvevents.decoding import decode
from kvpressure.sources.kvevents.zmtp import SUBSCRIBE_ALL, Address, Connection

_RETRY_SECONDS: Final = 5.0
_AFTER_FLOOD_SECONDS: Final = 60.0
_CPU_SHARE: Final = 0.1  # of a core, over time
_CPU_BURST_SECONDS: Final = 5.0  # ten thousand batches that are replayed
_REPLAY_SECONDS: Final = 5.0  # between two answers; the engine looks ten times a second, or once a step
_END: Final = -1

_failures: Final = FailureLog()
_one_at_a_time: Final = threading.Lock()  # what is decoded takes several times the memory of a message


@dataclass(frozen=True, slots=True)
class Followed:
    """Whose events they are, and where: ``replay`` ``None`` = what was sent cannot be asked for again."""

    target: str
    engine: str
    events: Address
    replay: Address | None = None


class Subscription:
    """The events of one engine, read in a thread of its own until ``close``."""

    def __init__(self, followed: Followed) -> None:
        self.followed = followed
        self._contents = Contents()
        self._trouble = CONNECTING
        self._last: int | None = None  # sequence number of the last batch, -1 = none was sent; None = unknown
        self._last_time = 0.0
        self._checked = False  # whether the process that sends is the one that sent the last batch
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._live: Connection | None = None
        self._credit, self._credited, self._used = _CPU_BURST_SECONDS, monotonic(), 0.0
        threading.Thread(target=self._run, name="kv-events", daemon=True).start()

    def reading(self, capacity_tokens: float | None) -> CacheReading:
        """What is known now. ``capacity_tokens``: of the engine's cache, ``None`` = unknown."""
        now, contents = time(), self._contents
        with self._lock:
            contents.set_capacity(capacity_tokens)
            reason = self._trouble or contents.reason
            adapters, salts = ({}, {}) if reason else contents.holders.shares(now)
            counters = {} if reason else contents.counters()
            resident = contents.holders.resident * (contents.block_size or 0)
        return CacheReading(
            self.followed.target, self.followed.engine, now, reason, adapters, salts, resident, counters
        )

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._live is not None:
            self._live.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._follow()
            except SourceError as error:
                self._trouble = error.reason
            except Exception as error:
                self._trouble = INTERNAL
                _failures.add(f"KV events of {self.followed.target}", "read", error)
            self._closed.wait(_AFTER_FLOOD_SECONDS if self._trouble == FLOOD else _RETRY_SECONDS)

    def _follow(self) -> None:
        self._checked = False
        with Connection(self.followed.events, b"SUB", None) as live:
            self._live = live
            live.send(SUBSCRIBE_ALL)
            self._catch_up()
            self._trouble = ""
            while not self._closed.is_set():
                self._take(*_batch(live.message()))

    def _take(self, number: int, payload: bytes) -> None:
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
        for start in (0,) if self._last is None else (max(self._last, 0), 0):
            try:
                if self.followed.replay is None or self._replayed(self.followed.replay, start):
                    self._checked = self.followed.replay is not None
                    return
            except SourceError as error:
                if error.reason == FLOOD:
                    raise
                return

    def _replayed(self, replay: Address, start: int) -> bool:
        """Take what is sent again from a number on. False if that is not the last batch, as it must be above 0."""
        begun = False
        with Connection(replay, b"DEALER", _REPLAY_SECONDS) as connection:
            connection.send(b"", start.to_bytes(8))
            while (answer := _batch(connection.message()))[0] != _END:
                number, payload = answer
                if not begun and start > 0:
                    if number != self._last or decode(payload)[0] != self._last_time:
                        return False
                else:
                    if not begun or number != (self._last or 0) + 1:
                        self._begin("" if number == 0 else GAP if begun else LATE)
                    self._apply(number, payload)
                begun = True
        if not begun and start == 0:
            self._begin("")
            self._last = -1  # nothing was sent yet
        return begun or start == 0

    def _begin(self, reason: str) -> None:
        with self._lock:
            self._contents.begin(reason)

    def _apply(self, number: int, payload: bytes) -> None:
        self._pay()
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
        now, used = monotonic(), thread_time()
        earned = (now - self._credited) * _CPU_SHARE
        self._credit = min(_CPU_BURST_SECONDS, self._credit + earned) - (used - self._used)
        self._credited, self._used = now, used
        if self._credit < 0:
            self._last = None
            self._begin(FLOOD)
            raise SourceError(FLOOD)


def _batch(frames: list[bytes]) -> tuple[int, bytes]:
    """Sequence number and payload: the last two frames."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        raise SourceError(PROTOCOL, "no batch of KV events")
    return int.from_bytes(frames[-2], signed=True), frames[-1]
