"""Request shape since the server started, from the page's own totals: what a watch of some seconds cannot see."""

from __future__ import annotations

from itertools import accumulate
from typing import Final

from kvpressure import readings
from kvpressure.readings import EngineReading, Histogram
from kvpressure.signals.window import HistogramIncrease

_SHAPES: Final = (
    ("prompt", readings.REQUEST_PROMPT),
    ("output", readings.REQUEST_OUTPUT),
    ("max_tokens", readings.REQUEST_MAX_TOKENS),
)
_RANKS: Final = (("0.5", 0.5), ("0.95", 0.95))


def since_start(reading: EngineReading | None) -> dict[str, float]:
    """Quantiles and means under the names of the signals (``prompt_quantiles:0.95``, ``prompt_mean``, ``context_mean``); what the page
    does not tell is missing.
    """
    found: dict[str, float] = {}
    for name, key in _SHAPES:
        histogram = reading.histograms.get(key) if reading is not None else None
        if histogram is None or not histogram.count:
            continue
        if histogram.sum is not None:
            found[f"{name}_mean"] = histogram.sum / histogram.count
        for text, rank in _RANKS:
            value = _quantile(histogram, rank)
            if value is not None:
                found[f"{name}_quantiles:{text}"] = value
    if "prompt_mean" in found and "output_mean" in found:
        found["context_mean"] = found["prompt_mean"] + found["output_mean"]
    return found


def _quantile(histogram: Histogram, rank: float) -> float | None:
    if not histogram.bounds or len(histogram.bounds) != len(histogram.counts):
        return None
    rising = tuple(accumulate(histogram.counts, max))
    return HistogramIncrease(histogram.bounds, rising, sum=None, count=histogram.count or 0.0).quantile(rank)
