"""The demo's story: collects verdicts and alerts, prints them line by line, and checks the sequence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from kvpressure.model.readings import EngineKey
from kvpressure.model.state import EngineState, State
from lab.demo.scenario import Phase, Scenario

_SENTENCES: Final = 3  # of evidence that are printed with a verdict
_MUTE_RECEIVERS: Final = ("heartbeat",)
_WELL: Final = ("healthy", "idle")
_UNREPORTED: Final = (
    "ended, but Alertmanager sent no notification of that: the alert was inhibited, or the demo was over before the"
    " next notification of its group"
)


@dataclass(frozen=True, slots=True)
class SeenVerdict:
    """A verdict and when it began; ``at`` is in seconds since the start."""

    at: float
    verdict: str
    stage: str | None
    confidence: float


@dataclass(slots=True)
class AlertSeen:
    """An alert as Alertmanager sent it."""

    name: str
    severity: str
    pod: str
    receiver: str
    fired: float
    cleared: float | None = None


class Story:
    """Thread-safe: verdicts come from the monitor's loop, alerts from the receiver, phases from the main thread."""

    def __init__(self, scenario: Scenario, elapsed: Callable[[], float], tell: Callable[[str], None]) -> None:
        self._scenario = scenario
        self._elapsed = elapsed
        self._tell = tell
        self._lock = threading.RLock()
        self._ended = False
        self._engines: dict[EngineKey, EngineState] = {}
        self.verdicts: list[SeenVerdict] = []  # of the scenario's pod
        self.alerts: dict[str, AlertSeen] = {}

    # --- what happens ---------------------------------------------------------------------------------------

    def phase(self, phase: Phase) -> None:
        """Begin a phase of the scenario."""
        self._say(f"== {phase.name}: {phase.text}")

    def observe(self, state: State) -> None:
        """Take one tick: print every changed verdict or stage."""
        with self._lock:
            for engine in () if self._ended else state.engines:
                before = self._engines.get(engine.key)
                self._engines[engine.key] = engine
                if before is None or _standing(before) != _standing(engine):
                    self._verdict(before, engine)

    def notify(self, receiver: str, alerts: Iterable[dict[str, Any]]) -> None:
        """Take a notification of Alertmanager."""
        with self._lock:
            for alert in () if self._ended or receiver in _MUTE_RECEIVERS else alerts:
                self._alert(receiver, alert)

    def end(self) -> None:
        """Take nothing more: what happens while everything is stopped belongs to no summary."""
        with self._lock:
            self._ended = True

    def status(self) -> str:
        """One line about the scenario's pod now."""
        with self._lock:
            engine = next((e for key, e in self._engines.items() if key.pod == self._scenario.pod), None)
        if engine is None or not engine.up:
            return f"{self._scenario.pod}: metrics not available"
        signals = engine.signals
        usage = signals.kv.kv_used_ratio
        step = signals.batch.step_seconds
        return (
            f"{self._scenario.pod}: {_count(signals.load.running)} running, {_count(signals.load.waiting)} waiting, "
            f"KV cache {'?' if usage is None else f'{usage:.0%}'}, "
            f"token every {'?' if step is None else f'{step * 1000:.0f} ms'}"
        )

    def _say(self, text: str) -> None:
        self._tell(f"[{self._elapsed():4.0f} s] {text}")

    def _verdict(self, before: EngineState | None, engine: EngineState) -> None:
        diagnosis = engine.diagnosis
        if engine.key.pod == self._scenario.pod:
            self.verdicts.append(SeenVerdict(self._elapsed(), diagnosis.verdict, diagnosis.stage, diagnosis.confidence))
        was = f"{_standing(before)} -> " if before is not None else ""
        self._say(f"{engine.key.pod}: {was}{_standing(engine)}, confidence {diagnosis.confidence:.2f}")
        if diagnosis.verdict in _WELL:
            return
        for mark, sentences in (("+", diagnosis.supporting), ("-", diagnosis.opposing)):
            for sentence in sentences[:_SENTENCES]:
                self._tell(f"           {mark} {sentence}")
        for name, limit in engine.limits.items():
            if limit.recommended is not None and limit.recommended != limit.value:
                now = "" if limit.value is None else f" (now {limit.value:g})"
                self._tell(f"           = set {name} to {limit.recommended:g}{now}")

    def _alert(self, receiver: str, alert: dict[str, Any]) -> None:
        labels = alert["labels"]
        key = alert["fingerprint"]
        known = self.alerts.get(key)
        about = f"{labels['alertname']} ({labels.get('severity', '')}, {receiver}) {labels.get('pod', '')}".rstrip()
        if alert["status"] == "firing" and (known is None or known.cleared is not None):
            self.alerts[key] = AlertSeen(
                labels["alertname"], labels.get("severity", ""), labels.get("pod", ""), receiver, self._elapsed()
            )
            self._say(f"ALERT {about}: {alert.get('annotations', {}).get('summary', '')}")
        elif alert["status"] == "resolved" and known is not None and known.cleared is None:
            known.cleared = self._elapsed()
            self._say(f"CLEARED {about}")

    # --- what should have happened --------------------------------------------------------------------------

    def summary(self, still_active: set[str] | None) -> list[str]:
        """All verdicts of the scenario's pod and all alerts, one per line; ``still_active`` as in ``missing``."""
        with self._lock:
            lines = [
                f"{seen.at:4.0f} s  {self._scenario.pod}  {seen.verdict}{f' ({seen.stage})' if seen.stage else ''}"
                for seen in self.verdicts
            ]
            for key, alert in self.alerts.items():
                unreported = "still firing" if key in (still_active or ()) else _UNREPORTED
                end = unreported if alert.cleared is None else f"cleared at {alert.cleared:.0f} s"
                lines.append(
                    f"{alert.fired:4.0f} s  {alert.name} ({alert.severity}, to {alert.receiver}) {alert.pod}: {end}"
                )
            return lines

    def missing(self, still_active: set[str] | None) -> list[str]:
        """What the scenario should have shown but did not. ``still_active``: fingerprints of alerts active at the
        end, ``None`` without Alertmanager, when no alert is expected.
        """
        with self._lock:
            missing = _missing_verdicts(self._scenario, self.verdicts)
            if still_active is not None:
                missing += self._missing_alerts(still_active)
            return missing

    def _missing_alerts(self, still_active: set[str]) -> list[str]:
        missing = []
        for name in self._scenario.alerts:
            seen = {
                key: alert
                for key, alert in self.alerts.items()
                if alert.name == name and alert.pod == self._scenario.pod
            }
            if not seen:
                missing.append(f"{name} did not fire for {self._scenario.pod}")
            missing += [
                f"{name} ({alert.severity}) did not clear"
                for key, alert in seen.items()
                if alert.cleared is None and key in still_active
            ]
        return missing


def _missing_verdicts(scenario: Scenario, verdicts: list[SeenVerdict]) -> list[str]:
    """Missing verdicts of the sequence: healthy, the scenario's verdict, healthy."""
    steps = (("first", _WELL), ("then", (scenario.verdict,)), ("at last", _WELL))
    rest = iter(verdicts)
    for when, wanted in steps:
        if not any(seen.verdict in wanted for seen in rest):
            seen = ", ".join(seen.verdict for seen in verdicts) or "nothing"
            return [f"{scenario.pod} was not {' or '.join(wanted)} {when} (seen: {seen})"]
    if verdicts[-1].verdict not in _WELL:
        return [f"{scenario.pod} ended {verdicts[-1].verdict}"]
    return []


def _standing(engine: EngineState) -> str:
    stage = engine.diagnosis.stage
    return engine.diagnosis.verdict + (f" ({stage})" if stage else "")


def _count(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"
