"""Request lengths and requests in flight of a recorded server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvpressure.capacity.errors import CapacityError
from kvpressure.capacity.load import RequestLengths, RequestLoad, from_quantiles
from kvpressure.model import readings
from kvpressure.model.readings import EngineKey, EngineReading, Histogram
from kvpressure.recording.format import RecordingError
from kvpressure.recording.reader import Reader

_MAX_ENGINES: Final = 1024
_IN_FLIGHT_QUANTILE: Final = 0.95


class _Growth:
    """Increase of a histogram over the recording; a restarted engine begins anew."""

    def __init__(self) -> None:
        self._before: Histogram | None = None
        self._bounds: tuple[float, ...] = ()
        self._counts: list[float] = []
        self.total = 0.0
        self.count = 0.0

    def add(self, now: Histogram) -> None:
        """Take the next reading of one engine's histogram."""
        before, self._before = self._before, now
        if before is None or before.bounds != now.bounds or before.count is None or now.count is None:
            return
        if now.count < before.count or before.sum is None or now.sum is None:
            return
        self.count += now.count - before.count
        self.total += now.sum - before.sum
        if self._bounds != now.bounds:
            self._bounds, self._counts = now.bounds, [0.0] * len(now.bounds)
        for place, (old, new) in enumerate(zip(before.counts, now.counts, strict=True)):
            self._counts[place] += max(0.0, new - old)

    def lengths(self) -> tuple[Sequence[int], float]:
        """Lengths at evenly spaced quantiles, linear between bucket bounds, and the quantile up to which they are
        known; without buckets the mean, and 0.
        """
        points = [
            (count / self._counts[-1], bound)
            for bound, count in zip(self._bounds, self._counts, strict=True)
            if self._counts[-1] and bound != float("inf")
        ]
        rising = [point for place, point in enumerate(points) if place == 0 or point[0] > points[place - 1][0]]
        if not rising or not rising[-1][0]:
            return (round(self.total / self.count),), 0.0
        shortest = [point for point in points if point[0] == 0][-1:]  # no request is in the buckets up to there
        return from_quantiles([*shortest, *(point for point in rising if point[0] > 0)]), rising[-1][0]


def from_recording(path: Path) -> RequestLoad:
    """The load on all engines of a recording. Raises ``CapacityError`` when no request finished in it."""
    prompts: dict[EngineKey, _Growth] = {}
    outputs: dict[EngineKey, _Growth] = {}
    in_flight: list[float] = []
    try:
        with Reader(path) as reader:
            for snapshot in reader:
                for page in snapshot.pages:
                    for engine in page.engines:
                        key = EngineKey(page.namespace, page.pod, engine.model_name, engine.engine)
                        if key not in prompts and len(prompts) >= _MAX_ENGINES:
                            continue
                        _add(prompts.setdefault(key, _Growth()), engine, readings.REQUEST_PROMPT)
                        _add(outputs.setdefault(key, _Growth()), engine, readings.REQUEST_OUTPUT)
                        if readings.RUNNING in engine.gauges:
                            in_flight.append(engine.gauges[readings.RUNNING] + engine.gauges.get(readings.WAITING, 0.0))
    except RecordingError as error:
        raise CapacityError(str(error)) from error
    requests: list[RequestLengths] = []
    known = 1.0
    for key, prompt in prompts.items():
        if prompt.count and outputs[key].count:
            (sent, known_sent), (answers, known_answers) = prompt.lengths(), outputs[key].lengths()
            known = min(known, known_sent, known_answers)
            requests += [RequestLengths(p, o, max(1, o) * prompt.count) for p in sent for o in answers]
    if not requests:
        raise CapacityError(
            f"{path}: the recording has no finished requests with known lengths; allowed: a recording of an engine"
            " that publishes histograms of request lengths"
        )
    in_flight.sort()
    at = min(len(in_flight) - 1, int(_IN_FLIGHT_QUANTILE * len(in_flight)))
    return RequestLoad(tuple(requests), in_flight=in_flight[at] if in_flight else None, known_share=known)


def _add(growth: _Growth, engine: EngineReading, name: str) -> None:
    histogram = engine.histograms.get(name)
    if histogram is not None:
        growth.add(histogram)
