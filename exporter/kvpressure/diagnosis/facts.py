"""Facts: the findings that rules read, each with the numbers in its sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kvpressure.diagnosis.finding import Finding, View, least
from kvpressure.diagnosis.gpu_facts import NO_GPU
from kvpressure.diagnosis.numbers import NOT_KNOWN, minutes, number, percent
from kvpressure.engines.registry import dialect
from kvpressure.model import reasons
from kvpressure.model.log_events import ALLOCATION_EVENTS
from kvpressure.model.signals import Signals
from kvpressure.signals.kv import full_from

SLOW: Final = "timeout"  # the reason of a page that did not come in time


def _peak_at(name: str) -> Callable[[View], bool | None]:
    return lambda v: least(v.s.kv.kv_used_ratio_recent_max, _level(v, name))


def _level(v: View, name: str) -> float:
    return full_from(name, v.s.kv.kv_watermark_ratio, v.t)


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


def _held_idle(v: View) -> bool | None:
    work, usage = v.s.progress.work_present, v.s.kv.kv_used_ratio
    return None if work is None or usage is None else not work and usage >= v.t["kv_held_ratio"]


def _preempting(v: View) -> bool | None:
    counted, silent = v.s.kv.preemptions_counted, v.s.kv.preemptions_inferred
    if counted is None and silent is None:
        return None
    return max(counted or 0.0, silent or 0.0) >= v.t["preemptions_min"]


def _source_is(*sources: str) -> Callable[[View], bool | None]:
    return lambda v: None if v.s.load.max_num_seqs_source is None else v.s.load.max_num_seqs_source in sources


def _long_prompt(s: Signals) -> float | None:
    """p95 of prompt tokens, else the mean: vLLM admits a request when its whole prompt fits, and one that does not
    fit blocks all behind it.
    """
    return s.context.prompt_quantiles.get("0.95", s.context.prompt_mean)


def _free(s: Signals) -> float | None:
    """KV tokens that were free for a new request at the recent peak."""
    kv = s.kv
    if kv.kv_used_ratio_recent_max is None or kv.kv_capacity_tokens is None:
        return None
    return max(0.0, 1.0 - (kv.kv_watermark_ratio or 0.0) - kv.kv_used_ratio_recent_max) * kv.kv_capacity_tokens


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
    free = _free(v.s)
    return None if free is None or prompt is None else free < prompt


def _any_fits(v: View) -> bool | None:
    """Whether any next prompt fits: long ones as seen, and in a warm cache one as long as the server allows, because
    the blocking one has not been seen yet.
    """
    s = v.s
    free, long, limit = _free(s), _long_prompt(s), s.context.context_limit
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


def _short(v: View) -> bool | None:
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


def _many(v: View, waiting: float | None) -> bool | None:
    """Whether so many waiting requests are more than the few between two steps of a busy engine."""
    running = v.s.load.running
    return None if waiting is None or running is None else waiting > 1 + v.t["calm_queue_ratio"] * running


def _for_capacity(v: View) -> bool | None:
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


def _prefill(v: View) -> bool | None:
    flow = v.s.throughput
    computed, generated = _computed(v), flow.generation_tokens_per_second
    if computed is None or generated is None:
        return None
    return computed > 0 and computed >= v.t["prefill_tokens_ratio"] * generated


def _computed(v: View) -> float | None:
    flow = v.s.throughput
    if flow.prompt_tokens_computed_per_second is None and v.s.load.kv_role in (None, "kv_producer"):
        return flow.prompt_tokens_per_second
    return flow.prompt_tokens_computed_per_second


def _stuck(name: str) -> Callable[[View], bool | None]:
    return lambda v: least(v.s.progress.seconds_without_progress, v.t[name])


def _prefill_usual(v: View) -> bool | None:
    stuck, usual = v.s.progress.seconds_without_progress, v.s.progress.prefill_usual_seconds
    return None if stuck is None or usual is None else stuck < v.t["latency_rising_ratio"] * usual


def _fresh(v: View) -> bool | None:
    """Whether the metrics describe the server now. One timeout means a slow server; any other failure, or a second
    one, may mean that it is gone, however young the last scrape.
    """
    progress = v.s.progress
    if progress.fresh_seconds is None:
        return None
    gone = int(progress.pages_failing or 0) > (1 if progress.page_error == SLOW else 0)
    return not gone and progress.fresh_seconds <= v.t["stale_page_seconds"]


def _worst_ratio(v: View) -> tuple[str, float] | None:
    return max(v.s.latency.baseline_ratios.items(), key=lambda item: item[1], default=None)


def _multiplied(v: View) -> bool | None:
    worst = _worst_ratio(v)
    return least(None if worst is None else worst[1], v.t["latency_multiplied_ratio"])


def _fell(v: View) -> bool | None:
    trend = v.s.throughput.throughput_trend_ratio
    return None if trend is None else trend <= v.t["most_ratio"]


def _seen_or(v: View, found: bool) -> bool | None:
    """What was found about the pod's GPUs; unknown rather than false where none is read."""
    return found or (None if v.gpu.unseen else False)


