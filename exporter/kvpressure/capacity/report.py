"""A capacity answer as text and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvpressure.capacity.kvbytes import CacheLayout, Parallel
from kvpressure.capacity.load import RequestLoad
from kvpressure.capacity.plan import Fit, GpuAudit, LimitPlan, Recommendation
from kvpressure.capacity.shapes import ModelShape
from kvpressure.printable import grouped, say

_PARTS = (
    ("weights", "weights"),
    ("activations", "activations (peak)"),
    ("graphs", "CUDA graphs"),
    ("non_torch", "outside torch (NCCL, ...)"),
    ("pool", "KV pool"),
    ("context", "CUDA context"),
    ("allocator", "allocator overhead"),
)
_SET = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")


@dataclass(frozen=True, slots=True)
class CapacityAnswer:
    """Question and result; the second half is set when a GPU's memory was given. ``tier``: bytes of a KV tier in host
    memory, for all GPUs together; ``load_speed``: bytes, ``prefill_speed``: tokens per second.
    """

    shape: ModelShape
    parallel: Parallel
    cache_dtype: str
    layout: CacheLayout
    lengths: tuple[int, ...]
    audit: GpuAudit | None = None
    fit: Fit | None = None
    load: RequestLoad | None = None
    needed: float | None = None
    plan: LimitPlan | None = None
    tier: int | None = None
    load_speed: float | None = None
    prefill_speed: float | None = None
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether the load fits; None = not asked."""
        return None if self.audit is None else not self.problems

    def concurrent(self, length: int) -> int | None:
        """Number of requests of this length that the pool holds at once."""
        return None if self.fit is None else self.fit.usable_blocks // self.layout.blocks(length)

    def in_tier(self, length: int) -> dict[str, float]:
        """Number of requests of this length that the tier holds, and the seconds to load one and to compute it; only
        what is known.
        """
        size = self.layout.request_bytes(length) * self.parallel.tensor * self.parallel.pipeline
        return {
            **({"in_tier": self.tier // size} if self.tier else {}),
            **({"load_seconds": size / self.load_speed} if self.load_speed else {}),
            **({"prefill_seconds": length / self.prefill_speed} if self.prefill_speed else {}),
        }


def as_json(answer: CapacityAnswer) -> dict[str, Any]:
    """Plain JSON values; sizes in bytes."""
    result: dict[str, Any] = {
        "model": answer.shape.name,
        "parallel": asdict(answer.parallel),
        "kv_cache_dtype": answer.cache_dtype,
        "kv_bytes_per_token_per_gpu": answer.layout.bytes_per_token,
        "linear": answer.layout.uniform,
        "groups": len(answer.layout.groups),
        "block_size": answer.layout.block_size,
        "block_bytes_per_gpu": answer.layout.block_bytes,
        "requests": [
            {
                "tokens": length,
                "blocks": answer.layout.blocks(length),
                "bytes_per_gpu": answer.layout.request_bytes(length),
                **({} if answer.fit is None else {"max_concurrent": answer.concurrent(length)}),
                **answer.in_tier(length),
            }
            for length in answer.lengths
        ],
    }
    if answer.audit is not None and answer.fit is not None:
        result |= {
            "memory": _memory(answer.audit),
            "limits": asdict(answer.audit.limits),
            "capacity": asdict(answer.fit),
            "fits": answer.fits,
            "problems": list(answer.problems),
            "warnings": list(answer.warnings),
            "needed_concurrency": answer.needed,
        }
    if answer.load is not None:
        result["recommended"] = None if answer.plan is None else _recommended(answer.plan)
    return result


def _memory(audit: GpuAudit) -> dict[str, Any]:
    return {
        "total_bytes": audit.total,
        "outside_bytes": audit.outside,
        **{name: asdict(getattr(audit, name)) for name, _ in _PARTS},
    }


def _recommended(plan: LimitPlan) -> dict[str, Any]:
    return {
        **{name: asdict(getattr(plan, name)) for name in _SET},
        "capacity": asdict(plan.fit),
        "memory": _memory(plan.audit),
    }


def as_text(answer: CapacityAnswer) -> str:
    """For a person."""
    return "\n".join([*_model(answer), *_lengths(answer), *_gpu(answer), *_advice(answer)])


def _model(answer: CapacityAnswer) -> Iterator[str]:
    parallel = answer.parallel
    spread = [
        f"{name} {size}"
        for name, size in (("TP", parallel.tensor), ("PP", parallel.pipeline), ("DCP", parallel.decode_context))
        if size > 1
    ]
    yield f"{answer.shape.name}, KV cache {answer.cache_dtype}, {', '.join(spread) or 'one GPU'}"
    beyond = "" if answer.layout.uniform else " beyond the windows (not linear: see the table)"
    yield f"KV bytes per token on each GPU: {grouped(answer.layout.bytes_per_token)}{beyond}"
    if answer.shape.recurrent_layers:
        yield (
            f"{answer.shape.recurrent_layers} layers keep a state of fixed size for each request instead of a KV cache:"
            " not included, so fewer requests fit"
        )
    if len(answer.layout.groups) > 1:
        yield (
            f"layers in {len(answer.layout.groups)} groups; one block of the pool is {_size(answer.layout.block_bytes)}"
        )


_IN_TIER: Final = {"in_tier": "in the tier", "load_seconds": "to load", "prefill_seconds": "to compute"}


def _lengths(answer: CapacityAnswer) -> Iterator[str]:
    shown = answer.in_tier(answer.lengths[0])
    yield ""
    yield (
        f"{'request, tokens':>16} {'on each GPU':>13}"
        + ("" if answer.fit is None else f" {'at once':>9}")
        + "".join(f" {_IN_TIER[name]:>11}" for name in shown)
    )
    for length in answer.lengths:
        many, values = answer.concurrent(length), answer.in_tier(length)
        texts = (say(value, "seconds" if name != "in_tier" else "") for name, value in values.items())
        yield (
            f"{grouped(length):>16} {_size(answer.layout.request_bytes(length)):>13}"
            + ("" if many is None else f" {grouped(many):>9}")
            + "".join(f" {text:>11}" for text in texts)
        )
    if answer.tier is not None:
        yield ""
        yield f"tier of {_size(answer.tier)}: keeps requests between their turns; no more of them run at once"


def _gpu(answer: CapacityAnswer) -> Iterator[str]:
    audit, fit = answer.audit, answer.fit
    if audit is None or fit is None:
        return
    yield ""
    yield f"memory of one GPU: {_size(audit.total)}, gpu_memory_utilization {audit.limits.gpu_memory_utilization:g}"
    for name, text in _PARTS:
        part = getattr(audit, name)
        yield f"  {text:26} {_size(part.bytes):>12}  {part.origin}"
    yield f"  {'left over':26} {_size(audit.outside):>12}"
    yield (
        f"KV cache: {grouped(fit.pool_blocks)} blocks; as vLLM logs it {grouped(fit.capacity_tokens)} tokens, "
        f"{fit.max_concurrency:.2f}x of {grouped(audit.limits.max_model_len)} tokens"
    )
    if fit.requests is not None:
        need = "" if answer.needed is None else f"; required: {answer.needed:g}"
        at = f"at gpu_memory_utilization {audit.limits.gpu_memory_utilization:g}"
        yield f"capacity {at}: {grouped(fit.requests)} concurrent requests of this load{need}"
    compared = answer.load is not None or answer.needed is not None
    yield (
        ("fits" if compared else "the server can start")
        if not answer.problems
        else "does not fit: " + "; ".join(answer.problems)
    )
    for warning in answer.warnings:
        yield f"but {warning}"


def _advice(answer: CapacityAnswer) -> Iterator[str]:
    if answer.load is None:
        return
    yield ""
    if answer.plan is None:
        yield (
            "no gpu_memory_utilization up to 0.95 is enough for this load: use more GPUs, a smaller cache dtype, or a"
            " smaller load"
        )
        return
    yield "set"
    for name in _SET:
        advised: Recommendation = getattr(answer.plan, name)
        value = "unknown" if advised.value is None else f"{advised.value:g}"
        yield f"  --{name.replace('_', '-'):25} {value:<8} {advised.reason}"


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count} B"
