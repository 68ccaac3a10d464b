"""Facts: the findings that rules read, each with the numbers in its sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvpressure.diagnosis.finding import NO_GPU, Finding, View, any_of, at_least, free_tokens, long_prompt, when_known
from kvpressure.model.arguments import OF_PROCESS
from kvpressure.signals.kv import full_from
from kvpressure.signals.requests import slow_phases
from kvpressure.signals.window import QUARTER_HOUR

SLOW: Final = "timeout"  # the reason of a page that did not come in time


def _reached(_: View, usage: float, level: float) -> bool:
    return usage >= level


def _trickle(v: View) -> bool | None:
    """Whether running requests get almost no tokens. A finished request counts as a token, because embeddings
    generate none.
    """
    tokens = v.s.throughput.generation_tokens_per_running
    finished = v.s.throughput.finished_per_second
    running = v.s.load.running
    if tokens is None or not running:
        return None
    return tokens + (finished or 0.0) / running < v.t["trickle_tokens_per_second"]


def _prefill_hidden(v: View) -> bool | None:
    """Whether blocks are allocated far faster than tokens are generated: vLLM books a prompt at its first token."""
    rise, capacity, output = (
        v.s.kv.kv_slope_per_second,
        v.s.kv.kv_capacity_tokens,
        v.s.throughput.generation_tokens_per_second,
    )
    if rise is None or output is None or (rise > 0 and capacity is None):
        return None
    return rise > 0 and rise * (capacity or 0.0) >= v.t["prefill_tokens_ratio"] * max(output, 1.0)


def _preempting(v: View) -> bool | None:
    counted, silent = v.s.kv.preemptions_counted, v.s.kv.preemptions_inferred
    if counted is None and silent is None:
        return None
    return max(counted or 0.0, silent or 0.0) >= v.t["preemptions_min"]


def _source_is(*sources: str) -> Callable[[View], bool | None]:
    return lambda v: None if v.s.load.max_num_seqs_source is None else v.s.load.max_num_seqs_source in sources


def _can_block(v: View) -> bool:
    """Whether KV usage is high enough to block a prompt, or vLLM reports requests waiting for capacity."""
    return (v.s.kv.kv_used_ratio_recent_max or 0.0) >= v.t["kv_head_of_line_ratio"] or (
        v.s.load.waiting_capacity or 0.0
    ) > 0


def _blocked(v: View, prompt: float | None) -> bool | None:
    """Whether such a prompt does not fit into the free blocks although the cache is not full. Below
    ``kv_head_of_line_ratio`` only where vLLM reports requests waiting for capacity.
    """
    peak, share = v.s.kv.kv_used_ratio_recent_max, v.recent.waiting_share
    if peak is None or share is None:
        return None
    if not _can_block(v) or share < 1.0:
        return False
    free = free_tokens(v)
    return None if free is None or prompt is None else free < prompt


def _any_fits(v: View) -> bool | None:
    """Whether any next prompt fits: long ones as seen, and in a warm cache one as long as the server allows, because
    the blocking one has not been seen yet.
    """
    s = v.s
    free, long, limit = free_tokens(v), long_prompt(v), s.context.context_limit
    if free is None or (long is None and limit is None):
        return None
    if long is not None and free < long:
        return False
    if limit is None or (s.kv.kv_used_ratio_recent_max or 0.0) < v.t["most_ratio"]:
        return True
    return free >= limit


def _queue(v: View) -> bool | None:
    share = v.recent.waiting_share
    return None if share is None else share >= v.t["most_ratio"] and (v.s.load.waiting or 0.0) > 0


def _answers_slow(v: View) -> bool | None:
    """Whether a phase of latency is slow beside its baseline."""
    if any(slow.usual is not None for slow in slow_phases(v.s, v.t)):
        return True
    return False if v.s.latency.usual else None


_uses_a_core: Final = at_least("api_server_cores", "container_limit_ratio")


def _is_felt(v: View) -> bool:
    """Whether users notice the time outside the engine, the engine lacks work meanwhile, or the API server can do no
    more; True where the first two are unknown.
    """
    seconds = v.s.latency.outside_engine_seconds
    felt = seconds is None or seconds >= v.t["objective_ttft_seconds"]
    return felt or v.recent.ran_out is not False or _uses_a_core(v) is True


def queue_short(v: View) -> bool | None:
    """Whether no request waits, or few and only briefly, as between two steps of a busy engine. ``None`` without queue
    times.
    """
    seconds, running, mean = v.s.latency.queue.get("0.95"), v.s.load.running, v.recent.waiting_mean
    if running is None or mean is None:
        return None
    if mean == 0:
        return True
    if mean >= v.t["calm_queue_ratio"] * running:
        return False
    return None if seconds is None else seconds < v.t["queue_short_seconds"]


def waited(v: View) -> bool | None:
    """Whether requests waited in the recent samples; that none did is known only from several."""
    share = v.recent.waiting_share
    return True if share else _none_in_several(v)


def _many_waited(v: View) -> bool | None:
    """Whether more than a few waited in a recent sample; that none did is known only from several."""
    most, running = v.recent.waiting_most, v.s.load.running
    if most is None or running is None:
        return None
    return True if _many(v, most, running) else _none_in_several(v)


def _none_in_several(v: View) -> bool | None:
    """False if no recent sample shows it and several samples, however far apart, are without a queue, else unknown."""
    return False if v.recent.samples >= v.t["values_min"] or v.recent.newest_waited is False else None


def for_capacity(v: View) -> bool | None:
    """Whether requests wait for capacity; unknown where vLLM before 0.20 does not separate waiting for a LoRA slot or
    for KV blocks from elsewhere.
    """
    queue = _queue(v)
    return _capacity_now(v) if queue else queue


def _capacity_now(v: View) -> bool | None:
    load = v.s.load
    if not load.waiting:
        return None if load.waiting is None else False
    if load.waiting_deferred is None:
        return None if load.lora or load.waits_for_blocks else True
    return not (load.waiting is not None and load.waiting_deferred >= load.waiting > 0)


def _deferred_fill(v: View) -> bool | None:
    """Whether running plus deferred requests reach max_num_seqs, at which vLLM admits nothing; false without deferred
    ones.
    """
    load = v.s.load
    if not load.waiting_deferred:
        return None if load.waiting_deferred is None else False
    if load.running is None or load.max_num_seqs is None:
        return None
    return load.running + load.waiting_deferred >= load.max_num_seqs


def _fresh(v: View) -> bool | None:
    """Whether the metrics describe the server now. One timeout means a slow server; any other failure, or a second
    one, may mean that it is gone, however young the last scrape.
    """
    progress = v.s.progress
    if progress.fresh_seconds is None:
        return None
    gone = int(progress.pages_failing or 0) > (1 if progress.page_error == SLOW else 0)
    return not gone and progress.fresh_seconds <= v.t["stale_page_seconds"]


def _seen_or(v: View, found: bool) -> bool | None:
    """What was found about the pod's GPUs; unknown rather than false where none is read."""
    return found or (None if v.gpu.unseen else False)