def _allocation(v: View) -> int:
    return sum(v.s.events.get(name, 0) for name in ALLOCATION_EVENTS)


def _held_for_others(v: View) -> bool | None:
    """Whether KV blocks may be held for a server that has yet to pull them: hardly anything runs here."""
    load = v.s.load
    held = load.waits_for_blocks and load.kv_role != "kv_consumer"
    return held and (load.running or 0.0) < v.t["several_min"]


def _budget_used(v: View) -> bool | None:
    tokens, budget = v.s.batch.step_tokens, v.s.load.max_num_batched_tokens
    return None if tokens is None or budget is None else tokens >= v.t["step_tokens_full_ratio"] * budget


def _steps_small(v: View) -> bool | None:
    tokens, budget = v.s.batch.step_tokens, v.s.load.max_num_batched_tokens
    return None if tokens is None else max(tokens, budget or 0.0) < v.t["max_num_batched_tokens_floor"]


_NO_PROGRESS_KNOWN: Final = "no requests in flight, or the engine publishes no token counters"
_NOT_SHOWN: Final = "the metrics endpoint does not show it"
_NO_PREEMPTIONS: Final = "no counter, and no queue movement to infer them from"
_NO_CGROUP: Final = "the container's cgroup was not read"
_LIMIT_SOURCES: Final = {
    "args": "set in the arguments",
    "log": "from the start-up log",
    "default": "the default",
    "observed": "inferred",
}

