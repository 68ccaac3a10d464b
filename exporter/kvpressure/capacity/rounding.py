"""Rounding of recommended limits."""

from __future__ import annotations

from math import ceil

from kvpressure.settings.thresholds import Thresholds


def context_limit(longest: float, t: Thresholds) -> int:
    """Tokens for the ``longest`` request plus a margin, rounded up to a usual number."""
    step = t["max_model_len_step_tokens"]
    return int(ceil(longest * t["max_model_len_spare_ratio"] / step) * step)
