"""A recording played in real time as a source, for demos and tests.

Times are shifted so that the first tick is now. After the last tick the source is down with reason ``ended``. Switch
the live sources off (``--no-collector.nvidia --no-collector.engines ...``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import time

from kvpressure.model.readings import ContainerReading, LogLine, Scrape, Snapshot, StepStats
from kvpressure.recording.format import RecordingError
from kvpressure.recording.reader import Reader
from kvpressure.sources.base import Reading, SourceError, SourceSettings


class RecordingSource:
    """Each ``read`` returns all scrapes and log lines since the last one, and the latest of all else, which stays
    between ticks.
    """

    name = "recording"

    def __init__(self, settings: SourceSettings, clock: Callable[[], float] = time) -> None:
        if settings.recording_file is None:
            raise SourceError("no_file", "--recording.file is not given")
        try:
            self._reader = Reader(settings.recording_file, keep_exposition=settings.keep_exposition)
        except RecordingError as error:
            raise SourceError("bad_file", str(error)) from error
        self._ticks: Iterator[Snapshot] = iter(self._reader)
        self._next = next(self._ticks, None)
        self._last: Snapshot | None = None
        self._hold = 2 * (self._reader.header.interval_seconds or 5.0)
        self._clock = clock
        self._shift = 0.0 if self._next is None else clock() - self._next.time
        self._lock = threading.Lock()

    def read(self) -> Reading:
        """Readings since the last read. Raises ``SourceError("ended")`` after the last tick."""
        with self._lock:
            if self._next is None:
                raise SourceError("ended")
            now = self._clock() - self._shift
            due: list[Snapshot] = []
            while self._next is not None and self._next.time <= now:
                due.append(self._next)
                self._next = next(self._ticks, None)
            self._last = due[-1] if due else self._last
        if self._last is None or now - self._last.time > self._hold:
            return Reading()  # a gap in the recording
        return self._reading(self._last, due)

    def close(self) -> None:
        """Close the file."""
        self._reader.__exit__(None, None, None)

    def _reading(self, last: Snapshot, due: list[Snapshot]) -> Reading:
        pages: tuple[Scrape, ...] = tuple(replace(page, time=page.time + self._shift) for s in due for page in s.pages)
        logs: tuple[LogLine, ...] = tuple(line for s in due for line in s.logs)
        return Reading(
            gpus=last.gpus,
            pages=pages,
            containers=tuple(map(self._moved, last.containers)),
            owners=last.owners,
            logs=logs,
            allocator=last.allocator,
            steps=tuple(map(self._moved_steps, last.steps)),
            node_conditions=last.node_conditions,
            targets=last.targets,
            pods=last.pods,
        )

    def _moved_steps(self, stats: StepStats) -> StepStats:
        return replace(stats, written=stats.written + self._shift)

    def _moved(self, container: ContainerReading) -> ContainerReading:
        ended = container.last_termination
        if ended is None or ended.finished_at is None:
            return container
        return replace(container, last_termination=replace(ended, finished_at=ended.finished_at + self._shift))
