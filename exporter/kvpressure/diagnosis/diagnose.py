"""One engine's diagnosis: evidence, verdict, stage, conditions and the documented signature."""

from __future__ import annotations

from kvpressure.diagnosis import conditions, reasons, signature
from kvpressure.diagnosis.conditions import Ahead, HeldCache
from kvpressure.diagnosis.evaluate import Answer, decide
from kvpressure.diagnosis.facts import Gathered, Recent, View
from kvpressure.diagnosis.hysteresis import VerdictHysteresis
from kvpressure.diagnosis.logic import Facts
from kvpressure.diagnosis.rules import TABLES
from kvpressure.model.signals import Signals
from kvpressure.model.state import STAGES, STEP_TOKENS, Diagnosis, Sentences
from kvpressure.settings.thresholds import Thresholds


class Diagnoser:
    """State that the diagnosis of one engine keeps between samples."""

    __slots__ = ("_ahead", "_held", "_seen", "_settled", "_stage", "_thresholds")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._settled = VerdictHysteresis()
        self._held = HeldCache()
        self._ahead = Ahead()
        self._stage: str | None = None
        self._seen: dict[str, bool | None] = {}  # the named facts of the verdict, when it was last found

    def diagnose(self, s: Signals, waiting: list[float], samples: int, utilization: float | None) -> Diagnosis:
        """The diagnosis now. ``waiting``: requests waiting in recent samples, ``samples``: readings so far,
        ``utilization``: the configured gpu_memory_utilization.
        """
        t = self._thresholds
        evidence = Gathered(View(s, Recent(waiting), t, samples))
        found = decide(TABLES, evidence.facts)
        finding = self._settled.observe(s.time, found, t)
        supporting, opposing = self._for_and_against(finding, found, evidence.facts)
        now = s if evidence.facts["page_fresh"] is True else s.without_metrics()
        documented = signature.conditions(now, t)
        is_met = signature.met(documented)
        held = self._held.observe(now.time, now.progress.work_present, now.kv.kv_used_ratio, t)
        ahead = self._ahead.observe(now, finding.verdict, t)
        return Diagnosis(
            verdict=finding.verdict,
            confidence=finding.confidence,
            stage=self._stage_of(finding, evidence.facts),
            since=self._settled.since,
            evidence=evidence,
            supporting=Sentences(lambda: tuple(evidence[name].text for name in supporting)),
            opposing=Sentences(lambda: tuple(evidence[name].text for name in opposing)),
            missing=Sentences(lambda: tuple(evidence.filled(text) for text in finding.missing)),
            inputs=Sentences(lambda: tuple(evidence.filled(text) for text in finding.inputs)),
            reasons=reasons.numbers(finding.verdict, evidence.facts, s),
            row=finding.row,
            grade=finding.grade.name.lower(),
            runner_up=finding.runner_up,
            conditions=conditions.evaluate(conditions.Moment(now, finding, held, ahead, utilization, is_met, t)),
            documented_signature=documented,
            documented_signature_met=is_met,
            signature_note=signature.note(now, finding.verdict, is_met),
        )

    def _for_and_against(self, finding: Answer, found: Answer, facts: Facts) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the supporting and opposing facts. While a verdict is held though another is found, supporting
        facts that no longer hold oppose it.
        """
        if finding.verdict == found.verdict:
            self._seen = {name: facts[name] for name in (*finding.supporting, *finding.opposing)}
        same = {name for name, value in self._seen.items() if facts[name] is value}
        over = (name for name in finding.supporting if name not in same and facts[name] is not None)
        return (
            tuple(name for name in finding.supporting if name in same),
            (*(name for name in finding.opposing if name in same), *over),
        )

    def _stage_of(self, finding: Answer, facts: Facts) -> str | None:
        """The stage. That of KV pressure never falls back while requests wait and none finishes."""
        before, self._stage = self._stage, finding.stage
        stuck = facts["queue_present"] is True and facts["finishing"] is False
        if stuck and before not in (None, STEP_TOKENS) and finding.stage not in (None, STEP_TOKENS):
            self._stage = max(before, finding.stage, key=STAGES.index)
        return self._stage
