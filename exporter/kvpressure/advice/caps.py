"""What a plan is computed from, and the caps on prompt and output that a gateway enforces.

A cap at the p95 if all requests then fit together, else lower, within the share of requests that may be refused. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, floor
from typing import Final

from kvpressure.advice.limits import at_once
from kvpressure.model import ceilings
from kvpressure.model.signals import ContextSignals, Signals
from kvpressure.model.state import EngineState

WATERMARK: Final = 0.1
_EXAMPLE: Final = (4096, 1024)
_PROMPT_STEP: Final = 256
_OUTPUT_STEP: Final = 64
ROUNDING: Final = 1e-9
UNSEEN: Final = 0.01  # of requests: those above the highest published quantile
MAX_REJECTED: Final = 0.1  # of all requests: caps at the p95 of prompts and of outputs


@dataclass(frozen=True, slots=True)
class PlanInput:
    """Inputs of the plan. ``usual``: request lengths since the server started, used where none finished in the
    window; ``gpu_bytes``: memory of each of its GPUs.
    """

    engine: EngineState
    usual: ContextSignals = field(default_factory=ContextSignals)
    gpu_bytes: tuple[float, ...] = ()

    @property
    def signals(self) -> Signals:
        """The engine's signals."""
        return self.engine.signals

    @property
    def address(self) -> str:
        """Address of the engine's server; "" when it was not scraped over HTTP."""
        target = self.engine.target.removesuffix("/metrics")
        return target if target.startswith("http") else ""

    def condition(self, name: str) -> bool | None:
        """Value of a condition beside the verdict; ``None`` = unknown."""
        return self.engine.diagnosis.conditions.get(name)

    @property
    def prompts(self) -> Mapping[str, float]:
        """Quantiles of prompt tokens: over the window, else since the server started."""
        return self.signals.context.prompt_quantiles or self.usual.prompt_quantiles

    @property
    def outputs(self) -> Mapping[str, float]:
        """Quantiles of output tokens: over the window, else since the server started."""
        return self.signals.context.output_quantiles or self.usual.output_quantiles

    @property
    def asked(self) -> Mapping[str, float]:
        """Quantiles of the requests' ``max_tokens``: over the window, else since the server started."""
        return self.signals.context.max_tokens_quantiles or self.usual.max_tokens_quantiles


@dataclass(frozen=True, slots=True)
class Caps:
    """Maximum tokens of a prompt and of an output. ``known`` False: no request was seen, the numbers are an example.
    ``long_prompts``, ``long_outputs``: largest shares of requests above them; ``long_asked``: share with a higher
    ``max_tokens``; None = unknown.
    """

    input_tokens: int
    output_tokens: int
    known: bool
    long_prompts: float | None = None
    long_outputs: float | None = None
    long_asked: float | None = None

    @property
    def frees_nothing(self) -> bool:
        """Whether no request is known to be longer than a cap, or to ask for more."""
        shares = (self.long_prompts, self.long_outputs, self.long_asked)
        return self.known and all(share is None or share <= UNSEEN + ROUNDING for share in shares)


def must_fit_together(engine: PlanInput) -> float | None:
    """Number of requests that must fit under the caps: the recommended limit, else what runs at once, else the limit
    in force.
    """
    limit = engine.engine.limit("max_num_seqs")
    return limit.recommended or running_at_once(engine) or limit.known


def running_at_once(engine: PlanInput) -> float | None:
    limit = engine.engine.limit("max_num_seqs").known
    return at_once(measured_at_once(engine), limit, engine.signals.load.limits.get("kv_capacity"))


def measured_at_once(engine: PlanInput) -> float | None:
    return engine.signals.batch.batch_p99 or engine.signals.load.running


def caps_for(engine: PlanInput, max_rejected: float = MAX_REJECTED) -> Caps:
    """Caps at the p95 if all requests then fit together, else lower, but rejecting at most ``max_rejected`` of
    requests, half for prompts and half for outputs.
    """
    if "0.95" not in engine.prompts or "0.95" not in engine.outputs:
        return _example(engine.engine.limit("max_model_len").known)
    question, answer = _sizes(engine, max_rejected / 2)
    return Caps(
        question,
        answer,
        True,
        share_above(engine.prompts, question),
        share_above(engine.outputs, answer),
        share_above(engine.asked, answer) if engine.asked else None,
    )


def _by_rank(quantiles: Mapping[str, float]) -> list[tuple[float, float]]:
    """(rank, value) in rising order; names that are no rank above 0 and up to 1 are left out."""
    ranks = ((ceilings.number_in(name, 1.0), value) for name, value in quantiles.items())
    return sorted((rank, value) for rank, value in ranks if rank)


def share_above(quantiles: Mapping[str, float], cap: float) -> float:
    """Largest share of values above ``cap``, by linear interpolation between the known quantiles."""
    rank, value = 0.0, 0.0
    for name, next_value in _by_rank(quantiles):
        if cap < next_value:
            return round(1.0 - rank - (name - rank) * max(0.0, cap - value) / (next_value - value), 4)
        rank, value = name, next_value
    return round(1.0 - rank, 4)


def _least_cap(quantiles: Mapping[str, float], share: float) -> float:
    """The smallest cap with at most ``share`` of the values above it; at most the highest known quantile."""
    rank, value = 0.0, 0.0
    for name, next_value in _by_rank(quantiles):
        if 1.0 - name <= share + ROUNDING:
            return value + (next_value - value) * min(1.0, (1.0 - share - rank) / (name - rank))
        rank, value = name, next_value
    return value


def _sizes(engine: PlanInput, share: float) -> tuple[int, int]:
    least_prompt, least_answer = (_least_cap(found, share) for found in (engine.prompts, engine.outputs))
    answer = ceil(max(engine.outputs["0.95"], least_answer, 1) / _OUTPUT_STEP) * _OUTPUT_STEP
    question = ceil(max(engine.prompts["0.95"], least_prompt, 1) / _PROMPT_STEP) * _PROMPT_STEP
    most = engine.engine.limit("max_model_len").known
    if most is not None:  # rounded up beyond it they would not be limits
        question, answer = min(question, max(1, int(most))), min(answer, max(1, int(most)))
    capacity, together = engine.signals.kv.kv_capacity_tokens, must_fit_together(engine)
    if capacity and together:
        budget = floor((1 - WATERMARK) * capacity / together)  # what capped requests may fill together
        if question + answer > budget >= 2 * _OUTPUT_STEP:
            scale = budget / (question + answer)
            answer = min(answer, max(_OUTPUT_STEP, floor(answer * scale), ceil(least_answer)))
            question = min(question, max(_OUTPUT_STEP, floor(question * scale), ceil(least_prompt)))
    return question, answer


def _example(max_model_len: float | None) -> Caps:
    """Example caps within what the server accepts."""
    most = int(max_model_len or 4 * _EXAMPLE[0])
    return Caps(max(1, min(_EXAMPLE[0], most // 2)), max(1, min(_EXAMPLE[1], most // 4)), known=False)
