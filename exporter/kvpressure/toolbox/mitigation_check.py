"""The guide's step 7 (verify): watches a server after mitigation until it has recovered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvpressure.advice.wording import name_of, reason_text
from kvpressure.errors import InputError
from kvpressure.model.state import EngineState, Found
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.printable import say
from kvpressure.publish.collector import worst_first
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.window import HALF_MINUTE
from kvpressure.sources.scrape.targets import Target
from kvpressure.toolbox import live_pages as live
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


@dataclass(frozen=True, slots=True)
class _WatchedTick:
    """Values of one tick."""

    kv: float | None = None
    waiting: float | None = None
    running: float | None = None
    gap: float | None = None
    refused: float | None = None
    verdict: str = "unknown"
    engine: str = ""


def verify(target: Target, seconds: float, thresholds: Thresholds) -> Outcome:
    """Watch ``target`` until it has been well for half a minute, or for ``seconds``. Raises ``InputError`` when it
    never answers.
    """
    pipeline, failed, trouble = Pipeline(thresholds), None, False
    first: _WatchedTick | None = None
    last, checks = _WatchedTick(), tuple[Found, ...]()
    started: float | None = None
    well_since: float | None = None
    recovered, now = False, 0.0
    waiting(f"watching {target.name} for up to {seconds:.0f} s")
    for snapshot in live.watch([target], seconds, 1.0, Around(versions=live.versions([target]))):
        engines = pipeline.observe(snapshot).engines
        answering = [engine for engine in engines if engine.up]
        failed = next((engine.error for engine in engines if engine.error is not None), failed)
        seen = _read(answering) if answering else _WatchedTick()
        first, now = first or (seen if answering else None), snapshot.time
        started = now if started is None else started
        checks = tuple(_checks(first or seen, last, seen, thresholds))
        ill, busy = any(check.value is False for check in checks), seen.verdict not in ("unknown", "idle")
        trouble = trouble or (ill and busy)
        well_since = None if ill or not busy else now if well_since is None else well_since
        last, recovered = seen, well_since is not None and now - well_since >= HALF_MINUTE
        if recovered:
            break
    if first is None:
        raise InputError(f"--verify: {target.name}: {reason_text(failed)}; is a vLLM server running there?")
    return Outcome(recovered, last.engine or target.name, last.verdict, now - (started or now), checks, trouble)


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


def _checks(first: _WatchedTick, before: _WatchedTick, seen: _WatchedTick, t: Thresholds) -> Iterator[Found]:
    """The signs of recovery, with their values at first and at the end."""

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
