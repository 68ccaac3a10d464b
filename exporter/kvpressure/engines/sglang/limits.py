"""The limits of an SGLang engine, its KV pool, and its features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from kvpressure.engines.base import Features, Known, Pool, Tier
from kvpressure.engines.sglang.aliases import CONTEXT
from kvpressure.model import ceilings
from kvpressure.model import readings as r
from kvpressure.model.arguments import GIB, EngineArgs, parse_version
from kvpressure.model.pools import KV_ROLES
from kvpressure.model.readings import EngineReading
from kvpressure.model.state import Limit

REFERENCE_VERSION: Final = "0.5.23"  # its defaults are assumed where no version is given
SLOTS: Final = (2048.0, 4096.0)  # fewest and most request slots
SPECULATIVE_SEQS: Final = 48.0
LIMITS: Final = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
NOT_LIMITS: Final = frozenset({"gpu_memory_utilization"})
"""``--mem-fraction-static`` leaves out activations, so that a device fuller than that is as it should be."""


def in_force(known: Known) -> dict[str, Limit]:
    """All known limits: from the start-up log, else from arguments, metrics or defaults."""
    return {name: limit for name in LIMITS if (limit := _limit(name, known)) is not None}


def _limit(name: str, known: Known) -> Limit | None:
    merged = known.merged
    explicit = merged.is_explicit(name)
    logged = known.facts.get(name)
    if logged:
        return Limit(name, logged, explicit, "log")
    given = merged.integer(name)
    if given:
        return Limit(name, given / _shared_by(name, merged), True, known.args.source)
    if name in merged.explicit:
        return None  # set to what is not visible, or to none (-1)
    gauges = known.reading.gauges if known.reading else {}
    if name == "max_model_len":
        length = gauges.get(CONTEXT)
        return Limit(name, length, explicit, "metrics") if length else None
    if explicit is not False:
        return None  # it is unknown whether it was left at its default
    found = _default_seqs(known, gauges) if name == "max_num_seqs" else _default_chunk(known)
    return None if found is None else Limit(name, found, False, "default")


def _shared_by(name: str, args: EngineArgs) -> float:
    """Number of ranks that share the given value (data-parallel attention), else 1."""
    shares = name in ("max_num_seqs", "max_num_batched_tokens") and args.values.get("enable_dp_attention") == "True"
    return float(args.data_parallel_size or 1) if shares else 1.0


def _default_seqs(known: Known, gauges: Mapping[str, float]) -> float | None:
    """The smaller of half the pool's tokens and the request slots; ``None`` without pool size or context limit."""
    if "speculative_algorithm" in known.merged.values:
        return SPECULATIVE_SEQS
    pool = known.facts.get("capacity_tokens") or gauges.get(r.KV_CAPACITY) or _set_tokens(known.merged)
    context = known.facts.get("max_model_len") or known.merged.max_model_len or gauges.get(CONTEXT)
    if not pool:
        return None
    if pool / 2 <= SLOTS[0]:
        return float(pool // 2)
    return None if not context else float(min(pool // 2, min(max(pool / context * 512, SLOTS[0]), SLOTS[1]) // 1))


def _set_tokens(args: EngineArgs) -> float | None:
    """``--max-total-tokens`` in whole pages."""
    tokens, page = args.integer("max_total_tokens"), args.integer("block_size") or 1
    return float(tokens // page * page) if tokens and page > 0 else None


def _default_chunk(known: Known) -> float | None:
    gpu = known.gpu
    found = default_limits(known.version, gpu.name if gpu else None, gpu.memory_total_bytes if gpu else None)
    chunk = found.get("max_num_batched_tokens")
    return None if chunk is None else chunk / _shared_by("max_num_batched_tokens", known.merged)


def default_limits(version: str | None, _gpu_name: str | None, gpu_bytes: float | None) -> Mapping[str, float]:
    """The default prefill chunk in tokens by release and GPU memory. The limit of running requests follows from the
    pool instead.
    """
    release = parse_version(version)
    if release is None or gpu_bytes is None:
        return {}
    gib = gpu_bytes / GIB
    if release >= (0, 5, 6):
        return {"max_num_batched_tokens": 2048 if gib < 35 else 4096 if gib < 60 else 8192 if gib < 160 else 16384}
    if release < (0, 5, 0):
        return {"max_num_batched_tokens": 2048 if gib < 25 else 8192}
    return {}  # changed somewhere between


def capacity_tokens(reading: EngineReading, _engines_on_page: int) -> float | None:
    """Tokens that the KV pool of one engine holds, from 0.5.6."""
    return reading.gauges.get(r.KV_CAPACITY) or None


def block_size(reading: EngineReading) -> float | None:
    """Tokens per page of the KV cache, from the labels of 0.5.9."""
    return ceilings.number_in(reading.cache_config.get("page_size"), ceilings.LABEL) or None


def pool(args: EngineArgs, reading: EngineReading | None, _engines_on_page: int) -> Pool:
    """The pool in tokens, from the metrics, else from ``--max-total-tokens``. If memory allows fewer, the start-up
    log has the smaller number, which takes precedence.
    """
    tokens = (None if reading is None else reading.gauges.get(r.KV_CAPACITY)) or _set_tokens(args)
    return Pool() if not tokens else Pool(blocks=int(tokens), block_size=1, dtype=args.kv_cache_dtype or "auto")


def tier(args: EngineArgs, reading: EngineReading | None) -> Tier:
    """HiCache, which counts in tokens."""
    size = reading.gauges.get(r.TIER_SIZE) if reading else None
    on = args.values.get("enable_hierarchical_cache") == "True" or bool(size)
    return Tier(True if on else False if args.complete else None, size, 1.0)


def tier_mistake(args: EngineArgs) -> str:
    """HiCache's options mean nothing until it is switched on, and it needs the radix cache."""
    on = args.values.get("enable_hierarchical_cache") == "True"
    given = sorted(name for name in args.explicit if name.startswith("hicache_"))
    if given and not on and args.complete:
        return f"--{given[0].replace('_', '-')} without --enable-hierarchical-cache: no tier"
    off = on and args.values.get("disable_radix_cache") == "True"
    return "--disable-radix-cache: SGLang does not start with both" if off else ""


def features(args: EngineArgs, flavour: str | None, _gauges: Sequence[str]) -> Features:
    """Features by the arguments; the role in a prefill/decode pair also by the flavour."""
    role = KV_ROLES.get(args.values.get("disaggregation_mode") or flavour or "")
    return Features(
        lora="enable_lora" in args.values or "lora_paths" in args.values,
        kv_role=role,
        waits_for_blocks=role is not None,
        whole_prompts=args.values.get("max_num_batched_tokens") == "-1",
        has_peer=role is not None,
    )
