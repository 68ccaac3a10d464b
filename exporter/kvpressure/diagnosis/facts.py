"""Facts: everything a rule may read, each true, false or unknown, with a sentence for each value.

A fact is declared once: its name, its clauses for ``docs/verdict-rows.md``, how it is found, and its sentences.
``{names}`` in sentences are keys of ``_NUMBERS``; sentences are written only when read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from typing import Final

from kvpressure.diagnosis import oom
from kvpressure.diagnosis.conditions import prefix_collapsed
from kvpressure.diagnosis.gpu_facts import GpuFacts
from kvpressure.diagnosis.numbers import NOT_KNOWN, number, percent
from kvpressure.engines.registry import dialect
from kvpressure.model import reasons
from kvpressure.model.frozen import frozen
from kvpressure.model.log_events import ALLOCATION_EVENTS
from kvpressure.model.signals import Signals
from kvpressure.model.state import Evidence
from kvpressure.printable import Asked
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.kv import full_from

SLOW: Final = "timeout"  # the reason of a page that did not come in time


class Recent:
    """The queue over the recent samples: number of samples, share with a queue (0-1), mean requests waiting."""

    __slots__ = ("samples", "waiting_mean", "waiting_share")

    def __init__(self, waiting: Sequence[float]) -> None:
        self.samples = len(waiting)
        self.waiting_share = sum(1 for value in waiting if value > 0) / len(waiting) if waiting else None
        self.waiting_mean = sum(waiting) / len(waiting) if waiting else None


class View:
    """Inputs of every fact: signals, recent queue, thresholds and the number of readings."""

    __slots__ = ("gpu", "readings", "recent", "s", "t")

    def __init__(self, s: Signals, recent: Recent, t: Thresholds, readings: int) -> None:
        self.s, self.recent, self.t, self.readings = s, recent, t, readings
        self.gpu = GpuFacts(s.compute, t)


@frozen
class Fact:
    """One input of the rules."""

    name: str
    title: str
    denied: str
    find: Callable[[View], bool | None]
    true: str
    false: str
    unknown: str


class Values(dict[str, bool | None]):
    """Facts by name, each found when first asked for."""

    __slots__ = ("_view",)

    def __init__(self, view: View) -> None:
        super().__init__()
        self._view = view

    def __missing__(self, name: str) -> bool | None:
        value = self[name] = FINDERS[name](self._view)
        return value


class Gathered(Mapping[str, Evidence]):
    """All facts about one engine at one moment; sentences are written when read."""

    __slots__ = ("_view", "facts")

    def __init__(self, view: View) -> None:
        self._view, self.facts = view, Values(view)

    def __getitem__(self, name: str) -> Evidence:
        value, fact = self.facts[name], BY_NAME[name]
        return Evidence(name, value, partial(_sentence, fact, value, self._view))

    def __iter__(self) -> Iterator[str]:
        return iter(BY_NAME)

    def __len__(self) -> int:
        return len(BY_NAME)

    def filled(self, text: str) -> str:
        """A sentence about a missing input with its numbers; a text that is only ``{fact}`` becomes that fact's
        sentence.
        """
        fact = text[1:-1] if text.startswith("{") and text.endswith("}") else ""
        return self[fact].text if fact in BY_NAME else text.format_map(_numbers(self._view))


def _sentence(fact: Fact, value: bool | None, view: View) -> str:
    form = fact.unknown if value is None else fact.true if value else fact.false
    return form.format_map(_numbers(view))


def least(value: float | None, at_least: float) -> bool | None:
    """Whether a value is at least ``at_least``; ``None`` if it is unknown."""
    return None if value is None else value >= at_least


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
    if limit is None or (s.kv.kv_used_ratio_recent_max or 0.0) < v.t["kv_warm_ratio"]:
        return True
    return free >= limit


def _queue(v: View) -> bool | None:
    share = v.recent.waiting_share
    return None if share is None else share >= v.t["queue_share_ratio"] and (v.s.load.waiting or 0.0) > 0


def _short(v: View) -> bool | None:
    """Whether few requests wait, and only briefly, as between two steps of a busy engine. ``None`` without queue
    times.
    """
    seconds, running, mean = v.s.latency.queue.get("0.95"), v.s.load.running, v.recent.waiting_mean
    if running is None or mean is None:
        return None
    if mean >= v.t["calm_queue_ratio"] * running:
        return False
    return None if seconds is None else seconds < v.t["queue_short_seconds"]


def _many_wait(v: View) -> bool | None:
    """Whether more requests wait than the few between two steps of a busy engine."""
    waiting, running = v.s.load.waiting, v.s.load.running
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
    return None if load.running is None else least(load.running + load.waiting_deferred, load.max_num_seqs or inf)


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
    return None if stuck is None or usual is None else stuck < v.t["prefill_usual_ratio"] * usual


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
    return None if trend is None else trend <= v.t["throughput_collapsed_ratio"]


def _allocation(v: View) -> int:
    return sum(v.s.events.get(name, 0) for name in ALLOCATION_EVENTS)


def _held_for_others(v: View) -> bool | None:
    """Whether KV blocks may be held for a server that has yet to pull them: hardly anything runs here."""
    load = v.s.load
    held = load.waits_for_blocks and load.kv_role != "kv_consumer"
    return held and (load.running or 0.0) < v.t["host_min_requests"]


_LEVEL_TEXT: Final = "{level}"
_FREE: Final = "{free_and_prompts}"
_LIMIT_TEXT: Final = "{running_of_limit}"
_QUEUE_TEXT: Final = "{queue}"
_RATES: Final = "{rates}"
_PREEMPTIONS: Final = "{preemption_counts}"
_LIMIT_SOURCES: Final = {
    "args": "from the arguments",
    "log": "from the start-up log",
    "default": "the default",
    "observed": "inferred",
}

FACTS: Final[tuple[Fact, ...]] = (
    Fact(
        "kv_full",
        "the KV cache is full",
        "the KV cache is not full",
        _peak_at("kv_full_ratio"),
        f"{_LEVEL_TEXT} (full at {{kv_full}})",
        f"{_LEVEL_TEXT}: not full (full at {{kv_full}})",
        "KV cache usage: unknown ({kv_why})",
    ),
    Fact(
        "kv_near_full",
        "the KV cache is nearly full",
        "the KV cache is not nearly full",
        _peak_at("kv_near_full_ratio"),
        f"{_LEVEL_TEXT}: nearly full or full (threshold {{kv_near}})",
        f"{_LEVEL_TEXT}: not nearly full (threshold {{kv_near}})",
        "KV cache usage: unknown ({kv_why})",
    ),
    Fact(
        "kv_near_full_now",
        "the KV cache is nearly full now",
        "the KV cache is not nearly full now",
        lambda v: least(v.s.kv.kv_used_ratio, _level(v, "kv_near_full_ratio")),
        "KV cache {kv} now: nearly full or full (threshold {kv_near})",
        "KV cache {kv} now: not nearly full (threshold {kv_near})",
        "KV cache usage now: unknown ({kv_why})",
    ),
    Fact(
        "kv_warm",
        "the KV cache is at least half full",
        "the KV cache is less than half full",
        lambda v: (v.s.kv.kv_used_ratio_recent_max or 0.0) >= v.t["kv_warm_ratio"],
        _LEVEL_TEXT,
        _LEVEL_TEXT,
        _LEVEL_TEXT,
    ),
    Fact(
        "kv_rising",
        "KV usage is rising",
        "KV usage is not rising",
        lambda v: None if v.s.kv.kv_slope_per_second is None else v.s.kv.kv_slope_per_second > 0,
        "KV usage is rising",
        "KV usage is not rising",
        "KV usage trend: unknown",
    ),
    Fact(
        "kv_held_idle",
        "KV blocks are held without requests",
        "no KV blocks are held without requests",
        _held_idle,
        "KV cache {kv} used with no requests in flight",
        "no KV blocks held without requests",
        "KV blocks held without requests: unknown",
    ),
    Fact(
        "head_of_line_blocked",
        "a long prompt (p95) does not fit",
        "no long prompt (p95) is held up",
        lambda v: _blocked(v, _long_prompt(v.s)),
        f"a p95 prompt does not fit into the KV cache: {_FREE}",
        "{long_not_blocked}",
        f"whether a p95 prompt fits into the KV cache: unknown ({_FREE})",
    ),
    Fact(
        "mean_prompt_blocked",
        "an average prompt does not fit",
        "no average prompt is held up",
        lambda v: _blocked(v, v.s.context.prompt_mean),
        f"an average prompt does not fit into the KV cache: {_FREE}",
        "{mean_not_blocked}",
        f"whether a prompt of average length fits into the KV cache: unknown ({_FREE})",
    ),
    Fact(
        "any_prompt_fits",
        "any prompt fits",
        "the longest prompt does not fit",
        _any_fits,
        f"prompts of the lengths seen fit into the KV cache: {_FREE}",
        f"the next prompt may not fit into the KV cache: {_FREE}",
        f"whether the next prompt fits into the KV cache: unknown ({_FREE})",
    ),
    Fact(
        "preempting",
        "requests were preempted in the last minute",
        "fewer than {preemptions_min} requests were preempted in the last minute",
        _preempting,
        f"{{preemptions}}: {_PREEMPTIONS}",
        f"{{preemptions}} below the threshold ({{few}}): {_PREEMPTIONS}",
        "{preemptions}: unknown (no counter, and no queue movement seen)",
    ),
    Fact(
        "preempting_now",
        "requests were preempted in the last {recent_window_seconds} s",
        "fewer than {preemptions_min} requests were preempted in the last {recent_window_seconds} s",
        lambda v: least(v.s.kv.preemptions_recent, v.t["preemptions_min"]),
        "{recent_preemptions} {preemptions} in the last {recent_seconds} s",
        "{preemptions} in the last {recent_seconds} s: {recent_preemptions} (threshold {few})",
        "{preemptions} in the last {recent_seconds} s: unknown",
    ),
    Fact(
        "preempted_recently",
        "requests were preempted in the last 30 s",
        "fewer than {preemptions_min} requests were preempted in the last 30 s",
        lambda v: least(v.s.kv.preemptions_recently, v.t["preemptions_min"]),
        "{preemptions} happened in the last 30 s",
        "{preemptions} in the last 30 s: {last_preemptions} (threshold {few})",
        "{preemptions} in the last 30 s: unknown",
    ),
    Fact(
        "prefix_cache_collapsed",
        "prefix cache hits collapsed",
        "prefix cache hits did not collapse",
        lambda v: prefix_collapsed(v.s, v.t),
        "prefix cache hit ratio fell to {hits} in the last 30 s (best in 15 minutes: {usual_hits})",
        "prefix cache hit ratio {hits} in the last 30 s (best in 15 minutes: {usual_hits})",
        "prefix cache hit ratio: unknown (too few prompts looked up, or caching off)",
    ),
    Fact(
        "preemptions_borne_out",
        "the counter confirms the preemptions",
        "the counter does not confirm the preemptions",
        lambda v: least(v.s.kv.preemptions_counted, v.t["preemptions_min"]),
        f"{{preemptions}} confirmed: {_PREEMPTIONS}",
        f"{{preemptions}} not confirmed: {_PREEMPTIONS}",
        "{preemption} counter: unknown (not on the metrics endpoint)",
    ),
    Fact(
        "preempting_much",
        "running requests are preempted {thrashing_preemptions_per_running_minute} or more times a minute each",
        "running requests are preempted fewer than {thrashing_preemptions_per_running_minute} times a minute each",
        lambda v: least(v.s.kv.preemptions_per_running_minute, v.t["thrashing_preemptions_per_running_minute"]),
        "frequent {preemptions}: {per_running} a minute per running request",
        "{preemptions} not frequent: {per_running} a minute per running request",
        "{preemptions} per running request: unknown",
    ),
    Fact(
        "running_falls_waiting_rises",
        "requests moved from running back to waiting",
        "fewer than {preemptions_min} requests moved from running back to waiting",
        lambda v: least(v.s.kv.preemptions_inferred, v.t["preemptions_min"]),
        "{silent} requests went from running back to waiting while none finished",
        "requests that went from running back to waiting: {silent} (threshold {few})",
        "requests going from running back to waiting: unknown",
    ),
    Fact(
        "running_at_limit",
        "max_num_seqs is reached",
        "max_num_seqs is not reached",
        lambda v: v.s.load.running_at_limit,
        f"{{max_num_seqs}} reached{{not_now}}: {_LIMIT_TEXT}",
        f"{{max_num_seqs}} not reached: {_LIMIT_TEXT}",
        "{max_num_seqs}: unknown ({runs})",
    ),
    Fact(
        "running_at_limit_now",
        "max_num_seqs is reached now",
        "max_num_seqs is not reached now",
        lambda v: v.s.load.running_at_limit_now,
        f"at {{max_num_seqs}} now: {_LIMIT_TEXT}",
        f"below {{max_num_seqs}} now: {_LIMIT_TEXT}",
        "{max_num_seqs}: unknown",
    ),
    Fact(
        "limit_is_stated",
        "max_num_seqs was read from arguments or log",
        "max_num_seqs was not read from arguments or log",
        _source_is("args", "log"),
        "{max_num_seqs} {limit} is set ({limit_source})",
        "{max_num_seqs} {limit} is not set in arguments or log ({limit_source})",
        "{max_num_seqs}: unknown",
    ),
    Fact(
        "limit_is_default",
        "max_num_seqs is the version's default",
        "max_num_seqs is not the version's default",
        _source_is("default"),
        "{max_num_seqs} {limit} is this version's default",
        "{max_num_seqs} {limit} is not a default ({limit_source})",
        "{max_num_seqs}: unknown",
    ),
    Fact(
        "limit_is_observed",
        "max_num_seqs is inferred from a constant batch",
        "max_num_seqs is not inferred from a constant batch",
        _source_is("observed"),
        "{max_num_seqs} {limit} is inferred: the batch is constant while requests wait",
        "{max_num_seqs} {limit} is known, not inferred from a constant batch ({limit_source})",
        "{max_num_seqs}: unknown",
    ),
    Fact(
        "running_plateau",
        "the batch size is constant",
        "the batch size varies",
        lambda v: v.s.load.running_plateau,
        "number of running requests is constant ({running})",
        "number of running requests varies ({running} now)",
        "variation of running requests: unknown",
    ),
    Fact(
        "something_runs",
        "requests are running",
        "no request is running",
        lambda v: None if v.s.load.running is None else v.s.load.running > 0,
        "{running} requests running",
        "no request running",
        "running requests: unknown",
    ),
    Fact(
        "several_run",
        "{host_min_requests} or more requests are running",
        "fewer than {host_min_requests} requests are running",
        lambda v: (v.s.load.running or 0.0) >= v.t["host_min_requests"],
        "{running} requests running",
        "{runs}",
        "running requests: unknown",
    ),
    Fact(
        "queue_present",
        "requests are waiting",
        "no requests are waiting",
        _queue,
        _QUEUE_TEXT,
        f"no lasting queue: {_QUEUE_TEXT}",
        "waiting requests: unknown",
    ),
    Fact(
        "waiting_now",
        "requests are waiting now",
        "no request is waiting now",
        lambda v: None if v.s.load.waiting is None else v.s.load.waiting > 0,
        _QUEUE_TEXT,
        "no request waiting",
        "waiting requests: unknown",
    ),
    Fact(
        "many_wait_now",
        "many requests are waiting now",
        "few or no requests are waiting now",
        _many_wait,
        _QUEUE_TEXT,
        _QUEUE_TEXT,
        "waiting requests: unknown",
    ),
    Fact(
        "queue_short",
        "the queue is short",
        "the queue is long or slow",
        _short,
        "the queue is short: {mean_queue}",
        "the queue is long or slow: {mean_queue}",
        "queue time: unknown ({queue})",
    ),
    Fact(
        "waited_recently",
        "requests waited in the last {recent_window_seconds} s",
        "no request waited in the last {recent_window_seconds} s",
        lambda v: None if v.recent.waiting_share is None else v.recent.waiting_share > 0,
        "mean queue in the last {recent_seconds} s: {waiting_mean} requests",
        "no request waited in the last {recent_seconds} s",
        "queue in the last {recent_seconds} s: unknown",
    ),
    Fact(
        "queue_for_capacity",
        "requests are waiting for capacity",
        "no request is waiting for capacity",
        _for_capacity,
        _QUEUE_TEXT,
        f"no request is waiting for capacity: {_QUEUE_TEXT}",
        f"reason for waiting: unknown ({_QUEUE_TEXT})",
    ),
    Fact(
        "deferred_fill_limit",
        "running and deferred requests together reach max_num_seqs",
        "running and deferred requests together are below max_num_seqs",
        _deferred_fill,
        f"{_QUEUE_TEXT}: running and deferred requests together reach {{max_num_seqs}} {{limit}}",
        f"running and deferred requests together are below {{max_num_seqs}}: {_QUEUE_TEXT}",
        "deferred requests: unknown ({deferred_where})",
    ),
    Fact(
        "queue_for_capacity_now",
        "requests are waiting for capacity now",
        "no request is waiting for capacity now",
        _capacity_now,
        _QUEUE_TEXT,
        f"no request is waiting for capacity: {_QUEUE_TEXT}",
        f"reason for waiting: unknown ({_QUEUE_TEXT})",
    ),
    Fact(
        "waits_for_blocks",
        "the server exchanges KV blocks with others",
        "the server exchanges no KV blocks",
        lambda v: v.s.load.waits_for_blocks,
        "requests may wait for KV blocks from other servers",
        "no request waits for KV blocks from other servers",
        "KV transfer: unknown",
    ),
    Fact(
        "blocks_held_for_others",
        "KV blocks may be held for another server",
        "no KV blocks are held for another server",
        _held_for_others,
        "KV blocks may be held until another server has pulled them",
        "no KV blocks are held until another server has pulled them",
        "KV transfer: unknown",
    ),
    Fact(
        "page_fresh",
        "the metrics are fresh",
        "the metrics are stale",
        _fresh,
        "last successful scrape {age} s ago{failing}",
        "metrics are stale: last successful scrape {age} s ago{failing}",
        "never scraped{page_error}",
    ),
    Fact(
        "scrape_failing",
        "the last scrape failed",
        "the last scrape succeeded",
        lambda v: (v.s.progress.pages_failing or 0.0) > 0,
        "the last scrape failed{page_error}",
        "the last scrape succeeded",
        "scrapes: unknown",
    ),
    Fact(
        "first_reading",
        "there was only one scrape so far",
        "there were several scrapes",
        lambda v: v.readings <= 1,
        "only one scrape so far",
        "{readings} scrapes so far",
        "scrapes: unknown",
    ),
    Fact(
        "work_present",
        "requests are in flight",
        "no requests are in flight",
        lambda v: v.s.progress.work_present,
        "{in_flight} requests in flight",
        "no requests in flight",
        "requests in flight: unknown",
    ),
    Fact(
        "tokens_flow",
        "tokens are being produced",
        "no tokens are being produced",
        lambda v: v.s.progress.tokens_flow,
        f"tokens are flowing: {_RATES}",
        "no tokens in the last {flow_seconds} s",
        "tokens: unknown (no second scrape, or no token counters)",
    ),
    Fact(
        "tokens_recently",
        "tokens were produced just now",
        "no token was produced just now",
        lambda v: v.s.progress.tokens_recently,
        f"tokens were produced just now: {_RATES}",
        "no token just now",
        "most recent tokens: unknown",
    ),
    Fact(
        "no_progress",
        "there was no progress for {no_progress_seconds} s",
        "there was progress in the last {no_progress_seconds} s",
        _stuck("no_progress_seconds"),
        "requests are pending, but for {stuck} s no token was produced, no request finished and no step had output",
        "requests are making progress",
        "progress: unknown (no requests in flight, or no token counters)",
    ),
    Fact(
        "no_progress_long",
        "there was no progress for {stalled_seconds} s",
        "there was progress in the last {stalled_seconds} s",
        _stuck("stalled_seconds"),
        "no progress for {stuck} s",
        "requests made progress in the last {stalled_from} s",
        "progress: unknown",
    ),
    Fact(
        "no_progress_very_long",
        "there was no progress for {prefill_patience_seconds} s",
        "there was progress in the last {prefill_patience_seconds} s",
        _stuck("prefill_patience_seconds"),
        "no progress for {stuck} s",
        "requests made progress in the last {patience} s",
        "progress: unknown",
    ),
    Fact(
        "gauges_still",
        "no gauge is moving",
        "gauges are moving",
        lambda v: (v.s.progress.seconds_still or 0.0) >= v.t["no_progress_seconds"],
        "no gauge or counter has moved for {still} s",
        "gauges are moving",
        "movement of gauges: unknown",
    ),
    Fact(
        "ever_produced",
        "the process has produced tokens since its start",
        "the process has produced no token since its start",
        lambda v: v.s.progress.ever_produced,
        "the process has produced tokens since its start",
        "the process has produced no token since its start",
        "tokens since process start: unknown",
    ),
    Fact(
        "prompt_at_once",
        "the last admitted prompt is computed in one step",
        "no prompt is computed in one step",
        lambda v: v.s.progress.prompt_at_once,
        "the last admitted prompt may still be computed, in one long step",
        "no prompt is being computed in one long step",
        "prompts computed in one step: unknown",
    ),
    Fact(
        "prefill_usual",
        "prefill usually takes at least this long here",
        "prefill usually takes less time here",
        _prefill_usual,
        "prefill usually takes {usual_prefill} s; last progress {stuck} s ago",
        "no progress for longer than prefill usually takes ({usual_prefill} s)",
        "usual prefill time: unknown (no first token yet)",
    ),
    Fact(
        "http_answers",
        "the HTTP server answers",
        "the HTTP server does not answer",
        lambda v: v.s.progress.http_moved,
        "the API server has answered requests since the last output",
        "the API server has answered no request since the last output",
        "HTTP answers: unknown",
    ),
    Fact(
        "clients_gone",
        "clients have closed their connections",
        "clients keep their connections",
        lambda v: v.s.progress.connections_dropped,
        "most clients have closed their connections since the last output",
        "clients have kept their connections since the last output",
        "client connections: unknown",
    ),
    Fact(
        "finishing",
        "requests are finishing",
        "no request is finishing",
        lambda v: v.s.progress.finished_flow,
        "requests finished in the last {flow_seconds} s",
        "no request finished in the last {flow_seconds} s",
        "finished requests: unknown",
    ),
    Fact(
        "prompts_looked_up",
        "prompts are being admitted",
        "no prompt is being admitted",
        lambda v: v.s.progress.queries_flow,
        "prompts were admitted in the last {flow_seconds} s (prefix-cache queries rose)",
        "no prompt was admitted in the last {flow_seconds} s",
        "admitted prompts: unknown (no prefix-cache counters)",
    ),
    Fact(
        "prompts_just_now",
        "prompts were admitted just now",
        "no prompt was admitted just now",
        lambda v: v.s.progress.queries_recently,
        "prompts were admitted just now (prefix-cache queries rose)",
        "no prompt was admitted just now",
        "prompts admitted just now: unknown (no prefix-cache counters)",
    ),
    Fact(
        "tokens_trickle",
        "running requests get almost no tokens",
        "running requests get tokens",
        _trickle,
        "running requests get almost no tokens: {per_request} tokens/s each",
        "running requests get {per_request} tokens/s each",
        "tokens per running request: unknown",
    ),
    Fact(
        "steps_slower",
        "steps take at least {steps_slower_ratio} × as long as before",
        "steps take less than {steps_slower_ratio} × as long as before",
        lambda v: least(v.s.batch.step_ratio, v.t["steps_slower_ratio"]),
        "steps are slow: they take {step_ratio} × as long as the fastest steps of the same batch size",
        "steps are not slow: they take {step_ratio} × as long as the fastest steps of the same batch size",
        "step time against earlier steps: unknown",
    ),
    Fact(
        "prefill_dominates",
        "prefill dominates",
        "prefill does not dominate",
        _prefill,
        f"prefill dominates: {_RATES}{{cached}}",
        f"prefill does not dominate: {_RATES}{{cached}}",
        f"whether prefill dominates: unknown ({_RATES}{{cached}})",
    ),
    Fact(
        "clients_came",
        "clients have connected since the last output",
        "no client has connected since the last output",
        lambda v: v.s.progress.clients_came,
        "clients have connected, or the queue has grown, since the last output",
        "no clients have connected since the last output, and the queue has not grown",
        "client connections: unknown",
    ),
    Fact(
        "engine_asleep",
        "the engine is asleep",
        "the engine is awake",
        lambda v: v.s.progress.asleep,
        "the engine is asleep (weights offloaded)",
        "the engine is awake",
        "sleep mode: unknown (not on the metrics endpoint)",
    ),
    Fact(
        "gpu_starved",
        "the GPU is starved",
        "the GPU is not starved",
        lambda v: v.gpu.starved,
        "GPU starved: {gpu} (starved below {starved})",
        "GPU not starved: {gpu} (starved below {starved})",
        "GPU activity: unknown ({gpu_known})",
    ),
    Fact(
        "gpu_saturated",
        "the GPU is saturated",
        "the GPU is not saturated",
        lambda v: v.gpu.saturated,
        "GPU saturated: {gpu}",
        "GPU not saturated: {gpu}",
        "GPU saturation: unknown ({gpu_known})",
    ),
    Fact(
        "gpu_works",
        "GPU units are busy or power is high",
        "GPU units are not busy and power is not high",
        lambda v: v.gpu.works,
        "GPU working hard: {gpu}",
        "GPU not working hard: {gpu}",
        "GPU load: unknown ({gpu_known})",
    ),
    Fact(
        "gpu_computes",
        "the GPU computes at its peak",
        "the GPU does not compute at its peak",
        lambda v: v.gpu.computes,
        "GPU computing at its peak: {gpu}",
        "GPU not computing at its peak: {gpu}",
        "GPU compute: unknown ({gpu_known})",
    ),
    Fact(
        "gpu_utilization_low",
        "GPU utilization is low",
        "GPU utilization is not low",
        lambda v: v.gpu.low,
        "GPU utilization low: {gpu}",
        "GPU utilization not low: {gpu}",
        "GPU utilization: unknown ({gpu_known})",
    ),
    Fact(
        "gpu_idle",
        "the GPU is idle",
        "the GPU is not idle",
        lambda v: v.gpu.idle,
        "GPU idle: {gpu}",
        "GPU not idle: {gpu}",
        "GPU activity: unknown ({gpu_known})",
    ),
    Fact(
        "gpu_unseen",
        "no GPU activity is readable",
        "GPU activity is readable",
        lambda v: v.gpu.unseen,
        "no GPU activity is readable",
        "GPU activity is readable",
        "GPU activity: unknown",
    ),
    Fact(
        "gpu_of_others",
        "other pods use the GPU too",
        "no other pod uses the GPU",
        lambda v: v.s.compute.gpus_of_others,
        "other pods use the same GPU",
        "no other pod uses the GPU",
        "GPU sharing: unknown",
    ),
    Fact(
        "gpu_shared",
        "the GPU's activity may come from another engine or pod",
        "the GPU's activity comes from this engine alone",
        lambda v: v.s.compute.gpus_shared or v.s.compute.gpus_of_others,
        "the GPU's activity may come from another engine or pod",
        "the GPU's activity comes from this engine alone",
        "GPU sharing: unknown",
    ),
    Fact(
        "cpu_throttled",
        "the CPU is throttled",
        "the CPU is not throttled",
        lambda v: least(v.s.host.cpu_throttled_ratio, v.t["cpu_throttled_ratio"]),
        "CPU throttled in {throttled} of its periods",
        "CPU not throttled (in {throttled} of its periods)",
        "CPU throttling: unknown (no container cgroup read)",
    ),
    Fact(
        "cpu_throttled_mostly",
        "most CPU periods are throttled",
        "most CPU periods are not throttled",
        lambda v: (v.s.host.cpu_throttled_ratio or 0.0) >= v.t["cpu_throttled_most_ratio"],
        "CPU throttled in {throttled} of its periods",
        "most CPU periods are not throttled",
        "CPU throttling: unknown",
    ),
    Fact(
        "cpu_contended",
        "there is CPU contention",
        "there is no CPU contention",
        lambda v: least(v.s.host.cpu_pressure_ratio, v.t["cpu_pressure_ratio"]),
        "CPU contention: processes waited for a CPU {contended} of the time",
        "no CPU contention (processes waited {contended} of the time)",
        "CPU contention: unknown (no pressure reading of the container)",
    ),
    Fact(
        "cpu_saturated",
        "the CPU is at its limit",
        "the CPU is below its limit",
        lambda v: least(v.s.host.cpu_used_ratio, v.t["cpu_saturated_ratio"]),
        "CPU: {cpu_used} of the limit used",
        "CPU below its limit ({cpu_used} used)",
        "CPU use: unknown (the container has no CPU limit, or CPU use was not read)",
    ),
    Fact(
        "api_server_saturated",
        "the API server uses a whole core",
        "the API server uses less than a core",
        lambda v: least(v.s.host.api_cpu_cores, v.t["api_cpu_cores"]),
        "API server saturated: {api_cores} cores used",
        "API server not saturated ({api_cores} cores used)",
        "API server CPU: unknown",
    ),
    Fact(
        "outside_engine_time",
        "much of the time is spent outside the engine",
        "little time is spent outside the engine",
        lambda v: least(v.s.latency.outside_engine_share, v.t["outside_engine_share_ratio"]),
        "{outside} of the requests' time is spent outside the engine",
        "only {outside} of the requests' time is spent outside the engine",
        "time outside the engine: unknown (latency histograms missing)",
    ),
    Fact(
        "latency_multiplied",
        "latency is at least {latency_multiplied_ratio} × its baseline",
        "latency is below {latency_multiplied_ratio} × its baseline",
        _multiplied,
        "latency multiplied: {worst_phase} p95 is {worst_ratio} × its baseline",
        "latency not multiplied: {worst_phase} p95 is {worst_ratio} × its baseline",
        "latency against baseline: unknown (no baseline yet, or too few requests)",
    ),
    Fact(
        "throughput_fell",
        "throughput is at most {throughput_collapsed_ratio} × its recent best",
        "throughput is above {throughput_collapsed_ratio} × its recent best",
        _fell,
        "throughput fell to {trend} of its recent best, while demand did not fall",
        "throughput is {trend} of its recent best",
        "throughput trend: unknown (less than two minutes of comparable load)",
    ),
    Fact(
        "allocation_failure_logged",
        "the log shows an allocation failure",
        "the log shows no allocation failure",
        lambda v: _allocation(v) > 0 if v.s.events_known else None,
        "allocation failures in the log of the last 10 minutes: {allocations}",
        "no allocation failures in the log of the last 10 minutes",
        "allocation failures: unknown (no log read)",
    ),
    Fact(
        "gpu_out_of_memory",
        "the log shows that GPU memory ran out",
        "the log does not show that GPU memory ran out",
        lambda v: oom.happened(v.s),
        oom.TRUE,
        oom.FALSE,
        oom.UNKNOWN,
    ),
)
FINDERS: Final = {fact.name: fact.find for fact in FACTS}
BY_NAME: Final[Mapping[str, Fact]] = {fact.name: fact for fact in FACTS}


def clause(name: str, holds: bool, levels: Mapping[str, str]) -> str:
    """A fact (``holds``) or its opposite as a short clause; ``levels``: thresholds by name, as printed."""
    return (BY_NAME[name].title if holds else BY_NAME[name].denied).format_map(levels)


def _cached(v: View) -> str:
    computed, prompt = _computed(v), v.s.throughput.prompt_tokens_per_second
    if computed is None and prompt is not None:
        return "; share computed here: unknown"
    if computed == prompt:
        return ""
    return f"; {number(computed)} of the prompt's computed, the rest was cached"


def _scrape_error(v: View) -> str:
    """Why the last scrape failed, in words; "" = it did not fail."""
    return reasons.in_words(v.s.progress.page_error or "")


def _failing(v: View) -> str:
    failing = int(v.s.progress.pages_failing or 0)
    if not failing:
        return ""
    times = "attempt" if failing == 1 else f"{failing} attempts"
    return f", last {times} failed ({_scrape_error(v) or NOT_KNOWN})"


def _known(*parts: tuple[str, float | None], otherwise: str) -> str:
    """The parts whose number is known, each with its number in place of ``#``; ``otherwise`` if none is."""
    return ", ".join(text.replace("#", number(value)) for text, value in parts if value is not None) or otherwise


