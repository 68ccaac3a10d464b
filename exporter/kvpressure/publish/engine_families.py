"""One engine as samples.

An engine that is down keeps what it is (``engine_up`` 0, ``engine_info``, its GPUs), what is concluded about it
(verdict, conditions, evidence: a crash loop shows just then) and its configured limits; everything measured is
absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvpressure import readings as r
from kvpressure.publish.families import Families, Labels, clean
from kvpressure.signals.model import Signals
from kvpressure.signals.score import LEVELS
from kvpressure.state import STAGES, VERDICTS, Diagnosis, EngineState

_REJECTED_STATUS: Final = ("4xx", "5xx")


def add_engine(out: Families, engine: EngineState) -> None:
    """Everything that is published about ``engine``."""
    key = engine.key
    labels = (clean(key.namespace), clean(key.pod), clean(key.model_name), clean(key.engine))
    out.add("engine_up", labels, engine.up)
    out.add(
        "engine_info",
        (*labels, clean(engine.version), clean(engine.flavour), clean(engine.container), clean(engine.target)),
        1,
    )
    for uuid in engine.gpus:
        out.add("engine_gpu_info", (*labels, clean(uuid)), 1)
    _add_diagnosis(out, labels, engine.diagnosis)
    _add_limits(out, labels, engine)
    if engine.up:
        _add_kv(out, labels, engine.signals)
        _add_score(out, labels, engine.signals)
        _add_batch(out, labels, engine.signals)
        _add_load(out, labels, engine.signals)
        _add_shape(out, labels, engine.signals)
        _add_latency(out, labels, engine.signals)
        _add_memory(out, labels, engine.signals)
        _add_counters(out, labels, engine.counters)


def _add_diagnosis(out: Families, labels: Labels, diagnosis: Diagnosis) -> None:
    out.states("verdict", labels, VERDICTS, diagnosis.verdict)
    out.add("verdict_confidence", labels, diagnosis.confidence)
    out.add("verdict_since_timestamp_seconds", labels, diagnosis.since)
    out.states("pressure_stage", labels, STAGES, diagnosis.stage)
    out.each("evidence", labels, {name: evidence.value for name, evidence in diagnosis.evidence.items()})
    out.each("condition", labels, diagnosis.conditions)
    out.each("documented_signature", labels, diagnosis.documented_signature)
    out.add("documented_signature_met", labels, diagnosis.documented_signature_met)


def _add_limits(out: Families, labels: Labels, engine: EngineState) -> None:
    for name, limit in engine.limits.items():
        one = (*labels, clean(name))
        out.add("limit", one, limit.value)
        out.add("limit_explicit", one, limit.explicit)
        out.add("limit_recommended", one, limit.recommended)


def _add_kv(out: Families, labels: Labels, signals: Signals) -> None:
    kv = signals.kv
    for name, value in (
        ("kv_cache_used_ratio", kv.kv_used_ratio),
        ("kv_cache_used_ratio_max", kv.kv_used_ratio_max),
        ("kv_cache_capacity_tokens", kv.kv_capacity_tokens),
        ("kv_cache_used_tokens", kv.kv_used_tokens),
        ("kv_cache_usage_slope_per_second", kv.kv_slope_per_second),
        ("kv_cache_seconds_to_full", kv.kv_seconds_to_full),
        ("kv_overcommit_ratio", kv.kv_overcommit_ratio),
        ("preemption_rate", kv.preemption_rate),
        ("recomputed_tokens_estimate_rate", kv.recomputed_tokens_rate),
        ("prefix_cache_hit_ratio", kv.prefix_hit_ratio),
    ):
        out.add(name, labels, value)


def _add_score(out: Families, labels: Labels, signals: Signals) -> None:
    compute = signals.compute
    out.add("memory_high_compute_low_score", labels, compute.memory_high_compute_low_score)
    out.each(
        "score_factor",
        labels,
        {
            "memory": compute.score_memory_factor,
            "compute": compute.score_compute_factor,
            "demand": compute.score_demand_factor,
        },
    )
    out.states("score_evidence_level", labels, LEVELS, compute.activity_level)


def _add_batch(out: Families, labels: Labels, signals: Signals) -> None:
    batch = signals.batch
    out.each("effective_batch_size", labels, {"0.5": batch.batch_p50, "0.95": batch.batch_p95, "0.99": batch.batch_p99})
    out.add("effective_batch_size_mean", labels, batch.batch_mean)
    out.add("batch_collapse_ratio", labels, batch.batch_collapse_ratio)
    out.histogram("running_requests", labels, batch.running_histogram, batch.running_samples_sum)


def _add_load(out: Families, labels: Labels, signals: Signals) -> None:
    load, throughput, progress = signals.load, signals.throughput, signals.progress
    out.add("requests_running", labels, load.running)
    out.each(
        "requests_waiting",
        labels,
        {"all": load.waiting, "capacity": load.waiting_capacity, "deferred": load.waiting_deferred},
    )
    out.add("requests_in_flight", labels, load.in_flight)
    out.each("max_concurrent_requests", labels, load.limits)
    out.add("concurrency_ratio", labels, load.concurrency_ratio)
    out.add("arrival_burst_ratio", labels, load.arrival_burst_ratio)
    out.each(
        "tokens_per_second",
        labels,
        {"prompt": throughput.prompt_tokens_per_second, "generation": throughput.generation_tokens_per_second},
    )
    out.add("throughput_trend_ratio", labels, throughput.throughput_trend_ratio)
    out.add("engine_progressing", labels, progress.progressing if progress.work_present else None)


def _add_shape(out: Families, labels: Labels, signals: Signals) -> None:
    context = signals.context
    out.each("context_length_tokens", labels, {"max_5m": context.context_max_5m, "mean": context.context_mean})
    out.add("context_length_spike_ratio", labels, context.context_spike_ratio)
    for kind, quantiles in (
        ("prompt", context.prompt_quantiles),
        ("output", context.output_quantiles),
        ("max_tokens", context.max_tokens_quantiles),
    ):
        out.each("request_tokens", (*labels, kind), quantiles)
    out.add("request_shape_two_humps", labels, context.two_humps)
    out.each("stream_seconds", labels, context.stream_quantiles)


def _add_latency(out: Families, labels: Labels, signals: Signals) -> None:
    latency = signals.latency
    for phase, quantiles in (
        ("ttft", latency.ttft),
        ("inter_token", latency.inter_token),
        ("e2e", latency.e2e),
        ("queue", latency.queue),
    ):
        out.each("latency_seconds", (*labels, phase), quantiles)
    out.each("latency_baseline_ratio", labels, latency.baseline_ratios)
    out.add("outside_engine_seconds", labels, latency.outside_engine_seconds)


def _add_memory(out: Families, labels: Labels, signals: Signals) -> None:
    """Reserved, allocated and their difference by scope.

    allocator: torch's own numbers. kv_pool: the pool against its blocks in use. kv_block: blocks in use against
    the tokens in them.
    """
    memory = signals.memory
    waste, pool_used = memory.kv_block_waste_bytes, memory.kv_pool_used_bytes
    in_blocks = None if waste is None or pool_used is None else pool_used - waste
    for scope, reserved, allocated in (
        ("allocator", memory.allocator_reserved_bytes, memory.allocator_allocated_bytes),
        ("kv_pool", memory.kv_pool_bytes, pool_used),
        ("kv_block", pool_used, in_blocks),
    ):
        out.add("memory_reserved_bytes", (*labels, scope), reserved)
        out.add("memory_allocated_bytes", (*labels, scope), allocated)
        if reserved is not None and allocated is not None:
            out.add("fragmentation_bytes", (*labels, scope), max(0.0, reserved - allocated))
    out.each("memory_component_bytes", labels, memory.components)


def _add_counters(out: Families, labels: Labels, counters: Mapping[str, float]) -> None:
    out.add("preemptions_total", labels, counters.get(r.PREEMPTIONS))
    out.add("prompt_tokens_total", labels, counters.get(r.PROMPT_TOKENS))
    out.add("generation_tokens_total", labels, counters.get(r.GENERATION_TOKENS))
    for name, value in counters.items():
        if name.startswith(r.FINISHED_PREFIX):
            out.add("requests_finished_total", (*labels, clean(name.removeprefix(r.FINISHED_PREFIX))), value)
        elif name.startswith(r.REJECTED_PREFIX):
            out.add("requests_rejected_total", (*labels, clean(name.removeprefix(r.REJECTED_PREFIX))), value)
        elif name.removeprefix(r.HTTP_PREFIX) in _REJECTED_STATUS:
            out.add("requests_rejected_total", (*labels, f"http_{name.removeprefix(r.HTTP_PREFIX)}"), value)
