"""The source's readings of GPU 0, once a second, as the exporter takes them."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

from kvpressure.model.readings import GpuReading
from kvpressure.sources.base import SourceError
from kvpressure.sources.gpu.nvidia.source import NvidiaSource

SECONDS = 1.0


class Sampler:
    """Reads in a thread while the block runs; ``readings`` holds (Unix seconds, reading), ``errors`` what failed."""

    def __init__(self) -> None:
        self.readings: list[tuple[float, GpuReading]] = []
        self.errors: list[str] = []
        self._source = NvidiaSource(SimpleNamespace(nvidia_gpm=True))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)
        self._source.close()

    def between(self, since: float, until: float) -> list[tuple[float, GpuReading]]:
        """Readings of that time."""
        return [(t, reading) for t, reading in list(self.readings) if since <= t <= until]

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            due += SECONDS
            try:
                gpus = self._source.read().gpus or ()
            except SourceError as error:
                self.errors.append(str(error))
                continue
            self.readings += [(time.time(), gpu) for gpu in gpus if gpu.index == 0 and gpu.parent_uuid is None]
