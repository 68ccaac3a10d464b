"""Where the memory of a GPU goes, how many requests fit, and which limits follow.

As in vLLM's start-up: ``total x gpu_memory_utilization`` is requested; weights, peak activations, memory outside
torch and CUDA graphs are taken from it; the rest is the KV pool. CUDA context and allocator overhead are outside the
request and must fit beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, floor, inf, sqrt
from typing import Final, Literal

from kvpressure.capacity.kvbytes import CacheLayout, Parallel
from kvpressure.capacity.load import RequestLoad
from kvpressure.capacity.shapes import ModelShape, number_of
from kvpressure.capacity.worksheet import ALLOCATOR_GB, CUDA_CONTEXT_GB
from kvpressure.engines import registry
from kvpressure.errors import InputError
from kvpressure.model.arguments import GIB, context_limit
from kvpressure.settings.thresholds import Thresholds

Origin = Literal["given", "measured", "estimate", "guide"]

IN_FLIGHT_BATCHES: Final = 2  # asynchronous scheduling computes the next step while the last one runs
MAX_UTILIZATION: Final = 0.95
Z_99: Final = 2.33  # 99 of 100 moments hold less than mean + 2.33 deviations
_HIDDEN_COPIES: Final = 4  # activations of one layer at once, in vectors of hidden_size and of intermediate_size
_INTERMEDIATE_COPIES: Final = 3
_LOGITS_COPIES: Final = 3  # fp32 logits, their sorted copy and the probabilities, while the sampler is warmed up
_NON_TORCH: Final = GIB // 4
_NON_TORCH_PARALLEL: Final = GIB  # NCCL buffers
_GRAPHS: Final = GIB


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes on one GPU, and their source."""

    bytes: int
    origin: Origin


@dataclass(frozen=True, slots=True)
class StatedMemory:
    """Parts of memory that the user stated, in bytes on one GPU (``weights``: of the whole model)."""

    weights: int | None = None
    weights_origin: Origin = "given"
    pool: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """The four limits that bound memory."""

    gpu_memory_utilization: float
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class GpuAudit:
    """One GPU. ``pool`` may be negative: the missing bytes. ``outside``: what the request leaves to others."""

    total: int
    limits: Limits
    weights: Part
    activations: Part
    graphs: Part
    non_torch: Part
    context: Part
    allocator: Part
    pool: Part

    @property
    def outside(self) -> int:
        """Unused bytes beyond the request; negative = context and allocator do not fit."""
        return self.total - self._inside - self.context.bytes - self.allocator.bytes

    @property
    def missing(self) -> int:
        """Bytes that the GPU lacks for vLLM's own parts, as with a pool set too large; 0 = none."""
        return max(0, self._inside - self.total)

    @property
    def _inside(self) -> int:
        return sum(part.bytes for part in (self.weights, self.activations, self.graphs, self.non_torch, self.pool))


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A value to set and why; without a value, what is unknown."""

    value: float | None
    reason: str


def default_limits_for(total_bytes: int, max_model_len: int, gpu: str | None = None) -> Limits:
    """The default engine's defaults for a GPU of this size."""
    engine = registry.default()
    found = engine.default_limits(engine.reference_version, gpu, float(total_bytes))
    return Limits(
        found["gpu_memory_utilization"], int(found["max_num_seqs"]), int(found["max_num_batched_tokens"]), max_model_len
    )


