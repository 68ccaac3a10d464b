"""Calls that may never return: NVML has no timeouts, and a hung call blocks its thread for good.

Work runs in a thread that is abandoned when it hangs; further work gets a new one. A key whose call hangs is not
tried again until the call returns, so there is at most one stuck thread per key.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Hung(Exception):
    """The call has not returned in time, or an earlier one for the same key hangs still."""


class Job(Generic[T]):
    """Work for another thread."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._running = (
            threading.Lock()
        )  # held until the work has ended: far cheaper than an Event, and there is one a GPU a second
        self._running.acquire()
        self.done = False
        """True once the work has ended."""
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work; called once, by the worker thread."""
        try:
            self._value = self._work()
        except BaseException as error:  # handed to whoever waits
            self._error = error
        self.done = True
        self._running.release()

    def result(self, timeout: float) -> T:
        """What the work returned or raised. Raises ``Hung`` after ``timeout`` seconds."""
        if not self.done and not self._running.acquire(timeout=timeout):
            raise Hung
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # set when there is no error


class HangGuard:
    """One thread for work that returns, plus one abandoned thread per hanging call. Not thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Job[Any] | None] | None = None
        self._stuck: dict[str, Job[Any]] = {}

    def start(self, work: Callable[[], T]) -> Job[T]:
        """Start ``work``; the previous one must have ended or been abandoned."""
        if self._queue is None:
            queue: SimpleQueue[Job[Any] | None] = SimpleQueue()
            threading.Thread(target=_serve, args=(queue,), name=self._name, daemon=True).start()
            self._queue = queue  # only now: where no thread can be started, the next call tries again
        job = Job(work)
        self._queue.put(job)
        return job

    def call(self, key: str, work: Callable[[], T], timeout: float) -> T:
        """Do ``work`` and return its result. Raises ``Hung``, or what the work raises."""
        if key in self.stuck():
            raise Hung
        job = self.start(work)
        try:
            return job.result(timeout)
        except Hung:
            self._stuck[key] = job
            self.close()
            raise

    def stuck(self) -> set[str]:
        """Keys whose call has not returned."""
        for key in [key for key, job in self._stuck.items() if job.done]:
            del self._stuck[key]
        return set(self._stuck)

    def close(self) -> None:
        """Let the thread end after its present work; further work gets a new one."""
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None


def _serve(queue: SimpleQueue[Job[Any] | None]) -> None:
    while (job := queue.get()) is not None:
        job.run()
