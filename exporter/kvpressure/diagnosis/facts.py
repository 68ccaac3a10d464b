"""Facts: everything a rule may read, each true, false or unknown, with a sentence for each value.

A fact is declared once: its name, its clauses, how it is found, the numbers behind it and why it may be unknown.
``{names}`` are keys of ``_NUMBERS``, words of the engine or thresholds; sentences are written only when read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from typing import Final

from kvpressure.diagnosis import oom
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
    """One input of the rules. ``title`` states it and ``denied`` its opposite, in docs and evidence; ``seen``: the
    numbers behind either; ``why``: the reason where it is unknown; ``question``: what is unknown then ("" = whether
    ``title``).
    """

    name: str
    title: str
    denied: str
    find: Callable[[View], bool | None]
    seen: str = ""
    why: str = ""
    question: str = ""

    def sentence(self, value: bool | None, numbers: Mapping[str, str]) -> str:
        """The evidence for this value."""
        if value is None:
            why = self.why.format_map(numbers)
            question = (self.question or f"whether {self.title}").format_map(numbers)
            return f"{question}: unknown" + (f" ({why})" if why else "")
        said, seen = (self.title if value else self.denied).format_map(numbers), self.seen.format_map(numbers)
        return f"{said}: {seen}" if seen else said


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
    return fact.sentence(value, _numbers(view))


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


def _seen_or(v: View, found: bool) -> bool | None:
    """What was found about the pod's GPUs; unknown rather than false where none is read."""
    return found or (None if v.gpu.unseen else False)


def _allocation(v: View) -> int:
    return sum(v.s.events.get(name, 0) for name in ALLOCATION_EVENTS)


def prefix_collapsed(s: Signals, t: Thresholds) -> bool | None:
    """Whether the prefix cache hits about a third or less (``hit_ratio_collapsed_ratio``) of its usual share."""
    now, usual = s.kv.prefix_hit_ratio_recent, s.kv.prefix_hit_ratio_usual
    if now is None or usual is None:
        return None
    return usual >= t["hit_ratio_usual_ratio"] and now <= t["hit_ratio_collapsed_ratio"] * usual


def _held_for_others(v: View) -> bool | None:
    """Whether KV blocks may be held for a server that has yet to pull them: hardly anything runs here."""
    load = v.s.load
    held = load.waits_for_blocks and load.kv_role != "kv_consumer"
    return held and (load.running or 0.0) < v.t["host_min_requests"]


_LIMIT_SOURCES: Final = {
    "args": "from the arguments",
    "log": "from the start-up log",
    "default": "the default",
    "observed": "inferred",
}