def held_for_others(v: View) -> bool | None:
    """Whether KV blocks may be held for a server that has yet to pull them: hardly anything runs here."""
    load = v.s.load
    held = load.waits_for_blocks and load.kv_role != "kv_consumer"
    return held and (load.running or 0.0) < v.t["several_min"]


def of_pair(holds: Callable[[View], bool | None]) -> Callable[[View], bool | None]:
    """What can hold only on a server that exchanges KV blocks with others; false on any other."""
    return lambda v: v.s.load.has_peer and holds(v)


def _waits_for_peer(v: View) -> bool | None:
    """Whether most waiting requests wait for KV blocks from elsewhere; where these are not told apart, all deferred
    ones do, unless adapters are served.
    """
    load, moves = v.s.load, v.s.transfers
    loading = load.waiting_deferred if moves.loads is None else moves.loads + (moves.loads_to_start or 0.0)
    if not load.waiting or loading is None or (moves.loads is None and load.lora):
        return None if load.waiting != 0 else False
    return loading >= v.t["most_ratio"] * load.waiting


def _loads_hold(v: View) -> bool | None:
    """Whether the KV cache would not be nearly full without the blocks that are on their way."""
    used, held = v.s.kv.kv_used_ratio, v.s.transfers.loads_kv_ratio
    if used is None or held is None:
        return None
    level = full_from("kv_near_full_ratio", v.s.kv.kv_watermark_ratio, v.t)
    return used >= level > used - held


def _many(v: View, waiting: float, running: float) -> bool:
    """Whether so many waiting requests are more than the few between two steps of a busy engine."""
    return waiting > 1 + v.t["calm_queue_ratio"] * running


_NO_PROGRESS_KNOWN: Final = "no requests in flight, or the engine publishes no token counters"
_NOT_SHOWN: Final = "the metrics endpoint does not show it"
_TOO_FEW: Final = "too few samples"
_NO_PREEMPTIONS: Final = "no counter, and no queue movement to infer them from"
_NO_CGROUP: Final = "the container's cgroup was not read"
_QUEUE: Final = "{waiting} waiting ({waiting_deferred} deferred), {running} running"
_ROOM: Final = (
    "{free_tokens} tokens free, mean prompt {prompt_mean} tokens, p95 prompt {prompt_p95} tokens,"
    " {max_model_len} {context_limit}"
)
_BLOCKED: Final = (
    f"{_ROOM}, recent peak {{kv_used_ratio_recent_max}}, requests waiting in {{waiting_share}} of the samples"
)
_LIMIT: Final = "{running} running now, limit {request_limit}, {limit_source}"
_GPU: Final = (
    "tensor activity {tensor_activity}, SM {sm_activity}, DRAM {dram_activity}, NVML utilization {gpu_utilization},"
    " between {gpu_lowest} and {gpu_highest} on the GPUs that may be this engine's, power {power} of the limit,"
    " estimated work {estimated_peak} of the GPU's peak, {gpu_of_others}"
)
_GPU_UNCLEAR: Final = f"{_GPU}, {{gpu_unclear}}"

