"""Calls that may never return: NVML has no timeouts, and a hung call blocks its thread for good.

Work runs in a thread that is abandoned when it hangs; further work gets a new one. A key whose call hangs is not
tried again until the call returns, so there is at most one stuck thread per key.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Hung(Exception):
    """The call has not returned in time, or an earlier one for the same key hangs still."""


_Queue = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class HangGuard:
    """One thread for work that returns, plus one abandoned thread per hanging call. Not thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: _Queue | None = None
        self._stuck: dict[str, Future[Any]] = {}

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Start ``work``; the previous one must have ended or been abandoned."""
        if self._queue is None:
            queue: _Queue = SimpleQueue()
            threading.Thread(target=_serve, args=(queue,), name=self._name, daemon=True).start()
            self._queue = queue  # only now: where no thread can be started, the next call tries again
        future: Future[T] = Future()
        self._queue.put((future, work))
        return future

    def call(self, key: str, work: Callable[[], T], timeout: float) -> T:
        """Do ``work`` and return its result. Raises ``Hung``, or what the work raises."""
        if key in self.stuck():
            raise Hung
        future = self.start(work)
        try:
            return result_of(future, timeout)
        except Hung:
            self._stuck[key] = future
            self.close()
            raise

    def stuck(self) -> set[str]:
        """Keys whose call has not returned."""
        self._stuck = {key: future for key, future in self._stuck.items() if not future.done()}
        return set(self._stuck)

    def close(self) -> None:
        """Let the thread end after its present work; further work gets a new one."""
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None


def _serve(queue: _Queue) -> None:
    while (job := queue.get()) is not None:
        future, work = job
        try:
            future.set_result(work())
        except BaseException as error:  # handed to whoever waits
            future.set_exception(error)


def result_of(future: Future[T], timeout: float) -> T:
    """What the work returned or raised. Raises ``Hung`` where it has not ended after ``timeout`` seconds."""
    try:
        return future.result(timeout)
    except TimeoutError:
        if future.done():  # raised by the work itself
            raise
        raise Hung from None