FACTS: Final[tuple[Fact, ...]] = (
    # --- the KV cache
    Fact(
        "kv_full",
        "the KV cache is full",
        "the KV cache is not full",
        _peak_at("kv_full_ratio"),
        "{level} (full at {kv_full})",
        "{kv_why}",
    ),
    Fact(
        "kv_near_full",
        "the KV cache is full or nearly full",
        "the KV cache is not nearly full",
        _peak_at("kv_near_full_ratio"),
        "{level} (threshold {kv_near})",
        "{kv_why}",
    ),
    Fact(
        "kv_near_full_now",
        "the KV cache is full or nearly full now",
        "the KV cache is not nearly full now",
        lambda v: least(v.s.kv.kv_used_ratio, _level(v, "kv_near_full_ratio")),
        "{kv} (threshold {kv_near})",
        "{kv_why}",
    ),
    Fact(
        "kv_warm",
        "the KV cache is at least half full",
        "the KV cache is less than half full",
        lambda v: least(v.s.kv.kv_used_ratio_recent_max, v.t["kv_warm_ratio"]),
        "{level}",
        "{kv_why}",
    ),
    Fact(
        "kv_rising",
        "KV cache usage is rising",
        "KV cache usage is not rising",
        lambda v: None if v.s.kv.kv_slope_per_second is None else v.s.kv.kv_slope_per_second > 0,
    ),
    Fact(
        "kv_held_idle",
        "KV blocks are held without requests",
        "no KV blocks are held without requests",
        _held_idle,
        "{held}",
    ),
    Fact(
        "head_of_line_blocked",
        "a prompt of p95 length is too long for the free KV cache",
        "no prompt of p95 length is kept waiting by the KV cache",
        lambda v: _blocked(v, _long_prompt(v.s)),
        "{long_blocked}",
        "{free_and_prompts}",
    ),
    Fact(
        "mean_prompt_blocked",
        "a prompt of average length is too long for the free KV cache",
        "no prompt of average length is kept waiting by the KV cache",
        lambda v: _blocked(v, v.s.context.prompt_mean),
        "{mean_blocked}",
        "{free_and_prompts}",
    ),
    Fact(
        "any_prompt_fits",
        "any prompt fits into the KV cache",
        "the next prompt may not fit into the KV cache",
        _any_fits,
        "{free_and_prompts}",
        "{free_and_prompts}",
    ),
    Fact(
        "prefix_cache_collapsed",
        "prefix cache hits collapsed",
        "prefix cache hits did not collapse",
        lambda v: prefix_collapsed(v.s, v.t),
        "hit ratio {hits} in the last 30 s, best in 15 minutes {usual_hits}",
        "too few prompts looked up, or caching off",
    ),
    Fact(
        "waits_for_blocks",
        "the server exchanges KV blocks with other servers",
        "the server exchanges no KV blocks with other servers",
        lambda v: v.s.load.waits_for_blocks,
    ),
    Fact(
        "blocks_held_for_others",
        "KV blocks may be held until another server has pulled them",
        "no KV blocks are held for another server",
        _held_for_others,
        question="whether KV blocks are held for another server",
    ),
    # --- preemptions
    Fact(
        "preempting",
        "requests were {preempted} in the last minute",
        "fewer than {preemptions_min} requests were {preempted} in the last minute",
        _preempting,
        "{preemption_counts}",
        "no counter, and no queue movement seen",
    ),
    Fact(
        "preempting_now",
        "requests were {preempted} in the last {recent_window_seconds} s",
        "fewer than {preemptions_min} requests were {preempted} in the last {recent_window_seconds} s",
        lambda v: least(v.s.kv.preemptions_recent, v.t["preemptions_min"]),
        "{recent_preemptions}",
    ),
    Fact(
        "preempted_recently",
        "requests were {preempted} in the last 30 s",
        "fewer than {preemptions_min} requests were {preempted} in the last 30 s",
        lambda v: least(v.s.kv.preemptions_recently, v.t["preemptions_min"]),
        "{last_preemptions}",
    ),
    Fact(
        "preemptions_borne_out",
        "the counter confirms the {preemptions}",
        "the counter does not confirm the {preemptions}",
        lambda v: least(v.s.kv.preemptions_counted, v.t["preemptions_min"]),
        "{preemption_counts}",
        "the metrics endpoint has no such counter",
    ),
    Fact(
        "preempting_much",
        "each running request is {preempted} {thrashing_preemptions_per_running_minute} or more times a minute",
        "each running request is {preempted} fewer than {thrashing_preemptions_per_running_minute} times a minute",
        lambda v: least(v.s.kv.preemptions_per_running_minute, v.t["thrashing_preemptions_per_running_minute"]),
        "{per_running} on average",
        question="how often each running request is {preempted}",
    ),
    Fact(
        "running_falls_waiting_rises",
        "requests moved from running back to waiting while none finished",
        "fewer than {preemptions_min} requests moved from running back to waiting",
        lambda v: least(v.s.kv.preemptions_inferred, v.t["preemptions_min"]),
        "{silent} in the last minute",
    ),
    # --- the sequence limit
    Fact(
        "running_at_limit",
        "{max_num_seqs} is reached",
        "{max_num_seqs} is not reached",
        lambda v: v.s.load.running_at_limit,
        "{reached}",
        "{running_of_limit}",
    ),
    Fact(
        "running_at_limit_now",
        "{max_num_seqs} is reached now",
        "{max_num_seqs} is not reached now",
        lambda v: v.s.load.running_at_limit_now,
        "{running_of_limit}",
        "{running_of_limit}",
    ),
    Fact(
        "limit_is_stated",
        "{max_num_seqs} was read from arguments or log",
        "{max_num_seqs} was not read from arguments or log",
        _source_is("args", "log"),
        "{limit}",
        question="where {max_num_seqs} comes from",
    ),
    Fact(
        "limit_is_default",
        "{max_num_seqs} is the version's default",
        "{max_num_seqs} is not the version's default",
        _source_is("default"),
        "{limit}",
        question="where {max_num_seqs} comes from",
    ),
    Fact(
        "limit_is_observed",
        "{max_num_seqs} is inferred from a constant number of running requests",
        "{max_num_seqs} is not inferred from the number of running requests",
        _source_is("observed"),
        "{limit}",
        question="where {max_num_seqs} comes from",
    ),
    Fact(
        "running_plateau",
        "the number of running requests is constant",
        "the number of running requests varies",
        lambda v: v.s.load.running_plateau,
        "{running}",
    ),
    Fact(
        "something_runs",
        "requests are running",
        "no request is running",
        lambda v: None if v.s.load.running is None else v.s.load.running > 0,
        "{running}",
    ),
    Fact(
        "several_run",
        "{host_min_requests} or more requests are running",
        "fewer than {host_min_requests} requests are running",
        lambda v: least(v.s.load.running, v.t["host_min_requests"]),
        "{running}",
    ),
    # --- the queue
    Fact("queue_present", "requests are waiting", "no queue has built up", _queue, "{queue}"),
    Fact(
        "waiting_now",
        "requests are waiting now",
        "no request is waiting now",
        lambda v: None if v.s.load.waiting is None else v.s.load.waiting > 0,
        "{queue}",
    ),
    Fact("many_wait_now", "many requests are waiting now", "few or no requests are waiting now", _many_wait, "{queue}"),
    Fact("queue_short", "the queue is short", "the queue is long or slow", _short, "{mean_queue}", "{queue}"),
    Fact(
        "waited_recently",
        "requests waited in the last {recent_window_seconds} s",
        "no request waited in the last {recent_window_seconds} s",
        lambda v: None if v.recent.waiting_share is None else v.recent.waiting_share > 0,
        "{waiting_mean}",
    ),
    Fact(
        "queue_for_capacity",
        "requests are waiting for capacity",
        "no request is waiting for capacity",
        _for_capacity,
        "{queue}",
        "{queue}",
    ),
    Fact(
        "queue_for_capacity_now",
        "requests are waiting for capacity now",
        "no request is waiting for capacity now",
        _capacity_now,
        "{queue}",
        "{queue}",
    ),
    Fact(
        "deferred_fill_limit",
        "running and deferred requests together reach {max_num_seqs}",
        "running and deferred requests together are below {max_num_seqs}",
        _deferred_fill,
        "{queue}, {max_num_seqs} {limit}",
        "{deferred_where}",
    ),
    # --- metrics and progress
    Fact(
        "page_fresh",
        "the metrics are fresh",
        "the metrics are stale",
        _fresh,
        "last successful scrape {age} s ago{failing}",
        "never scraped{page_error}",
    ),
    Fact(
        "scrape_failing",
        "the last scrape failed",
        "the last scrape succeeded",
        lambda v: None if v.s.progress.pages_failing is None else v.s.progress.pages_failing > 0,
        "{scrape_error}",
    ),
    Fact(
        "first_reading",
        "there was only one scrape so far",
        "there were several scrapes",
        lambda v: v.readings <= 1,
        "{readings}",
    ),
    Fact(
        "work_present",
        "requests are in flight",
        "no requests are in flight",
        lambda v: v.s.progress.work_present,
        "{in_flight}",
    ),
    Fact(
        "tokens_flow",
        "tokens are being produced",
        "no token was produced in the last {flow_window_seconds} s",
        lambda v: v.s.progress.tokens_flow,
        "{rates}",
        "no second scrape, or no token counters",
    ),
    Fact(
        "tokens_recently",
        "tokens were produced just now",
        "no token was produced just now",
        lambda v: v.s.progress.tokens_recently,
    ),
    Fact(
        "no_progress",
        "requests made no progress for {no_progress_seconds} s",
        "requests made progress in the last {no_progress_seconds} s",
        _stuck("no_progress_seconds"),
        "last token, finished request or step with output {stuck} s ago",
        "no requests in flight, or no token counters",
        question="whether requests make progress",
    ),
    Fact(
        "no_progress_long",
        "requests made no progress for {stalled_seconds} s",
        "requests made progress in the last {stalled_seconds} s",
        _stuck("stalled_seconds"),
        "last progress {stuck} s ago",
        question="whether requests make progress",
    ),
    Fact(
        "no_progress_very_long",
        "requests made no progress for {prefill_patience_seconds} s",
        "requests made progress in the last {prefill_patience_seconds} s",
        _stuck("prefill_patience_seconds"),
        "last progress {stuck} s ago",
        question="whether requests make progress",
    ),
    Fact(
        "gauges_still",
        "no gauge or counter is moving",
        "gauges or counters are moving",
        lambda v: least(v.s.progress.seconds_still, v.t["no_progress_seconds"]),
        "last movement {still_seconds} s ago",
        question="whether gauges are moving",
    ),
    Fact(
        "ever_produced",
        "the process has produced tokens since its start",
        "the process has produced no token since its start",
        lambda v: v.s.progress.ever_produced,
    ),
    Fact(
        "prompt_at_once",
        "the last admitted prompt may be computed in one long step",
        "no prompt is being computed in one long step",
        lambda v: v.s.progress.prompt_at_once,
        question="whether a prompt is being computed in one long step",
    ),
    Fact(
        "prefill_usual",
        "prefill usually takes longer than the time since the last progress",
        "prefill usually takes less than the time since the last progress",
        _prefill_usual,
        "usually {usual_prefill} s, last progress {stuck} s ago",
        "no first token yet",
        question="how long prefill usually takes",
    ),
    Fact(
        "http_answers",
        "the API server has answered requests since the last output",
        "the API server has answered no request since the last output",
        lambda v: v.s.progress.http_moved,
    ),
    Fact(
        "clients_gone",
        "most clients have closed their connections since the last output",
        "clients have kept their connections since the last output",
        lambda v: v.s.progress.connections_dropped,
    ),
    Fact(
        "clients_came",
        "clients have connected, or the queue has grown, since the last output",
        "no clients have connected since the last output, and the queue has not grown",
        lambda v: v.s.progress.clients_came,
    ),
    Fact(
        "finishing",
        "requests finished in the last {flow_window_seconds} s",
        "no request finished in the last {flow_window_seconds} s",
        lambda v: v.s.progress.finished_flow,
    ),
    Fact(
        "prompts_looked_up",
        "prompts were admitted in the last {flow_window_seconds} s",
        "no prompt was admitted in the last {flow_window_seconds} s",
        lambda v: v.s.progress.queries_flow,
        why="no prefix-cache counters",
    ),
    Fact(
        "prompts_just_now",
        "prompts were admitted just now",
        "no prompt was admitted just now",
        lambda v: v.s.progress.queries_recently,
        why="no prefix-cache counters",
    ),
    Fact(
        "tokens_trickle",
        "running requests get almost no tokens",
        "running requests get tokens",
        _trickle,
        "{per_request} tokens/s each",
        question="how many tokens each running request gets",
    ),
    Fact(
        "prefill_dominates",
        "prefill dominates",
        "prefill does not dominate",
        _prefill,
        "{prefill_rates}{cached}",
        "{prefill_rates}{cached}",
    ),
    Fact(
        "engine_asleep",
        "the engine is asleep (weights offloaded)",
        "the engine is awake",
        lambda v: v.s.progress.asleep,
        why="the metrics endpoint does not show sleep mode",
        question="whether the engine is asleep",
    ),
    # --- the GPU
    Fact(
        "gpu_starved",
        "the GPU is starved",
        "the GPU is not starved",
        lambda v: v.gpu.starved,
        "{gpu} (starved below {starved})",
        "{gpu_known}",
    ),
    Fact(
        "gpu_saturated",
        "the GPU is saturated",
        "the GPU is not saturated",
        lambda v: v.gpu.saturated,
        "{gpu}",
        "{gpu_known}",
    ),
    Fact(
        "gpu_works",
        "GPU units are busy or power is high",
        "GPU units are not busy and power is not high",
        lambda v: v.gpu.works,
        "{gpu}",
        "{gpu_known}",
    ),
    Fact(
        "gpu_computes",
        "the GPU computes at its peak",
        "the GPU does not compute at its peak",
        lambda v: v.gpu.computes,
        "{gpu}",
        "{gpu_known}",
    ),
    Fact(
        "gpu_utilization_low",
        "GPU utilization is low",
        "GPU utilization is not low",
        lambda v: v.gpu.low,
        "{gpu}",
        "{gpu_known}",
    ),
    Fact("gpu_idle", "the GPU is idle", "the GPU is not idle", lambda v: v.gpu.idle, "{gpu}", "{gpu_known}"),
    Fact(
        "gpu_unseen",
        "no GPU activity is readable",
        "GPU activity is readable",
        lambda v: v.gpu.unseen,
        question="whether GPU activity is readable",
    ),
    Fact(
        "gpu_of_others",
        "other pods use the GPU too",
        "no other pod uses the GPU",
        lambda v: _seen_or(v, v.s.compute.gpus_of_others),
    ),
    Fact(
        "gpu_shared",
        "the GPU's activity may come from another engine or pod",
        "the GPU's activity comes from this engine alone",
        lambda v: _seen_or(v, v.s.compute.gpus_shared or v.s.compute.gpus_of_others),
        question="whether another engine or pod uses the GPU",
    ),
    # --- the host
    Fact(
        "cpu_throttled",
        "the CPU is throttled",
        "the CPU is not throttled",
        lambda v: least(v.s.host.cpu_throttled_ratio, v.t["cpu_throttled_ratio"]),
        "{throttled} of its CFS periods",
        "no container cgroup read",
    ),
    Fact(
        "cpu_throttled_mostly",
        "most CPU periods are throttled",
        "most CPU periods are not throttled",
        lambda v: least(v.s.host.cpu_throttled_ratio, v.t["cpu_throttled_most_ratio"]),
        "{throttled}",
        "no container cgroup read",
    ),
    Fact(
        "cpu_contended",
        "there is CPU contention",
        "there is no CPU contention",
        lambda v: least(v.s.host.cpu_pressure_ratio, v.t["cpu_pressure_ratio"]),
        "processes waited for a CPU {contended} of the time",
        "no pressure reading of the container",
    ),
    Fact(
        "cpu_saturated",
        "the CPU is at its limit",
        "the CPU is below its limit",
        lambda v: least(v.s.host.cpu_used_ratio, v.t["cpu_saturated_ratio"]),
        "{cpu_used} of the limit used",
        "the container has no CPU limit, or CPU use was not read",
    ),
    Fact(
        "api_server_saturated",
        "the API server uses a whole core",
        "the API server uses less than a core",
        lambda v: least(v.s.host.api_cpu_cores, v.t["api_cpu_cores"]),
        "{api_cores} cores",
    ),
    # --- what users feel
    Fact(
        "outside_engine_time",
        "requests spend much of their time outside the engine",
        "requests spend little of their time outside the engine",
        lambda v: least(v.s.latency.outside_engine_share, v.t["outside_engine_share_ratio"]),
        "{outside}",
        "latency histograms missing",
    ),
    Fact(
        "latency_multiplied",
        "latency is at least {latency_multiplied_ratio} × its baseline",
        "latency is below {latency_multiplied_ratio} × its baseline",
        _multiplied,
        "{worst_phase} p95 {worst_ratio} ×",
        "no baseline yet, or too few requests",
        question="latency against its baseline",
    ),
    Fact(
        "steps_slower",
        "steps take at least {steps_slower_ratio} × as long as the fastest steps of the same batch size",
        "steps take less than {steps_slower_ratio} × as long as the fastest steps of the same batch size",
        lambda v: least(v.s.batch.step_ratio, v.t["steps_slower_ratio"]),
        "{step_ratio} ×",
        question="step time against the fastest steps",
    ),
    Fact(
        "throughput_fell",
        "throughput fell to {throughput_collapsed_ratio} × its best recent minute or less",
        "throughput is above {throughput_collapsed_ratio} × its best recent minute",
        _fell,
        "now {trend}",
        "less than two minutes of comparable load",
        question="whether throughput fell",
    ),
    # --- the log
    Fact(
        "allocation_failure_logged",
        "the log shows an allocation failure",
        "the log shows no allocation failure",
        lambda v: _allocation(v) > 0 if v.s.events_known else None,
        "{allocations} in the last 10 minutes",
        "no log read",
    ),
    Fact(
        "gpu_out_of_memory",
        oom.TRUE,
        oom.FALSE,
        lambda v: oom.happened(v.s),
        "{oom_seen}",
        "no log read",
    ),
)
FINDERS: Final = {fact.name: fact.find for fact in FACTS}
BY_NAME: Final[Mapping[str, Fact]] = {fact.name: fact for fact in FACTS}


