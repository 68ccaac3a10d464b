"""One engine as commands report it: its published state with what belongs to it.

An exporter's document is read into the same objects (``toolbox.exporter_document``), so the rest does not depend on
the input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvpressure.advice import mitigation, triage
from kvpressure.advice.limits import PlanInput
from kvpressure.advice.wording import name_of
from kvpressure.model import ceilings
from kvpressure.model.readings import GpuReading
from kvpressure.model.signals import ContextSignals, Signals
from kvpressure.model.state import Diagnosis, EngineState, State
from kvpressure.publish.diagnosis_json import engine_entry
from kvpressure.publish.page.view import ViewContext
from kvpressure.toolbox.since_start import since_start


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine. ``gpus``: its own; ``usual``: its request lengths since the server started; ``entry`` makes its JSON
    output; ``published_cause``: as a past scrape has it, "" = to be said of the engine.
    """

    engine: EngineState
    gpus: tuple[GpuReading, ...] = ()
    triage: tuple[triage.TriageStep, ...] = ()
    plan: mitigation.MitigationPlan = field(default_factory=lambda: mitigation.MitigationPlan(""))
    usual: ContextSignals = field(default_factory=ContextSignals)
    entry: Callable[[], Mapping[str, Any]] = dict
    published_cause: str = ""

    @property
    def name(self) -> str:
        """Namespace, pod and model, as far as known."""
        return name_of(self.engine.key)

    @property
    def identity(self) -> dict[str, str]:
        """The labels of its series."""
        key = self.engine.key
        return {"namespace": key.namespace, "pod": key.pod, "model_name": key.model_name, "engine": key.engine}

    @property
    def diagnosis(self) -> Diagnosis:
        """Its diagnosis."""
        return self.engine.diagnosis

    @property
    def cause(self) -> str:
        """What is known, in one sentence."""
        return self.published_cause or mitigation.cause(self.engine)

    @property
    def plan_input(self) -> PlanInput:
        """Input of the plan for KV pressure."""
        sizes = tuple(float(gpu.memory_total_bytes) for gpu in self.gpus if gpu.memory_total_bytes is not None)
        return PlanInput(self.engine, self.usual, sizes)

    @property
    def true_conditions(self) -> list[str]:
        """Conditions that hold, in alphabetical order."""
        return [name for name, value in sorted(self.diagnosis.conditions.items()) if value is True]

    def without(self, unseen: Sequence[str]) -> EngineView:
        """The same view, with ``unseen`` added to its missing inputs."""
        found = self.diagnosis
        diagnosis = replace(found, missing=(*found.missing, *unseen), inputs=(*found.inputs, *unseen))
        return replace(self, engine=replace(self.engine, diagnosis=diagnosis))

    def as_json(self) -> dict[str, Any]:
        """Its entry of an exporter's document, with what this view adds."""
        shape = {item.name for item in fields(ContextSignals)}
        flat = Signals(0.0, context=self.usual).flat().items()
        usual = {name: value for name, value in flat if value is not None and name.partition(":")[0] in shape}
        return {**self.entry(), "missing": list(self.diagnosis.missing), **({"since_start": usual} if usual else {})}


def engine_view(engine: EngineState, state: State, around: ViewContext) -> EngineView:
    """The view of an engine of ``state``."""
    return EngineView(
        engine,
        tuple(gpu.reading for gpu in state.gpus if gpu.reading.uuid in engine.gpus),
        triage.steps(engine, state, around.thresholds),
        mitigation.plan(engine, around.thresholds),
        since_start(engine.reading),
        lambda: engine_entry(engine, state, around),
    )


def number(value: object) -> float | None:
    """A number that an exporter may have published, else None."""
    return ceilings.number(value, ceilings.WORK, -ceilings.WORK)


def flag(value: object) -> bool | None:
    """True, False, else None."""
    return value if isinstance(value, bool) else None
