"""One source in one thread: its schedule, deadline, newest reading and health."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, TypeVar

from kvpressure.model.isolation import FailureLog
from kvpressure.model.readings import SourceHealth, counted
from kvpressure.model.reasons import INTERNAL, TIMEOUT
from kvpressure.runtime.plausibility import believed
from kvpressure.sources.base import FatalSourceError, NothingHere, Reading, Source, SourceError
from kvpressure.sources.catalog import SourceSpec

log = logging.getLogger(__name__)

PENDING_PAGES: Final = 1024  # readings that no tick has taken yet are bounded by these
PENDING_LOGS: Final = 10_000

_T = TypeVar("_T")


def next_due(due: float, interval: float, now: float) -> float:
    """The next point of ``due + n * interval`` after ``now``: no drift, and missed points are skipped."""
    missed = int(max(0.0, now - due) // interval)
    return due + (missed + 1) * interval


class Worker:
    """Reads ``source`` every ``spec.interval_seconds`` in a daemon thread. ``take`` and ``health`` are called by the
    loop and never wait for a read.

    A read beyond its deadline counts as failed with reason ``timeout``; its result is still used when it comes,
    unless it took more than twice the deadline and is too old.
    """

    def __init__(
        self,
        spec: SourceSpec,
        source: Source,
        on_fatal: Callable[[FatalSourceError], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.spec = spec
        self.source = source
        self._on_fatal = on_fatal
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()  # held for assignments only, never during a read
        self._health = SourceHealth(spec.name)
        self._reading_since: float | None = None
        self._overdue = False
        self._unread: Reading | None = None
        self._held: Reading | None = None
        self._arrived = 0.0
        self._failures = FailureLog()
        self._thread: threading.Thread | None = None

    @property
    def answered(self) -> bool:
        """Whether a read has succeeded, failed, timed out, or found nothing to read."""
        return self._health.up is not None or self._health.reason is not None

    def start(self, stop: threading.Event) -> None:
        """Read in a thread until ``stop`` is set."""
        self._thread = threading.Thread(target=self._run, args=(stop,), name=f"source-{self.spec.name}", daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Wait for the thread, at most ``timeout`` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)

    def read_once(self) -> bool:
        """Read once and record the result. False after a fatal failure."""
        started = self._clock()
        with self._lock:
            self._reading_since = started
        reason = None
        counts: Mapping[str, int] | None = None
        reading = None
        try:
            reading = believed(self.source.read())
        except FatalSourceError as error:
            self._finish(started, None, error.reason)
            self._on_fatal(error)
            return False
        except NothingHere as error:
            self._nothing_here(error.reason)
            return True
        except SourceError as error:
            reason, counts = error.reason, error.counts
            log.debug("source %s: %s", self.spec.name, error)
        except Exception as error:
            reason = INTERNAL
            self._failures.add(f"source {self.spec.name}", "read", error)
        self._finish(started, reading, reason, counts)
        return True

    def take(self, now: float) -> Reading | None:
        """What arrived since the last call; else the last reading while it may be held; else ``None``.

        Scrapes and log lines are events: each is returned once, also when two reads fall between two ticks.
        """
        with self._lock:
            self._note_overdue(now)
            if self._overdue:
                return None
            reading, self._unread = self._unread, None
            if reading is None and self._held is not None and now - self._arrived <= self.spec.hold_seconds:
                reading = self._held
            return reading

    def behind(self, now: float) -> bool:
        """Whether the source is healthy but its next read is late, so that there is nothing to take."""
        with self._lock:
            kept = self.spec.hold_seconds if self._held is not None else 0.0
            old = now - self._arrived > max(kept, self.spec.interval_seconds)
            return self._health.up is True and self._unread is None and old

    def health(self, now: float) -> SourceHealth:
        """Health of the source at ``now``."""
        with self._lock:
            self._note_overdue(now)
            return self._health

    def hanging_seconds(self, now: float) -> float:
        """Seconds since the present read's deadline; 0 if it has not passed."""
        with self._lock:
            since = self._reading_since
        return 0.0 if since is None else max(0.0, now - since - self.spec.deadline_seconds)

    def _run(self, stop: threading.Event) -> None:
        due = self._clock()
        while not stop.is_set():
            if not self.read_once():
                return
            due = next_due(due, self.spec.interval_seconds, self._clock())
            stop.wait(max(0.0, due - self._clock()))

    def _note_overdue(self, now: float) -> None:
        since = self._reading_since
        if since is not None and not self._overdue and now - since > self.spec.deadline_seconds:
            self._overdue = True
            self._fail(TIMEOUT)

    def _finish(
        self, started: float, reading: Reading | None, reason: str | None, counts: Mapping[str, int] | None = None
    ) -> None:
        now = self._clock()
        duration = now - started
        with self._lock:
            self._note_overdue(now)
            known_late = self._overdue
            self._reading_since = None
            self._overdue = False
            self._health = replace(self._health, duration_seconds=duration)
            if reading is None:
                self._fail(reason or INTERNAL, counts)
            elif known_late and duration > 2 * self.spec.deadline_seconds:
                self._held = None  # already counted as a timeout
            else:
                self._accept(reading, now)

    def _accept(self, reading: Reading, now: float) -> None:
        self._unread = reading if self._unread is None else _merged(self._unread, reading)
        self._held = replace(reading, pages=None, logs=None) if self.spec.hold_seconds else None
        self._arrived = now
        errors = counted(self._health.errors, reading.errors)
        self._health = replace(self._health, up=True, reason=None, last_success=self._wall(), errors=errors)

    def _nothing_here(self, reason: str) -> None:
        with self._lock:
            self._reading_since = None
            self._overdue = False
            self._held = self._unread = None
            self._health = replace(self._health, up=None, reason=reason)

    def _fail(self, reason: str, counts: Mapping[str, int] | None = None) -> None:
        """Record a failure; ``counts`` None = one of ``reason``."""
        self._held = None  # a failed reading is absent, not the one before
        self._health = self._health.failed(reason, counts)


def _merged(older: Reading, newer: Reading) -> Reading:
    return replace(
        newer,
        pages=_joined(older.pages, newer.pages, PENDING_PAGES),
        logs=_joined(older.logs, newer.logs, PENDING_LOGS),
    )


def _joined(older: tuple[_T, ...] | None, newer: tuple[_T, ...] | None, limit: int) -> tuple[_T, ...] | None:
    if older is None or newer is None:
        return newer if older is None else older
    return (older + newer)[-limit:]