def clause(name: str, holds: bool, levels: Mapping[str, str]) -> str:
    """A fact (``holds``) or its opposite as a short clause; ``levels``: thresholds by name, as printed."""
    return (BY_NAME[name].title if holds else BY_NAME[name].denied).format_map(levels)


def forms(name: str) -> tuple[str, str, str]:
    """A fact's sentences for true, false and unknown, with the names of numbers in braces."""
    fact, unfilled = BY_NAME[name], Asked(lambda number: f"{{{number}}}")
    return fact.sentence(True, unfilled), fact.sentence(False, unfilled), fact.sentence(None, unfilled)


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


def _some(value: float | None) -> str:
    """The number; "" if it is 0."""
    return number(value) if value else ""


def _known(*parts: tuple[str, float | None], otherwise: str) -> str:
    """The parts whose number is known, each with its number in place of ``#``; ``otherwise`` if none is."""
    return ", ".join(text.replace("#", number(value)) for text, value in parts if value is not None) or otherwise


def _usage(v: View) -> str:
    now, peak = v.s.kv.kv_used_ratio, v.s.kv.kv_used_ratio_recent_max
    return f"recent peak {percent(peak)}" if now is None else f"{percent(now)} now, recent peak {percent(peak)}"


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


def _reached(v: View) -> str:
    """As ``_running_of_limit``, and over what time the limit was reached where it no longer is."""
    if not v.s.load.running_at_limit or v.s.load.running_at_limit_now is not False:
        return _running_of_limit(v)
    return f"in most of the last {number(v.t['recent_window_seconds'])} s; now {_running_of_limit(v)}"


