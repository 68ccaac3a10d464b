"""The limits of a vLLM engine (value in force, whether it was set, and where it was read), and its KV pool by the
labels of ``cache_config_info`` and by its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import inf
from typing import Any, Final

from kvpressure.engines.base import Features, Known, Pool, Tier
from kvpressure.engines.vllm.arguments import MAX_TEXT, printed
from kvpressure.model import ceilings
from kvpressure.model.arguments import GIB, EngineArgs, Version, parse_version
from kvpressure.model.pools import KV_ROLES
from kvpressure.model.readings import LORA_MOMENT, RUNNING_LIMIT, SWAPPED, TIER_STORED, EngineReading
from kvpressure.model.state import LIMITS, Limit
from kvpressure.parsed import json_of, mapping, mappings, text

REFERENCE_VERSION: Final = "0.33.0"  # its defaults are assumed where no version is given


def positive(text: str | None) -> float | None:
    """The number in a label if it is above 0 and plausible; ``None`` for anything else ("None", "nan", "x")."""
    return ceilings.number_in(text, ceilings.LABEL) or None


def capacity_tokens(reading: EngineReading, engines_on_page: int) -> float | None:
    """Tokens that the KV cache of one engine holds; ``None`` if unknown.

    ``kv_cache_size_tokens`` where published (right for hybrid models). Else usable blocks times block size, which
    holds for models with one KV group; ``num_gpu_blocks`` is the sum over a server's data-parallel engines, and block
    0 is never used, except by V0.
    """
    config = reading.cache_config
    size = positive(config.get("kv_cache_size_tokens"))
    if size:
        return size
    blocks = positive(config.get("num_gpu_blocks"))
    tokens = positive(config.get("effective_attention_block_size")) or block_size(reading)
    if not blocks or not tokens:
        return None
    per_engine = blocks / max(1, engines_on_page)
    unused = 0 if SWAPPED in reading.gauges else 1
    return (per_engine - unused) * tokens if per_engine > 1 else None


def block_size(reading: EngineReading) -> float | None:
    """Tokens in a KV block."""
    return positive(reading.cache_config.get("block_size"))


def pool(args: EngineArgs, reading: EngineReading | None, engines_on_page: int) -> Pool:
    """``--kv-cache-memory-bytes`` is the pool itself, unless the number of blocks is overridden; else
    ``num_gpu_blocks``, which is the sum over a server's engines.
    """
    config = reading.cache_config if reading else {}
    overridden = "num_gpu_blocks_override" in args.explicit or "num_gpu_blocks_override" in config
    if args.kv_cache_memory_bytes and not overridden:
        return Pool(bytes=float(args.kv_cache_memory_bytes))
    blocks, size = positive(config.get("num_gpu_blocks")), positive(config.get("block_size"))
    if blocks is None or size is None:
        return Pool()
    return Pool(
        blocks=int(blocks) // max(1, engines_on_page), block_size=int(size), dtype=config.get("cache_dtype", "auto")
    )


V0_MAX_NUM_SEQS: Final = 256.0
KV_TRANSFER: Final = "kv_transfer_config"
_EXTRA: Final = "kv_connector_extra_config"
_SEVERAL: Final = "MultiConnector"
_TIERS: Final = (
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
    "MooncakeStoreConnector",
    "LMCacheMPConnector",
    "FlexKVConnectorV1",
)
SYNCHRONOUS: Final = (
    "LMCacheConnectorV1",
    "LMCacheConnector",
)  # load blocks within the step: nothing waits for them, nobody pulls them
STORES: Final = (*SYNCHRONOUS, *_TIERS, "HF3FSKVConnector", "ExampleConnector", "SharedStorageConnector")
"""A tier of one server, or a store that several share: no request waits for another server."""


def takes_lora(args: EngineArgs) -> bool:
    """Whether adapters are served, for whose slots requests may wait."""
    return "enable_lora" in args.values and (args.values["enable_lora"] or "").lower() != "false"


def kv_role(args: EngineArgs) -> str | None:
    """Role in KV transfer: kv_producer, kv_consumer or kv_both; "" = a connector without a visible role, ``None`` =
    no connector. Dynamo's mode takes precedence, because its workers name no role or kv_both.
    """
    mode, connectors = KV_ROLES.get(args.values.get("disaggregation_mode") or ""), _connectors(args)
    if mode is not None or not connectors:
        return mode
    return text(_deciding(connectors).get("kv_role"))


def _connectors(args: EngineArgs) -> list[Mapping[str, Any]]:
    """The connectors of ``--kv-transfer-config``, which is given as JSON or by field: those that a MultiConnector
    holds, else the one. Empty without the option.
    """
    options = tuple((name, value or "") for name, value in args.values.items() if name.partition(".")[0] == KV_TRANSFER)
    if not options:
        return []
    config = _transfer_config(options)
    if config.get("kv_connector") != _SEVERAL:
        return [config]
    inner = mappings(mapping(config.get(_EXTRA)).get("connectors"))
    return [{"kv_role": config.get("kv_role"), **connector} for connector in inner] or [config]


@lru_cache(maxsize=64)  # asked at every sample
def _transfer_config(options: tuple[tuple[str, str], ...]) -> Mapping[str, Any]:
    config: dict[str, Any] = {}
    for name, given in options:
        value = json_of(given[:MAX_TEXT]) or printed(given[:MAX_TEXT])
        holder, _, key = name.removeprefix(KV_TRANSFER).removeprefix(".").rpartition(".")
        if holder == _EXTRA:
            config[_EXTRA] = {**mapping(config.get(_EXTRA)), key: value}
        else:
            config |= {key: value} if key else mapping(value)
    return config


def _deciding(connectors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The connector that makes the server's role: the first with a peer, else one that may have a peer."""
    return min(connectors, key=lambda one: (True, None, False).index(_has_peer(one)))


