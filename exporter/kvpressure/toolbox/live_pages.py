"""Watches live endpoints for some seconds through the exporter's own source, one snapshot per tick."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from kvpressure.model.readings import ContainerReading, GpuReading, LogLine, Scrape, Snapshot
from kvpressure.parsed import mapping
from kvpressure.settings.settings import Settings
from kvpressure.sources.catalog import CollectorSettings
from kvpressure.sources.scrape.source import EngineSource
from kvpressure.sources.scrape.targets import Target
from kvpressure.toolbox import fetch

MAX_TARGETS: Final = 64
TIMEOUT_SECONDS: Final = 3.0
_GIVEN_GPU: Final = "given"


class Clock:
    """Time for the watch; replaced in tests."""

    def now(self) -> float:
        """Unix seconds."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(max(0.0, seconds))


CLOCK = Clock()


@dataclass(frozen=True, slots=True)
class GivenGpu:
    """The GPU as the user states it, which determines vLLM's defaults."""

    name: str
    memory_bytes: int

    def reading(self) -> GpuReading:
        """A reading with its identity and size only."""
        return GpuReading(_GIVEN_GPU, 0, "given", name=self.name, memory_total_bytes=self.memory_bytes)


@dataclass(frozen=True, slots=True)
class Around:
    """Inputs beside the metrics: containers and log lines of the first tick, versions by target."""

    containers: tuple[ContainerReading, ...] = ()
    logs: tuple[LogLine, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    gpu: GivenGpu | None = None


def versions(targets: Sequence[Target]) -> dict[str, str]:
    """Response of ``/version`` by target; missing without one."""
    found = {target.name: mapping(fetch.get_json(target, "/version", 2.0)).get("version") for target in targets}
    return {name: version for name, version in found.items() if isinstance(version, str)}


def watch(targets: Sequence[Target], seconds: float, interval: float, around: Around) -> Iterator[Snapshot]:
    """The snapshots of these targets; see ``ticks``."""
    source = EngineSource(
        Settings(
            collectors={EngineSource.name: CollectorSettings(True, interval, TIMEOUT_SECONDS)},
            engine_targets=tuple(targets),
            engine_timeout_seconds=TIMEOUT_SECONDS,
            engine_max_targets=MAX_TARGETS,
            engine_pace="fixed",
        )
    )
    try:
        yield from ticks(lambda: source.read().pages or (), seconds, interval, around)
    finally:
        source.close()


def ticks(read: Callable[[], Sequence[Scrape]], seconds: float, interval: float, around: Around) -> Iterator[Snapshot]:
    """A snapshot of what ``read`` returns every ``interval`` for ``seconds``, the last one at the end."""
    start, first = CLOCK.now(), True
    while True:
        began = CLOCK.now()
        yield snapshot(began, read(), around, first)
        first = False
        if began + interval > start + seconds:
            return
        CLOCK.sleep(began + interval - CLOCK.now())


def snapshot(now: float, pages: Sequence[Scrape], around: Around, first: bool) -> Snapshot:
    """One tick of ``pages`` with the inputs beside them."""
    gpu = around.gpu
    placed = tuple(
        replace(
            page,
            time=now,
            version=page.version or around.versions.get(page.target),
            gpus=page.gpus or ((_GIVEN_GPU,) if gpu else ()),
        )
        for page in pages
    )
    return Snapshot(
        now,
        gpus=(gpu.reading(),) if gpu else (),
        pages=placed,
        containers=around.containers,
        logs=around.logs if first else (),
    )
