"""API server side: counts every step of the engines.

A step reaches every API server with the outputs for its own clients, and exactly one of them with the scheduler's
statistics. With one API server the requests that got a token are therefore the exact decoding batch of the step; with
several, only the scheduler's count of running requests covers the whole step.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from operator import index
from typing import Any, Final

from kvpressure_vllm import registry_gauges
from kvpressure_vllm.report import guarded, repeat

KV_REPORTS: Final = 10  # reports whose KV maxima are kept, at about one a second
LARGEST_BATCH: Final = 8192  # larger ones count as this
LARGEST_COUNT: Final = 2**40  # of anything in one step; more is no count


class StepCounts:
    """Sums over the steps of one engine since this process started. ``steps``: those with scheduler statistics while
    something ran; ``decoded``: sum of requests that got a token; ``batch`` and ``running``: steps by decoding and by
    running requests.
    """

    __slots__ = ("_kv_max", "_kv_maxima", "batch", "decoded", "preemptions", "running", "steps", "tokens")

    def __init__(self) -> None:
        self.steps = self.decoded = self.tokens = self.preemptions = 0
        self.batch: dict[int, int] = {}
        self.running: dict[int, int] = {}
        self._kv_max: float | None = None
        self._kv_maxima: deque[float] = deque(maxlen=KV_REPORTS)

    def record(self, scheduler: Any, iteration: Any) -> None:
        """Count one step, from vLLM's ``SchedulerStats`` and ``IterationStats``; either may be missing.

        vLLM does not guarantee these classes. All of a step is read before any is counted, so that an invalid part
        leaves the sums unchanged.
        """
        decoded = tokens = preempted = running = 0
        usage: float | None = None
        if iteration is not None:
            decoded = min(len(iteration.inter_token_latencies_iter), LARGEST_BATCH)
            tokens = _count(iteration.num_generation_tokens)
            preempted = _count(iteration.num_preempted_reqs)
        if scheduler is not None:
            running = min(_count(scheduler.num_running_reqs), LARGEST_BATCH)
            usage = float(scheduler.kv_cache_usage)
        self.tokens += tokens
        self.preemptions += preempted
        if decoded:
            self.decoded += decoded
            self.batch[decoded] = self.batch.get(decoded, 0) + 1
        if usage is None:
            return
        if running or decoded:
            self.steps += 1
            self.running[running] = self.running.get(running, 0) + 1
        if 0.0 <= usage <= 1.0 and (self._kv_max is None or usage > self._kv_max):
            self._kv_max = usage

    def report(self) -> dict[str, object]:
        """The sums now, and the largest KV usage of the last ten reports."""
        if self._kv_max is not None:
            self._kv_maxima.append(self._kv_max)
            self._kv_max = None
        elif self._kv_maxima:
            self._kv_maxima.popleft()  # no step since the last report: expire the oldest
        return {
            "steps": self.steps,
            "decoded": self.decoded,
            "tokens": self.tokens,
            "preemptions": self.preemptions,
            "kv_max": max(self._kv_maxima, default=None),
            "batch": dict(self.batch),
            "running": dict(self.running),
        }


def _count(value: Any) -> int:
    """A whole number. Raises ``TypeError`` or ``ValueError`` otherwise."""
    number = index(value)
    if not 0 <= number <= LARGEST_COUNT:
        raise ValueError(f"{number} is no count")
    return number


class Frontend:
    """The engines of this API server, and the thread that reports them."""

    def __init__(self) -> None:
        self._engines: dict[int, StepCounts] = {}
        self._lock = threading.Lock()
        self._thread_of: int | None = None

    def engine(self, index: int) -> StepCounts:
        """The counts of one engine, the same object at every call. Starts the thread."""
        with self._lock:
            if self._thread_of != os.getpid():
                self._thread_of = os.getpid()
                threading.Thread(target=repeat, args=(self.report,), name="kvpressure-steps", daemon=True).start()
            return self._engines.setdefault(index, StepCounts())

    @guarded
    def report(self) -> None:
        """Update the counters on vLLM's own endpoint."""
        registry_gauges.show_steps({str(index): counts.report() for index, counts in list(self._engines.items())})


FRONTEND: Final = Frontend()
