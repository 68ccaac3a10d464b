"""One engine's diagnosis: evidence, verdict, stage, conditions and the documented signature, put together."""

from __future__ import annotations

from kvpressure.diagnosis import conditions, signature
from kvpressure.diagnosis.conditions import HeldCache
from kvpressure.diagnosis.evidence import Recent, gather
from kvpressure.diagnosis.settle import Settled
from kvpressure.diagnosis.verdicts import Case, decide
from kvpressure.signals.model import Signals
from kvpressure.state import Diagnosis
from kvpressure.thresholds import Thresholds


class Diagnoser:
    """Keeps what a diagnosis of one engine needs from one sample to the next."""

    __slots__ = ("_held", "_settled", "_thresholds")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._settled = Settled()
        self._held = HeldCache()

    def diagnose(self, s: Signals, waiting: list[float], samples: int, utilization: float | None) -> Diagnosis:
        """The diagnosis now. ``waiting`` are the recent samples of the queue, ``samples`` how many readings there were,
        ``utilization`` the configured gpu_memory_utilization.
        """
        t = self._thresholds
        evidence = gather(s, Recent(waiting), t)
        found = decide(Case(s, evidence, t, samples))
        finding = self._settled.observe(s.time, found, t, page_missing=evidence["page_fresh"].value is not True)
        documented = signature.conditions(s, t)
        is_met = signature.met(documented, t)
        held = self._held.observe(s.time, s.progress.work_present, s.kv.kv_used_ratio, t)
        return Diagnosis(
            verdict=finding.verdict,
            confidence=finding.confidence,
            stage=finding.stage,
            since=self._settled.since,
            evidence=evidence,
            supporting=tuple(evidence[name].text for name in finding.supporting),
            opposing=tuple(evidence[name].text for name in finding.opposing),
            missing=finding.missing,
            conditions=conditions.evaluate(s, finding, held, utilization, is_met, t),
            documented_signature=documented,
            documented_signature_met=is_met,
            signature_note=signature.note(s, finding.verdict, is_met),
        )
