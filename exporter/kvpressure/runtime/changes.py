"""Logs changes on the node: targets up or down, engines found or lost, verdicts. One line per change."""

from __future__ import annotations

import logging

from kvpressure.model.readings import EngineKey, Snapshot
from kvpressure.model.state import CALM, EngineState, State, TargetState
from kvpressure.runtime.logging import with_fields

log = logging.getLogger(__name__)


class ChangeLog:
    """A monitor listener. Not thread-safe."""

    def __init__(self) -> None:
        self._targets: dict[str, bool] = {}
        self._engines: dict[EngineKey, EngineState] = {}

    def __call__(self, snapshot: Snapshot, state: State) -> None:
        """Log the differences to the tick before."""
        reasons = {page.target: page.error for page in snapshot.pages if page.error is not None}
        for target in state.targets:
            if self._targets.get(target.target) is not target.up:
                _target(target, reasons.get(target.target) or "")
        for name in self._targets.keys() - {target.target for target in state.targets}:
            log.info("target removed", extra=with_fields(target=name))
        self._targets = {target.target: target.up for target in state.targets}
        # One that has never answered is a target, not yet an engine.
        self._compare({one.key: one for one in state.engines if one.up or one.key in self._engines})

    def _compare(self, engines: dict[EngineKey, EngineState]) -> None:
        for key in sorted(self._engines.keys() - engines.keys()):
            log.info("engine lost", extra=with_fields(**_identity(self._engines[key])))
        for key, engine in engines.items():
            before = self._engines.get(key)
            if before is None:
                log.info("engine found", extra=with_fields(**_identity(engine)))
            if _standing(before) != _standing(engine):
                _verdict(before, engine)
        self._engines = engines


def _target(target: TargetState, reason: str) -> None:
    if target.up:
        log.info("target up", extra=with_fields(target=target.target))
    else:
        log.warning("target down", extra=with_fields(target=target.target, reason=reason))


def _verdict(before: EngineState | None, engine: EngineState) -> None:
    found = engine.diagnosis
    log.log(
        logging.INFO if found.verdict in CALM else logging.WARNING,
        "verdict changed",
        extra=with_fields(
            **_identity(engine),
            verdict=found.verdict,
            stage=found.stage or "",
            confidence=round(found.confidence, 2),
            before=before.diagnosis.verdict if before is not None else "",
        ),
    )


def _identity(engine: EngineState) -> dict[str, str]:
    key = engine.key
    return {
        "namespace": key.namespace,
        "pod": key.pod,
        "model": key.model_name,
        "engine": key.engine,
        "target": engine.target,
    }


def _standing(engine: EngineState | None) -> tuple[str, str | None] | None:
    return None if engine is None else (engine.diagnosis.verdict, engine.diagnosis.stage)
