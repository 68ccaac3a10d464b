"""Request lengths since the server started, from its own totals; a watch of some seconds sees no request finish."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Final

from kvpressure.model import readings
from kvpressure.model.readings import EngineReading, Histogram
from kvpressure.model.signals import ContextSignals
from kvpressure.signals.window import HistogramIncrease

_RANKS: Final = {"0.5": 0.5, "0.95": 0.95}


def since_start(reading: EngineReading | None) -> ContextSignals:
    """Quantiles and means; unpublished ones are missing."""
    histograms = reading.histograms if reading else {}
    lengths = [
        _total(histograms.get(name, Histogram()))
        for name in (readings.REQUEST_PROMPT, readings.REQUEST_OUTPUT, readings.REQUEST_MAX_TOKENS)
    ]
    prompt, output, _ = (length.mean() for length in lengths)
    quantiles = [  # as Prometheus computes them: by the buckets alone
        dict(zip(_RANKS, replace(one, sum=None).quantiles([*_RANKS.values()]), strict=False)) for one in lengths
    ]
    return ContextSignals(
        context_mean=None if prompt is None or output is None else prompt + output,
        prompt_mean=prompt,
        output_mean=output,
        prompt_quantiles=quantiles[0],
        output_quantiles=quantiles[1],
        max_tokens_quantiles=quantiles[2],
    )


def _total(histogram: Histogram) -> HistogramIncrease:
    """All that was ever observed; without quantiles where the buckets are unsound."""
    sound = histogram.count and len(histogram.bounds) == len(histogram.counts)
    rising = tuple(accumulate(histogram.counts, max)) if sound else ()
    return HistogramIncrease(histogram.bounds, rising, histogram.sum, histogram.count)