def _usage(v: View) -> str:
    kv = v.s.kv
    if kv.kv_used_ratio is None and kv.kv_used_ratio_recent_max is None:
        return f"KV cache usage: unknown ({_NUMBERS['kv_why'](v)})"
    if kv.kv_used_ratio is None or kv.kv_used_ratio_recent_max is None:
        return f"KV cache {percent(kv.kv_used_ratio_recent_max if kv.kv_used_ratio is None else kv.kv_used_ratio)}"
    return f"KV cache {percent(kv.kv_used_ratio)} now, recent peak {percent(kv.kv_used_ratio_recent_max)}"


def _free_and_prompts(v: View) -> str:
    """Tokens free at the recent peak, and prompt lengths in tokens."""
    context = v.s.context
    free = _known(("# tokens free", _free(v.s)), otherwise="free tokens: unknown")
    prompts = _known(
        ("mean prompt # tokens", context.prompt_mean),
        ("p95 # tokens", context.prompt_quantiles.get("0.95")),
        otherwise="prompt length: unknown",
    )
    longest = (
        ""
        if context.context_limit is None
        else f", {dialect(v.s.dialect).called('max_model_len')} {number(context.context_limit)}"
    )
    return f"{free}; {prompts}{longest}"


def _running_of_limit(v: View) -> str:
    load, limit = v.s.load, dialect(v.s.dialect).called("max_num_seqs")
    if load.max_num_seqs is None:
        return f"{_runs(v)}; {limit}: unknown"
    where = f" ({limit_source(load.max_num_seqs_source)})" if load.max_num_seqs_source else ""
    if load.running is None:
        return f"running requests: unknown; {limit} {number(load.max_num_seqs)}{where}"
    return f"{number(load.running)} of {number(load.max_num_seqs)} running{where}"