def _free_if_known(v: View) -> str:
    """Tokens free at the recent peak, and prompt lengths if they are known; "" if the free tokens are unknown."""
    free = _free(v.s)
    if free is None:
        return ""
    return f" ({number(free)} tokens free)" if v.s.context.prompt_mean is None else f" ({_free_and_prompts(v)})"


def _held_up(v: View, prompt: float | None) -> str:
    """The numbers behind ``_blocked``, and which part of it is false."""
    if _blocked(v, prompt) is not False:
        return _free_and_prompts(v)
    if not _can_block(v):
        why = "KV cache usage is too low for that"
    elif v.recent.waiting_share != 1.0:
        why = "the queue was empty at times"
    else:
        why = "the prompt fits into the free KV cache"
    return f"{why}{_free_if_known(v)}"


def limit_source(source: str | None) -> str:
    """Where a limit was read, in words."""
    return _LIMIT_SOURCES.get(source, source) if source else "source: unknown"


def _runs(v: View) -> str:
    return _known(("# requests running", v.s.load.running), otherwise="running requests: unknown")


def _queue_text(v: View) -> str:
    load = v.s.load
    text = _known(("# waiting", load.waiting), ("# running", load.running), otherwise="waiting requests: unknown")
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
    return (
        f"only {engine.title} {since} and later reports deferred requests"
        if since
        else "the metrics endpoint does not show deferred requests"
    )