def waits_for_blocks(args: EngineArgs) -> bool:
    """Whether requests may wait for other servers' KV blocks, or finished ones until others have pulled theirs; a
    cache beside one server (LMCache, role kv_both) does neither.
    """
    role = kv_role(args)
    beside = all(connector.get("kv_connector") in SYNCHRONOUS for connector in _connectors(args))
    return role is not None and not (role == "kv_both" and beside)


def tier(args: EngineArgs, reading: EngineReading | None) -> Tier:
    """The KV tier by the labels of its info metric (0.32), else by ``--kv-offloading-size`` in GiB or the connector's
    own setting.
    """
    config, counters = (reading.cache_config, reading.counters) if reading else ({}, {})
    connectors, given = _connectors(args), args.number("kv_offloading_size")
    holds = any(connector.get("kv_connector") in (*_TIERS, *SYNCHRONOUS) for connector in connectors)
    configured = True if given or holds or TIER_STORED in counters else None
    if configured is None and args.complete and kv_role(args) is None:
        configured = False
    blocks, tokens = positive(config.get("capacity_blocks")), positive(config.get("cpu_kv_cache_size_tokens"))
    if blocks and reading:
        return Tier(configured, blocks, block_size(reading))
    sizes = (positive(str(mapping(connector.get(_EXTRA)).get("cpu_bytes_to_use"))) for connector in connectors)
    stated = given * GIB if given else next(filter(None, sizes), None)
    if args.values.get("kv_offloading_backend") == "lmcache":
        stated = None  # its own server may have another size
    size = positive(config.get("cpu_kv_cache_size_bytes")) or stated
    return Tier(configured, size, tokens / size if tokens and size else None)


def tier_mistake(args: EngineArgs) -> str:
    """``--kv-offloading-backend`` alone switches nothing on."""
    alone = args.values.get("kv_offloading_backend") and args.is_explicit("kv_offloading_size") is False
    return "--kv-offloading-backend without --kv-offloading-size: no tier" if alone else ""


