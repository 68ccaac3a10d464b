"""Findings that triage, common problems and the checklist show, and that nothing is judged by."""

from __future__ import annotations

from typing import Final

from kvpressure.diagnosis.finding import NO_GPU, Finding, View, allocation_failures, at_least, when_known

FEW_REQUESTS: Final = 5.0  # guide "Finding the KV Cache Problem": "OOM crash with 5 concurrent requests"
_NONE_FINISHED: Final = "no request finished in the last 5 minutes, or no histograms of lengths"


def _waits(v: View, level: str) -> bool | None:
    """Whether p95 time to first token or in the queue reaches a threshold; ``None`` without both."""
    phases = (v.s.latency.ttft, v.s.latency.queue)
    known = [phase["0.95"] >= v.t[level] for phase in phases if "0.95" in phase]
    return any(known) if known else None


def _oom_with_few(v: View) -> bool | None:
    failures = allocation_failures(v)
    if not failures:
        return None if failures is None else False
    in_flight, spike = v.s.load.in_flight, v.s.context.context_spike_ratio
    few = in_flight is not None and in_flight <= FEW_REQUESTS
    return few or (spike is not None and spike >= v.t["context_spike_ratio"])


SHOWN: Final = (
    Finding(
        "context_spike",
        "the longest request is at least {context_spike_ratio} the mean",
        "the longest request is below {context_spike_ratio} the mean",
        at_least("context_spike", "context_spike_ratio"),
        "longest {context_longest} tokens, {context_spike} the mean",
        _NONE_FINISHED,
        "length of the longest request",
    ),
    Finding(
        "arrivals_bursty",
        "requests arrive in bursts",
        "requests do not arrive in bursts",
        at_least("arrival_burst", "arrival_burst_ratio_high"),
        "busiest 10 s {arrival_burst} the mean rate (a burst from {arrival_burst_ratio_high})",
        "too few requests",
        "arrival bursts",
    ),
    Finding(
        "kv_overcommitted",
        "the load may need more than the KV cache holds",
        "the load cannot need more than the KV cache holds",
        when_known(lambda _, ratio: ratio >= 1, "kv_overcommit"),
        "highest token demand {requests_reached} requests × {context_mean} tokens, {kv_overcommit} the KV capacity of"
        " {kv_capacity_tokens} tokens",
        "request lengths or the KV capacity are unknown",
        "highest token demand",
    ),
    Finding(
        "prompt_lengths_bimodal",
        "short and long requests share this server",
        "prompt lengths of the last minutes form one group",
        lambda v: v.s.context.bimodal_prompts,
        why="too few prompts",
        question="groups of prompt lengths",
    ),
    Finding(
        "memory_required_high",
        "at least {memory_warning_ratio} of GPU memory is required",
        "less than {memory_warning_ratio} of GPU memory is required",
        at_least("gpu_memory_needed", "memory_warning_ratio"),
        "{gpu_memory_needed} used without free KV blocks",
        f"{NO_GPU}, or the size of a KV pool on it is unknown",
        "required GPU memory",
    ),
    Finding(
        "waits_long",
        "the first token takes {ttft_floor_seconds} or longer, in the queue or in all",
        "the first token takes less than {ttft_floor_seconds}, as does the queue",
        lambda v: _waits(v, "ttft_floor_seconds"),
        "p95 time to first token {ttft_p95}, in the queue {queue_p95}",
        "no latency histograms, or no token",
        "time that users wait",
    ),
    Finding(
        "waits_very_long",
        "users wait {wait_page_seconds} or longer",
        "users wait less than {wait_page_seconds}",
        lambda v: _waits(v, "wait_page_seconds"),
        "p95 time to first token {ttft_p95}, in the queue {queue_p95}",
        "no latency histograms, or no token",
        "time that users wait",
    ),
    Finding(
        "oom_with_few_requests",
        "memory ran out with few requests, or after a long one",
        "memory did not run out with few requests",
        _oom_with_few,
        "{allocation_failures} allocation failures logged, {in_flight} requests in flight, longest request"
        " {context_longest} tokens",
        "no log read",
        "allocation failures with few requests",
    ),
)