FACTS: Final[tuple[Finding, ...]] = (
    # --- the KV cache
    Finding(
        "kv_full",
        "the KV cache is full",
        "the KV cache is not full",
        _peak_at("kv_full_ratio"),
        "{level} (full at {kv_full})",
        "{kv_why}",
        "KV cache usage",
    ),
    Finding(
        "kv_near_full",
        "the KV cache is full or nearly full",
        "the KV cache is not nearly full",
        _peak_at("kv_near_full_ratio"),
        "{level} (threshold {kv_near})",
        "{kv_why}",
        "KV cache usage",
    ),
    Finding(
        "kv_near_full_now",
        "the KV cache is full or nearly full now",
        "the KV cache is not nearly full now",
        lambda v: least(v.s.kv.kv_used_ratio, _level(v, "kv_near_full_ratio")),
        "{kv} (threshold {kv_near})",
        "{kv_why}",
        "KV cache usage",
    ),
    Finding(
        "kv_warm",
        "the KV cache is at least half full",
        "the KV cache is less than half full",
        lambda v: least(v.s.kv.kv_used_ratio_recent_max, v.t["most_ratio"]),
        "{level}",
        "{kv_why}",
        "KV cache usage",
    ),
    Finding(
        "kv_rising",
        "KV cache usage is rising",
        "KV cache usage is not rising",
        lambda v: None if v.s.kv.kv_slope_per_second is None else v.s.kv.kv_slope_per_second > 0,
        why="too few samples of KV cache usage",
    ),
    Finding(
        "kv_held_idle",
        "KV blocks are held without requests",
        "KV blocks are in use only while requests are in flight",
        _held_idle,
        "{held}",
        needs=("work", "kv"),
    ),
    Finding(
        "head_of_line_blocked",
        "a prompt of p95 length is too long for the free KV cache",
        "prompts of p95 length do not wait for KV cache",
        lambda v: _blocked(v, _long_prompt(v.s)),
        "{long_blocked}",
        needs=("kv_peak", "kv_capacity", "long_prompt", "queue"),
    ),
    Finding(
        "mean_prompt_blocked",
        "a prompt of average length is too long for the free KV cache",
        "prompts of average length do not wait for KV cache",
        lambda v: _blocked(v, v.s.context.prompt_mean),
        "{mean_blocked}",
        needs=("kv_peak", "kv_capacity", "mean_prompt", "queue"),
    ),
    Finding(
        "any_prompt_fits",
        "every prompt fits into the KV cache",
        "the next prompt may not fit into the KV cache",
        _any_fits,
        "{free_and_prompts}",
        needs=("kv_peak", "kv_capacity", "longest_prompt"),
    ),
    Finding(
        "waits_for_blocks",
        "the server exchanges KV blocks with other servers",
        "the server exchanges no KV blocks with other servers",
        lambda v: v.s.load.waits_for_blocks,
        question="exchange of KV blocks with other servers",
    ),
    Finding(
        "blocks_held_for_others",
        "KV blocks of finished prompts may be waiting for a decode server to fetch them",
        "no KV blocks of finished prompts are waiting for a decode server to fetch them",
        _held_for_others,
        question="whether KV blocks of finished prompts are waiting for a decode server to fetch them",
    ),
    # --- preemptions
    Finding(
        "preempting",
        "requests were {preempted} in the last minute",
        "fewer than {preemptions_min} requests were {preempted} in the last minute",
        _preempting,
        "{preemption_counts}",
        _NO_PREEMPTIONS,
        "{preemptions} in the last minute",
    ),
    Finding(
        "preempting_now",
        "requests were {preempted} in the last {recent_window_seconds} s",
        "fewer than {preemptions_min} requests were {preempted} in the last {recent_window_seconds} s",
        lambda v: least(v.s.kv.preemptions_recent, v.t["preemptions_min"]),
        "{recent_preemptions}",
        question="{preemptions} in the last {recent_window_seconds} s",
        why=_NO_PREEMPTIONS,
    ),
    Finding(
        "preempted_recently",
        "requests were {preempted} in the last 30 s",
        "fewer than {preemptions_min} requests were {preempted} in the last 30 s",
        lambda v: least(v.s.kv.preemptions_recently, v.t["preemptions_min"]),
        "{last_preemptions}",
        question="{preemptions} in the last 30 s",
        why=_NO_PREEMPTIONS,
    ),
    Finding(
        "preemptions_borne_out",
        "the engine itself counted {preemptions}",
        "the engine itself counted fewer than {preemptions_min} {preemptions}",
        lambda v: least(v.s.kv.preemptions_counted, v.t["preemptions_min"]),
        "{preemptions_counted}",
        "the metrics endpoint has no such counter",
        "{preemptions} by the engine's counter",
    ),
    Finding(
        "preempting_much",
        "{preemptions} per running request reach 1 a minute",
        "{preemptions} per running request are below 1 a minute",
        lambda v: least(v.s.kv.preemptions_per_running_minute, 1),
        "{per_running} a minute on average",
        question="{preemptions} per running request",
        why=_NO_PREEMPTIONS,
    ),
    # --- the sequence limit
    Finding(
        "running_at_limit",
        "{max_num_seqs} was reached for most of the last {recent_window_seconds} s",
        "{max_num_seqs} was reached only briefly or not at all in the last {recent_window_seconds} s",
        lambda v: v.s.load.running_at_limit,
        "{running_of_limit}",
        question="whether {max_num_seqs} is reached",
        needs=("running", "max_num_seqs"),
        why="too few samples",
    ),
    Finding(
        "running_at_limit_now",
        "{max_num_seqs} is reached now",
        "{max_num_seqs} is not reached now",
        lambda v: v.s.load.running_at_limit_now,
        "{running_of_limit}",
        needs=("running", "max_num_seqs"),
        why="too few samples",
    ),
    Finding(
        "limit_is_stated",
        "{max_num_seqs} is set explicitly",
        "{max_num_seqs} is in neither the arguments nor the log",
        _source_is("args", "log"),
        "{limit_of_source}",
        question="source of {max_num_seqs}",
        why="the limit itself is unknown",
    ),
    Finding(
        "limit_is_observed",
        "{max_num_seqs} is inferred from a constant number of running requests",
        "{max_num_seqs} is known",
        _source_is("observed"),
        "{limit_of_source}",
        question="source of {max_num_seqs}",
        why="the limit itself is unknown",
    ),
    Finding(
        "running_plateau",
        "running requests stay at a constant number while a queue builds up and KV blocks are free",
        "no sign of a hidden limit on running requests",
        lambda v: v.s.load.running_plateau,
        "{running_now}",
        question="running requests",
        why="no requests in flight, or too few samples",
    ),
    Finding(
        "something_runs",
        "requests are running",
        "no request is running",
        lambda v: None if v.s.load.running is None else v.s.load.running > 0,
        "{running}",
        question="running requests",
        why=_NOT_SHOWN,
    ),
    Finding(
        "several_run",
        "several requests are running ({several_min} or more)",
        "fewer than {several_min} requests are running",
        lambda v: least(v.s.load.running, v.t["several_min"]),
        "{running}",
        question="running requests",
        why=_NOT_SHOWN,
    ),
    # --- the token budget of a step
    Finding(
        "step_budget_used",
        "steps use up their token budget",
        "steps do not use up their token budget",
        _budget_used,
        "{step_tokens} tokens a step, {max_num_batched_tokens} {step_budget}",
        question="whether steps use up their token budget ({max_num_batched_tokens})",
        needs=("step_tokens", "max_num_batched_tokens"),
    ),
    Finding(
        "steps_small",
        "steps compute fewer than {max_num_batched_tokens_floor} tokens, and no larger budget is known",
        "steps compute {max_num_batched_tokens_floor} tokens or more, or their budget allows it",
        _steps_small,
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
        "{queue}",
        question="waiting requests",
        why=_NOT_SHOWN,
    ),
    Finding(
        "waiting_now",
        "requests are waiting now",
        "no request is waiting now",
        lambda v: None if v.s.load.waiting is None else v.s.load.waiting > 0,
        "{queue}",
        question="waiting requests",
        why=_NOT_SHOWN,
    ),
    Finding(
        "many_wait_now",
        "many requests are waiting now",
        "few or no requests are waiting now",
        lambda v: _many(v, v.s.load.waiting),
        "{queue}",
        needs=("waiting", "running"),
    ),
    Finding(
        "many_waited_recently",
        "many requests waited in the last {recent_window_seconds} s",
        "few or no requests waited in the last {recent_window_seconds} s",
        lambda v: _many(v, v.recent.waiting_most),
        "{waiting_most}",
        question="number of requests waiting in the last {recent_window_seconds} s",
        needs=("queue", "running"),
    ),
    Finding(
        "queue_short",
        "the queue is short",
        "the queue is long or slow",
        _short,
        "{mean_queue}",
        needs=("running", "queue", "queue_time"),
    ),
    Finding(
        "waited_recently",
        "requests waited in the last {recent_window_seconds} s",
        "no request waited in the last {recent_window_seconds} s",
        lambda v: None if v.recent.waiting_share is None else v.recent.waiting_share > 0,
        "{waiting_mean}",
        question="waiting requests in the last {recent_window_seconds} s",
        why=_NOT_SHOWN,
    ),
    Finding(
        "queue_for_capacity",
        "requests are waiting for capacity",
        "no request is waiting for capacity",
        _for_capacity,
        "{queue}",
        needs=("waiting", "queue"),
        why="{deferred_where}",
    ),
    Finding(
        "queue_for_capacity_now",
        "requests are waiting for capacity now",
        "no request is waiting for capacity now",
        _capacity_now,
        "{queue}",
        needs=("waiting",),
        why="{deferred_where}",
    ),
    Finding(
        "deferred_fill_limit",
        "running and deferred requests together reach {max_num_seqs}",
        "running and deferred requests together are below {max_num_seqs}",
        _deferred_fill,
        "{queue}{of_limit}",
        why="{deferred_where}",
        needs=("running", "max_num_seqs"),
    ),
    # --- metrics and progress
    Finding(
        "page_fresh",
        "the metrics are fresh",
        "the metrics are stale",
        _fresh,
        "last successful scrape {age} s ago{failing}",
        "never scraped{page_error}",
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
        lambda v: v.readings <= 1,
        "{readings}",
        question="number of scrapes",
    ),
    Finding(
        "work_present",
        "requests are in flight",
        "no requests are in flight",
        lambda v: v.s.progress.work_present,
        "{in_flight}",
        question="requests in flight",
        why=_NOT_SHOWN,
    ),
    Finding(
        "tokens_flow",
        "tokens are being produced",
        "no token was produced in the last {recent_window_seconds} s",
        lambda v: v.s.progress.tokens_flow,
        "{rates}",
        "no second scrape, or no token counters",
    ),
    Finding(
        "tokens_recently",
        "tokens were produced in the last {lately_seconds} s",
        "no token was produced in the last {lately_seconds} s",
        lambda v: v.s.progress.tokens_recently,
        why="no second scrape, or no token counters",
    ),
    Finding(
        "no_progress",
        "requests have made no progress for {no_progress_seconds} s or longer",
        "requests made progress in the last {no_progress_seconds} s",
        _stuck("no_progress_seconds"),
        "last progress {stuck} s ago",
        _NO_PROGRESS_KNOWN,
        question="progress of requests",
    ),
    Finding(
        "no_progress_long",
        "requests have made no progress for {stalled_seconds} s or longer",
        "requests made progress in the last {stalled_seconds} s",
        _stuck("stalled_seconds"),
        "last progress {stuck} s ago",
        _NO_PROGRESS_KNOWN,
        question="progress of requests",
    ),
    Finding(
        "no_progress_very_long",
        "requests have made no progress for {prefill_patience_seconds} s or longer",
        "requests made progress in the last {prefill_patience_seconds} s",
        _stuck("prefill_patience_seconds"),
        "last progress {stuck} s ago",
        _NO_PROGRESS_KNOWN,
        question="progress of requests",
    ),
    Finding(
        "gauges_still",
        "no gauge or counter is moving",
        "gauges or counters are moving",
        lambda v: least(v.s.progress.seconds_still, v.t["no_progress_seconds"]),
        "last movement {still_seconds} s ago",
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
        _prefill_usual,
        "{stuck} s (usual prefill {usual_prefill} s)",
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
        "finishing",
        "some requests finished in the last {recent_window_seconds} s",
        "no request finished in the last {recent_window_seconds} s",
        lambda v: v.s.progress.finished_flow,
        question="finished requests in the last {recent_window_seconds} s",
        why="no second scrape, or finished requests are not counted",
    ),
    Finding(
        "prompts_looked_up",
        "prompts were admitted in the last {recent_window_seconds} s",
        "no prompt was admitted in the last {recent_window_seconds} s",
        lambda v: v.s.progress.queries_flow,
        why="no second scrape, or no prefix cache counters",
        question="prompts admitted in the last {recent_window_seconds} s",
    ),
    Finding(
        "prompts_just_now",
        "prompts were admitted in the last {lately_seconds} s",
        "no prompt was admitted in the last {lately_seconds} s",
        lambda v: v.s.progress.queries_recently,
        why="no second scrape, or no prefix cache counters",
        question="prompts admitted in the last {lately_seconds} s",
    ),
    Finding(
        "tokens_trickle",
        "running requests get almost no tokens",
        "running requests get tokens",
        _trickle,
        "{per_request} tokens/s each",
        question="output tokens per running request",
        why="no request is running, or the engine publishes no token counters",
    ),
    Finding(
        "prefill_dominates",
        "prefill dominates",
        "prefill does not dominate",
        _prefill,
        "{prefill_rates}{cached}",
        needs=("computed_rate", "output_rate"),
    ),
    Finding(
        "engine_asleep",
        "the engine is asleep (sleep mode)",
        "the engine is awake",
        lambda v: v.s.progress.asleep,
        why="the metrics endpoint does not show sleep mode",
        question="sleep mode",
    ),
    # --- the GPU
    Finding(
        "gpu_starved",
        "the GPU is starved",
        "the GPU is not starved",
        lambda v: v.gpu.starved,
        "{gpu} (starved below {starved})",
        "{gpu_known}",
    ),
    Finding(
        "gpu_saturated",
        "the GPU is saturated",
        "the GPU is not saturated",
        lambda v: v.gpu.saturated,
        "{gpu}",
        "{gpu_known}",
    ),
    Finding(
        "gpu_works",
        "GPU cores or GPU memory are busy, or power is high",
        "GPU cores and GPU memory are not busy, and power is not high",
        lambda v: v.gpu.works,
        "{gpu}",
        "{gpu_known}",
        "whether GPU cores or GPU memory are busy",
    ),
    Finding(
        "gpu_computes",
        "the GPU computes at its peak",
        "the GPU does not compute at its peak",
        lambda v: v.gpu.computes,
        "{gpu}",
        "{gpu_known}",
    ),
    Finding(
        "gpu_utilization_low",
        "GPU utilization is low",
        "GPU utilization is not low",
        lambda v: v.gpu.low,
        "{gpu}",
        "{gpu_known}",
    ),
    Finding("gpu_idle", "the GPU is idle", "the GPU is not idle", lambda v: v.gpu.idle, "{gpu}", "{gpu_known}"),
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
        lambda v: least(v.s.host.cpu_throttled_ratio, v.t["cpu_throttled_ratio"]),
        "in {throttled} of its CFS periods",
        _NO_CGROUP,
        "CPU throttling",
    ),
    Finding(
        "cpu_throttled_mostly",
        "most CPU periods are throttled",
        "fewer than half of the CPU periods are throttled",
        lambda v: least(v.s.host.cpu_throttled_ratio, v.t["most_ratio"]),
        "{throttled}",
        _NO_CGROUP,
        "CPU throttling",
    ),
    Finding(
        "cpu_contended",
        "there is CPU contention",
        "there is no CPU contention",
        lambda v: least(v.s.host.cpu_pressure_ratio, v.t["most_ratio"]),
        "processes waited for a CPU {contended} of the time",
        "the container's CPU pressure was not read",
        "CPU contention",
    ),
    Finding(
        "cpu_saturated",
        "the CPU is at its limit",
        "the CPU is below its limit",
        lambda v: least(v.s.host.cpu_used_ratio, v.t["container_limit_ratio"]),
        "{cpu_used} of the limit used",
        "the container has no CPU limit, or its CPU use was not read",
        "CPU use against the limit",
    ),
    Finding(
        "api_server_saturated",
        "the engine's API server uses a whole core",
        "the engine's API server uses less than a core",
        lambda v: least(v.s.host.api_cpu_cores, v.t["container_limit_ratio"]),
        "{api_cores} cores",
        question="CPU use of the engine's API server",
        why="the metrics endpoint does not show the CPU time of its process",
    ),
    # --- what users feel
    Finding(
        "outside_engine_time",
        "requests spend much of their time outside the engine",
        "requests spend little of their time outside the engine",
        lambda v: least(v.s.latency.outside_engine_share, v.t["outside_engine_share_ratio"]),
        "{outside}",
        "no latency histograms",
        "time that requests spend outside the engine",
    ),
    Finding(
        "latency_multiplied",
        "latency is at least {latency_multiplied_ratio} × its baseline",
        "latency is below {latency_multiplied_ratio} × its baseline",
        _multiplied,
        "{worst_phase} p95 {worst_ratio} ×",
        "no baseline yet, or too few requests",
        question="latency compared with its baseline",
    ),
    Finding(
        "steps_slower",
        "steps take at least {latency_multiplied_ratio} × as long as the fastest steps of a similar batch size",
        "steps take less than {latency_multiplied_ratio} × as long as the fastest steps of a similar batch size",
        lambda v: least(v.s.batch.step_ratio, v.t["latency_multiplied_ratio"]),
        "{step_ratio} ×",
        why="no earlier steps of a similar batch size",
        question="step time compared with the fastest steps",
    ),
    Finding(
        "throughput_fell",
        "throughput is at most {most_ratio} × that of the best recent minute",
        "throughput is above {most_ratio} × that of the best recent minute",
        _fell,
        "now {trend} ×",
        "less than two minutes of comparable load",
        question="throughput compared with the best recent minute",
    ),
    # --- the log
    Finding(
        "allocation_failure_logged",
        "the log shows recent allocation failures",
        "the log shows no recent allocation failure",
        lambda v: _allocation(v) > 0 if v.s.events_known else None,
        "{allocations}",
        "no log read",
        "allocation failures",
    ),
)


