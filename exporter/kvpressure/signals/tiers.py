"""KV memory beyond the GPU's: what a tier in host memory, or what lies behind it, takes, gives back and refuses."""

from __future__ import annotations

from typing import Final

from kvpressure.engines.base import Tier
from kvpressure.model import readings as r
from kvpressure.model.signals import TierSignals
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.window import FIVE_MINUTES, EngineWindow

_SIGNS: Final = frozenset({r.TIER_STORED, r.TIER_REFUSED})
_NOT_BEHIND: Final = ("device", "p2p")  # the GPU's own cache, and another server's


def tier_signals(
    window: EngineWindow, tier: Tier, capacity: float | None, gpus: int | None, t: Thresholds
) -> TierSignals:
    """All signals of a tier over five minutes. ``capacity``: tokens of the GPU's KV cache; ``gpus``: of the engine,
    whose transfer times add up.
    """
    last = window.last
    if last is None or last.counters.keys().isdisjoint(_SIGNS):
        return TierSignals(tier_configured=tier.configured)
    counters = last.counters
    stored, loaded = (window.increase(name, FIVE_MINUTES) for name in (r.TIER_STORED, r.TIER_LOADED))
    if stored is not None and stored[0] <= 0:
        stored = None
    cached = _rates(window, r.CACHED_PREFIX)
    refused = window.increase(r.TIER_REFUSED, FIVE_MINUTES)
    total, size = counters.get(r.TIER_STORED), tier.size
    hits = sum(counters.get(r.CACHED_PREFIX + where, 0.0) for where in cached if where not in _NOT_BEHIND)
    in_use = last.gauges.get(r.TIER_USED)
    return TierSignals(
        tier_configured=True,
        tier_capacity_tokens=None if size is None or tier.tokens is None else size * tier.tokens,
        tier_pinned_ratio=last.gauges.get(r.TIER_PINNED),
        tier_used_ratio=None if in_use is None or not size else in_use / size,
        tier_stored=_in_tokens(_rates(window, r.TIER_STORED_PREFIX), tier),
        tier_loaded=_in_tokens(_rates(window, r.TIER_LOADED_PREFIX), tier),
        cached=cached,
        tier_reloaded_ratio=None if stored is None or loaded is None else loaded[0] / stored[0],
        tier_turnover_seconds=None if stored is None or size is None else size * stored[1] / stored[0],
        # a counter with labels appears with the first event
        tier_refused=refused[0] if refused else 0.0 if r.TIER_REFUSED not in counters else None,
        tier_served=None if total is None else counters.get(r.TIER_LOADED, 0.0) + hits > 0,
        tier_stored_ratio=None
        if total is None or tier.tokens is None or not capacity
        else total * tier.tokens / capacity,
        load_seconds_per_token=_load_cost(window, t["hit_ratio_min_tokens"]),
        tier_gpus=gpus,
        prefill_seconds_per_token=_prefill_cost(window),
    )


def _rates(window: EngineWindow, prefix: str) -> dict[str, float]:
    """Counters of this prefix per second, by the rest of their names."""
    names = (name for name in (window.last.counters if window.last else {}) if name.startswith(prefix))
    rates = {name.removeprefix(prefix): window.rate(name, FIVE_MINUTES) for name in names}
    return {name: rate for name, rate in rates.items() if rate is not None}


def _in_tokens(rates: dict[str, float], tier: Tier) -> dict[str, float]:
    return {} if tier.tokens is None else {name: rate * tier.tokens for name, rate in rates.items()}


def _load_cost(window: EngineWindow, least: float) -> float | None:
    """Seconds of transfers, those of all GPUs together, for each prompt token found in the tier; ``None`` with few."""
    seconds = window.increase(r.TIER_LOAD_SECONDS, FIVE_MINUTES)
    found = [window.increase(r.CACHED_PREFIX + where, FIVE_MINUTES) for where in ("host", "disk")]
    tokens = sum(increase[0] for increase in found if increase is not None)
    return None if seconds is None or tokens <= least else seconds[0] / tokens


def _prefill_cost(window: EngineWindow) -> float | None:
    """Seconds of prefill for each prompt token computed."""
    computed, prefill = (
        window.increase(r.PROMPT_TOKENS_COMPUTED, FIVE_MINUTES),
        window.observed(r.PREFILL, FIVE_MINUTES),
    )
    if not computed or computed[0] <= 0 or prefill is None or prefill[0].sum is None:
        return None
    return prefill[0].sum / computed[0]
