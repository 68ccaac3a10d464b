"""Recommended limits of one engine, in the order and sizes of the guide "Emergency Mitigation", what its plan is
computed from, and the caps on prompt and output that a gateway enforces: at the p95 if all requests then fit together,
else lower, within the share of requests that may be refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, floor
from typing import Final

from kvpressure.model import ceilings
from kvpressure.model.arguments import context_limit
from kvpressure.model.pools import KV_ROLES, OTHER_SIDE, SIDES
from kvpressure.model.signals import ContextSignals, Signals
from kvpressure.model.state import CALM, LIMITS, REUSE, STEP_TOKENS, Diagnosis, EngineState, Limit, limit_of
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.window import HOUR, MINUTE


def max_num_seqs(
    s: Signals, verdict: str, t: Thresholds, stage: str | None = None, asked: float | None = None
) -> float | None:
    """Recommended ``max_num_seqs``, with two significant digits, or ``None``. Under KV pressure what fits
    (``requests_that_fit``), or where that is unknown the smallest documented cut of the requests running; none if one
    request runs. Where the limit binds, a raise to what fits, at most double of the requests in flight (``asked``:
    the most of late); where the step budget binds, a cut to what fits, if a larger budget would let in more.
    """
    if verdict == "concurrency_limited":
        most = max(asked or 0.0, s.load.in_flight or 0.0)
        return _room_for_more_prompts(s, most, t) if stage == STEP_TOKENS else _raised_num_seqs(s, most, t)
    if verdict != "kv_pressure" or side(s):
        return None
    measured = s.batch.batch_p99 if s.batch.batch_p99 is not None else s.load.running
    reached, fit = at_once(measured, s.load.max_num_seqs, s.load.limits.get("kv_capacity")), requests_that_fit(s, t)
    if reached is None or reached <= 1:
        return None
    if s.load.kv_share_at_peak is None:  # what fits may be more than what runs
        fit = min(fit or reached, reached * (1 - t["max_num_seqs_cut_min_ratio"]))
    return None if fit is None else two_digits(fit)


def side(s: Signals) -> str:
    """The side of a pair that the engine is on: prefill or decode, "" = neither, or unknown. Lower limits on one side
    fill the other: what decode does not run is held by prefill, and prefill holds it whatever runs there.
    """
    return SIDES.get(s.load.kv_role, "")


def peer_of(engine: EngineState) -> str:
    """What servers this one exchanges KV blocks with, in a word."""
    return OTHER_SIDE.get(side(engine.signals), "other")


def side_of(engine: EngineState) -> str:
    """The same of a published engine, whose signals may have come without words."""
    return engine.pool.role if engine.pool.role in KV_ROLES else side(engine.signals)


def requests_that_fit(s: Signals, t: Thresholds) -> float | None:
    """Requests running at once that leave the smallest documented cut of the KV cache free, by what each held in the
    last five minutes. The one model of demand: raising and lowering ``max_num_seqs`` end at the same number. ``None``
    where usage and request lengths are unknown.
    """
    share = max((share for share in (s.load.kv_share_held, s.load.kv_share_at_peak) if share), default=None)
    return None if share is None else (1 - t["max_num_seqs_cut_min_ratio"]) / share


def two_digits(value: float) -> float:
    """``value`` rounded down to two significant digits, at least 1: more would change with every sample."""
    step = 10 ** max(0, len(str(floor(value))) - 2)
    return float(max(1, floor(value / step) * step))


class SteadyValue:
    """A recommended value as steady as the verdict: it begins with a confident one and stays while verdict and current
    value do, until a request has finished and another value differs by more than a tenth. A raise ends with the
    confidence.
    """

    __slots__ = ("_asked", "_for", "_value")

    def __init__(self) -> None:
        self._for: tuple[str, str | None, float | None] | None = None
        self._value: float | None = None
        self._asked = 0.0  # the most requests in flight meanwhile

    def observe(self, diagnosis: Diagnosis, s: Signals, t: Thresholds) -> float | None:
        """The ``max_num_seqs`` to publish now."""
        step = diagnosis.stage if diagnosis.stage in (STEP_TOKENS, REUSE) else None
        current = diagnosis.verdict, step, s.load.max_num_seqs
        sure = diagnosis.confidence >= t["confident"] and step != REUSE  # the cache has room for what runs
        if current != self._for or not (sure or diagnosis.verdict == "kv_pressure"):
            self._for, self._value, self._asked = (current if sure else None), None, 0.0
        if self._for is None:
            return None
        self._asked = max(self._asked, s.load.in_flight or 0.0)
        new, old = max_num_seqs(s, diagnosis.verdict, t, step, self._asked), self._value
        grow = s.requests.requests_finished_per_second == 0  # what each holds now is not what it will hold
        if new is None or old is None or (not grow and abs(new - old) > t["trend_change_ratio"] * old):
            self._value = new
        return self._value


class LongestRequest:
    """Longest request of one engine in tokens: the maximum over an hour, held while the verdict
    is neither healthy nor idle.
    """

    __slots__ = ("_held", "_minutes")

    def __init__(self) -> None:
        self._minutes: deque[tuple[float, float]] = deque()  # (begin of the minute, longest of it)
        self._held: float | None = None

    def observe(self, t: float, longest: float | None, verdict: str) -> float | None:
        """Take the longest of the last minutes; return the one that counts now, ``None`` before the first."""
        minutes = self._minutes
        while minutes and minutes[-1][0] > t:  # the clock stepped back
            minutes.pop()
        while minutes and minutes[0][0] < t - HOUR:
            minutes.popleft()
        if longest is not None:
            if minutes and t - minutes[-1][0] < MINUTE:
                longest = max(longest, minutes[-1][1])
                minutes[-1] = (minutes[-1][0], longest)
            else:
                minutes.append((t, longest))
        known = [tokens for _, tokens in minutes]
        if self._held is not None and verdict not in CALM:
            known.append(self._held)
        self._held = max(known, default=None)
        return self._held


class AdvisedLimits:
    """The limits of one engine with what is recommended for each, from one tick to the next."""

    __slots__ = ("_longest", "_max_num_seqs")

    def __init__(self) -> None:
        self._longest = LongestRequest()
        self._max_num_seqs = SteadyValue()

    def observe(self, limits: Mapping[str, Limit], s: Signals, diagnosis: Diagnosis, t: Thresholds) -> dict[str, Limit]:
        """The limits to publish now. ``limits``: those that are in force."""
        finished = s.context.context_max_5m if s.context.prompt_quantiles else None  # whole requests, not their prefill
        longest = self._longest.observe(s.time, finished, diagnosis.verdict)
        known = {name: limit_of(limits, name).known for name in LIMITS}
        confident = diagnosis.verdict if diagnosis.confidence >= t["confident"] else "unknown"
        demand = "unknown" if diagnosis.stage == REUSE else confident  # the cache has room for what runs
        recommended = {
            "max_num_seqs": self._max_num_seqs.observe(diagnosis, s, t),
            "max_num_batched_tokens": max_num_batched_tokens(
                s, known["max_num_batched_tokens"], demand, diagnosis.stage, t
            ),
            "gpu_memory_utilization": gpu_memory_utilization(
                s, known["gpu_memory_utilization"], diagnosis.conditions.get("gpu_out_of_memory"), confident, t
            ),
            "max_model_len": max_model_len(longest, known["max_model_len"], demand, t),
        }
        return {
            name: limits[name] if value is None else replace(limit_of(limits, name), recommended=value)
            for name, value in recommended.items()
            if name in limits or value is not None
        }


def at_once(measured: float | None, limit: float | None, fits: float | None) -> float | None:
    """Requests that run at once: ``measured``, within ``limit``; if not measured, what ``fits`` into the cache,
    because a limit above that has no effect.
    """
    bound = measured if measured is not None else fits
    return min((value for value in (bound, limit) if value is not None), default=None)


def _raised_num_seqs(s: Signals, asked: float, t: Thresholds) -> float | None:
    """The raise; ``None`` where the limit or what fits is unknown, before a request has finished, because those that
    run may grow, and where the smallest documented cut would undo it.
    """
    limit, fit = s.load.max_num_seqs, requests_that_fit(s, t)
    if None in (limit, s.load.kv_share_at_peak, s.context.output_mean) or limit is None or fit is None:
        return None
    target = two_digits(min(fit, t["max_num_seqs_raise_ratio"] * asked))
    return target if limit <= target * (1 - t["max_num_seqs_cut_min_ratio"]) else None


def _room_for_more_prompts(s: Signals, asked: float, t: Thresholds) -> float | None:
    """What fits, where more is asked for and no limit is that low: with a larger budget the KV cache would be full."""
    fit = requests_that_fit(s, t)
    if None in (s.load.kv_share_at_peak, s.context.output_mean) or fit is None:
        return None
    return two_digits(fit) if fit < min(asked, s.load.max_num_seqs or asked) else None


def past_peak(s: Signals) -> float | None:
    """``max_num_seqs`` at which the most tokens came, of the last 15 minutes; ``None`` where it is unknown or not below
    the limit.
    """
    peak, limit = s.batch.peak_batch, s.load.max_num_seqs
    return None if peak is None or limit is None or round(peak) >= limit else float(max(1, round(peak)))


def max_num_batched_tokens(
    s: Signals, current: float | None, verdict: str, stage: str | None, t: Thresholds
) -> float | None:
    """Under KV pressure, half of the current token budget, at least the usual one, which a full step would ask for
    again. Where steps use it up, the usual budget, or double of one that is as large. ``None`` otherwise, or without a
    known budget.
    """
    if current is None:
        return None
    least = t["max_num_batched_tokens_usual"]
    if stage == STEP_TOKENS and verdict == "concurrency_limited":
        return max(least, t["max_num_seqs_raise_ratio"] * current)
    if verdict != "kv_pressure" or current <= least or side(s):
        return None
    return float(max(least, floor(current * (1 - t["max_num_seqs_cut_max_ratio"]))))


def gpu_memory_utilization(
    s: Signals, current: float | None, out_of_memory: bool | None, verdict: str, t: Thresholds
) -> float | None:
    """Where allocations fail on the GPU, the documented 0.7, or 0.6 for long-context or bursty traffic and where 0.7 is
    set already. Under KV pressure the same as a raise, where a smaller share leaves memory of the GPU unused. Else
    ``None``: less memory means a smaller KV pool.
    """
    if not out_of_memory and verdict != "kv_pressure":
        return None
    bursty = (s.load.arrival_burst_ratio or 0.0) >= t["arrival_burst_ratio_high"]
    long_context = (s.context.context_spike_ratio or 0.0) >= t["context_spike_ratio"]
    usual, lower = t["gpu_memory_utilization_recommended"], t["gpu_memory_utilization_long_context"]
    first = lower if bursty or long_context else usual
    if out_of_memory:
        return next((target for target in (first, lower) if current is None or current > target), None)
    used = s.memory.device_used_ratio
    if current is None or used is None or current >= first:
        return None
    return first if used + first - current < t["memory_critical_ratio"] else None


def max_model_len(longest: float | None, current: float | None, verdict: str, t: Thresholds) -> float | None:
    """The ``longest`` request in tokens (``LongestRequest``) plus a margin, under KV
    pressure and where the current limit is larger; else ``None``.
    """
    if verdict != "kv_pressure" or current is None or longest is None:
        return None
    target = float(context_limit(longest, t))
    return target if target < current else None


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
    def pool_grows(self) -> bool:
        """Whether the recommended ``gpu_memory_utilization`` is a raise."""
        limit = self.engine.limit("gpu_memory_utilization")
        return limit.recommended is not None and limit.known is not None and limit.recommended > limit.known

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


def _between(points: Iterable[tuple[float, float]], place: float) -> float:
    """The second number of rising points where the first is ``place``, by linear interpolation from (0, 0); that of the
    last point beyond it.
    """
    x, y = 0.0, 0.0
    for next_x, next_y in points:
        if place < next_x:
            return y + (next_y - y) * max(0.0, place - x) / (next_x - x)
        x, y = next_x, next_y
    return y


def share_above(quantiles: Mapping[str, float], cap: float) -> float:
    """Largest share of values above ``cap``, by linear interpolation between the known quantiles."""
    return round(1.0 - _between(((value, rank) for rank, value in _by_rank(quantiles)), cap), 4)


def _least_cap(quantiles: Mapping[str, float], share: float) -> float:
    """The smallest cap with at most ``share`` of the values above it; at most the highest known quantile."""
    return _between(_by_rank(quantiles), round(1.0 - share, 9))


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