def _longest_known(s: Signals) -> float | None:
    """Length of a long prompt, or the largest that the server allows."""
    long = _long_prompt(s)
    return s.context.context_limit if long is None else long


def _cached(v: View) -> str:
    computed, prompt = _computed(v), v.s.throughput.prompt_tokens_per_second
    return "" if computed == prompt else f"; {number(computed)} prompt tokens/s computed, the rest cached"


def _scrape_error(v: View) -> str:
    """Why the last scrape failed, in words; "" = it did not fail."""
    return reasons.in_words(v.s.progress.page_error or "")


def _failing(v: View) -> str:
    failing = int(v.s.progress.pages_failing or 0)
    if not failing:
        return ""
    times = "attempt" if failing == 1 else f"{failing} attempts"
    return f", last {times} failed ({_scrape_error(v) or NOT_KNOWN})"


def _some(value: float | None) -> str:
    """The number; "" if it is 0."""
    return number(value) if value else ""


def _known(*parts: tuple[str, float | None], otherwise: str = "") -> str:
    """The parts whose number is known, each with its number in place of ``#``; ``otherwise`` if none is."""
    return ", ".join(text.replace("#", number(value)) for text, value in parts if value is not None) or otherwise


def _usage(v: View) -> str:
    now, peak = v.s.kv.kv_used_ratio, v.s.kv.kv_used_ratio_recent_max
    return f"recent peak {percent(peak)}" if now is None else f"{percent(now)} now, recent peak {percent(peak)}"


