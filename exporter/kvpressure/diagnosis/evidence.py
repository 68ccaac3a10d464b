"""Named evidence: each a yes, a no, or not known, with a sentence that carries the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvpressure.diagnosis import oom
from kvpressure.signals.kv import full_from
from kvpressure.signals.logevents import ALLOCATION_EVENTS
from kvpressure.signals.model import ComputeSignals, ProgressSignals, Signals
from kvpressure.signals.score import PROFILING
from kvpressure.state import Evidence
from kvpressure.thresholds import Thresholds

NOT_KNOWN: Final = "not known"
PERCENT: Final = 100
SLOW: Final = "timeout"  # the reason of a page that did not come in time


class Recent:
    """What the last seconds of samples looked like, beyond the newest one."""

    __slots__ = ("samples", "waiting_mean", "waiting_share")

    def __init__(self, waiting: Sequence[float]) -> None:
        self.samples = len(waiting)
        self.waiting_share = sum(1 for value in waiting if value > 0) / len(waiting) if waiting else None
        self.waiting_mean = sum(waiting) / len(waiting) if waiting else None


def gather(s: Signals, recent: Recent, t: Thresholds) -> dict[str, Evidence]:
    """All evidence about one engine now. ``recent`` says what most of the last samples looked like."""
    found = [*_cache(s, recent, t), *_queue(s, recent, t), *_flow(s, t), *_gpu(s, t), *_host(s, t), *_harm(s, t)]
    return {item.name: item for item in found}


def _number(value: float | None, digits: int = 0) -> str:
    return NOT_KNOWN if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A ratio as people read it."""
    return NOT_KNOWN if value is None else f"{value * PERCENT:.0f} %"


def _compare(value: float | None, at_least: float) -> bool | None:
    return None if value is None else value >= at_least


def _cache(s: Signals, recent: Recent, t: Thresholds) -> list[Evidence]:
    kv, load = s.kv, s.load
    peak = kv.kv_used_ratio_recent_max
    full_level = full_from("kv_full_ratio", kv.kv_watermark_ratio, t)
    near_level = full_from("kv_near_full_ratio", kv.kv_watermark_ratio, t)
    full, near = _compare(peak, full_level), _compare(peak, near_level)
    recorded = "KV usage is not recorded" if kv.kv_recorded is False else "KV usage is not known"
    level = recorded if peak is None else f"KV cache used {percent(kv.kv_used_ratio)}, at most {percent(peak)} lately"
    filling = (
        None
        if peak is None
        else (kv.kv_seconds_to_full is not None and kv.kv_seconds_to_full <= t["kv_seconds_to_full_warning"])
    )
    counted, silent = kv.preemptions_counted, kv.preemptions_silent
    preempting = None
    if counted is not None or silent is not None:
        preempting = max(counted or 0.0, silent or 0.0) >= t["preemptions_min"]
    sign = None if silent is None else silent >= t["preemptions_min"]
    room = _room_text(s)
    return [
        Evidence("kv_full", full, f"{level} (full from {percent(full_level)})"),
        Evidence("kv_near_full", near, f"{level} (near full from {percent(near_level)})"),
        Evidence("kv_near_full_now", _compare(kv.kv_used_ratio, near_level), level),
        Evidence(
            "kv_filling",
            filling,
            "KV cache is full in "
            + (
                f"{kv.kv_seconds_to_full:.0f} s at the present slope"
                if kv.kv_seconds_to_full is not None
                else "no foreseeable time"
            ),
        ),
        Evidence("head_of_line_blocked", _blocked(s, recent, t, _long_prompt(s)), room),
        Evidence("mean_prompt_blocked", _blocked(s, recent, t, s.context.prompt_mean), room),
        Evidence("any_prompt_fits", _any_fits(s, t), room),
        Evidence(
            "preempting",
            preempting,
            f"preemptions in the last minute: {_number(counted)} counted, {_number(silent)} by the immediate sign",
        ),
        Evidence(
            "preempting_now",
            _compare(kv.preemptions_recent, t["preemptions_min"]),
            f"{_number(kv.preemptions_recent)} preemptions in the last seconds",
        ),
        Evidence(
            "running_falls_waiting_rises",
            sign,
            f"{_number(silent)} requests went from running back to waiting while nothing finished",
        ),
        Evidence(
            "running_at_limit",
            load.running_at_limit,
            f"{_number(load.running)} running of max_num_seqs "
            f"{_number(load.max_num_seqs)} ({load.max_num_seqs_source or 'limit not known'})",
        ),
        Evidence(
            "running_stands_still",
            load.running_stands_still,
            f"{_number(load.running)} have been running for a while, no more and no fewer"
            if load.running_stands_still
            else f"{_number(load.running)} run",
        ),
    ]