def features(args: EngineArgs, flavour: str | None, gauges: Sequence[str]) -> Features:
    """Features by the arguments, flavour and gauges. V0 allocates all blocks of a prompt at once; without chunked
    prefill a prompt is one step.
    """
    chunked = (args.values.get("enable_chunked_prefill") or "").lower()
    role, connectors = kv_role(args), _connectors(args)
    return Features(
        takes_lora(args) or LORA_MOMENT in gauges,
        role,
        waits_for_blocks(args),
        flavour == "v0" or SWAPPED in gauges or chunked == "false",
        role is not None and _has_peer({**(_deciding(connectors) if connectors else {}), "kv_role": role}),
    )


def _has_peer(connector: Mapping[str, Any]) -> bool | None:
    """Whether KV blocks are exchanged with other servers, by role and connector ("kv_both" is what tiers say, too)."""
    if connector.get("kv_role") in ("kv_producer", "kv_consumer"):
        return True
    name = text(connector.get("kv_connector"))
    return None if name in ("", _SEVERAL) else name not in STORES


def in_force(known: Known) -> dict[str, Limit]:
    """All known limits, from the best source: arguments, start-up log, metrics, default by version and GPU."""
    merged, gpu, facts = known.merged, known.gpu, known.facts
    config = known.reading.cache_config if known.reading else {}
    defaults = dict(
        default_limits(known.version, gpu.name if gpu else None, gpu.memory_total_bytes if gpu else None, known.flavour)
    )
    if known.flavour == "v0":
        defaults.setdefault("max_num_seqs", V0_MAX_NUM_SEQS)
    length = facts.get("max_model_len") or _max_model_len(config)
    values = limits_in_force(merged, defaults, length)
    found: dict[str, Limit] = {}
    for name in LIMITS:
        value = values.get(name)
        explicit = merged.is_explicit(name)
        if name == "max_num_batched_tokens" and "max_num_batched_tokens" in facts:
            value = facts[name]
        if name == "gpu_memory_utilization" and value is None:
            value = positive(config.get(name))
        if value is None:
            continue
        found[name] = Limit(name, value, explicit, _source(name, known, config, explicit))
    told = known.reading.gauges.get(RUNNING_LIMIT) if known.reading else None
    if told and "max_num_seqs" not in merged.explicit:
        found["max_num_seqs"] = Limit("max_num_seqs", told, merged.is_explicit("max_num_seqs"), "metrics")
    active, seqs = merged.max_num_active_seqs, found.get("max_num_seqs")
    if active is not None and (seqs is None or active < (seqs.value or inf)):  # it lowers the running batch
        source = known.args.source if "max_num_active_seqs" in known.args.explicit else "log"
        found["max_num_seqs"] = Limit("max_num_seqs", float(active), True, source)
    return found


def _source(name: str, known: Known, config: Mapping[str, str], explicit: bool | None) -> str:
    if name in known.args.explicit:
        return known.args.source
    if (known.logged is not None and name in known.logged.explicit) or name in known.facts:
        return "log"
    if name == "gpu_memory_utilization" and name in config:
        return "metrics"
    if name == "max_model_len" and explicit is not True:
        return "metrics"
    return "default"


def _max_model_len(config: Mapping[str, str]) -> float | None:
    """Capacity divided by vLLM's published maximum concurrency for max_model_len (0.24 and later)."""
    size, concurrency = positive(config.get("kv_cache_size_tokens")), positive(config.get("kv_cache_max_concurrency"))
    return float(round(size / concurrency)) if size and concurrency else None


# --- defaults ---------------------------------------------------------------------------------------------
#
# Source: the releases 0.5.5 to 0.33 (``vllm/engine/arg_utils.py``, ``vllm/config/*.py``). Where a change is only known
# to lie between two releases, a version in between gets no value.