def _free_and_prompts(v: View) -> str:
    """Tokens free at the recent peak, and prompt lengths in tokens, as far as known."""
    context = v.s.context
    free = _known(("# tokens free", _free(v.s)))
    prompts = _known(
        ("mean prompt # tokens", context.prompt_mean),
        ("p95 prompt # tokens", context.prompt_quantiles.get("0.95")),
        (f"{dialect(v.s.dialect).called('max_model_len')} #", context.context_limit),
    )
    return "; ".join(filter(None, (free, prompts)))


def _limit_note(v: View) -> str:
    """Where the limit was read, in brackets; "" if that is unknown."""
    source = v.s.load.max_num_seqs_source
    return f" ({limit_source(source)})" if source else ""


def _limit_of_source(v: View) -> str:
    return f"{number(v.s.load.max_num_seqs)}{_limit_note(v)}"


def _running_of_limit(v: View) -> str:
    load = v.s.load
    return f"limit {number(load.max_num_seqs)}{_limit_note(v)}, {number(load.running)} running now"


def _held_up(v: View, prompt: float | None) -> str:
    """The numbers behind ``_blocked``, and which part of it is false."""
    if _blocked(v, prompt) is not False:
        return _free_and_prompts(v)
    if not _can_block(v):
        return f"KV cache usage is below {percent(v.t['kv_head_of_line_ratio'])}"
    if v.recent.waiting_share != 1.0:
        return f"the queue was empty at times in the last {number(v.t['recent_window_seconds'])} s"
    return f"they fit ({_free_and_prompts(v)})"


