"""An engine as the user states it, for a plan without a server: the same advice, computed from the numbers given."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvpressure.diagnosis import advice
from kvpressure.signals.model import (
    BatchSignals,
    ContextSignals,
    KvSignals,
    LoadSignals,
    MemorySignals,
    Signals,
)
from kvpressure.state import LIMITS
from kvpressure.thresholds import Thresholds
from kvpressure.toolbox.live import Card
from kvpressure.toolbox.view import EngineView


@dataclass(frozen=True, slots=True)
class Given:
    """What was stated; None = not stated. Tokens and requests are counts, ``pool_bytes`` is of one GPU."""

    verdict: str
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
    card: Card | None = None


def engine_from(given: Given, t: Thresholds) -> EngineView:
    """As if an exporter had said it."""
    context = (given.prompt_tokens or 0) + (given.output_tokens or 0) or None
    limits = {} if given.max_num_seqs is None else {"args": given.max_num_seqs}
    if given.capacity_tokens and context:
        limits["kv_capacity"] = max(1.0, given.capacity_tokens / context)
    signals = Signals(
        time=0.0,
        kv=KvSignals(kv_capacity_tokens=given.capacity_tokens),
        batch=BatchSignals(batch_p99=given.running),
        load=LoadSignals(running=given.running, max_num_seqs=given.max_num_seqs, limits=limits),
        context=ContextSignals(
            context_mean=context, prompt_quantiles=_p95(given.prompt_tokens), output_quantiles=_p95(given.output_tokens)
        ),
        memory=MemorySignals(kv_pool_bytes=given.pool_bytes),
    )
    confident = given.verdict
    recommended = {
        "max_num_seqs": advice.max_num_seqs(signals, confident, t),
        "max_num_batched_tokens": advice.max_num_batched_tokens(given.max_num_batched_tokens, confident, t),
        "gpu_memory_utilization": advice.gpu_memory_utilization(
            signals, given.gpu_memory_utilization, given.out_of_memory, t
        ),
        "max_model_len": None,
    }
    data: dict[str, Any] = {
        "verdict": given.verdict,
        "confidence": 1.0,
        "up": True,
        "version": given.version,
        "signals": signals.flat(),
        "evidence": {"preempting": {"value": given.preempting or None, "text": "as given"}},
        "conditions": {"gpu_out_of_memory": given.out_of_memory},
        "limits": {
            name: {"value": getattr(given, name), "explicit": None, "source": "given", "recommended": recommended[name]}
            for name in LIMITS
        },
        "gpus": [],
    }
    gpus: list[dict[str, Any]] = []
    if given.card is not None:
        gpus = [asdict(given.card.reading())]
        data["gpus"] = [gpus[0]["uuid"]]
    return EngineView(data, {"engines": [data], "gpus": gpus})


def _p95(value: float | None) -> dict[str, float]:
    return {} if value is None else {"0.95": value}
