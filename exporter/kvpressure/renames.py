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

#: alert -> those whose place it took
_ALERTS_MERGED: Final = {
    "InferenceSlow": "InferenceQueueTimeHigh InferenceRequestsWaitTooLong InferenceTimeToFirstTokenHigh"
    " InferenceTokenLatencyHigh",
    "InferenceStalled": "InferenceEngineStalled",
    "InferenceKVCachePressure": "InferenceModelKVPressure",
}

#: threshold or constant -> those whose place it took
_THRESHOLDS_MERGED: Final = {
    "recent_window_seconds": "flow_window_seconds pressure_leave_seconds unseen_gap_seconds",
    "kv_recent_seconds": "verdict_unconfirmed_seconds",
    "stale_page_seconds": "plugin_silent_seconds",
    "ttft_floor_seconds": "queue_floor_seconds",
    "objective_ttft_seconds": "ttft_objective_seconds",
    "latency_multiplied_ratio": "steps_slower_ratio",
    "latency_rising_ratio": "prefill_usual_ratio",
    "batch_collapse_min_requests": "wait_page_min_requests",
    "container_limit_ratio": "api_cpu_cores cpu_saturated_ratio host_memory_limit_ratio",
    "signature_utilization_ratio": "host_queue_utilization_ratio",
    "max_num_seqs_cut_max_ratio": "max_num_batched_tokens_cut_ratio",
    "crash_loop_window_seconds": "gpu_fault_window_seconds",
    "log_window_seconds": "kill_window_seconds",
    "counting_window_seconds": "scrape_check_seconds stall_window_seconds",
    "most_ratio": "at_limit_share_ratio batch_collapse_warning_ratio comparable_batch_ratio cpu_pressure_ratio"
    " cpu_throttled_most_ratio dram_busy_ratio dram_ramp_ratio dropped_share_ratio fleet_pressure_ratio"
    " hump_valley_ratio kv_warm_ratio preemption_match_high_ratio preemption_match_low_ratio queue_share_ratio"
    " throughput_collapsed_ratio",
    "trend_change_ratio": "demand_rose_ratio throughput_fell_ratio throughput_flat_ratio",
    "several_min": "came_min_connections host_min_requests kv_held_stretches",
    "values_min": "batch_min_samples kv_unrecorded_samples lengths_min_requests",
}

#: thresholds that are gone, as patterns -> what holds now
_THRESHOLDS_GONE: Final = {
    "confidence_*": "confidence follows from the rule's grade",
    "verdict_enter_samples": "confidence follows from the rule's grade",
    "rules_*": "the intervals and limits of the rule groups are fixed",
    "no_traffic_quiet_ratio": "InferenceNoTraffic is gone",
    "notify_*": "your Alertmanager's configuration has these times",
    "wait_page_for_seconds": "use durations in the values file",
    "baseline_rank_ratio": "the baseline is the median",
    "fleet_min_engines": "it is two engines",
    "traffic_min_requests": "it is one request",
    "dropped_min_requests": "it is one request",
    "kv_overcommit_warning_ratio": "it is 1",
    "objective_days_burn": "it is 1",
    "capacity_lost_ratio": "a pod that does not serve is counted, and no share",
    "thrashing_preemptions_per_running_minute": "it is 1",
    "kv_window_seconds": "it is a minute",
    "burst_min_seconds": "it is a minute",
    "baseline_every_seconds": "it is half a minute",
    "plateau_window_seconds": "it is half a minute",
    "kv_unrecorded_window_seconds": "it is half a minute",
    "kv_forecast_seconds": "it is an hour",
    "longest_request_seconds": "it is an hour",
}


def threshold_gone(name: str, settable: Collection[str]) -> str | None:
    """What holds in place of the threshold ``name`` now; ``None`` for a name that never was one. ``settable``: the
    thresholds that there are.
    """
    for now, merged in _THRESHOLDS_MERGED.items():
        if name in merged.split():
            return f"{now} has its place" if now in settable else "it is a fixed number"
    return next((now for old, now in _THRESHOLDS_GONE.items() if fnmatchcase(name, old)), None)


def renamed(name: str, known: Collection[str]) -> str | None:
    """What ``name`` is called now; ``None`` if it is no old name of one of ``known``."""
    for old, new in (*_BEGINNINGS.items(), ("", "")):
        now = new + name.removeprefix(old)
        merged = next((alert for alert, former in _ALERTS_MERGED.items() if now in former.split()), now)
        if name.startswith(old) and merged != name and merged in known:
            return merged
    return None


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The name that a misspelt ``word`` probably meant; ``None`` if none is close. ``cutoff``: 1 = equal."""
    import difflib  # needed after a mistake only

    return next(iter(difflib.get_close_matches(word[:100], list(known), 1, cutoff)), None)
