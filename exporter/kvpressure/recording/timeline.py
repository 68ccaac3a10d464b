"""A replay as lines: JSON for programs, a timeline of changes for people."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from kvpressure.advice.wording import name_of
from kvpressure.model import ceilings
from kvpressure.model.readings import EngineKey
from kvpressure.model.state import Diagnosis, EngineState

_MAX_ENGINES: Final = 4096  # followed at once; churn beyond that starts anew


def json_line(t: float, engine: EngineState) -> str:
    """One engine at one tick: the public contract of ``replay --format json`` (docs/recordings.md)."""
    answer = engine.diagnosis
    return json.dumps(
        {
            "t": t,
            "namespace": engine.key.namespace,
            "pod": engine.key.pod,
            "model_name": engine.key.model_name,
            "engine": engine.key.engine,
            "verdict": answer.verdict,
            "confidence": answer.confidence,
            "grade": answer.grade,
            "row": answer.row,
            "runner_up": answer.runner_up,
            "stage": answer.stage,
            "evidence": {name: item.value for name, item in answer.evidence.items()},
            "conditions": dict(answer.conditions),
            "signals": {
                name: value if value is not None and ceilings.is_finite(value) else None
                for name, value in engine.signals.flat().items()
            },
            "documented_signature": dict(answer.documented_signature),
        },
        separators=(",", ":"),
    )


@dataclass(slots=True)
class _Followed:
    """The last shown state of one engine, and the duration of each verdict."""

    verdict: str = ""
    stage: str | None = None
    conditions: frozenset[str] = frozenset()
    since: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)


class Timeline:
    """Shows changes of verdicts, stages and conditions, with their sentences."""

    def __init__(self) -> None:
        self._engines: dict[EngineKey, _Followed] = {}
        self._start: float | None = None
        self._last = 0.0

    def lines(self, t: float, engines: tuple[EngineState, ...]) -> Iterator[str]:
        """Lines for changes at ``t``."""
        self._start = t if self._start is None else self._start
        self._last = t
        for engine in engines:
            if engine.key not in self._engines and len(self._engines) >= _MAX_ENGINES:
                self._engines.clear()
            known = self._engines.setdefault(engine.key, _Followed(since=t))
            found = list(self._changes(known, t, engine.diagnosis))
            if found:
                yield f"{clock(t)}  +{t - self._start:.0f} s  {name_of(engine.key)}  {found[0]}"
                yield from (f"    {line}" for line in found[1:])

    def _changes(self, known: _Followed, t: float, answer: Diagnosis) -> Iterator[str]:
        true = frozenset(name for name, value in answer.conditions.items() if value)
        if (answer.verdict, answer.stage, true) == (known.verdict, known.stage, known.conditions):
            return
        moved = (answer.verdict, answer.stage) != (known.verdict, known.stage)
        was = f"{_verdict(known.verdict, known.stage)} -> " if moved and known.verdict else ""
        yield f"{was}{_verdict(answer.verdict, answer.stage)}, confidence {answer.confidence:.2f}{_row(answer)}"
        if moved:
            yield from (f"for: {sentence}" for sentence in answer.supporting)
            yield from (f"against: {sentence}" for sentence in answer.opposing)
            if answer.verdict == "unknown":
                yield from (f"missing: {sentence}" for sentence in answer.missing)
        yield from (f"condition {name}: now true" for name in sorted(true - known.conditions))
        yield from (f"condition {name}: no longer true" for name in sorted(known.conditions - true))
        if answer.verdict != known.verdict:
            known.seconds[known.verdict] = known.seconds.get(known.verdict, 0.0) + t - known.since
            known.since = t
        known.verdict, known.stage, known.conditions = answer.verdict, answer.stage, true

    def summary(self) -> Iterator[str]:
        """For each engine, how long each verdict lasted."""
        for key, known in self._engines.items():
            total = {**known.seconds, known.verdict: known.seconds.get(known.verdict, 0.0) + self._last - known.since}
            ranked = sorted(total.items(), key=lambda item: -item[1])
            shares = ", ".join(f"{verdict} {seconds:.0f} s" for verdict, seconds in ranked if verdict)
            yield f"{name_of(key)}: {shares}"


def _verdict(verdict: str, stage: str | None) -> str:
    return f"{verdict} ({stage})" if stage else verdict


def _row(answer: Diagnosis) -> str:
    """Grade, row and runner-up; "" for a verdict without a rule."""
    if not answer.row:
        return ""
    close = f"; also possible: {answer.runner_up}" if answer.runner_up else ""
    return f" ({answer.grade}; rule: {answer.row}{close})"


def clock(t: float) -> str:
    """UTC, to the second."""
    try:
        return datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ValueError, OverflowError, OSError):  # a recording may claim any time
        return f"t={t:.0f}"