@lru_cache(maxsize=64)
def default_limits(
    version: str | None, gpu_name: str | None, gpu_memory_bytes: float | None, flavour: str | None = None
) -> Mapping[str, float]:
    """A server's defaults of ``gpu_memory_utilization``, ``max_num_seqs`` and ``max_num_batched_tokens`` (missing =
    unknown).

    ``flavour``: "v0" or "v1", None = by version. ``gpu_name`` "cpu": the CPU backend.
    """
    number = parse_version(version)
    if number is None or number < (0, 5, 5):
        return {}
    utilization = 0.92 if number >= (0, 20, 0) else 0.90
    name = (gpu_name or "").lower()
    tokens, seqs = _UNKNOWN_PAIR
    if flavour == "v0" or (flavour is None and number < (0, 8, 0)):
        seqs = 256  # the token budget depends on max_model_len there
    elif number < (0, 8, 0):  # V1 as an option of 0.6.6 to 0.7.3
        tokens, seqs = 8192 if re.search(r"\bh[12]00\b", name) else 2048, 1024
    elif number < (0, 8, 5):
        pass  # was not compared
    elif name == "cpu":
        tokens, seqs = (2048, 128) if number >= (0, 33, 0) else _UNKNOWN_PAIR
    elif gpu_memory_bytes is not None:
        tokens, seqs = _tier(number, name, gpu_memory_bytes / GIB)
    limits = {"gpu_memory_utilization": utilization, "max_num_batched_tokens": tokens, "max_num_seqs": seqs}
    return {limit: float(value) for limit, value in limits.items() if value is not None}


_Pair = tuple[int | None, int | None]  # tokens, seqs
_UNKNOWN_PAIR: Final[_Pair] = (None, None)
_SMALL: Final[_Pair] = (2048, 256)
_LARGE: Final[_Pair] = (8192, 1024)


def _tier(number: Version, name: str, gib: float) -> _Pair:
    """Tiers by device memory (0.8.5 and later)."""
    if gib < 70:
        return _SMALL
    if "a100" in name:
        return _LARGE if number == (0, 8, 5) else _SMALL if number >= (0, 9, 1) else _UNKNOWN_PAIR
    if "gb10" in name and number >= (0, 33, 0):
        return _SMALL
    if gib >= 160 and number > (0, 26, 0):
        return 16384 if number >= (0, 29, 0) else None, 1024
    return _LARGE


def limits_in_force(
    args: EngineArgs, defaults: Mapping[str, float], max_model_len: float | None = None
) -> Mapping[str, float]:
    """Set values over defaults, with the adjustments that vLLM makes to defaults.

    ``max_model_len``: the context limit if known otherwise (e.g. from the metrics).
    """
    limits = dict(defaults)
    if args.values.get("performance_mode") == "throughput":
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if name in limits:
                limits[name] *= 2
    for name, value in (
        ("gpu_memory_utilization", args.gpu_memory_utilization),
        ("max_num_seqs", args.max_num_seqs),
        ("max_num_batched_tokens", args.max_num_batched_tokens),
        ("max_model_len", args.max_model_len or max_model_len),
    ):
        if value is not None:
            limits[name] = value
        elif name in args.explicit:
            limits.pop(name, None)  # set to something that cannot be read
    seqs, tokens = limits.get("max_num_seqs"), limits.get("max_num_batched_tokens")
    length = limits.get("max_model_len")
    if "max_num_batched_tokens" not in args.explicit and tokens is not None and length is not None:
        if args.values.get("enable_chunked_prefill") == "False":
            tokens = max(tokens, length)
        if seqs is not None:
            tokens = min(tokens, seqs * length)
        limits["max_num_batched_tokens"] = tokens
    if "max_num_seqs" not in args.explicit and seqs is not None and tokens is not None:
        limits["max_num_seqs"] = min(seqs, tokens)
    return limits