def audit(
    shape: ModelShape, parallel: Parallel, total_bytes: int, limits: Limits, given: StatedMemory, *, graphs: bool = True
) -> GpuAudit:
    """Where the memory of one GPU goes. ``graphs`` False = ``--enforce-eager``.

    Raises ``InputError`` when the size of the weights is neither stated nor known.
    """
    if given.weights is None:
        raise InputError(f"{shape.name}: the size of the weights is unknown; give --weights")
    ranks = parallel.tensor * parallel.pipeline
    result = GpuAudit(
        total_bytes,
        limits,
        Part(ceil(given.weights / ranks), given.weights_origin),
        Part(_activations(shape, parallel, limits), "estimate"),
        Part(_GRAPHS if graphs else 0, "estimate"),
        Part(_NON_TORCH if ranks == 1 else _NON_TORCH_PARALLEL, "estimate"),
        Part(int(CUDA_CONTEXT_GB * 1e9), "guide"),
        Part(int(ALLOCATOR_GB * 1e9), "guide"),
        Part(0, "estimate"),
    )
    requested = int(total_bytes * limits.gpu_memory_utilization)
    taken = result.weights.bytes + result.activations.bytes + result.graphs.bytes + result.non_torch.bytes
    return replace(
        result, pool=Part(requested - taken, "estimate") if given.pool is None else Part(given.pool, "given")
    )


def _activations(shape: ModelShape, parallel: Parallel, limits: Limits) -> int:
    """Peak of the dummy forward at ``max_num_batched_tokens`` and of the sampler at ``max_num_seqs``.

    Measured on two models: within 0.3 GB of what vLLM kept back (see ``tests/capacity``).
    """
    hidden = number_of(shape.config, "hidden_size", "n_embd", "d_model")
    intermediate = number_of(shape.config, "intermediate_size", "ffn_dim") or 4 * hidden
    tokens = min(limits.max_num_batched_tokens, limits.max_num_seqs * limits.max_model_len)
    forward = (
        tokens * (_HIDDEN_COPIES * hidden + _INTERMEDIATE_COPIES * intermediate / parallel.tensor) * shape.dtype_bytes
    )
    return round(forward + _LOGITS_COPIES * 4 * limits.max_num_seqs * number_of(shape.config, "vocab_size"))


# --- what fits ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fit:
    """What a pool holds. ``usable_blocks``: without the one that vLLM keeps. ``longest`` = longest single request;
    ``requests`` = how many of the stated load at once, 99 of 100 moments; both None without a load or pool.
    """

    pool_blocks: int
    usable_blocks: int
    capacity_tokens: int
    max_concurrency: float
    longest: int
    requests: int | None


def fit(layout: CacheLayout, found: GpuAudit, load: RequestLoad | None) -> Fit:
    """Capacity of the audited pool, as vLLM logs it and for the stated load."""
    limits = found.limits
    blocks = layout.pool_blocks(found.pool.bytes)
    in_flight = IN_FLIGHT_BATCHES * limits.max_num_batched_tokens
    return Fit(
        blocks,
        max(0, blocks - 1),
        layout.capacity_tokens(blocks, limits.max_model_len, in_flight),
        layout.max_concurrency(blocks, limits.max_model_len, in_flight),
        layout.longest(blocks, limits.max_model_len, in_flight),
        requests_that_fit(layout, max(0, blocks - 1), load, limits.max_model_len) if load else None,
    )


def requests_that_fit(layout: CacheLayout, usable_blocks: int, load: RequestLoad, max_model_len: int) -> int:
    """How many requests of ``load`` fit at once in 99 of 100 moments, each counted at its full length.

    The sum over N requests has mean N x m and deviation sqrt(N) x s; the largest N with
    N x m + 2.33 x sqrt(N) x s <= blocks.
    """
    totals = {min(request.total, max_model_len) for request in load.requests}
    blocks = {total: float(layout.blocks(max(1, total))) for total in totals}
    mean, deviation = load.mean_and_deviation(
        {request.total: blocks[min(request.total, max_model_len)] for request in load.requests}
    )
    root = (sqrt((Z_99 * deviation) ** 2 + 4 * mean * usable_blocks) - Z_99 * deviation) / (2 * mean)
    return floor(root * root + 1e-9)


# --- what to set --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LimitPlan:
    """Recommended limits with reasons, and the capacity with them."""

    max_model_len: Recommendation
    max_num_batched_tokens: Recommendation
    gpu_memory_utilization: Recommendation
    max_num_seqs: Recommendation
    audit: GpuAudit
    fit: Fit