def limit_source(source: str | None) -> str:
    """Where a limit was read, in words."""
    return _LIMIT_SOURCES.get(source, source) if source else "source: unknown"


def _queue_text(v: View) -> str:
    load = v.s.load
    deferred = "" if load.waiting_deferred is None else f" ({number(load.waiting_deferred)} of them deferred)"
    return _known((f"# waiting{deferred}", load.waiting), ("# running", load.running))


def _of_limit(v: View) -> str:
    limit = v.s.load.max_num_seqs
    return "" if limit is None else f", {dialect(v.s.dialect).called('max_num_seqs')} {number(limit)}"


def _mean_queue(v: View) -> str:
    seconds = v.s.latency.queue.get("0.95")
    time = "" if seconds is None else f", p95 queue time {number(seconds, 2)} s"
    return f"{number(v.recent.waiting_mean, 1)} waiting on average, {number(v.s.load.running)} running{time}"


def _rates(v: View) -> str:
    rates = v.s.throughput
    return _known(
        ("# prompt tokens/s", rates.prompt_tokens_per_second),
        ("# output tokens/s", rates.generation_tokens_per_second),
        otherwise="tokens/s: unknown",
    )


def _deferred_where(v: View) -> str:
    engine = dialect(v.s.dialect)
    since = engine.deferred_since
    return (
        f"{engine.title} reports deferred requests only in {since} and later"
        if since
        else "the metrics endpoint does not show deferred requests"
    )