FACTS: Final[tuple[Finding, ...]] = (
    # --- the KV cache
    Finding(
        "kv_full",
        "the KV cache is full",
        "the KV cache is not full",
        when_known(_reached, "kv_used_ratio_recent_max", "kv_full"),
        "recent peak {kv_used_ratio_recent_max} (full at {kv_full}), {kv_used_ratio} now",
        "{kv_why}",
        "KV cache usage",
    ),
    Finding(
        "kv_near_full",
        "the KV cache is full or nearly full",
        "the KV cache is not nearly full",
        when_known(_reached, "kv_used_ratio_recent_max", "kv_near_full"),
        "recent peak {kv_used_ratio_recent_max} (threshold {kv_near_full}), {kv_used_ratio} now",
        "{kv_why}",
        "KV cache usage",
    ),
    Finding(
        "kv_near_full_now",
        "the KV cache is full or nearly full now",
        "the KV cache is not nearly full now",
        when_known(_reached, "kv_used_ratio", "kv_near_full"),
        "{kv_used_ratio} (threshold {kv_near_full})",
        "{kv_why}",
        "KV cache usage",
    ),
    Finding(
        "kv_warm",
        "the KV cache is at least half full",
        "the KV cache is less than half full",
        at_least("kv_used_ratio_recent_max", "most_ratio"),
        "recent peak {kv_used_ratio_recent_max}, {kv_used_ratio} now",
        "{kv_why}",
        "KV cache usage",
    ),
    Finding(
        "kv_free_beside_queue",
        "requests waited while most of the KV cache was free",
        "requests did not wait while most of the KV cache was free",
        when_known(lambda v, used: used < v.t["most_ratio"], "kv_used_ratio_waiting"),
        "{kv_used_ratio_waiting} used on average in the samples of {recent_window_seconds} with a queue",
        "no request waited, or KV usage is unknown",
        "KV cache usage while requests wait",
    ),
    Finding(
        "kv_rising",
        "KV cache usage is rising",
        "KV cache usage is not rising",
        lambda v: None if v.s.kv.kv_slope_per_second is None else v.s.kv.kv_slope_per_second > 0,
        why="too few samples of KV cache usage",
    ),
    Finding(
        "head_of_line_blocked",
        "a prompt of p95 length is too long for the free KV cache",
        "prompts of p95 length do not wait for KV cache",
        lambda v: _blocked(v, long_prompt(v)),
        _BLOCKED,
        needs=("kv_used_ratio_recent_max", "kv_capacity_tokens", "long_prompt", "waiting_share"),
    ),
    Finding(
        "mean_prompt_blocked",
        "a prompt of average length is too long for the free KV cache",
        "prompts of average length do not wait for KV cache",
        lambda v: _blocked(v, v.s.context.prompt_mean),
        _BLOCKED,
        needs=("kv_used_ratio_recent_max", "kv_capacity_tokens", "prompt_mean", "waiting_share"),
    ),
    Finding(
        "any_prompt_fits",
        "every prompt fits into the KV cache",
        "the next prompt may not fit into the KV cache",
        _any_fits,
        _ROOM,
        needs=("kv_used_ratio_recent_max", "kv_capacity_tokens", "longest_prompt"),
    ),
    Finding(
        "waits_for_blocks",
        "requests may wait for KV blocks from elsewhere",
        "no request waits for KV blocks from elsewhere",
        lambda v: v.s.load.waits_for_blocks,
        question="exchange of KV blocks with other servers",
    ),
    Finding(
        "blocks_held_for_others",
        "KV blocks of finished prompts may be waiting for a decode server to fetch them",
        "no KV blocks of finished prompts are waiting for a decode server to fetch them",
        held_for_others,
        question="whether KV blocks of finished prompts are waiting for a decode server to fetch them",
    ),
    Finding(
        "waits_for_peer",
        "most waiting requests wait for the other server of the pair",
        "most waiting requests wait for something else than the other server of the pair",
        of_pair(_waits_for_peer),
        "{loads} on their way, {loads_to_start} wait to be, {waiting} waiting",
        "the engine does not tell why they wait",
    ),
    Finding(
        "loads_hold_cache",
        "the KV cache is nearly full because of blocks that are on their way from another server",
        "the KV cache is not nearly full, or not because of blocks that are on their way",
        of_pair(_loads_hold),
        "{kv_used_ratio} used, {loads_kv} of the cache on the way",
        "the engine does not report it",
    ),
    # --- reuse of the KV cache
    Finding(
        "prefill_repeated",
        "prompts are computed again after their KV blocks were evicted",
        "hardly any prompt is computed again after its KV blocks were evicted",
        at_least("prefill_repeated", "hit_ratio_usual_ratio"),
        "{prefill_repeated} of the computed prompt tokens (threshold {hit_ratio_usual_ratio}),"
        " hit ratio {hit_ratio} now and {hit_ratio_twice} with twice the KV memory,"
        " evicted after {kept_seconds} and wanted after {wanted_seconds}",
        "only the server's KV events show it: --engine.target '…;kv-events=tcp://HOST:PORT'",
    ),
    Finding(
        "evicted_before_reuse",
        "KV blocks are evicted about as early as they are wanted again",
        "KV blocks are wanted again long before they are evicted",
        when_known(lambda v, kept, wanted: wanted >= v.t["most_ratio"] * kept, "kept_seconds", "wanted_seconds"),
        "evicted after {kept_seconds}, wanted after {wanted_seconds}",
        "needs KV events, or the ages of evicted blocks",
    ),
    Finding(
        "few_cache_hits",
        "some prompt tokens come from the prefix cache, and most are computed",
        "most prompt tokens come from the prefix cache, or none",
        when_known(lambda v, hits: 0 < hits < v.t["most_ratio"], "hit_ratio"),
        "hit ratio {hit_ratio} over 5 minutes",
        "nothing was looked up, or prefix caching is off",
        "prefix cache hits",
    ),
    Finding(
        "cache_turns_over",
        "the KV cache is overwritten within a quarter of an hour",
        "the KV cache is not overwritten within a quarter of an hour",
        when_known(lambda _, kept: kept <= QUARTER_HOUR, "kept_seconds"),
        "an unused block stays for {kept_seconds}",
        "KV usage, KV capacity or token counters: unknown",
        "how long unused KV blocks stay",
    ),
    Finding(
        "first_token_long",
        "users wait {ttft_floor_seconds} or longer for the first token",
        "users wait less than {ttft_floor_seconds} for the first token",
        at_least("ttft_p95", "ttft_floor_seconds"),
        "p95 {ttft_p95}",
        "no first token in the last minute",
        "time to first token",
    ),
    # --- preemptions
    Finding(
        "preempting",
        "requests were {preempted} in the last minute",
        "fewer than {preemptions_min} requests were {preempted} in the last minute",
        _preempting,
        "{preemptions_counted} in {engine}'s counter, {preemptions_inferred} inferred from queue movement",
        _NO_PREEMPTIONS,
        "{preemptions} in the last minute",
    ),
    Finding(
        "preempting_now",
        "requests were {preempted} in the last {recent_window_seconds}",
        "fewer than {preemptions_min} requests were {preempted} in the last {recent_window_seconds}",
        at_least("preemptions_recent", "preemptions_min"),
        "{preemptions_recent}",
        question="{preemptions} in the last {recent_window_seconds}",
        why=_NO_PREEMPTIONS,
    ),
    Finding(
        "preempted_recently",
        "requests were {preempted} in the last 30 s",
        "fewer than {preemptions_min} requests were {preempted} in the last 30 s",
        at_least("preemptions_recently", "preemptions_min"),
        "{preemptions_recently}",
        question="{preemptions} in the last 30 s",
        why=_NO_PREEMPTIONS,
    ),
    Finding(
        "preemptions_borne_out",
        "the engine itself counted {preemptions}",
        "the engine itself counted fewer than {preemptions_min} {preemptions}",
        at_least("preemptions_counted", "preemptions_min"),
        "{preemptions_counted}",
        "the metrics endpoint has no such counter",
        "{preemptions} by the engine's counter",
    ),
    Finding(
        "preempting_much",
        "{preemptions} per running request reach 1 a minute",
        "{preemptions} per running request are below 1 a minute",
        when_known(lambda _, ratio: ratio >= 1, "preemptions_per_running"),
        "{preemptions_per_running} a minute on average",
        question="{preemptions} per running request",
        why=_NO_PREEMPTIONS,
    ),
    # --- the sequence limit
    Finding(
        "running_at_limit",
        "{max_num_seqs} was reached for most of the last {recent_window_seconds}",
        "{max_num_seqs} was reached only briefly or not at all in the last {recent_window_seconds}",
        lambda v: v.s.load.running_at_limit,
        _LIMIT,
        question="whether {max_num_seqs} is reached",
        needs=("running", "request_limit"),
        why="too few samples",
    ),
    Finding(
        "running_at_limit_now",
        "{max_num_seqs} is reached now",
        "{max_num_seqs} is not reached now",
        lambda v: v.s.load.running_at_limit_now,
        _LIMIT,
        needs=("running", "request_limit"),
        why="too few samples",
    ),
    Finding(
        "running_far_below",
        "running requests stayed far below {max_num_seqs} for half a minute",
        "running requests did not stay far below {max_num_seqs} for half a minute",
        when_known(lambda v, most, limit: most <= v.t["most_ratio"] * limit, "running_most", "request_limit"),
        "at most {running_most} running, limit {request_limit}, {limit_source}",
        needs=("running_most", "request_limit"),
    ),
    Finding(
        "limit_is_stated",
        "{max_num_seqs} is set explicitly",
        "{max_num_seqs} is in neither the arguments nor the log",
        _source_is("args", OF_PROCESS, "log"),
        "limit {request_limit}, {limit_source}",
        question="source of {max_num_seqs}",
        why="the limit itself is unknown",
    ),
    Finding(
        "limit_is_observed",
        "{max_num_seqs} is inferred from the number of running requests",
        "{max_num_seqs} is known",
        _source_is("observed"),
        "limit {request_limit}, {limit_source}",
        question="source of {max_num_seqs}",
        why="the limit itself is unknown",
    ),
    Finding(
        "running_plateau",
        "running requests come back to one maximum while others wait and KV blocks are free",
        "no sign of a hidden limit on running requests",
        lambda v: v.s.load.running_plateau,
        "{running} running",
        question="running requests",
        why="no requests in flight, or too few samples",
    ),
    Finding(
        "something_runs",
        "requests are running",
        "no request is running",
        any_of("running"),
        question="running requests",
        why=_NOT_SHOWN,
    ),
    Finding(
        "several_run",
        "several requests are running ({several_min} or more)",
        "fewer than {several_min} requests are running",
        at_least("running", "several_min"),
        "{running} running",
        question="running requests",
        why=_NOT_SHOWN,
    ),
    # --- the token budget of a step
    Finding(
        "step_budget_used",
        "steps use up their token budget",
        "steps do not use up their token budget",
        when_known(
            lambda v, tokens, budget: tokens >= v.t["step_tokens_full_ratio"] * budget, "step_tokens", "step_limit"
        ),
        "{step_tokens} tokens a step, {max_num_batched_tokens} {step_limit}",
        question="whether steps use up their token budget ({max_num_batched_tokens})",
        needs=("step_tokens", "step_limit"),
    ),
    Finding(
        "steps_small",
        "steps compute fewer than {max_num_batched_tokens_floor} tokens, and no larger budget is known",
        "steps compute {max_num_batched_tokens_floor} tokens or more, or their budget allows it",
        when_known(
            lambda v, tokens: max(tokens, v.s.load.max_num_batched_tokens or 0.0) < v.t["max_num_batched_tokens_floor"],
            "step_tokens",
        ),
        "{step_tokens} tokens a step",
        "the engine does not count its steps, or no output token came in the last half minute",
        "tokens in a step",
    ),
    # --- the queue
    Finding(
        "queue_present",
        "requests are waiting",
        "no queue has built up",
        _queue,
        _QUEUE,
        question="waiting requests",
        why=_NOT_SHOWN,
    ),
    Finding(
        "waiting_now",
        "requests are waiting now",
        "no request is waiting now",
        any_of("waiting"),
        _QUEUE,
        question="waiting requests",
        why=_NOT_SHOWN,
    ),
    Finding(
        "many_wait_now",
        "many requests are waiting now",
        "few or no requests are waiting now",
        when_known(_many, "waiting", "running"),
        _QUEUE,
        needs=("waiting", "running"),
    ),
    Finding(
        "many_waited_recently",
        "many requests waited in the last {recent_window_seconds}",
        "few or no requests waited in the last {recent_window_seconds}",
        _many_waited,
        "at most {waiting_most}",
        question="number of requests waiting in the last {recent_window_seconds}",
        needs=("waiting_share", "running"),
        why=_TOO_FEW,
    ),
    Finding(
        "queue_unbroken",
        "requests waited in every sample of the last {recent_window_seconds}",
        "requests did not wait in every sample of the last {recent_window_seconds}",
        lambda v: None if v.recent.samples < v.t["values_min"] else v.recent.waiting_share == 1.0,
        "{waiting_mean} on average",
        question="waiting requests in the last {recent_window_seconds}",
        why=_TOO_FEW,
    ),
    Finding(
        "queue_short",
        "the queue is short",
        "the queue is long or slow",
        queue_short,
        "{waiting_mean} waiting on average, {running} running, p95 queue time {queue_p95}",
        needs=("running", "waiting_share", "queue_p95"),
    ),
    Finding(
        "waited_recently",
        "requests waited in the last {recent_window_seconds}",
        "no request waited in the last {recent_window_seconds}",
        waited,
        "{waiting_mean} on average",
        question="waiting requests in the last {recent_window_seconds}",
        needs=("waiting_share",),
        why=_TOO_FEW,
    ),
    Finding(
        "queue_for_capacity",
        "requests are waiting for capacity",
        "no request is waiting for capacity",
        for_capacity,
        _QUEUE,
        needs=("waiting", "waiting_share"),
        why="{deferred_where}",
    ),
    Finding(
        "queue_for_capacity_now",
        "requests are waiting for capacity now",
        "no request is waiting for capacity now",
        _capacity_now,
        _QUEUE,
        needs=("waiting",),
        why="{deferred_where}",
    ),
    Finding(
        "deferred_fill_limit",
        "running and deferred requests together reach {max_num_seqs}",
        "running and deferred requests together are below {max_num_seqs}",
        _deferred_fill,
        f"{_QUEUE}, {{max_num_seqs}} {{request_limit}}",
        why="{deferred_where}",
        needs=("running", "request_limit"),
    ),
    # --- metrics and progress
    Finding(
        "page_fresh",
        "the metrics are fresh",
        "the metrics are stale",
        _fresh,
        "last successful scrape {fresh_seconds} ago, {failing}",
        "{never_scraped}",
    ),
    Finding(
        "page_young",
        "the last scrape is less than {lately_seconds} old",
        "the last scrape is {lately_seconds} old or older",
        when_known(lambda v, age: age < v.t["lately_seconds"], "fresh_seconds"),
        "{fresh_seconds}",
        question="age of the last scrape",
        why="never scraped",
    ),
    Finding(
        "scrape_failing",
        "the last scrape failed",
        "the last scrape succeeded",
        lambda v: None if v.s.progress.pages_failing is None else v.s.progress.pages_failing > 0,
        "{scrape_error}",
        question="result of the last scrape",
        why="never scraped",
    ),
    Finding(
        "first_reading",
        "there has been only one scrape so far",
        "there have been several scrapes",
        lambda v: None if v.readings is None else v.readings <= 1,
        why="not counted",
        question="number of scrapes",
    ),
    Finding(
        "work_present",
        "requests are in flight",
        "no requests are in flight",
        lambda v: v.s.progress.work_present,
        "{running} running, {waiting} waiting",
        question="requests in flight",
        why=_NOT_SHOWN,
    ),
    Finding(
        "tokens_flow",
        "tokens are being produced",
        "no token was produced in the last {recent_window_seconds}",
        lambda v: v.s.progress.tokens_flow,
        "{prompt_tokens} prompt tokens/s, {output_tokens} output tokens/s over 30 s",
        "no second scrape, or no token counters",
    ),
    Finding(
        "tokens_recently",
        "tokens were produced in the last {lately_seconds}",
        "no token was produced in the last {lately_seconds}",
        lambda v: v.s.progress.tokens_recently,
        why="no second scrape, or no token counters",
    ),
    Finding(
        "no_progress",
        "requests have made no progress for {no_progress_seconds} or longer",
        "requests made progress in the last {no_progress_seconds}",
        at_least("stuck_seconds", "no_progress_seconds"),
        "last progress {stuck_seconds} ago",
        _NO_PROGRESS_KNOWN,
        question="progress of requests",
    ),
    Finding(
        "no_progress_long",
        "requests have made no progress for {stalled_seconds} or longer",
        "requests made progress in the last {stalled_seconds}",
        at_least("stuck_seconds", "stalled_seconds"),
        "last progress {stuck_seconds} ago",
        _NO_PROGRESS_KNOWN,
        question="progress of requests",
    ),
    Finding(
        "no_progress_very_long",
        "requests have made no progress for {prefill_patience_seconds} or longer",
        "requests made progress in the last {prefill_patience_seconds}",
        at_least("stuck_seconds", "prefill_patience_seconds"),
        "last progress {stuck_seconds} ago",
        _NO_PROGRESS_KNOWN,
        question="progress of requests",
    ),
    Finding(
        "gauges_still",
        "no gauge or counter is moving",
        "gauges or counters are moving",
        at_least("still_seconds", "no_progress_seconds"),
        "last movement {still_seconds} ago",
        _NO_PROGRESS_KNOWN,
        question="whether gauges and counters are still changing",
    ),
    Finding(
        "ever_produced",
        "the process has produced tokens since its start",
        "the process has produced no token since its start",
        lambda v: v.s.progress.ever_produced,
        question="tokens since the start of the process",
        why="the engine publishes no token counters",
    ),
    Finding(
        "prompt_at_once",
        "the engine may be prefilling the last admitted prompt in one step",
        "the engine is not prefilling a whole prompt in one step",
        lambda v: v.s.progress.prompt_at_once,
        question="whether the engine is prefilling a whole prompt in one step",
    ),
    Finding(
        "prefill_usual",
        "the time since the last progress is normal for a prefill",
        "the time since the last progress is too long for a prefill",
        when_known(
            lambda v, stuck, usual: stuck < v.t["latency_rising_ratio"] * usual, "stuck_seconds", "prefill_seconds"
        ),
        "{stuck_seconds}, usual prefill {prefill_seconds}",
        "no requests in flight, or no first token yet",
        question="usual prefill time",
    ),
    Finding(
        "http_answers",
        "the engine's API server answered HTTP requests since the last token",
        "the engine's API server answered no HTTP request since the last token",
        lambda v: v.s.progress.http_moved,
        question="whether the engine's API server answered HTTP requests since the last token",
        why="no requests in flight, or connections and HTTP requests are not counted",
    ),
    Finding(
        "clients_gone",
        "most clients have closed their connections since the last token",
        "most clients have kept their connections since the last output",
        lambda v: v.s.progress.connections_dropped,
        question="connections that clients closed since the last token",
        why="no requests in flight, or connections and HTTP requests are not counted",
    ),
    Finding(
        "clients_came",
        "clients have connected, or the queue has grown, since the last output",
        "no clients have connected since the last output, and the queue has not grown",
        lambda v: v.s.progress.clients_came,
        question="new client connections since the last output",
        why="no requests in flight, or connections and HTTP requests are not counted",
    ),
    Finding(
        "server_at_rest",
        "no client is connected to the engine's API server",
        "clients are connected to the engine's API server",
        lambda v: v.s.progress.at_rest,
        why="its open descriptors are not published, or have shown no load yet",
        question="clients connected to the engine's API server",
    ),
    Finding(
        "clients_stay",
        "clients have been connected for {no_progress_seconds} or longer although no request is in flight",
        "no clients stay connected while no request is in flight",
        at_least("connected_seconds", "no_progress_seconds"),
        "for {connected_seconds}",
        "its open descriptors are not published, or have shown no load yet",
        "how long clients stay connected while gauges show nothing",
    ),
    Finding(
        "finishing",
        "some requests finished in the last {recent_window_seconds}",
        "no request finished in the last {recent_window_seconds}",
        lambda v: v.s.progress.finished_flow,
        question="finished requests in the last {recent_window_seconds}",
        why="no second scrape, or finished requests are not counted",
    ),
    Finding(
        "prompts_looked_up",
        "prompts were admitted in the last {recent_window_seconds}",
        "no prompt was admitted in the last {recent_window_seconds}",
        lambda v: v.s.progress.queries_flow,
        why="no second scrape, or no prefix cache counters",
        question="prompts admitted in the last {recent_window_seconds}",
    ),
    Finding(
        "prompts_just_now",
        "prompts were admitted in the last {lately_seconds}",
        "no prompt was admitted in the last {lately_seconds}",
        lambda v: v.s.progress.queries_recently,
        why="no second scrape, or no prefix cache counters",
        question="prompts admitted in the last {lately_seconds}",
    ),
    Finding(
        "tokens_trickle",
        "running requests get almost no tokens",
        "running requests get tokens",
        _trickle,
        "{output_per_running} tokens/s each",
        question="output tokens per running request",
        why="no request is running, or the engine publishes no token counters",
    ),
    Finding(
        "prefill_dominates",
        "prefill dominates",
        "prefill does not dominate",
        when_known(
            lambda v, prompt, output: prompt > 0 and prompt >= v.t["prefill_tokens_ratio"] * output,
            "computed_tokens",
            "output_tokens",
        ),
        "{computed_tokens} prompt tokens/s computed here, {output_tokens} output tokens/s",
        needs=("computed_tokens", "output_tokens"),
    ),
    Finding(
        "prefill_hidden",
        "a prompt is being computed that is not counted yet: blocks are allocated far faster than tokens are generated",
        "blocks are not allocated faster than tokens explain",
        _prefill_hidden,
        "{kv_used_ratio} used, {output_tokens} output tokens/s",
        needs=("kv_capacity_tokens", "output_tokens"),
        why="too few samples of KV cache usage",
        question="whether a prompt is being computed",
    ),
    Finding(
        "engine_asleep",
        "the engine is asleep (sleep mode)",
        "the engine is awake",
        lambda v: v.s.progress.asleep,
        why="the metrics endpoint does not show sleep mode",
        question="sleep mode",
    ),
    Finding(
        "engine_paused",
        "the engine was told to pause, or updates its weights",
        "the engine was told to go on",
        lambda v: v.s.progress.paused,
        why="neither its log nor the metrics endpoint shows it",
        question="whether the engine was told to pause",
    ),
    # --- the GPU
    Finding(
        "gpu_starved",
        "the GPU is starved",
        "the GPU is not starved",
        lambda v: v.gpu.starved,
        f"{_GPU}, starved below {{gpu_starved_ratio}}",
        _GPU_UNCLEAR,
    ),
    Finding(
        "gpu_saturated",
        "the GPU is saturated",
        "the GPU is not saturated",
        lambda v: v.gpu.saturated,
        _GPU,
        _GPU_UNCLEAR,
    ),
    Finding(
        "gpu_works",
        "GPU cores or GPU memory are busy, or power is high",
        "GPU cores and GPU memory are not busy, and power is not high",
        lambda v: v.gpu.works,
        _GPU,
        _GPU_UNCLEAR,
        "whether GPU cores or GPU memory are busy",
    ),
    Finding(
        "gpu_computes",
        "the GPU computes at its peak",
        "the GPU does not compute at its peak",
        lambda v: v.gpu.computes,
        _GPU,
        _GPU_UNCLEAR,
    ),
    Finding(
        "gpu_utilization_low",
        "GPU utilization is low",
        "GPU utilization is not low",
        lambda v: v.gpu.low,
        _GPU,
        _GPU_UNCLEAR,
    ),
    Finding("gpu_idle", "the GPU is idle", "the GPU is not idle", lambda v: v.gpu.idle, _GPU, _GPU_UNCLEAR),
    Finding(
        "gpu_unseen",
        "no GPU activity is readable",
        "GPU activity is readable",
        lambda v: v.gpu.unseen,
        question="GPU activity",
    ),
    Finding(
        "gpu_of_others",
        "other pods use the GPU too",
        "no other pod uses the GPU",
        lambda v: _seen_or(v, v.s.compute.gpus_of_others),
        why=NO_GPU,
        question="other pods on the GPU",
    ),
    Finding(
        "gpu_shared",
        "the GPU's activity may come from another engine or pod",
        "the GPU's activity comes from this engine alone",
        lambda v: _seen_or(v, v.s.compute.gpus_shared or v.s.compute.gpus_of_others),
        why=NO_GPU,
        question="other engines and pods on the GPU",
    ),
    # --- the host
    Finding(
        "cpu_throttled",
        "the CPU is throttled",
        "the CPU is not throttled",
        at_least("cpu_throttled", "cpu_throttled_ratio"),
        "in {cpu_throttled} of its CFS periods",
        _NO_CGROUP,
        "CPU throttling",
    ),
    Finding(
        "cpu_throttled_mostly",
        "most CPU periods are throttled",
        "fewer than half of the CPU periods are throttled",
        at_least("cpu_throttled", "most_ratio"),
        "{cpu_throttled}",
        _NO_CGROUP,
        "CPU throttling",
    ),
    Finding(
        "cpu_contended",
        "there is CPU contention",
        "there is no CPU contention",
        at_least("cpu_contended", "most_ratio"),
        "processes waited for a CPU {cpu_contended} of the time",
        "the container's CPU pressure was not read",
        "CPU contention",
    ),
    Finding(
        "cpu_saturated",
        "the CPU is at its limit",
        "the CPU is below its limit",
        at_least("cpu_used", "container_limit_ratio"),
        "{cpu_used} of the limit used",
        "the container has no CPU limit, or its CPU use was not read",
        "CPU use against the limit",
    ),
    Finding(
        "api_server_saturated",
        "the engine's API server uses a whole core",
        "the engine's API server uses less than a core",
        _uses_a_core,
        "{api_server_cores} cores",
        question="CPU use of the engine's API server",
        why="the metrics endpoint does not show the CPU time of its process",
    ),
    # --- what users feel
    Finding(
        "outside_engine_time",
        "requests spend much of their time outside the engine",
        "requests spend little time outside the engine, or a small share of theirs",
        when_known(lambda v, share: share >= v.t["outside_engine_share_ratio"] and _is_felt(v), "outside_share"),
        "{outside_seconds}, {outside_share}",
        "no latency histograms",
        "time that requests spend outside the engine",
    ),
    Finding(
        "latency_multiplied",
        "latency is at least {latency_multiplied_ratio} its baseline",
        "latency is below {latency_multiplied_ratio} its baseline",
        at_least("worst_latency", "latency_multiplied_ratio"),
        "{worst_phase} p95 {worst_latency}",
        "no baseline yet, or too few requests",
        question="latency compared with its baseline",
    ),
    Finding(
        "answers_slow",
        "users wait at least {latency_multiplied_ratio} as long as usual, and long",
        "users wait about as long as usual, or not long",
        _answers_slow,
        question="how long users wait, compared with the baseline",
        why="no baseline yet, or too few requests finish",
    ),
    Finding(
        "steps_slower",
        "steps take at least {latency_multiplied_ratio} as long as the fastest steps of a similar batch size",
        "steps take less than {latency_multiplied_ratio} as long as the fastest steps of a similar batch size",
        at_least("step_slowdown", "latency_multiplied_ratio"),
        "{step_slowdown}",
        why="no earlier steps of a similar batch size",
        question="step time compared with the fastest steps",
    ),
    Finding(
        "throughput_fell",
        "throughput is at most {most_ratio} of that of the best recent minute",
        "throughput is above {most_ratio} of that of the best recent minute",
        when_known(lambda v, trend: trend <= v.t["most_ratio"], "throughput_trend"),
        "now {throughput_trend}",
        "less than two minutes of comparable load",
        question="throughput compared with the best recent minute",
    ),
    Finding(
        "clients_give_up",
        "clients give up before their answers are complete, so work is thrown away",
        "clients wait for their answers",
        at_least("given_up", "rejected_critical_ratio"),
        "{given_up} of the answers in the last minute",
        "answers over HTTP or finished requests are not counted, or are too few",
        "share of answers that clients give up",
    ),
    Finding(
        "server_refuses",
        "the server ends most requests without an answer",
        "the server answers most requests",
        at_least("refused", "most_ratio"),
        "{refused} of those that ended in the last {recent_window_seconds} were aborted",
        "what an aborted request means on this server was not tried",
        "share of requests that the server aborts",
    ),
    Finding(
        "past_peak",
        "fewer running requests gave as many tokens",
        "fewer running requests gave fewer tokens",
        when_known(lambda v, peak, batch: peak < v.t["at_limit_ratio"] * batch, "peak_batch", "batch_mean"),
        "nearly the most of the last 15 minutes with about {peak_batch}, {batch_mean} now",
        question="number of running requests with the most tokens",
        why="no histogram of inter-token latency",
    ),
    # --- the log
    Finding(
        "allocation_failure_logged",
        "the log shows recent allocation failures",
        "the log shows no recent allocation failure",
        any_of("allocation_failures"),
        "{allocation_failures} in the last {log_window_seconds}",
        "no log read",
        "allocation failures",
    ),
)