def _long_prompt(s: Signals) -> float | None:
    """The prompt that only one in twenty exceeds: vLLM admits a request when its whole prompt fits, and one that does not
    fit holds up all behind it.
    """
    return s.context.prompt_quantiles.get("0.95", s.context.prompt_mean)


def _free(s: Signals) -> float | None:
    """Tokens of the cache that were free for a new request at its fullest lately."""
    kv = s.kv
    if kv.kv_used_ratio_recent_max is None or kv.kv_capacity_tokens is None:
        return None
    return max(0.0, 1.0 - (kv.kv_watermark_ratio or 0.0) - kv.kv_used_ratio_recent_max) * kv.kv_capacity_tokens


def _blocked(s: Signals, recent: Recent, t: Thresholds, prompt: float | None) -> bool | None:
    """Such a prompt does not fit into the free blocks although the cache is not full. Below the usual level only where
    vLLM says that requests wait for capacity.
    """
    kv = s.kv
    if kv.kv_used_ratio_recent_max is None or recent.waiting_share is None:
        return None
    warm = kv.kv_used_ratio_recent_max >= t["kv_head_of_line_ratio"] or (s.load.waiting_capacity or 0.0) > 0
    if not warm or recent.waiting_share < 1.0:
        return False
    free = _free(s)
    return None if free is None or prompt is None else free < prompt


def _any_fits(s: Signals, t: Thresholds) -> bool | None:
    """Whether the cache has room for whatever prompt is next: the long ones that were seen, and from half full on one as
    long as the server allows, because the one that blocks has not been seen yet.
    """
    free, long, kv = _free(s), _long_prompt(s), s.kv
    if free is None or (long is None and s.context.context_limit is None):
        return None
    if long is not None and free < long:
        return False
    if s.context.context_limit is None or (kv.kv_used_ratio_recent_max or 0.0) < t["kv_warm_ratio"]:
        return True
    return free >= s.context.context_limit


def _room_text(s: Signals) -> str:
    free = _free(s)
    if free is None:
        return "free room in tokens is not known"
    return (
        f"free room {free:.0f} tokens, mean prompt {_number(s.context.prompt_mean)}, p95 {_number(_long_prompt(s))}, "
        f"at most {_number(s.context.context_limit)} tokens"
    )


def _queue(s: Signals, recent: Recent, t: Thresholds) -> list[Evidence]:
    load = s.load
    queue = None
    if recent.waiting_share is not None:
        queue = recent.waiting_share >= t["queue_share_ratio"] and (load.waiting or 0.0) > 0
    for_capacity = None
    if queue is not None:
        deferred_only = (
            load.waiting_deferred is not None and load.waiting is not None and load.waiting_deferred >= load.waiting > 0
        )
        for_capacity = queue and not deferred_only
        if queue and load.waiting_deferred is None and (load.lora or load.waits_for_blocks):
            for_capacity = (
                None  # vLLM before 0.20 does not tell what waits for a LoRA slot or for KV blocks from elsewhere
            )
    text = f"{_number(load.waiting)} requests wait, {_number(load.running)} run"
    return [
        Evidence("queue_present", queue, text),
        Evidence(
            "queue_short",
            _short(s, recent, t),
            f"{_number(recent.waiting_mean, 1)} of {_number(load.running)} wait, p95 of the "
            f"queue time {_number(s.latency.queue.get('0.95'), 2)} s",
        ),
        Evidence(
            "waited_lately",
            None if recent.waiting_share is None else recent.waiting_share > 0,
            f"mean queue of the last seconds {_number(recent.waiting_mean, 1)}",
        ),
        Evidence(
            "queue_for_capacity",
            for_capacity,
            text + ("" if load.waiting_deferred is None else f" ({_number(load.waiting_deferred)} deferred)"),
        ),
    ]


def _short(s: Signals, recent: Recent, t: Thresholds) -> bool | None:
    """Whether those that wait are few and wait a moment only, as some always do between two steps of a busy engine.
    ``None`` where nobody tells how long the few wait.
    """
    seconds, running = s.latency.queue.get("0.95"), s.load.running
    if running is None or recent.waiting_mean is None:
        return None
    if recent.waiting_mean >= t["calm_queue_ratio"] * running:
        return False
    return None if seconds is None else seconds < t["queue_short_seconds"]


