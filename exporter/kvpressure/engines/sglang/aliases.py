"""Sample names of all SGLang releases, mapped to the canonical names of ``readings``.

The scheduler updates its gauges after a prefill batch and every 40 decode steps; the tokenizer process writes tokens,
requests and latencies for the whole server, without a rank. Sources: releases 0.4.1 to 0.5.23; captures under
``tests/fixtures/sglang``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from kvpressure.engines.base import Family, SampleName, counter, gauge, table
from kvpressure.model import ceilings
from kvpressure.model import readings as r
from kvpressure.model.readings import EngineReading, PageText

PREFIXES: Final = ("sglang:", "sglang_", "ray_sglang:", "ray_sglang_")
SERIES_PATTERN: Final = "(ray_)?sglang[:_].+"
SERIES_LABELS: Final = frozenset(
    {
        "engine_type",
        "tp_rank",
        "pp_rank",
        "dp_rank",
        "moe_ep_rank",
        "priority",
        "is_streaming",
        "cache_source",
        "mode",
        "pool",
        "reason",
        "stage",
    }
)
REPEATED_BY: Final = frozenset({"tp_rank", "moe_ep_rank"})  # with --enable-metrics-for-all-schedulers
CONFIG_LABELS: Final = frozenset({"page_size", "num_pages"})
CONTEXT: Final = "context_length"  # gauge of the context limit, from 0.5.14

# Requests that wait for something else than KV: a grammar, or the other half of a prefill/decode pair. One spelling has
# one family, for they add up and no release has two of the same.
DEFERRED_QUEUES: Final = {
    "num_grammar_queue_reqs": r.WAITING_DEFERRED,
    "num_prefill_prealloc_queue_reqs": r.LOADS_TO_START,  # to 0.5.9
    "num_prefill_bootstrap_queue_reqs": r.LOADS_TO_START,  # from 0.5.14; for the decode server's handshake and slots
    "num_prefill_infight_queue_reqs": r.LOADS,  # to 0.4.9
    "num_prefill_inflight_queue_reqs": r.LOADS,  # from 0.5.2
    "num_decode_prealloc_queue_reqs": r.LOADS_TO_START,  # for the handshake, then for slots
    "num_decode_transfer_queue_reqs": r.LOADS,
    "num_decode_host_receive_queue_reqs": r.LOADS,
}
_COUNTED_TOO: Final = {
    r.LOADS: r.WAITING_DEFERRED,
    r.LOADS_TO_START: r.WAITING_DEFERRED,
    r.WAITING_DEFERRED: r.WAITING,
}


def _queue(name: str, meaning: str) -> Family:
    return Family("gauge", (name,), meaning, ceiling=ceilings.REQUESTS, join="sum", also=_COUNTED_TOO)


def _transfers(meaning: str, name: str, scale: float = 1.0) -> Family:
    return Family("counter", (name,), meaning, scale=scale, ceiling=ceilings.WORK, join="sum")


def _stages(part: str, **values: str) -> Family:
    """A part of the histogram of the stages of a request, by stage."""
    name = f"per_stage_req_latency_seconds_{part}"  # 0.5.4
    return Family("counter", (name,), label="stage", values=values, ceiling=ceilings.WORK, join="sum")


def _of_server(kind: str, canonical: str, *names: str) -> Family:
    """A metric that the tokenizer process counts for all engines of the server; parts by ``is_streaming`` (0.5.23)
    add up.
    """
    return Family(
        "histogram" if kind == "histogram" else "counter",
        names,
        canonical,
        per_server=True,
        join="sum",
        copies=("is_streaming", "cache_source"),
    )


FAMILIES: Final = (
    gauge(r.RUNNING, "num_running_reqs"),
    Family("gauge", ("num_queue_reqs",), r.WAITING, ceiling=ceilings.REQUESTS, join="sum"),
    *(_queue(name, meaning) for name, meaning in DEFERRED_QUEUES.items()),
    gauge(r.LOADS_KV, "prealloc_full_token_usage", ceiling=ceilings.RATIO),
    _stages("count", prefill_transfer_kv_cache=r.TRANSFERS, decode_transferred=r.TRANSFERS),
    _stages("sum", prefill_transfer_kv_cache=r.TRANSFER_SECONDS),  # decode's is from when a slot is free, prefill in it
    _transfers(r.TRANSFER_BYTES, "kv_transfer_total_mb_sum", 2.0**20),  # prefill, where the backend reports bytes
    _transfers(r.TRANSFERS_FAILED, "num_transfer_failed_reqs"),  # both sides
    _transfers(r.TRANSFERS_FAILED, "num_bootstrap_failed_reqs"),
    gauge(r.STEP_OUTPUT, "spec_accept_length"),
    gauge(r.KV_USAGE, "token_usage", ceiling=ceilings.RATIO),
    gauge(r.KV_CAPACITY, "max_total_num_tokens", ceiling=ceilings.COUNT),  # 0.5.6
    gauge(CONTEXT, "context_len", ceiling=ceilings.COUNT),  # 0.5.14
    counter(r.PREEMPTIONS, "num_retracted_requests", "total_retracted_reqs"),  # the old one a gauge, 0.4.9 to 0.5.2
    Family(
        "counter",
        ("realtime_tokens",),
        label="mode",
        values={
            "prefill_compute": r.PROMPT_TOKENS_COMPUTED,
            "prefill_cache": r.PREFIX_HITS,
            "decode": r.GENERATION_TOKENS,
        },
        join="sum",
        also={r.PROMPT_TOKENS_COMPUTED: r.PREFIX_QUERIES, r.PREFIX_HITS: r.PREFIX_QUERIES},
    ),  # 0.5.9; moves while requests run
    _of_server("histogram", r.TTFT, "time_to_first_token_seconds"),
    _of_server("histogram", r.INTER_TOKEN, "inter_token_latency_seconds"),  # 0.4.6; the older one is no time of a step
    _of_server("histogram", r.E2E, "e2e_request_latency_seconds"),
    Family("histogram", ("queue_time_seconds", "queue_time_s"), r.QUEUE),
    _of_server("histogram", r.REQUEST_PROMPT, "prompt_tokens_histogram"),
    _of_server("histogram", r.REQUEST_OUTPUT, "generation_tokens_histogram"),
    Family("config", ("cache_config_info",)),
    Family("counter", ("hicache_backup_tokens",), label="pool", values={"kv": r.TIER_STORED}),
    Family("counter", ("load_back_tokens",), label="pool", values={"kv": r.TIER_LOADED}),
    counter(r.TIER_STORED_PREFIX + "disk", "backuped_tokens"),
    counter(r.TIER_LOADED_PREFIX + "disk", "prefetched_tokens"),
    Family(
        "counter",
        ("hicache_dropped_tokens",),
        label="reason",
        values={"host_pressure": r.TIER_REFUSED},
        join="sum",
        copies=("pool", "pid"),
    ),
    gauge(r.TIER_USED, "hicache_host_used_tokens", ceiling=ceilings.COUNT),
    gauge(r.TIER_SIZE, "hicache_host_total_tokens", ceiling=ceilings.COUNT),
    Family(
        "counter",
        ("prefill_effective_tokens",),
        label="mode",
        values={f"{where}_hit": r.CACHED_PREFIX + where for where in ("device", "host", "storage")},
    ),
)
AT_END: Final = (
    _of_server("counter", r.PROMPT_TOKENS, "prompt_tokens"),
    _of_server("counter", r.GENERATION_TOKENS, "generation_tokens"),
    _of_server("counter", r.FINISHED_PREFIX + "any", "num_requests"),
)
"""Counters that are updated when a request ends; those above with the same canonical name take precedence."""

SAMPLES: Final[Mapping[str, SampleName]] = {
    **{name: replace(sample, age=1) for name, sample in table("sglang", AT_END, PREFIXES).items()},
    **table("sglang", FAMILIES, PREFIXES),
}


def identify(labels: Mapping[str, str]) -> tuple[str | None, str | None]:
    """(model, engine) of a series; the engine is its data-parallel rank and pipeline stage.

    (None, None) for parts by priority (the total has an empty one) and repetitions by further tensor-parallel ranks.
    With data-parallel attention that rank differs between engines and is ignored.
    """
    rank, stage = labels.get("dp_rank"), labels.get("pp_rank") or "0"
    if labels.get("priority") or (rank is None and labels.get("tp_rank", "0") != "0"):
        return None, None
    named = rank is not None or "pp_rank" in labels
    return labels.get("model_name"), "/".join(
        [rank or "0", *([f"pp{stage}"] if stage != "0" else [])]
    ) if named else None


def flavour(text: PageText, _engines: Sequence[EngineReading]) -> str | None:
    """The half of a prefill/decode pair by the label ``engine_type``: unified, prefill or decode (0.4.6 and later)."""
    halves = ("prefill", "decode", "unified")
    return next((half for half in halves if b'engine_type="%b"' % half.encode() in text), None)
