"""The limits of an engine: value in force, whether somebody set it, and where it was read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvpressure.args import EngineArgs, default_limits, limits_in_force
from kvpressure.commandline import parse
from kvpressure.readings import EnginePage, GpuReading
from kvpressure.signals.config import positive
from kvpressure.state import LIMITS

V0_MAX_NUM_SEQS: Final = 256.0
KV_TRANSFER: Final = "kv_transfer_config"
_KV_FIELDS: Final = {
    "kv_role": re.compile(r"\bkv_role\b['\"]?\s*[:=]\s*['\"]?(kv_[a-z]+)"),
    "kv_connector": re.compile(r"\bkv_connector\b['\"]?\s*[:=]\s*['\"]?(\w+)"),
}
SYNCHRONOUS: Final = (
    "LMCacheConnectorV1",
    "LMCacheConnector",
)  # load blocks within the step: nothing waits for them, nobody pulls them


@dataclass(frozen=True, slots=True)
class InForce:
    """``source``: args, log, metrics, default."""

    value: float
    explicit: bool | None
    source: str


def from_page(page: EnginePage) -> EngineArgs:
    """Arguments of the pod's command line; empty when none were seen."""
    return parse(page.args, page.env)


def takes_lora(args: EngineArgs) -> bool:
    """Whether adapters are served, for whose slots requests may wait."""
    return "enable_lora" in args.values and (args.values["enable_lora"] or "").lower() != "false"


def kv_role(args: EngineArgs) -> str | None:
    """What the server is to others that KV blocks come from or go to: kv_producer, kv_consumer or kv_both; empty where a KV
    connector is set and its role is not told, ``None`` where none is.
    """
    if not any(name.partition(".")[0] == KV_TRANSFER for name in args.values):
        return None
    return _kv_field(args, "kv_role") or ""


def _kv_field(args: EngineArgs, name: str) -> str | None:
    """A field of ``--kv-transfer-config``, which is given as JSON or field by field."""
    told = _KV_FIELDS[name].search(args.values.get(KV_TRANSFER) or "")
    return told[1] if told else args.values.get(f"{KV_TRANSFER}.{name}")


def waits_for_blocks(args: EngineArgs) -> bool:
    """Whether requests may wait for KV blocks of other servers, or finished ones for others to pull theirs. A cache beside one
    server (LMCache, role kv_both) does neither.
    """
    role = kv_role(args)
    return role is not None and not (role == "kv_both" and _kv_field(args, "kv_connector") in SYNCHRONOUS)


def in_force(
    args: EngineArgs,
    logged: EngineArgs | None,
    facts: Mapping[str, float],
    config: Mapping[str, str],
    version: str | None,
    flavour: str | None,
    gpu: GpuReading | None,
) -> dict[str, InForce]:
    """All limits that are known, from the best source: arguments, start-up log, metrics, default by version and card."""
    merged = args if logged is None else args.merged(logged)
    defaults = dict(
        default_limits(version, gpu.name if gpu else None, gpu.memory_total_bytes if gpu else None, flavour=flavour)
    )
    if flavour == "v0":
        defaults.setdefault("max_num_seqs", V0_MAX_NUM_SEQS)
    length = facts.get("max_model_len") or _max_model_len(config)
    values = limits_in_force(merged, defaults, length)
    found: dict[str, InForce] = {}
    for name in LIMITS:
        value = values.get(name)
        explicit = merged.is_explicit(name)
        if name == "max_num_batched_tokens" and "max_num_batched_tokens" in facts:
            value = facts[name]
        if name == "gpu_memory_utilization" and value is None:
            value = positive(config.get(name))
        if value is None:
            continue
        found[name] = InForce(value, explicit, _source(name, args, logged, facts, config, explicit))
    _lower_by_active_seqs(found, merged, args)
    return found


def _lower_by_active_seqs(found: dict[str, InForce], merged: EngineArgs, args: EngineArgs) -> None:
    """``--max-num-active-seqs`` lowers the running batch below ``max_num_seqs``: the smaller of both binds."""
    active, seqs = merged.max_num_active_seqs, found.get("max_num_seqs")
    if active is not None and (seqs is None or active < seqs.value):
        found["max_num_seqs"] = InForce(
            float(active), True, "args" if "max_num_active_seqs" in args.explicit else "log"
        )


def _source(
    name: str,
    args: EngineArgs,
    logged: EngineArgs | None,
    facts: Mapping[str, float],
    config: Mapping[str, str],
    explicit: bool | None,
) -> str:
    if name in args.explicit:
        return "args"
    if (logged is not None and name in logged.explicit) or name in facts:
        return "log"
    if name == "gpu_memory_utilization" and name in config:
        return "metrics"
    if name == "max_model_len" and explicit is not True:
        return "metrics"
    return "default"


def _max_model_len(config: Mapping[str, str]) -> float | None:
    """Capacity over the maximum concurrency that vLLM states for max_model_len (0.24 and later)."""
    size, concurrency = positive(config.get("kv_cache_size_tokens")), positive(config.get("kv_cache_max_concurrency"))
    return float(round(size / concurrency)) if size and concurrency else None