def _flow(s: Signals, t: Thresholds) -> list[Evidence]:
    progress, flow = s.progress, s.throughput
    stuck = progress.seconds_without_progress
    prefill = None
    prompt, generated = flow.prompt_tokens_per_second, flow.generation_tokens_per_second
    computed = flow.prompt_tokens_computed_per_second
    if computed is None and s.load.kv_role in (None, "kv_producer"):
        computed = prompt
    if computed is not None and generated is not None:
        prefill = computed > 0 and computed >= t["prefill_tokens_ratio"] * generated
    rates = f"{_number(prompt)} prompt and {_number(generated)} generated tokens/s"
    cached = ""
    if computed is None and prompt is not None:
        cached = " (how many of the prompt's were computed here is not known)"
    elif computed != prompt:
        cached = f" ({_number(computed)} of the prompt's computed, the rest was cached)"
    return [
        _page(progress, t),
        Evidence("work_present", progress.work_present, f"{_number(s.load.in_flight)} requests in flight"),
        Evidence("tokens_flow", progress.tokens_flow, rates),
        Evidence("tokens_lately", progress.tokens_lately, rates),
        Evidence(
            "no_progress",
            None if stuck is None else stuck >= t["no_progress_seconds"],
            f"work is present and no token, finished request or step with output came for {_number(stuck)} s"
            if stuck
            else "tokens or finished requests came lately",
        ),
        Evidence("prefill_dominates", prefill, rates + cached),
        Evidence("clients_came", progress.connections_came, "clients have come since something last came out"),
        Evidence(
            "engine_asleep",
            progress.asleep,
            "the engine is "
            + ("asleep" if progress.asleep else "awake" if progress.asleep is False else "not known to sleep"),
        ),
    ]


def _page(progress: ProgressSignals, t: Thresholds) -> Evidence:
    """Whether there is a page that tells of now. A single answer that comes too late says that the server is slow; any
    other failure, or a second one, that nobody may be there, however young the last page is.
    """
    if progress.fresh_seconds is None:
        why = f": {progress.page_error}" if progress.page_error else ""
        return Evidence("page_fresh", None, f"no page was ever read{why}")
    failing = int(progress.pages_failing or 0)
    gone = failing > (1 if progress.page_error == SLOW else 0)
    text = f"newest page is {progress.fresh_seconds:.0f} s old"
    if failing:
        text += (
            f", the last {failing} attempts to read one failed"
            if failing > 1
            else ", the last attempt to read one failed"
        )
        text += f" ({progress.page_error or NOT_KNOWN})"
    return Evidence("page_fresh", not gone and progress.fresh_seconds <= t["stale_page_seconds"], text)


def _gpu(s: Signals, t: Thresholds) -> list[Evidence]:
    gpu = s.compute
    starved, saturated, text = _activity(gpu, t)
    low, high = gpu.gpu_utilization_low, gpu.gpu_utilization_high
    used = gpu.gpu_utilization
    waits = None if used is None else used < t["host_queue_utilization_ratio"]
    idle = None if used is None else used <= t["gpu_idle_ratio"]
    if gpu.gpus_shared and low is not None and high is not None:
        waits = _of_some(low < t["host_queue_utilization_ratio"], high < t["host_queue_utilization_ratio"])
        idle = _of_some(low <= t["gpu_idle_ratio"], high <= t["gpu_idle_ratio"])
        starved = _of_some(low < t["gpu_starved_ratio"], starved)
        saturated = _of_some(
            saturated or high >= t["compute_bound_utilization_ratio"], low >= t["compute_bound_utilization_ratio"]
        )
        text += f" (between {percent(low)} and {percent(high)}; which of them this engine uses is not known)"
    works = _works(gpu, t)
    if gpu.gpus_of_others:  # what the card does is at most what this engine does on it, and may be none of it
        starved, waits, idle = starved or None, waits or None, idle or None
        saturated, works = (False if said is False else None for said in (saturated, works))
        text += " (other pods have it too; how much of it is this engine's is not known)"
    return [
        Evidence("gpu_starved", starved, f"{text} (starved below {percent(t['gpu_starved_ratio'])})"),
        Evidence("gpu_saturated", saturated, text),
        Evidence("gpu_works", works, text),
        Evidence("gpu_utilization_low", waits, text),
        Evidence("gpu_idle", idle, text),
    ]


def _of_some(any_card: bool | None, every_card: bool | None) -> bool | None:
    """What holds for the cards of one engine, if nobody says which of all these they are."""
    if every_card:
        return True
    return None if any_card else any_card


