"""An engine with stated values, and its plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvpressure.advice import limits as advice
from kvpressure.advice import mitigation
from kvpressure.advice.limits import MAX_REJECTED
from kvpressure.advice.plan import pressure_plan
from kvpressure.model.readings import EngineKey
from kvpressure.model.signals import BatchSignals, ContextSignals, KvSignals, LoadSignals, MemorySignals, Signals
from kvpressure.model.state import LIMITS, Diagnosis, EngineState, Found, Limit
from kvpressure.settings.thresholds import Thresholds, builtin
from kvpressure.toolbox import mitigation_report
from kvpressure.toolbox.engine_view import EngineView
from kvpressure.toolbox.live_pages import GivenGpu


@dataclass(frozen=True, slots=True)
class StatedEngine:
    """Stated values; None = not stated. Tokens and requests are counts, ``pool_bytes`` is per GPU."""

    verdict: str = "kv_pressure"
    version: str | None = None
    running: float | None = None
    max_num_seqs: float | None = None
    max_num_batched_tokens: float | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: float | None = None
    capacity_tokens: float | None = None
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    pool_bytes: float | None = None
    out_of_memory: bool = False
    preempting: bool = False
    gpu: GivenGpu | None = None


def engine_from(given: StatedEngine, t: Thresholds) -> EngineView:
    """The engine's view, as if the pipeline had made it."""
    context = (given.prompt_tokens or 0) + (given.output_tokens or 0) or None
    limits = {} if given.max_num_seqs is None else {"args": given.max_num_seqs}
    if given.capacity_tokens and context:
        limits["kv_capacity"] = max(1.0, given.capacity_tokens / context)
    held = (given.prompt_tokens or 0) + (given.output_tokens or 0) / 2
    signals = Signals(
        time=0.0,
        kv=KvSignals(kv_capacity_tokens=given.capacity_tokens),
        batch=BatchSignals(batch_p99=given.running),
        load=LoadSignals(
            running=given.running,
            max_num_seqs=given.max_num_seqs,
            limits=limits,
            kv_share_held=held / given.capacity_tokens if held and given.capacity_tokens else None,
            kv_share_at_peak=1 / given.running if given.running else None,
        ),
        context=ContextSignals(
            context_mean=context, prompt_quantiles=_p95(given.prompt_tokens), output_quantiles=_p95(given.output_tokens)
        ),
        memory=MemorySignals(kv_pool_bytes=given.pool_bytes),
    )
    confident = given.verdict
    recommended = {
        "max_num_seqs": advice.max_num_seqs(signals, confident, t),
        "max_num_batched_tokens": advice.max_num_batched_tokens(
            signals, given.max_num_batched_tokens, confident, None, t
        ),
        "gpu_memory_utilization": advice.gpu_memory_utilization(
            signals, given.gpu_memory_utilization, given.out_of_memory, confident, t
        ),
        "max_model_len": None,
    }
    preempting = Found("preempting", given.preempting or None, "as given")
    gpus = () if given.gpu is None else (given.gpu.reading(),)
    engine = EngineState(
        key=EngineKey("", "", "", ""),
        target="",
        container="",
        gpus=tuple(gpu.uuid for gpu in gpus),
        up=True,
        error=None,
        version=given.version,
        flavour=None,
        reading=None,
        counters={},
        signals=signals,
        diagnosis=Diagnosis(
            given.verdict,
            1.0,
            None,
            0.0,
            evidence={"preempting": preempting},
            conditions={"gpu_out_of_memory": given.out_of_memory or None},
        ),
        limits={name: Limit(name, getattr(given, name), None, "given", recommended[name]) for name in LIMITS},
    )
    return EngineView(engine, gpus, plan=mitigation.plan(engine, t))


def _p95(value: float | None) -> dict[str, float]:
    return {} if value is None else {"0.95": value}


def plan_of(stated: StatedEngine, max_rejected: float = MAX_REJECTED) -> dict[str, Any]:
    """What ``mitigate --format json`` prints of the engine."""
    view = engine_from(stated, builtin())
    plan = pressure_plan(view.plan_input, builtin(), ("deploy/NAME",), max_rejected)
    return mitigation_report.as_json(view, (), plan, "URL")