def recommend(
    shape: ModelShape,
    parallel: Parallel,
    layout: CacheLayout,
    total_bytes: int,
    given: StatedMemory,
    load: RequestLoad,
    needed: float | None,
    t: Thresholds,
    *,
    graphs: bool = True,
) -> LimitPlan | None:
    """Limits for ``load``, derived from memory. ``needed`` = requests that must fit at once, if stated.

    The utilization is the documented one where that suffices; else the smallest that holds ``needed`` requests, or
    vLLM's default where none are stated. None when not even 0.95 holds the load.
    """
    length = min(context_limit(load.longest, t), shape.max_model_len or inf)
    default = default_limits_for(total_bytes, int(length))
    tokens, budget = _batched_tokens(load, default.max_num_batched_tokens, needed, t)
    documented, why = _utilization(load, t)
    for utilization in _candidates(documented, default.gpu_memory_utilization if needed is None else None):
        limits = Limits(utilization, default.max_num_seqs, tokens, int(length))
        found = audit(shape, parallel, total_bytes, limits, given, graphs=graphs)
        fits = fit(layout, found, load)
        holds = fits.requests or 0
        if fits.longest >= limits.max_model_len and holds >= max(1.0, needed or 0.0):
            if utilization > documented:
                why = f"documented: {documented:g}, but the load needs more memory"
            cap = min(limits.max_num_batched_tokens, max(default.max_num_seqs, ceil(needed or 0.0)))
            seqs = min(holds, cap)
            return LimitPlan(
                _model_len(length, shape, load),
                Recommendation(tokens, budget),
                Recommendation(utilization, why),
                Recommendation(seqs, _seqs_reason(holds, cap, utilization)),
                replace(found, limits=replace(limits, max_num_seqs=seqs)),
                fits,
            )
    return None


def _seqs_reason(holds: int, cap: int, utilization: float) -> str:
    if holds > cap:
        return f"at {utilization:g} the cache holds {holds}; more than vLLM's default or the token budget is of no use"
    return f"requests of this load that fit 99 % of the time at gpu_memory_utilization {utilization:g}"


def _candidates(documented: float, default: float | None) -> Iterable[float]:
    yield documented
    if default is not None:
        yield from (default, MAX_UTILIZATION)
    else:
        yield from (percent / 100 for percent in range(floor(documented * 100) + 1, round(MAX_UTILIZATION * 100) + 1))


def _model_len(length: float, shape: ModelShape, load: RequestLoad) -> Recommendation:
    """No value where only a part of the requests is known: vLLM would refuse the others."""
    if length == shape.max_model_len:
        return Recommendation(length, "the model's own limit")
    if load.known_share < 1:
        known = f"up to p{floor(1000 * load.known_share) / 10:g}" if load.known_share else "on average"
        return Recommendation(None, f"lengths are known {known} only, not the longest request (p100)")
    return Recommendation(length, f"the longest request ({load.longest} tokens) and a quarter to spare")


def _batched_tokens(load: RequestLoad, default: int, needed: float | None, t: Thresholds) -> tuple[int, str]:
    """One long prompt a step, not many: more only raises the peak of activations. A decoding request takes a token."""
    prompt = load.quantile("prompt", 0.95)
    least = max(prompt, ceil(needed or 0.0), int(t["max_num_batched_tokens_floor"]))
    power = 1 << (least - 1).bit_length()
    if power >= default:
        return default, "vLLM's default for this GPU; longer prompts take several steps"
    return power, f"one step takes a prompt of the p95 length ({prompt} tokens)"


def _utilization(load: RequestLoad, t: Thresholds) -> tuple[float, str]:
    spread = load.quantile("total", 0.95) / max(1.0, sum(r.total for r in load.requests) / len(load.requests))
    if spread >= t["context_spike_ratio"]:
        return t["gpu_memory_utilization_long_context"], "documented for long-context load (p95 above twice the mean)"
    return t["gpu_memory_utilization_recommended"], "documented: leaves memory for allocator overhead and fragmentation"