def _not_now(v: View) -> str:
    """Over what time the limit was reached, where it no longer is; "" where it still is."""
    lately = f" in most samples of the last {number(v.t['recent_window_seconds'])} s, but not now"
    return lately if v.s.load.running_at_limit_now is False else ""


def _free_if_known(v: View) -> str:
    """Tokens free at the recent peak, and prompt lengths if they are known; "" if the free tokens are unknown."""
    free = _free(v.s)
    if free is None:
        return ""
    return f": {number(free)} tokens free" if v.s.context.prompt_mean is None else f": {_free_and_prompts(v)}"


def _not_blocked(v: View, prompt: str) -> str:
    """Which part of ``_blocked`` is false."""
    if not _can_block(v):
        why = f"KV cache usage is too low to hold up {prompt}"
    elif v.recent.waiting_share != 1.0:
        why = f"the queue was empty at times, so {prompt} did not wait long for the KV cache"
    else:
        why = f"{prompt} fits into the free KV cache"
    return f"{why}{_free_if_known(v)}"


def limit_source(source: str | None) -> str:
    """Where a limit was read, in words."""
    return _LIMIT_SOURCES.get(source, source) if source else "source: unknown"


def _runs(v: View) -> str:
    return _known(("# requests running", v.s.load.running), otherwise="running requests: unknown")


