"""What the checklist asks of a server's container: no item of the guide."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, inf
from typing import Final

from kvpressure.capacity import weights
from kvpressure.model.state import Found
from kvpressure.printable import duration, say
from kvpressure.toolbox.audit_subject import Item, Subject
from kvpressure.toolbox.host_settings import DEFAULT_SHARED_BYTES, SHARED_MEMORY, HostSettings

_PROCESSES_WHY: Final = "a server whose processes share too few CPU cores leaves its GPU idle"
_SHARED_WHY: Final = "the processes of several GPUs exchange data through /dev/shm"
_SHARED_BYTES: Final = 1 << 30  # as in KServe's configurations for vLLM; vLLM's own examples give 2 GiB
_START_WHY: Final = "a probe that gives up before the model is loaded restarts the server without end"
# Fastest: Python's imports and the start of the processes take about 20 s (vLLM's issue 15225), weights come from the
# page cache. Slowest: 5 min for compilation and warm-up (issue 44881), weights come over a network of 1.6 Gbit/s.
_FASTEST_START: Final = (20.0, 10e9)  # seconds, bytes/s
_SLOWEST_START: Final = (300.0, 0.2e9)


def container(s: Subject) -> Iterator[Item]:
    host = s.server.host
    if host is not None:
        yield _cpu(s, host)
        yield _shared_memory(s, host)
        yield _start(s, host)


def _gpus(s: Subject, host: HostSettings) -> int | None:
    """GPUs of the container; None if neither its resources nor its arguments give their number."""
    if host.gpus is not None:
        return host.gpus
    engine = s.args.engine_gpus
    return None if engine is None else engine * (s.args.integer("data_parallel_size_local") or 1)


def _cpu(s: Subject, host: HostSettings) -> Item:
    gpus, limit = _gpus(s, host), host.cpu_limit
    needed = None if gpus is None else s.dialect.processes(s.args, gpus)
    result: bool | None = True
    if limit is None:
        found = "no CPU limit"
    elif needed is None:
        result, found = None, f"CPU limit {limit:g}; number of processes unknown"
    else:
        result, found = limit >= needed, f"CPU limit {limit:g}; {needed} processes"
    return Item(
        Found("cpu_limit", result, found),
        "the CPU limit is at least one core for each process",
        _PROCESSES_WHY,
        f"resources.limits.cpu of {needed} or more, or no CPU limit" if result is False else "",
    )


def _shared_memory(s: Subject, host: HostSettings) -> Item:
    gpus, size = _gpus(s, host), host.shared_bytes
    result: bool | None
    if gpus == 1:
        result, found = True, "one GPU: not needed"
    elif gpus is None:
        result, found = None, "number of GPUs unknown"
    else:
        size = DEFAULT_SHARED_BYTES if size is None else size
        result = size >= _SHARED_BYTES
        limit = "without a limit of its own" if size == inf else say(size, "bytes")
        found = f"{SHARED_MEMORY} {limit}{' (default)' if host.shared_bytes is None else ''}, {gpus} GPUs"
    return Item(
        Found("shared_memory", result, found),
        f"{SHARED_MEMORY} is large enough for several GPUs",
        _SHARED_WHY,
        f"an emptyDir with medium: Memory and sizeLimit 2Gi, mounted at {SHARED_MEMORY}",
    )


def _start(s: Subject, host: HostSettings) -> Item:
    seconds = host.start_seconds
    size = weights.estimated(s.shape) if s.shape is not None else None
    fastest, slowest = (fixed + (size or 0) / rate for fixed, rate in (_FASTEST_START, _SLOWEST_START))
    result: bool | None = None
    if seconds is None:
        result, found = True, "no startup or liveness probe"
    else:
        found = f"{host.start_probe} restarts the server after {duration(seconds)}"
        if seconds < fastest:
            result = False
        elif size and seconds >= slowest:
            result = True
        found += (
            f"; a start takes between {duration(fastest)} and {duration(slowest)} (estimate)"
            if size
            else "; model size unknown"
        )
    advised = f"a startupProbe with periodSeconds 10 and failureThreshold {ceil(slowest / 10)}"
    return Item(
        Found("start_time", result, found),
        "probes leave enough time to load the model",
        _START_WHY,
        advised if size else f"{advised} or more; measure how long a start takes",
    )
