"""Recommended limits, rounded to what people write."""

from __future__ import annotations

from math import ceil

from kvpressure.settings.thresholds import Thresholds


def context_limit(longest: float, t: Thresholds) -> int:
    """Tokens that hold the ``longest`` request with some to spare, rounded up to what people write."""
    step = t["max_model_len_step_tokens"]
    return int(ceil(longest * t["max_model_len_spare_ratio"] / step) * step)
