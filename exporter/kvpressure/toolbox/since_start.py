"""Request lengths since the server started, from its own totals; a watch of some seconds sees no request finish."""

from __future__ import annotations

from itertools import accumulate
from typing import Final

from kvpressure.model import readings
from kvpressure.model.readings import EngineReading, Histogram
from kvpressure.model.signals import ContextSignals
from kvpressure.signals.window import HistogramIncrease

_RANKS: Final = (("0.5", 0.5), ("0.95", 0.95))


def since_start(reading: EngineReading | None) -> ContextSignals:
    """Quantiles and means; unpublished ones are missing."""
    if reading is None:
        return ContextSignals()
    prompt, output = _mean(reading, readings.REQUEST_PROMPT), _mean(reading, readings.REQUEST_OUTPUT)
    return ContextSignals(
        context_mean=None if prompt is None or output is None else prompt + output,
        prompt_mean=prompt,
        output_mean=output,
        prompt_quantiles=_quantiles(reading, readings.REQUEST_PROMPT),
        output_quantiles=_quantiles(reading, readings.REQUEST_OUTPUT),
        max_tokens_quantiles=_quantiles(reading, readings.REQUEST_MAX_TOKENS),
    )


def _mean(reading: EngineReading, name: str) -> float | None:
    histogram = reading.histograms.get(name)
    if histogram is None or not histogram.count or histogram.sum is None:
        return None
    return histogram.sum / histogram.count


def _quantiles(reading: EngineReading, name: str) -> dict[str, float]:
    histogram = reading.histograms.get(name)
    if histogram is None or not histogram.count:
        return {}
    return {text: value for text, rank in _RANKS if (value := _quantile(histogram, rank)) is not None}


def _quantile(histogram: Histogram, rank: float) -> float | None:
    if not histogram.bounds or len(histogram.bounds) != len(histogram.counts):
        return None
    rising = tuple(accumulate(histogram.counts, max))
    return HistogramIncrease(histogram.bounds, rising, sum=None, count=histogram.count or 0.0).quantile(rank)
