"""Reports as metrics on vLLM's own endpoint, through ``PROMETHEUS_MULTIPROC_DIR``.

With that variable set, prometheus_client collects metrics of all processes from files, and vLLM serves them.
prometheus_client is imported on first use; vLLM has loaded it by then. Without the variable nothing is reported,
because a worker's registry is not served.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any, Final

log = logging.getLogger("kvpressure.plugin")

ALLOCATOR: Final = "kvpressure:allocator"  # labels rank, figure, pid (ranks repeat where each replica counts its own)
WRITTEN: Final = "kvpressure:written_seconds"  # labels rank, pid: when, Unix seconds
STEPS: Final = "kvpressure:engine_steps"  # labels engine, count (batch or running), size
SUMS: Final = "kvpressure:engine_sums"  # labels engine, sum (steps, decoded, tokens, preemptions)
KV_MAX: Final = "kvpressure:engine_kv_max"  # label engine; the largest of all API servers, 0 = no step
FRONTENDS: Final = "kvpressure:frontends"


@functools.cache
def _metrics() -> dict[str, Any] | None:
    if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        log.warning("kvpressure plugin: PROMETHEUS_MULTIPROC_DIR is not set: nothing is reported")
        return None
    from prometheus_client import Counter, Gauge

    return {
        ALLOCATOR: Gauge(
            ALLOCATOR, "torch's allocator in a worker, by figure.", ["rank", "figure"], multiprocess_mode="liveall"
        ),
        WRITTEN: Gauge(WRITTEN, "When a worker's figures were taken.", ["rank"], multiprocess_mode="liveall"),
        STEPS: Counter(STEPS, "Engine steps by batch size.", ["engine", "count", "size"]),
        SUMS: Counter(SUMS, "Sums over engine steps.", ["engine", "sum"]),
        KV_MAX: Gauge(KV_MAX, "Largest KV usage of the last ten seconds.", ["engine"], multiprocess_mode="livemax"),
        FRONTENDS: Gauge(FRONTENDS, "API servers that count steps.", multiprocess_mode="livesum"),
    }


_shown: dict[tuple[str, ...], int] = {}


def _advance(counter: Any, labels: tuple[str, ...], value: int) -> None:
    before = _shown.get(labels, -1)  # so that a count of 0 is shown
    if value > before:
        before = max(before, 0)
        counter.labels(*labels).inc(value - before)
        _shown[labels] = value


def show_allocator(figures: Mapping[str, int]) -> None:
    """Set the gauges of one worker."""
    import time

    if (metrics := _metrics()) is None:
        return
    rank = str(figures["rank"])
    for name, value in figures.items():
        if name != "rank":
            metrics[ALLOCATOR].labels(rank, name).set(value)
    metrics[WRITTEN].labels(rank).set(time.time())


def show_steps(reports: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise the counters to the sums in ``reports`` (by engine)."""
    if (metrics := _metrics()) is None:
        return
    metrics[FRONTENDS].set(1)
    for engine, report in reports.items():
        for name in ("steps", "decoded", "tokens", "preemptions"):
            _advance(metrics[SUMS], (engine, name), report[name])
        for kind in ("batch", "running"):
            for size, count in report[kind].items():
                _advance(metrics[STEPS], (engine, kind, str(size)), count)
        metrics[KV_MAX].labels(engine).set(report["kv_max"] or 0.0)
