"""What a wrong name was meant to be: the new name of a setting or alert, or the nearest name."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Final

#: beginning of an old name -> beginning of the new one
_BEGINNINGS: Final = {
    "collector.vllm": "collector.engines",
    "vllm.": "engine.",
    "--collector.vllm": "--collector.engines",
    "--no-collector.vllm": "--no-collector.engines",
    "--vllm.": "--engine.",
    "Vllm": "Inference",
}

#: thresholds that are gone, as patterns -> what decides now
_THRESHOLDS_GONE: Final = {
    "confidence_*": "confidence follows from the rule's grade",
    "verdict_enter_samples": "confidence follows from the rule's grade",
    "rules_*": "the intervals and limits of the rule groups are fixed",
    "notify_*": "your Alertmanager's configuration has these times",
    "flow_window_seconds": "recent_window_seconds has its place",
    "unseen_gap_seconds": "recent_window_seconds has its place",
    "queue_floor_seconds": "ttft_floor_seconds, which includes the queue, has its place",
    "ttft_objective_seconds": "objective_ttft_seconds has its place",
    "steps_slower_ratio": "latency_multiplied_ratio has its place",
    "at_limit_share_ratio": "most_ratio has its place",
    "wait_page_min_requests": "batch_collapse_min_requests has its place",
    "wait_page_for_seconds": "durations in the values file have its place",
    "gpu_fault_window_seconds": "crash_loop_window_seconds has its place",
    "stall_window_seconds": "counting_window_seconds, a constant, has its place",
    "scrape_check_seconds": "counting_window_seconds, a constant, has its place",
    "kill_window_seconds": "log_window_seconds has its place",
    "plateau_window_seconds": "it is half a minute",
    "kv_unrecorded_window_seconds": "it is half a minute",
    "traffic_min_requests": "one request is traffic",
    "dropped_min_requests": "it is one request",
    "kv_overcommit_warning_ratio": "it is 1",
    "objective_days_burn": "it is 1",
    "fleet_min_engines": "it is two engines",
    "baseline_rank_ratio": "the baseline is the median",
    "kv_warm_ratio": "most_ratio, a constant, has its place",
    "dram_busy_ratio": "most_ratio, a constant, has its place",
    "fleet_pressure_ratio": "most_ratio, a constant, has its place",
    "pressure_leave_seconds": "recent_window_seconds has its place",
    "verdict_unconfirmed_seconds": "kv_recent_seconds has its place",
    "queue_share_ratio": "most_ratio, a constant, has its place",
    "cpu_throttled_most_ratio": "most_ratio, a constant, has its place",
    "cpu_pressure_ratio": "most_ratio, a constant, has its place",
    "dropped_share_ratio": "most_ratio, a constant, has its place",
    "comparable_batch_ratio": "most_ratio, a constant, has its place",
    "preemption_match_*_ratio": "most_ratio, a constant, has its place",
    "batch_collapse_warning_ratio": "most_ratio, a constant, has its place",
    "hump_valley_ratio": "most_ratio, a constant, has its place",
    "throughput_collapsed_ratio": "most_ratio, a constant, has its place",
    "throughput_f*_ratio": "trend_change_ratio, a constant, has its place",
    "demand_rose_ratio": "trend_change_ratio, a constant, has its place",
    "host_min_requests": "several_min, a constant, has its place",
    "came_min_connections": "several_min, a constant, has its place",
    "kv_held_stretches": "several_min, a constant, has its place",
    "batch_min_samples": "values_min, a constant, has its place",
    "lengths_min_requests": "values_min, a constant, has its place",
    "kv_unrecorded_samples": "values_min, a constant, has its place",
    "api_cpu_cores": "container_limit_ratio has its place",
    "cpu_saturated_ratio": "container_limit_ratio has its place",
    "host_memory_limit_ratio": "container_limit_ratio has its place",
    "plugin_silent_seconds": "stale_page_seconds has its place",
    "kv_window_seconds": "it is a minute",
    "burst_min_seconds": "it is a minute",
    "baseline_every_seconds": "it is half a minute",
    "kv_forecast_seconds": "it is an hour",
    "longest_request_seconds": "it is an hour",
    "host_queue_utilization_ratio": "signature_utilization_ratio has its place",
    "max_num_batched_tokens_cut_ratio": "max_num_seqs_cut_max_ratio has its place",
    "thrashing_preemptions_per_running_minute": "it is 1",
    "prefill_usual_ratio": "latency_rising_ratio, a constant, has its place",
    "dram_ramp_ratio": "it is half of most_ratio",
}


def threshold_gone(name: str) -> str | None:
    """What decides in place of the threshold ``name`` now; ``None`` for a name that never was one."""
    return next((now for old, now in _THRESHOLDS_GONE.items() if fnmatchcase(name, old)), None)


def renamed(name: str, known: Collection[str]) -> str | None:
    """What ``name`` is called now; ``None`` if it is no old name of one of ``known``."""
    for old, new in _BEGINNINGS.items():
        if name.startswith(old) and (found := new + name.removeprefix(old)) in known:
            return found
    return None


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name that a misspelt ``word`` probably meant; ``None`` if none is close. ``cutoff``: 1 = equal."""
    import difflib  # needed after a mistake only

    return next(iter(difflib.get_close_matches(word[:100], list(known), 1, cutoff)), None)