def _queue_text(v: View) -> str:
    load = v.s.load
    text = _known(
        ("# requests waiting", load.waiting), ("# running", load.running), otherwise="waiting requests: unknown"
    )
    return text + ("" if load.waiting_deferred is None else f" ({number(load.waiting_deferred)} deferred)")


def _mean_queue(v: View) -> str:
    seconds = v.s.latency.queue.get("0.95")
    time = "queue time: unknown" if seconds is None else f"queue time p95 {number(seconds, 2)} s"
    return f"mean {number(v.recent.waiting_mean, 1)} waiting, {number(v.s.load.running)} running, {time}"


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
    return f"reported by {engine.title} {since} and later" if since else "not on the metrics endpoint"


def _preemption_counts(v: View) -> str:
    return _known(
        (f"# counted by {dialect(v.s.dialect).title} in the last minute", v.s.kv.preemptions_counted),
        ("# inferred from queue movement", v.s.kv.preemptions_inferred),
        otherwise="number: unknown",
    )


_NUMBERS: Final[Mapping[str, Callable[[View], str]]] = {
    "engine": lambda v: dialect(v.s.dialect).title,
    "preemptions": lambda v: dialect(v.s.dialect).called("preemptions"),
    "deferred_where": _deferred_where,
    "preemption": lambda v: dialect(v.s.dialect).called("preemption"),
    "max_num_seqs": lambda v: dialect(v.s.dialect).called("max_num_seqs"),
    "kv": lambda v: percent(v.s.kv.kv_used_ratio),
    "kv_full": lambda v: percent(_level(v, "kv_full_ratio")),
    "kv_near": lambda v: percent(_level(v, "kv_near_full_ratio")),
    "kv_why": lambda v: "this engine does not report it" if v.s.kv.kv_recorded is False else "not read yet",
    "level": _usage,
    "free_and_prompts": _free_and_prompts,
    "long_not_blocked": lambda v: _not_blocked(v, "a p95 prompt"),
    "mean_not_blocked": lambda v: _not_blocked(v, "an average prompt"),
    "running_of_limit": _running_of_limit,
    "not_now": _not_now,
    "runs": _runs,
    "queue": _queue_text,
    "rates": _rates,
    "preemption_counts": _preemption_counts,
    "few": lambda v: number(v.t["preemptions_min"]),
    "last_preemptions": lambda v: number(v.s.kv.preemptions_recently),
    "silent": lambda v: number(v.s.kv.preemptions_inferred),
    "recent_preemptions": lambda v: number(v.s.kv.preemptions_recent),
    "flow_seconds": lambda v: number(v.t["flow_window_seconds"]),
    "recent_seconds": lambda v: number(v.t["recent_window_seconds"]),
    "per_running": lambda v: number(v.s.kv.preemptions_per_running_minute, 1),
    "running": lambda v: number(v.s.load.running),
    "hits": lambda v: percent(v.s.kv.prefix_hit_ratio_recent),
    "usual_hits": lambda v: percent(v.s.kv.prefix_hit_ratio_usual),
    "per_request": lambda v: number(v.s.throughput.generation_tokens_per_running, 1),
    "step_ratio": lambda v: number(v.s.batch.step_ratio, 1),
    "waiting_mean": lambda v: number(v.recent.waiting_mean, 1),
    "mean_queue": _mean_queue,
    "limit": lambda v: number(v.s.load.max_num_seqs),
    "limit_source": lambda v: limit_source(v.s.load.max_num_seqs_source),
    "age": lambda v: number(v.s.progress.fresh_seconds),
    "failing": _failing,
    "page_error": lambda v: f": {_scrape_error(v)}" if v.s.progress.page_error else "",
    "readings": lambda v: str(v.readings),
    "in_flight": lambda v: number(v.s.load.in_flight),
    "cached": _cached,
    "stuck": lambda v: number(v.s.progress.seconds_without_progress),
    "usual_prefill": lambda v: number(v.s.progress.prefill_usual_seconds),
    "still": lambda v: number(v.s.progress.seconds_still),
    "stalled_from": lambda v: number(v.t["stalled_seconds"]),
    "patience": lambda v: number(v.t["prefill_patience_seconds"]),
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
    "trend": lambda v: percent(v.s.throughput.throughput_trend_ratio),
    "allocations": lambda v: str(_allocation(v)),
    "oom_times": lambda v: oom.times(v.s),
    "oom_figures": lambda v: oom.figures(v.s, v.t),
}


def levels(t: Thresholds) -> Asked:
    """Thresholds by name, as printed."""
    return Asked(lambda name: t.entry(name).text)


def _numbers(view: View) -> Asked:
    return Asked(lambda name: _NUMBERS[name](view))