def _activity(gpu: ComputeSignals, t: Thresholds) -> tuple[bool | None, bool | None, str]:
    """Starved, saturated, and the numbers: by profiling where it is, else by all of the rest.

    Without profiling only utilization proves a starved GPU (no kernel ran): small models at their best draw little power
    and have little work, so that much of either disproves it and little says nothing. Saturated is what any of them says;
    a small estimate alone does not disprove it.
    """
    if gpu.activity_level == PROFILING and gpu.tensor_activity is not None:
        busiest = max(gpu.tensor_activity, gpu.dram_activity or 0.0, gpu.sm_activity or 0.0)
        return (
            busiest < t["gpu_starved_ratio"],
            gpu.tensor_activity >= t["tensor_busy_ratio"] or (gpu.dram_activity or 0.0) >= t["dram_busy_ratio"],
            f"tensor activity {percent(gpu.tensor_activity)}, SM {percent(gpu.sm_activity)}, DRAM "
            f"{percent(gpu.dram_activity)}",
        )
    used, power, work = gpu.gpu_utilization, gpu.power_ratio, gpu.estimated_peak_ratio
    busiest_card = used if gpu.gpu_utilization_high is None else gpu.gpu_utilization_high
    parts = (
        (used, "NVML utilization {}"),
        (power, "power {} of the limit"),
        (work, "estimated work {} of the card's peak"),
    )
    text = ", ".join(form.format(percent(value)) for value, form in parts if value is not None)
    starved = None if busiest_card is None else busiest_card < t["gpu_starved_ratio"]
    if used is None and (_compare(power, t["power_starved_ratio"]) or _compare(work, t["gpu_starved_ratio"])):
        starved = False
    saturated = None if used is None and power is None else False
    if (
        _compare(used, t["compute_bound_utilization_ratio"])
        or _compare(power, t["power_prefill_ratio"])
        or _compare(work, t["dram_busy_ratio"])
    ):
        saturated = True
    return starved, saturated, text or "GPU activity is not known"


def _works(gpu: ComputeSignals, t: Thresholds) -> bool | None:
    """Whether the GPU works hard by what it does: busy units, power, or vLLM's estimate; a duty cycle does not tell."""
    if gpu.activity_level == PROFILING:
        parts = ((gpu.tensor_activity, "tensor_busy_ratio"), (gpu.dram_activity, "dram_busy_ratio"))
    else:
        parts = ((gpu.power_ratio, "power_prefill_ratio"), (gpu.estimated_peak_ratio, "dram_busy_ratio"))
    known = [value >= t[least] for value, least in parts if value is not None]
    return any(known) if known else None


def _host(s: Signals, t: Thresholds) -> list[Evidence]:
    host, latency = s.host, s.latency
    outside = (
        None
        if latency.outside_engine_share is None
        else latency.outside_engine_share >= t["outside_engine_share_ratio"]
    )
    api = _compare(host.api_cpu_cores, t["api_cpu_cores"])
    return [
        Evidence(
            "cpu_throttled",
            _compare(host.cpu_throttled_ratio, t["cpu_throttled_ratio"]),
            f"{percent(host.cpu_throttled_ratio)} of CFS periods throttled",
        ),
        Evidence(
            "cpu_contended",
            _compare(host.cpu_pressure_ratio, t["cpu_pressure_ratio"]),
            f"something waited for a CPU {percent(host.cpu_pressure_ratio)} of the time",
        ),
        Evidence(
            "cpu_saturated",
            _compare(host.cpu_used_ratio, t["cpu_saturated_ratio"]),
            f"CPU used {percent(host.cpu_used_ratio)} of its limit",
        ),
        Evidence("api_server_saturated", api, f"API server uses {_number(host.api_cpu_cores, 2)} cores"),
        Evidence(
            "outside_engine_time",
            outside,
            f"{percent(latency.outside_engine_share)} of end-to-end time is spent outside the engine",
        ),
    ]


def _harm(s: Signals, t: Thresholds) -> list[Evidence]:
    worst = max(s.latency.baseline_ratios.items(), key=lambda item: item[1], default=None)
    text = (
        "latency against baseline is not known"
        if worst is None
        else f"{worst[0]} p95 is {worst[1]:.1f} times its baseline"
    )
    allocation, fell = sum(s.events.get(name, 0) for name in ALLOCATION_EVENTS), s.throughput.throughput_trend_ratio
    return [
        Evidence(
            "latency_multiplied", _compare(None if worst is None else worst[1], t["latency_multiplied_ratio"]), text
        ),
        Evidence(
            "throughput_fell",
            None if fell is None else fell <= t["throughput_collapsed_ratio"],
            f"generation is {percent(fell)} of the best minute lately with no more requests",
        ),
        Evidence(
            "allocation_failure_logged",
            allocation > 0 if s.events_known else None,
            f"{allocation} allocation failures in the log lately",
        ),
        Evidence(
            "restarted_recently",
            None if s.host.restarts_recent is None else s.host.restarts_recent > 0,
            ("" if s.host.restarts_all_known or s.host.restarts_recent is None else "at least ")
            + f"{_number(s.host.restarts_recent)} restarts in half an hour",
        ),
        oom.evidence(s, t),
    ]