def _oom_seen(v: View) -> str:
    return f"{oom.times(v.s)} in the last 10 minutes{oom.figures(v.s, v.t)}" if oom.happened(v.s) else ""


def _preemption_counts(v: View) -> str:
    return _known(
        (f"# counted by {dialect(v.s.dialect).title}", v.s.kv.preemptions_counted),
        ("# inferred from queue movement", v.s.kv.preemptions_inferred),
        otherwise="number: unknown",
    )


_WORDS: Final = frozenset({"max_num_seqs", "preempted", "preemptions"})  # an engine may have its own
_NUMBERS: Final[Mapping[str, Callable[[View], str]]] = {
    "deferred_where": _deferred_where,
    "kv": lambda v: percent(v.s.kv.kv_used_ratio),
    "kv_full": lambda v: percent(_level(v, "kv_full_ratio")),
    "kv_near": lambda v: percent(_level(v, "kv_near_full_ratio")),
    "kv_why": lambda v: "this engine does not report it" if v.s.kv.kv_recorded is False else "not read yet",
    "level": _usage,
    "held": lambda v: f"{percent(v.s.kv.kv_used_ratio)} of the KV cache" if _held_idle(v) else "",
    "free_and_prompts": _free_and_prompts,
    "long_blocked": lambda v: _held_up(v, _long_prompt(v.s)),
    "mean_blocked": lambda v: _held_up(v, v.s.context.prompt_mean),
    "running_of_limit": _running_of_limit,
    "reached": _reached,
    "queue": _queue_text,
    "rates": lambda v: "" if v.s.progress.tokens_flow is False else _rates(v),
    "prefill_rates": _rates,
    "preemption_counts": _preemption_counts,
    "running": lambda v: _some(v.s.load.running),
    "in_flight": lambda v: _some(v.s.load.in_flight),
    "readings": lambda v: "" if v.readings <= 1 else str(v.readings),
    "waiting_mean": lambda v: (
        f"{number(v.recent.waiting_mean, 1)} requests on average" if v.recent.waiting_mean else ""
    ),
    "last_preemptions": lambda v: number(v.s.kv.preemptions_recently),
    "silent": lambda v: number(v.s.kv.preemptions_inferred),
    "recent_preemptions": lambda v: number(v.s.kv.preemptions_recent),
    "per_running": lambda v: number(v.s.kv.preemptions_per_running_minute, 1),
    "hits": lambda v: percent(v.s.kv.prefix_hit_ratio_recent),
    "usual_hits": lambda v: percent(v.s.kv.prefix_hit_ratio_usual),
    "per_request": lambda v: number(v.s.throughput.generation_tokens_per_running, 1),
    "step_ratio": lambda v: number(v.s.batch.step_ratio, 1),
    "mean_queue": _mean_queue,
    "limit": lambda v: number(v.s.load.max_num_seqs),
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
    "trend": lambda v: percent(v.s.throughput.throughput_trend_ratio),
    "scrape_error": _scrape_error,
    "oom_seen": _oom_seen,
    "allocations": lambda v: str(_allocation(v)),
}


def levels(t: Thresholds, engine: str = "") -> Asked:
    """Thresholds by name, as printed, and words as the engine has them ("" = the default engine)."""
    return Asked(lambda name: dialect(engine).called(name) if name in _WORDS else t.entry(name).text)


def _numbers(view: View) -> Asked:
    others = levels(view.t, view.s.dialect)
    return Asked(lambda name: _NUMBERS[name](view) if name in _NUMBERS else others[name])
