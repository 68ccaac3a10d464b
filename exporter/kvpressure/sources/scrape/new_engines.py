"""Limits new engine names per target, because each creates series that a Prometheus keeps for weeks.

A server gets new engine names when restarted with another model or, under Ray, with a new replica. An endpoint with
other names at every scrape would create thousands of series a minute, although each scrape is within its limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvpressure.model.readings import EngineReading
from kvpressure.sources.scrape.layout import MAX_ENGINES

BURST: Final = MAX_ENGINES  # new engines at once
"""New engine names of one target at once. Beyond: one more a minute. Shown as: `page_cut{reason="new_engines"}`."""
SECONDS_EACH: Final = 60.0  # after the burst: one more in this time
KNOWN: Final = 2 * MAX_ENGINES  # names that are remembered, the ones seen last


class NewEngines:
    """The engine names of one target; times are seconds of any steady clock."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], None] = {}  # the one seen last is last
        self._tokens = float(BURST)
        self._at: float | None = None

    def admit(self, engines: tuple[EngineReading, ...], now: float) -> tuple[tuple[EngineReading, ...], int]:
        """(engines to publish, number of new ones refused)."""
        self._refill(now)
        kept = tuple(
            engine for engine in engines if (engine.model_name, engine.engine) in self._known or self._takes_one()
        )
        self._remember(kept)
        return kept, len(engines) - len(kept)

    def _refill(self, now: float) -> None:
        if self._at is not None:
            self._tokens = min(float(BURST), self._tokens + max(0.0, now - self._at) / SECONDS_EACH)
        self._at = now

    def _takes_one(self) -> bool:
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def _remember(self, engines: Sequence[EngineReading]) -> None:
        for engine in engines:
            key = (engine.model_name, engine.engine)
            self._known.pop(key, None)
            self._known[key] = None
        while len(self._known) > KNOWN:
            del self._known[next(iter(self._known))]