def _preemption_counts(v: View) -> str:
    return _known(
        (f"# (counted by {dialect(v.s.dialect).title})", v.s.kv.preemptions_counted),
        ("# (inferred from queue movement)", v.s.kv.preemptions_inferred),
        otherwise="number: unknown",
    )


INPUTS: Final[Mapping[str, tuple[str, Callable[[View], object]]]] = {
    "computed_rate": ("prompt tokens/s computed by this server", _computed),
    "kv": ("KV cache usage", lambda v: v.s.kv.kv_used_ratio),
    "kv_capacity": ("KV capacity", lambda v: v.s.kv.kv_capacity_tokens),
    "kv_peak": ("KV cache usage", lambda v: v.s.kv.kv_used_ratio_recent_max),
    "long_prompt": ("prompt lengths", lambda v: _long_prompt(v.s)),
    "longest_prompt": ("prompt lengths", lambda v: _longest_known(v.s)),
    "max_num_batched_tokens": ("{max_num_batched_tokens}", lambda v: v.s.load.max_num_batched_tokens),
    "max_num_seqs": ("{max_num_seqs}", lambda v: v.s.load.max_num_seqs),
    "mean_prompt": ("prompt lengths", lambda v: v.s.context.prompt_mean),
    "output_rate": ("output tokens/s", lambda v: v.s.throughput.generation_tokens_per_second),
    "queue": ("waiting requests", lambda v: v.recent.waiting_share),
    "queue_time": ("queue time", lambda v: v.s.latency.queue.get("0.95")),
    "running": ("running requests", lambda v: v.s.load.running),
    "step_tokens": ("tokens in a step", lambda v: v.s.batch.step_tokens),
    "waiting": ("waiting requests", lambda v: v.s.load.waiting),
    "work": ("requests in flight", lambda v: v.s.progress.work_present),
}
"""What a finding may need, in words, and how it is read."""
NUMBERS: Final[Mapping[str, Callable[[View], str]]] = {
    "deferred_where": _deferred_where,
    "step_tokens": lambda v: number(v.s.batch.step_tokens),
    "step_budget": lambda v: number(v.s.load.max_num_batched_tokens),
    "kv": lambda v: percent(v.s.kv.kv_used_ratio),
    "kv_full": lambda v: percent(_level(v, "kv_full_ratio")),
    "kv_near": lambda v: percent(_level(v, "kv_near_full_ratio")),
    "kv_why": lambda v: "the engine does not report it" if v.s.kv.kv_recorded is False else "not read yet",
    "level": _usage,
    "held": lambda v: f"{percent(v.s.kv.kv_used_ratio)} of the KV cache" if _held_idle(v) else "",
    "free_and_prompts": _free_and_prompts,
    "long_blocked": lambda v: _held_up(v, _long_prompt(v.s)),
    "mean_blocked": lambda v: _held_up(v, v.s.context.prompt_mean),
    "running_of_limit": _running_of_limit,
    "queue": _queue_text,
    "rates": lambda v: "" if v.s.progress.tokens_flow is False else _rates(v),
    "prefill_rates": _rates,
    "preemption_counts": _preemption_counts,
    "running": lambda v: _some(v.s.load.running),
    "running_now": lambda v: f"{number(v.s.load.running)} running",
    "in_flight": lambda v: _some(v.s.load.in_flight),
    "readings": lambda v: "" if v.readings <= 1 else str(v.readings),
    "waiting_mean": lambda v: f"{number(v.recent.waiting_mean, 1)} on average" if v.recent.waiting_mean else "",
    "waiting_most": lambda v: f"at most {number(v.recent.waiting_most)}" if v.recent.waiting_most else "",
    "last_preemptions": lambda v: number(v.s.kv.preemptions_recently),
    "preemptions_counted": lambda v: number(v.s.kv.preemptions_counted),
    "recent_preemptions": lambda v: number(v.s.kv.preemptions_recent),
    "per_running": lambda v: number(v.s.kv.preemptions_per_running_minute, 1),
    "per_request": lambda v: number(v.s.throughput.generation_tokens_per_running, 1),
    "step_ratio": lambda v: number(v.s.batch.step_ratio, 1),
    "mean_queue": _mean_queue,
    "limit_of_source": _limit_of_source,
    "of_limit": _of_limit,
    "age": lambda v: number(v.s.progress.fresh_seconds),
    "failing": _failing,
    "page_error": lambda v: f": {_scrape_error(v)}" if v.s.progress.page_error else "",
    "cached": _cached,
    "stuck": lambda v: number(v.s.progress.seconds_without_progress),
    "usual_prefill": lambda v: number(v.s.progress.prefill_usual_seconds),
    "still_seconds": lambda v: number(v.s.progress.seconds_still),
    "gpu": lambda v: v.gpu.text(),
    "gpu_known": lambda v: v.gpu.known(),
    "starved": lambda v: percent(v.t["gpu_starved_ratio"]),
    "throttled": lambda v: percent(v.s.host.cpu_throttled_ratio),
    "contended": lambda v: percent(v.s.host.cpu_pressure_ratio),
    "cpu_used": lambda v: percent(v.s.host.cpu_used_ratio),
    "api_cores": lambda v: number(v.s.host.api_cpu_cores, 2),
    "outside": lambda v: percent(v.s.latency.outside_engine_share),
    "worst_phase": lambda v: (_worst_ratio(v) or (NOT_KNOWN, 0.0))[0],
    "worst_ratio": lambda v: number((_worst_ratio(v) or ("", None))[1], 1),
    "trend": lambda v: number(v.s.throughput.throughput_trend_ratio, 2),
    "scrape_error": _scrape_error,
    "allocations": lambda v: f"{_allocation(v)} in the last {minutes(v.t['log_window_seconds'])}",
}
