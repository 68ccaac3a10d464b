"""One engine's diagnosis: evidence, verdict, stage, conditions and the documented signature."""

from __future__ import annotations

from kvpressure.diagnosis.conditions import NAMES, Ahead, HeldCache
from kvpressure.diagnosis.evaluate import Answer, decide
from kvpressure.diagnosis.finding import Recent, View
from kvpressure.diagnosis.findings import ACTIONABLE, PUBLISHED, Gathered, Values
from kvpressure.diagnosis.hysteresis import VerdictHysteresis
from kvpressure.diagnosis.logic import Facts
from kvpressure.diagnosis.rules import TABLES
from kvpressure.diagnosis.signature import PREFIX, note
from kvpressure.model.signals import Signals
from kvpressure.model.state import SIGNATURE_CONDITIONS, STAGES, STEP_TOKENS, Diagnosis, Sentences
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
        values = Values(View(s, Recent(waiting), t, samples, utilization))
        evidence, beside = Gathered(values), Gathered(values, NAMES)
        view, now = values.fresh, values.fresh.s
        view.held = self._held.observe(now.time, now.progress.work_present, now.kv.kv_used_ratio, t)
        found = decide(TABLES, values)
        answer = self._settled.observe(s.time, found, t)
        supporting, opposing = self._for_and_against(answer, found, values)
        view.ahead = self._ahead.observe(now, answer.verdict, t)
        view.answer = answer
        is_met = values["documented_signature"]
        return Diagnosis(
            verdict=answer.verdict,
            confidence=answer.confidence,
            stage=self._stage_of(answer, values),
            since=self._settled.since,
            evidence=evidence,
            supporting=Sentences(lambda: tuple(evidence[name].text for name in supporting)),
            opposing=Sentences(lambda: tuple(evidence[name].text for name in opposing)),
            missing=Sentences(lambda: tuple(evidence.filled(text) for text in answer.missing)),
            inputs=Sentences(lambda: tuple(evidence.filled(text) for text in answer.inputs)),
            reasons=_reasons(answer.verdict, supporting, evidence),
            row=answer.row,
            grade=answer.grade.name.lower(),
            runner_up=answer.runner_up,
            conditions={name: values[name] for name in NAMES},
            published={name: values[name] for name in PUBLISHED},
            beside=beside,
            documented_signature={name: values[f"{PREFIX}{name}"] for name in SIGNATURE_CONDITIONS},
            documented_signature_met=is_met,
            signature_note=note(now, answer.verdict, is_met),
        )

    def _for_and_against(self, answer: Answer, found: Answer, facts: Facts) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the supporting and opposing facts. While a verdict is held though another is found, supporting
        facts that no longer hold oppose it.
        """
        if answer.verdict == found.verdict:
            self._seen = {name: facts[name] for name in (*answer.supporting, *answer.opposing)}
        same = {name for name, value in self._seen.items() if facts[name] is value}
        over = (name for name in answer.supporting if name not in same and facts[name] is not None)
        return (
            tuple(name for name in answer.supporting if name in same),
            (*(name for name in answer.opposing if name in same), *over),
        )

    def _stage_of(self, answer: Answer, facts: Facts) -> str | None:
        """The stage. That of KV pressure never falls back while requests wait and none finishes."""
        before, self._stage = self._stage, answer.stage
        stuck = facts["queue_present"] is True and facts["finishing"] is False
        if stuck and before not in (None, STEP_TOKENS) and answer.stage not in (None, STEP_TOKENS):
            self._stage = max(before, answer.stage, key=STAGES.index)
        return self._stage


def _reasons(verdict: str, supporting: tuple[str, ...], evidence: Gathered) -> dict[str, float]:
    """The numbers behind what supports a verdict that asks for action; KV usage too where the cache is not full."""
    if verdict not in ACTIONABLE:
        return {}
    not_the_cache = ("kv_full",) if evidence["kv_full"].value is False else ()
    return evidence.numbers_behind((*supporting, *not_the_cache))
