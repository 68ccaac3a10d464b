"""The guide's step 7 (verify): watches a server after mitigation until it has recovered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvpressure.advice.wording import reason_text
from kvpressure.errors import InputError
from kvpressure.model.state import EngineState, Found
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.printable import say
from kvpressure.publish.collector import worst_first
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.window import HALF_MINUTE
from kvpressure.sources.scrape.targets import Target
from kvpressure.toolbox import live_pages as live
from kvpressure.toolbox.engine_view import name_of
from kvpressure.toolbox.live_pages import Around
from kvpressure.toolbox.terminal import waiting


@dataclass(frozen=True, slots=True)
class Outcome:
    """``recovered``: every known check held for half a minute until the end of the watch, under traffic; a
    server without requests proves nothing. ``engine``: the one in most trouble at the end, with its ``verdict``.
    ``trouble``: a check failed during the watch.
    """

    recovered: bool
    engine: str
    verdict: str
    seconds: float
    checks: tuple[Found, ...]
    trouble: bool = False


@dataclass(slots=True)
class _WatchedTick:
    """Values of one tick, and those they are compared with."""

    kv: float | None = None
    waiting: float | None = None
    running: float | None = None
    gap: float | None = None
    refused: float | None = None
    verdict: str = "unknown"
    engine: str = ""


@dataclass(slots=True)
class _Watch:
    first: _WatchedTick | None = None
    last: _WatchedTick = field(default_factory=_WatchedTick)
    well_since: float | None = None
    started: float = 0.0
    trouble: bool = False


def verify(target: Target, seconds: float, thresholds: Thresholds) -> Outcome:
    """Watch ``target`` until it has been well for half a minute, or for ``seconds``. Raises ``InputError`` when it
    never answers.
    """
    pipeline, watch = Pipeline(thresholds), _Watch()
    checks: tuple[Found, ...] = ()
    gone = 0.0
    failed: str | None = None
    waiting(f"watching {target.name} for up to {seconds:.0f} s")
    for snapshot in live.watch([target], seconds, 1.0, Around(versions=live.versions([target]))):
        state = pipeline.observe(snapshot)
        engines = [engine for engine in state.engines if engine.up]
        failed = next((engine.error for engine in state.engines if engine.error is not None), failed)
        if watch.first is None:
            watch.started = snapshot.time
        gone = snapshot.time - watch.started
        seen = _read(engines) if engines else _WatchedTick()
        if watch.first is None and engines:
            watch.first = seen
        checks = _observe(watch, seen, snapshot.time, thresholds)
        if watch.well_since is not None and snapshot.time - watch.well_since >= HALF_MINUTE:
            return Outcome(True, seen.engine, seen.verdict, gone, checks, watch.trouble)
    if watch.first is None:
        raise InputError(f"--verify: {target.name}: {reason_text(failed)}; is a vLLM server running there?")
    return Outcome(False, watch.last.engine or target.name, watch.last.verdict, gone, checks, watch.trouble)


def _observe(watch: _Watch, seen: _WatchedTick, now: float, t: Thresholds) -> tuple[Found, ...]:
    checks = tuple(_checks(watch, seen, t))
    well = all(check.value is not False for check in checks)
    watch.trouble = watch.trouble or (not well and seen.verdict not in ("unknown", "idle"))
    well = well and seen.verdict not in ("unknown", "idle")
    watch.well_since = (watch.well_since if watch.well_since is not None else now) if well else None
    watch.last = seen
    return checks


def _read(engines: list[EngineState]) -> _WatchedTick:
    """The worst values of all engines of the server."""
    kv = [e.signals.kv.kv_used_ratio_recent_max for e in engines if e.signals.kv.kv_used_ratio_recent_max is not None]
    gaps = [e.signals.latency.inter_token["0.95"] for e in engines if "0.95" in e.signals.latency.inter_token]
    refused = [
        value
        for e in engines
        for name, value in e.counters.items()
        if name.startswith("rejected:") or name == "http:5xx"
    ]
    worst = min(engines, key=worst_first)
    return _WatchedTick(
        max(kv, default=None),
        _sum(e.signals.load.waiting for e in engines),
        _sum(e.signals.load.running for e in engines),
        max(gaps, default=None),
        max(refused, default=None),
        worst.diagnosis.verdict,
        name_of(worst.key),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _checks(watch: _Watch, seen: _WatchedTick, t: Thresholds) -> Iterator[Found]:
    """The signs of recovery, with their values at first and at the end."""
    first, before = watch.first or seen, watch.last

    def found(name: str, value: bool | None, at_first: str, at_last: str) -> Found:
        return Found(name, value, f"{at_first} at first, {at_last} at the end")

    yield found("verdict", seen.verdict not in ("kv_pressure", "stalled"), first.verdict, seen.verdict)
    room = None if seen.kv is None else seen.kv < t["kv_full_ratio"] or not seen.waiting
    yield found("headroom in the KV cache", room, say(first.kv, "ratio"), say(seen.kv, "ratio"))
    short = seen.waiting == 0 or (seen.running is not None and (seen.waiting or 0) < seen.running)
    yield found("queue", None if seen.waiting is None else short, say(first.waiting), say(seen.waiting))
    steady = None if seen.gap is None else seen.gap < t["latency_multiplied_ratio"] * (first.gap or seen.gap)
    yield found("token latency p95", steady, say(first.gap, "seconds"), say(seen.gap, "seconds"))
    grown = None if seen.running is None or not seen.waiting else seen.running > t["signature_batch_size"]
    yield found("batch size", grown, say(first.running), say(seen.running))
    refusals = None if seen.refused is None or before.refused is None else seen.refused <= before.refused
    yield found("503s and rejections", refusals, say(first.refused), say(seen.refused))
