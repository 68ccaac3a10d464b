"""How often an engine is scraped: every second under load, rarely while calm, and at bounded cost. Pure; time is
passed in.

The engine renders its metrics in the process that serves users, so a scrape costs them CPU: at most the fastest of
the last answers, because slower ones waited behind other work. Scrapes may use ``CALM_SHARE`` of a core while the
engine is calm and ``BUSY_SHARE`` under load, so large or slow endpoints (several API servers, many engines) are
scraped less often. A loaded server answers slowly whatever a scrape costs, so an engine with requests is scraped at
least every ``WORKING_INTERVAL``, and the first scrapes, which cannot tell cost from load, are fast. Our own CPU for
parsing is bounded in the same way.

A target that keeps failing is asked less often, and so is one whose failures cost us CPU.

A sign of load makes the next scrapes fast at once; if the next scrape confirms it, for a minute. An unconfirmed sign
was a request that had just arrived, as on any healthy server. The first movement of any counter after rest is such a
sign, as is a cache that would be full within a minute at its present rise: pace follows what moves, not the verdict.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from kvpressure.model import readings as r
from kvpressure.model.readings import EngineReading, Scrape

CALM_INTERVAL: Final = 2.0  # seconds
SLOWEST_INTERVAL: Final = 12.0  # metrics older than 15 s count as stale
WORKING_INTERVAL: Final = 3.0  # at most for slow answers while requests run or wait: pressure is to be seen within 3 s
CALM_AFTER: Final = 60.0  # seconds without a sign of load
CALM_SHARE: Final = 0.005
BUSY_SHARE: Final = 0.015
COST_PAGES: Final = 5
LOOK_PAGES: Final = 3  # fast ones after a first sign of load
BUSY_KV: Final = 0.5
FELL_TO: Final = 0.5  # of the largest batch of the last minute
FELL_FROM: Final = 4.0  # smaller batches come and go
PATIENCE: Final = 3  # failures in a row that change nothing; each further one doubles the interval
FAILING_INTERVAL: Final = 5.0  # maximum, so that a recovered engine is noticed soon
EARLY: Final = 0.1  # share of the interval: reads are not exactly periodic


class ScrapeInterval:
    """Scrape interval of one target. ``fast``: interval under load in seconds; the first minute counts as load."""

    def __init__(self, fast: float) -> None:
        self._fast = fast
        self._failures = 0  # in a row
        self._failed_cost = 0.0  # seconds of our CPU for the last attempt, if that failed
        self._started: float | None = None
        self._busy_until: float | None = None
        self._sign = False  # of load, on the last page
        self._working = False  # requests ran or waited on the last page
        self._answers: deque[float] = deque(maxlen=COST_PAGES)  # seconds each took
        self._scans: deque[float] = deque(maxlen=COST_PAGES)  # seconds of our CPU
        self._peak: dict[str, tuple[float, float]] = {}  # engine -> largest batch, when
        self._tokens: dict[str, float] = {}
        self._usage: dict[str, tuple[float, float]] = {}  # engine -> KV usage on the last page, when
        self._moved: tuple[Mapping[str, float], ...] | None = None  # counters of the last page
        self._rests = False  # no counter moved before the last page

    def due(self, now: float) -> bool:
        """Whether to scrape now."""
        if self._busy_until is None:
            self._busy_until = now + CALM_AFTER
        return self._started is None or now >= self._started + (1 - EARLY) * self.interval(now)

    def started(self, now: float) -> None:
        """Note the start of a scrape."""
        self._started = now

    def interval(self, now: float) -> float:
        """Present interval in seconds."""
        busy = self._busy_until is None or now < self._busy_until
        wanted = self._fast if busy else max(self._fast, CALM_INTERVAL)
        share = BUSY_SHARE if busy else CALM_SHARE
        slowest = FAILING_INTERVAL if self._failures else SLOWEST_INTERVAL
        theirs = min(self._answers) / share if len(self._answers) == COST_PAGES else 0.0
        if self._working:
            theirs = min(theirs, WORKING_INTERVAL)
        cheap = min(max(theirs, min(self._scans, default=0.0) / share), slowest)
        cheap_for_us = min(self._failed_cost / share, SLOWEST_INTERVAL)
        return max(wanted, cheap, cheap_for_us, self._patience())

    def _patience(self) -> float:
        """Seconds between attempts at a failing target; 0 if it is not failing."""
        if self._failures < PATIENCE:
            return 0.0
        return min(self._fast * 2.0 ** min(self._failures - PATIENCE + 1, 16), FAILING_INTERVAL)

    def observe(self, page: Scrape, now: float, scan_seconds: float = 0.0) -> None:
        """Take a scrape and our CPU time for it in seconds. A failed one tells nothing about load."""
        if page.error is not None:
            self._failures += 1
            self._failed_cost = scan_seconds  # of ours alone: the rest of the time was spent waiting
            return
        self._failures, self._failed_cost = 0, 0.0
        self._scans.append(scan_seconds)
        if page.duration_seconds is not None:
            self._answers.append(page.duration_seconds)
        self._working = any(
            engine.gauges.get(name, 0.0) > 0 for engine in page.engines for name in (r.RUNNING, r.WAITING)
        )
        self._forget_all_but({engine.engine for engine in page.engines})
        loaded = [self._loaded(engine, now) for engine in page.engines]  # each keeps a history
        before, self._sign = self._sign, any([*loaded, self._begins(page)])
        if self._sign:
            until = now + (CALM_AFTER if before else (LOOK_PAGES + 0.5) * self._fast)
            self._busy_until = max(until, self._busy_until or 0.0)

    def _forget_all_but(self, engines: set[str]) -> None:
        """Forget engines that are gone, because names may be new at every scrape."""
        self._peak = {engine: peak for engine, peak in self._peak.items() if engine in engines}
        self._tokens = {engine: tokens for engine, tokens in self._tokens.items() if engine in engines}
        self._usage = {engine: usage for engine, usage in self._usage.items() if engine in engines}

    def _begins(self, page: Scrape) -> bool:
        """Whether counters moved that stood still between the two pages before."""
        rested, counters = self._rests, tuple(engine.counters for engine in page.engines)
        self._rests, self._moved = self._moved == counters, counters
        return rested and not self._rests

    def _loaded(self, engine: EngineReading, now: float) -> bool:
        """Whether the cache fills, a queue exists, the batch falls, or requests get no tokens."""
        running = engine.gauges.get(r.RUNNING, 0.0)
        return (
            engine.gauges.get(r.KV_USAGE, 0.0) > BUSY_KV
            or engine.gauges.get(r.WAITING, 0.0) > 0
            or self._fills(engine, now)
            or self._falls(engine.engine, running, now)
            or self._starves(engine, running)
        )

    def _fills(self, engine: EngineReading, now: float) -> bool:
        """Whether the cache would be full within ``CALM_AFTER`` if it went on rising as since the last page."""
        usage = engine.gauges.get(r.KV_USAGE, 0.0)
        before, at = self._usage.get(engine.engine, (usage, now))
        self._usage[engine.engine] = usage, now
        return usage > before and (1.0 - usage) * (now - at) < CALM_AFTER * (usage - before)

    def _falls(self, engine: str, running: float, now: float) -> bool:
        peak, at = self._peak.get(engine, (0.0, now))
        if running >= peak or now - at > CALM_AFTER:
            self._peak[engine] = (running, now)
            return False
        return peak >= FELL_FROM and 0 < running <= FELL_TO * peak

    def _starves(self, engine: EngineReading, running: float) -> bool:
        tokens = engine.counters.get(r.GENERATION_TOKENS)
        if tokens is None:
            return False
        before, self._tokens[engine.engine] = self._tokens.get(engine.engine), tokens
        return running > 0 and before is not None and tokens <= before
