"""Signals of one engine at one moment: frozen, one class per signal file; each field with the metric that publishes it.

``None`` means that an input is missing, so the signal is unknown. Field names are unique over all classes: flattened,
they are the names under ``signals`` in the JSON of ``replay`` and ``/api/v1/diagnosis``. Collector, table of metrics
and ``docs/reference/metrics.md`` derive from these declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from functools import partial
from operator import attrgetter
from typing import Any, Final, Literal, TypeVar, cast

from kvpressure.model.frozen import frozen

PREFIX: Final = "kvpressure_"

# A summary is quantiles over a window here, without count and sum.
Kind = Literal["gauge", "counter", "info", "summary"]

ENGINE: Final = ("namespace", "pod", "model_name", "engine")
GPU: Final = ("uuid", "gpu", "vendor")
CONTAINER: Final = ("namespace", "pod", "container")

_DECLARED: Final = "kvpressure.published"
_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")


@frozen
class Metric:
    """One metric family. ``name``: without prefix, with ``_total`` for counters and ``_info`` for infos. ``absent``:
    when the series is missing, which is part of its meaning.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    absent: str = ""

    @property
    def full_name(self) -> str:
        """Name as published on ``/metrics``."""
        return PREFIX + self.name


def gauge(name: str, help: str, *labels: str, absent: str = "") -> Metric:
    """A gauge of one engine; ``labels`` come after the engine's own."""
    return Metric(name, "gauge", help, (*ENGINE, *labels), absent)


def quantiles(name: str, help: str, *labels: str, absent: str = "") -> Metric:
    """Quantiles of one engine; ``labels`` are those between the engine's own and ``quantile``."""
    return Metric(name, "summary", help, (*ENGINE, *labels, "quantile"), absent)


@frozen
class Published:
    """A value of a signal group as samples of ``metric``; ``labels`` are label values after the engine's own. A
    mapping has a sample per key, which is the last label.
    """

    metric: Metric
    labels: tuple[str, ...] = ()


@frozen
class Output:
    """How one published value is read from its group."""

    read: Callable[[Any], Any]
    published: Published


def published(metric: Metric, *labels: str, default: Any = None) -> Any:
    """A dataclass field whose value is published; a type as ``default`` (such as ``dict``) is a factory."""
    declared = {_DECLARED: Published(metric, labels)}
    if isinstance(default, type):
        return field(default_factory=default, metadata=declared)
    return field(default=default, metadata=declared)


def publishes(metric: Metric, *labels: str) -> Callable[[_F], _F]:
    """Decorator: publish what a method of a signal group derives from its fields."""

    def mark(method: _F) -> _F:
        setattr(method, _DECLARED, Published(metric, labels))
        return method

    return mark


_OUTPUTS: Final[dict[type[Any], tuple[Output, ...]]] = {}  # by group: there are as many as classes of signals


def outputs(group: type[Any]) -> tuple[Output, ...]:
    """Everything that a signal group publishes, in order of declaration."""
    if group not in _OUTPUTS:
        read = [(attrgetter(item.name), item.metadata.get(_DECLARED)) for item in fields(group)]
        read += [(method, getattr(method, _DECLARED, None)) for method in vars(group).values()]
        _OUTPUTS[group] = tuple(Output(reader, said) for reader, said in read if isinstance(said, Published))
    return _OUTPUTS[group]


def metrics_of(groups: Sequence[type[Any]]) -> Iterator[Metric]:
    """The metrics that signal groups publish, each once."""
    seen: dict[str, Metric] = {}
    for group in groups:
        for output in outputs(group):
            metric = output.published.metric
            if metric.name not in seen:
                seen[metric.name] = metric
                yield metric


def later(compute: Callable[..., _T], *given: object) -> _T:
    """What ``compute`` makes of ``given``, for a field that is ``when_read``. Another thread may read it, so nothing
    that is given may change.
    """
    return cast(_T, partial(compute, *given))


def when_read(*names: str) -> Callable[[type[_T]], type[_T]]:
    """Decorator of a ``frozen`` class: these fields may be given as ``later``, and are computed when first read. In
    most ticks nobody reads what is only published.
    """

    def made(cls: type[_T]) -> type[_T]:
        for name in names:
            setattr(cls, name, _read_once(vars(cls)[name]))
        return cls

    return made


def _read_once(slot: Any) -> property:
    """The slot of a field that is computed when first read."""

    def read(of: object) -> Any:
        value = slot.__get__(of)
        if type(value) is partial:
            value = value()
            slot.__set__(of, value)
        return value

    return property(read, slot.__set__)


_NO_KV: Final = "the engine has no KV usage gauge, or the gauge stays 0 while requests are running"
_WARMUP: Final = "too few samples in the window"
_BATCH: Final = quantiles(
    "effective_batch_size", "Quantiles of the number of running requests, over the last minute.", absent=_WARMUP
)
_BY_REASON: Final = gauge(
    "requests_waiting_by_reason",
    "Requests waiting, by reason: capacity (no free KV blocks or batch slots) or deferred (waiting for something"
    " else).",
    "reason",
    absent="the engine does not report why requests wait",
)
_TOKENS: Final = gauge("tokens_per_second", "Token throughput over the last 30 s.", "kind")
_REQUEST_TOKENS: Final = quantiles(
    "request_tokens",
    "Quantiles of prompt tokens, output tokens and max_tokens per request over 5 minutes.",
    "kind",
    absent=_WARMUP,
)
_TIER_MOVES: Final = gauge(
    "kv_tier_tokens_per_second",
    "KV tokens stored in a tier beyond the GPU's memory and loaded from it, per second over the last 5 minutes.",
    "direction",
    "tier",
    absent="the engine reports no tier, or not what it moves in tokens",
)
_LATENCY: Final = quantiles(
    "latency_seconds",
    "Latency quantiles over the last minute, computed from bucket differences.",
    "phase",
    absent="nothing was observed in the window",
)
_FRAGMENTATION: Final = gauge(
    "fragmentation_bytes",
    "Reserved minus allocated memory. Scopes: allocator (memory that PyTorch reserved and no tensor uses;"
    " needs the plugin), kv_pool (unused part of the KV pool), kv_block (estimated waste inside KV blocks).",
    "scope",
    absent="the memory of this scope is unknown",
)

_REUSE_SECONDS: Final = gauge(
    "kv_reuse_seconds",
    "How long KV blocks stay (until: eviction) and how long after their first use they are wanted again (until: reuse)."
    " Source events: means of the blocks that were stored again after an eviction, over 5 minutes. Source estimate:"
    " median time without use before the eviction, and p95 time between uses, over 15 minutes of --kv-cache-metrics;"
    " else what is free of the cache, divided by the tokens written per second. Reuse is underestimated then, because"
    " it is seen only of blocks still in the cache.",
    "source",
    "until",
    absent="KV usage, capacity or token counters are missing; reuse: neither KV events nor --kv-cache-metrics",
)

PROFILING: Final = "profiling"
POWER: Final = "power"
ESTIMATED: Final = "estimated_flops"
UTILIZATION: Final = "utilization_weak"
NO_ACTIVITY: Final = "none"


@frozen
class KvSignals:
    """KV cache: usage, capacity, slope, exhaustion and preemption (``signals.kv``)."""

    kv_recorded: bool | None = None  # False = gauge missing, or constantly 0 while requests run
    kv_used_ratio: float | None = published(
        gauge(
            "kv_cache_used_ratio",
            "Share of KV blocks in use, 0-1; evictable prefix blocks count as free.",
            absent=_NO_KV,
        )
    )
    kv_used_ratio_max: float | None = published(
        gauge("kv_cache_used_ratio_max", "Maximum of kv_cache_used_ratio over the last 60 s of samples.", absent=_NO_KV)
    )
    kv_used_ratio_recent_max: float | None = None  # over the last 10 s
    kv_used_ratio_waiting: float | None = None  # mean of the recent samples in which requests wait
    kv_watermark_ratio: float | None = None  # share of the blocks kept free when a request is admitted
    kv_capacity_tokens: float | None = published(
        gauge(
            "kv_cache_capacity_tokens",
            "KV capacity in tokens.",
            absent="the capacity is not in cache_config_info and cannot be computed from blocks (hybrid models)",
        )
    )
    kv_used_tokens: float | None = published(
        gauge("kv_cache_used_tokens", "Capacity times usage: token slots in occupied blocks.", absent=_NO_KV)
    )
    kv_slope_per_second: float | None = None  # over the last 15 s
    kv_seconds_to_full: float | None = published(
        gauge(
            "kv_cache_seconds_to_full",
            "Time until the cache is full if usage keeps rising at the current rate.",
            absent="KV usage is not rising",
        )
    )
    kv_overcommit_ratio: float | None = published(
        gauge(
            "kv_overcommit_ratio",
            "Largest number of KV tokens that the current load can need within the engine's limits, divided by KV"
            " capacity."
            " Above 1, the limits admit more than the KV cache holds.",
            absent="request lengths or the KV capacity are unknown",
        )
    )
    requests_reached: float | None = None  # that the load can run at once within the limits, behind the ratio above
    preemption_rate: float | None = published(
        gauge(
            "preemption_rate",
            "Preemptions per second over the last minute: the larger of the counted and the inferred number. A"
            " preemption is inferred if a request moves from running to waiting while no request finishes.",
        )
    )
    preemptions_counted: float | None = None  # by the counter in the last 60 s
    # Inferred from queue movement in the last 60 s, as far as the counter confirms it
    preemptions_inferred: float | None = None
    preemptions_recent: float | None = None  # in the last 15 s, the larger of counted and inferred
    preemptions_recently: float | None = None  # in the last 30 s, the larger of counted and inferred
    preemptions_per_running_minute: float | None = None
    recomputed_tokens_rate: float | None = published(
        gauge(
            "recomputed_tokens_estimate_rate",
            "Tokens recomputed per second after preemptions. An estimate: preemptions times the mean output length plus"
            " the part of the mean prompt that is computed, not found in a cache or tier.",
            absent="the preemption rate or the request lengths are unknown",
        )
    )
    # By factor of the KV memory
    prefix_hit_ratio: Mapping[str, float] = published(
        gauge(
            "prefix_hit_ratio",
            "Prefix-cache hits divided by lookups over the last 5 minutes. Capacity 1: measured; others: predicted from"
            " KV events for so many times the KV memory (same requests, same routing, LRU).",
            "capacity",
            absent="nothing was looked up; predicted: no KV events, fewer blocks were evicted than the factor adds, or"
            " blocks come from other servers or tiers",
        ),
        default=dict,
    )
    prefix_hit_ratio_recent: float | None = None  # over the last half minute
    prefix_hit_ratio_usual: float | None = None  # median half minute, without those of a collapse
    prefill_repeated_ratio: float | None = published(
        gauge(
            "prefill_repeated_ratio",
            "Share (0-1) of the prompt tokens computed over the last 5 minutes whose KV blocks had been in the cache"
            " and were evicted, without those of preempted requests.",
            absent="no KV events, no prompt computed, or blocks come from other servers or tiers",
        )
    )
    kv_working_set_tokens: float | None = published(
        gauge(
            "kv_working_set_tokens",
            "KV capacity in tokens that gives nearly the hit ratio of eight times the present one.",
            absent="no KV events, or fewer blocks were evicted than eight times the capacity adds",
        )
    )
    reuse_seconds: Mapping[str, float] = published(_REUSE_SECONDS, "events", default=dict)
    reuse_seconds_estimated: Mapping[str, float] = published(_REUSE_SECONDS, "estimate", default=dict)


_HELD: Final = gauge(
    "kv_held_ratio",
    "Share (0-1) of the blocks in the prefix cache, mean of the last minute, by adapter or by cache salt: the five"
    " largest holders, (none), (unknown) and (other). A salt is a number that changes when the exporter restarts.",
    "by",
    "holder",
    absent="the engine's KV events are not read, or were not read long enough; no request had an adapter, or a salt",
)


@frozen
class CacheSignals:
    """What is in the prefix cache, by the engine's KV events (``kvevents``)."""

    held_by_adapter: Mapping[str, float] = published(_HELD, "adapter", default=dict)
    held_by_salt: Mapping[str, float] = published(_HELD, "salt", default=dict)
    events_complete: Mapping[str, float] = published(
        gauge(
            "kv_events_complete",
            "1 if the contents of the engine's prefix cache are known by its KV events, else 0, with the reason.",
            "reason",
            absent="the engine publishes no KV events, or their endpoint is unknown",
        ),
        default=dict,
    )


@frozen
class TierSignals:
    """KV memory beyond the GPU's, over five minutes (``signals.kv``). Nothing else is known without a tier."""

    tier_configured: bool | None = None
    tier_capacity_tokens: float | None = published(
        gauge(
            "kv_tier_capacity_tokens",
            "Tokens that the KV tier in host memory holds.",
            absent="the engine reports no tier, or not its size in tokens",
        )
    )
    # Held by transfers, not full: a full tier of old blocks reads near 0
    tier_pinned_ratio: float | None = None
    tier_used_ratio: float | None = None  # by content
    tier_stored: Mapping[str, float] = published(_TIER_MOVES, "stored", default=dict)
    tier_loaded: Mapping[str, float] = published(_TIER_MOVES, "loaded", default=dict)
    cached: Mapping[str, float] = published(
        gauge(
            "prompt_tokens_cached_per_second",
            "Prompt tokens per second that were found in a cache over the last 5 minutes, by where: device (the GPU's"
            " KV cache), host, disk, p2p (another server), ...",
            "source",
            absent="the engine reports no tier, or not where it found them",
        ),
        default=dict,
    )
    tier_reloaded_ratio: float | None = None  # loaded, divided by stored
    tier_turnover_seconds: float | None = None  # in which as much is stored as it holds
    tier_refused: float | None = None  # stores, loads, blocks or tokens that it did not take
    tier_served: bool | None = None  # anything was loaded since the start
    tier_stored_ratio: float | None = None  # since the start, divided by what the GPU's cache holds
    load_seconds_per_token: float | None = None  # transfers of all GPUs together
    tier_gpus: float | None = None  # whose transfers add up
    prefill_seconds_per_token: float | None = None


@frozen
class BatchSignals:
    """Effective batch size and its collapse (``signals.batch``)."""

    batch_mean: float | None = published(
        gauge(
            "effective_batch_size_mean",
            "Mean number of decoding requests, calculated from the rate of the inter-token latency sum (Little's law).",
            absent="no output token came in 30 s, or the engine has no histogram of inter-token latency",
        )
    )
    batch_p50: float | None = published(_BATCH, "0.5")
    batch_p95: float | None = published(_BATCH, "0.95")
    batch_p99: float | None = published(_BATCH, "0.99")
    batch_collapse_ratio: float | None = published(
        gauge(
            "batch_collapse_ratio",
            "Unused share of the possible batch, 0-1: 1 - (p95 batch size / possible batch). The possible"
            " batch is the smaller of two numbers: requests in flight that are not deferred, and the limit on running"
            " requests.",
            absent="no request is in flight that could run",
        )
    )
    step_seconds: float | None = None  # mean inter-token latency over the last 30 s
    step_tokens: float | None = None  # tokens that a step computed, mean of the last 30 s
    peak_batch: float | None = None  # smallest mean batch with nearly the most tokens/s, of the last 15 minutes
    # Step time of the last 15 s against the fastest comparable one of the last 15 minutes
    step_ratio: float | None = None


@when_read("kv_share_held", "kv_share_at_peak", "arrival_burst_ratio")
@frozen
class LoadSignals:
    """Requests in flight against the limits (``signals.batch``)."""

    running: float | None = published(gauge("requests_running", "Requests in the scheduler's running list."))
    waiting: float | None = published(gauge("requests_waiting", "Requests waiting to be scheduled."))
    waiting_capacity: float | None = published(_BY_REASON, "capacity")
    waiting_deferred: float | None = published(_BY_REASON, "deferred")
    lora: bool = False  # adapters are served, for whose slots requests may wait
    # Requests may wait for KV blocks from elsewhere, or hold theirs until others have pulled them
    waits_for_blocks: bool = False
    has_peer: bool | None = None  # KV blocks come from other servers, or go to them
    # Of a server that exchanges KV blocks with others; "" = unknown role
    kv_role: str | None = None
    in_flight: float | None = published(
        gauge(
            "requests_in_flight",
            "Requests running plus requests waiting.",
            absent="the engine does not report running or waiting requests",
        )
    )
    limits: Mapping[str, float] = published(
        gauge(
            "max_concurrent_requests",
            "Maximum number of concurrent requests, by source of the limit.",
            "source",
        ),
        default=dict,
    )
    max_num_seqs: float | None = None
    max_num_seqs_source: str | None = None  # args, log, default, observed
    max_num_batched_tokens: float | None = None  # the token budget of a step
    concurrency_ratio: float | None = published(
        gauge(
            "concurrency_ratio",
            "Requests in flight divided by the smallest known limit on running requests.",
            absent="no limit on running requests is known",
        )
    )
    running_at_limit: bool | None = None  # in most of the recent samples
    running_at_limit_now: bool | None = None
    running_most: float | None = None  # in a sample of the last half minute
    running_plateau: bool | None = None  # at one maximum again and again, while requests wait and the cache has room
    kv_share_held: float | None = None  # of the KV cache, by a running request in five minutes
    kv_share_at_peak: float | None = None  # the same where usage was highest
    arrival_burst_ratio: float | None = published(
        gauge("arrival_burst_ratio", "Arrival rate of the busiest 10 s divided by the 5-minute mean.", absent=_WARMUP)
    )


@when_read("output_quantiles", "max_tokens_quantiles", "stream_quantiles", "bimodal_prompts")
@frozen
class ContextSignals:
    """Length and shape of requests over five minutes (``signals.requests``)."""

    context_max_5m: float | None = published(
        gauge(
            "context_length_max_tokens",
            "Prompt plus output tokens of the longest request of the last 5 minutes.",
            absent=_WARMUP,
        )
    )
    context_mean: float | None = published(
        gauge("context_length_mean_tokens", "Mean prompt plus output tokens per request.", absent=_WARMUP)
    )
    context_spike_ratio: float | None = published(
        gauge(
            "context_length_spike_ratio",
            "Longest request of the last 5 minutes divided by the mean.",
            absent=_WARMUP,
        )
    )
    prompt_mean: float | None = None
    output_mean: float | None = None
    context_limit: float | None = None  # max_model_len: no request is longer
    prompt_quantiles: Mapping[str, float] = published(_REQUEST_TOKENS, "prompt", default=dict)
    output_quantiles: Mapping[str, float] = published(_REQUEST_TOKENS, "output", default=dict)
    max_tokens_quantiles: Mapping[str, float] = published(_REQUEST_TOKENS, "max_tokens", default=dict)
    stream_quantiles: Mapping[str, float] = field(default_factory=dict)  # seconds from end to end
    bimodal_prompts: bool | None = published(
        gauge(
            "prompt_lengths_bimodal",
            "1 if this server gets both short and long prompts.",
            absent=_WARMUP,
        )
    )


@frozen
class LatencySignals:
    """Latency by phase over the last minute against the engine's own baseline (``signals.requests``)."""

    ttft: Mapping[str, float] = published(_LATENCY, "ttft", default=dict)
    inter_token: Mapping[str, float] = published(_LATENCY, "inter_token", default=dict)
    e2e: Mapping[str, float] = published(_LATENCY, "e2e", default=dict)
    queue: Mapping[str, float] = published(_LATENCY, "queue", default=dict)
    baseline_ratios: Mapping[str, float] = published(
        gauge(
            "latency_baseline_ratio",
            "p95 latency divided by this engine's own baseline; e2e: mean duration divided by what answers of the same"
            " length usually take.",
            "phase",
            absent="no baseline yet",
        ),
        default=dict,
    )
    usual: Mapping[str, float] = field(default_factory=dict)  # the baseline of each phase; e2e: at equal length
    outside_engine_seconds: float | None = published(
        gauge(
            "outside_engine_seconds",
            "Mean time per finished request outside the engine: tokenizer, the engine's API server, network.",
            absent="no finished request in the window",
        )
    )
    outside_engine_share: float | None = None  # of mean e2e, else of the time to first token, at least


@frozen
class Slow:
    """A phase of latency that is slow: its p95 now, and usually, in seconds; ``None`` = no baseline. ``badly``: it may
    wake somebody.
    """

    phase: str
    seconds: float
    usual: float | None = None
    badly: bool = False

    @property
    def multiple(self) -> float:
        """Multiple of the usual seconds; 0 without a baseline."""
        return 0.0 if self.usual is None else self.seconds / self.usual


@frozen
class ThroughputSignals:
    """Token rates and their trend against demand (``signals.progress``)."""

    prompt_tokens_per_second: float | None = published(_TOKENS, "prompt")
    prompt_tokens_computed_per_second: float | None = None  # without those that the prefix cache or another server had
    generation_tokens_per_second: float | None = published(_TOKENS, "generation")
    throughput_trend_ratio: float | None = published(
        gauge(
            "throughput_trend_ratio",
            "Generation throughput of the last minute, divided by the best one-minute throughput of the last 15"
            " minutes. The best throughput is taken only from minutes whose demand was not above the current demand.",
            absent="too little history, or demand fell",
        )
    )
    generation_tokens_per_running: float | None = None  # tokens per second of each running request
    finished_per_second: float | None = None
    throughput_flat: bool | None = None  # did not follow rising demand, or fell while demand did not
    step_output_tokens: float | None = published(
        gauge(
            "speculative_tokens_per_step",
            "Output tokens of a request's step over the last minute: accepted draft tokens plus its own.",
            absent="speculative decoding is off, or nothing was generated",
        )
    )
    drafts_accepted_usual: float | None = None  # draft tokens accepted in a request's step
    speculates: bool | None = None


@frozen
class TransferSignals:
    """KV blocks on their way between servers (``signals.progress``). What the other side records is ``None`` here."""

    loads: float | None = published(
        gauge(
            "kv_loads",
            "Requests whose KV blocks are on their way between this server and another, or from a tier.",
            absent="the engine does not report it",
        )
    )
    loads_to_start: float | None = None  # requests that wait until theirs are
    loads_stuck_seconds: float | None = None  # with such requests, and without one that ended well or failed
    loads_kv_ratio: float | None = None  # of the KV cache, held by those on their way
    transfer_seconds: float | None = published(
        gauge(
            "kv_transfer_seconds",
            "Mean time of a transfer of KV blocks over the last minute.",
            absent="too few transfers ended here: one of the two servers records them",
        )
    )
    transfer_slowdown: float | None = None  # seconds a byte, as a multiple of this engine's usual
    transfers_failed_ratio: float | None = published(
        gauge(
            "kv_transfers_failed_ratio",
            "Share (0-1) of transfers of KV blocks, handshakes among them, that failed over the last 5 minutes.",
            absent="no transfer ended here: one of the two servers records them",
        )
    )
    leases_expired_ratio: float | None = None  # of the prompts of five minutes: computed here and thrown away
    read_after_expiry: float | None = None  # in five minutes, each once by rank
    prompts_computed_ratio: float | None = None  # of the prompt tokens of five minutes, computed here


@frozen
class RequestSignals:
    """Requests that finish, fail or wait, over five minutes (``signals.requests``)."""

    requests_finished_per_second: float | None = None  # over five minutes, without those that ended with abort or error
    requests_lost_ratio: float | None = published(
        gauge(
            "requests_lost_ratio",
            "Share (0-1) of requests that ended without an answer over the last 5 minutes. Failed: refused by a queue"
            " limit, answered with 5xx, or ended with error (only the largest of the three counts is used, because one"
            " request may be in all three), or aborted by the server. Abandoned by their clients: as many as are above"
            " the usual share, from rejected_critical_ratio on.",
            absent="fewer than failed_min_per_second requests fail, and about as many as usual are abandoned",
        )
    )
    failed_ratio: float | None = None  # of requests that ended in five minutes
    abandoned_more_ratio: float | None = None  # of requests, above the usual share; from rejected_critical_ratio on
    abandoned_usual_ratio: float | None = published(
        gauge(
            "requests_abandoned_usual_ratio",
            "Usual share (0-1) of requests that clients abandon before they end.",
            absent="no baseline yet, or too few requests end",
        )
    )
    given_up_ratio: float | None = None  # of the answers of the last minute, those that clients did not wait for
    refused_ratio: float | None = None  # of the requests that ended in the last 15 s, those that the server aborted
    wait_estimated_seconds: float | None = None  # where too few requests finish for a quantile
    waited_before: bool | None = None  # requests already waited five minutes ago


@frozen
class ProgressSignals:
    """Whether the engine makes progress (``signals.progress``)."""

    work_present: bool | None = None
    progressing: bool | None = None  # the last scrape showed progress; unknown without requests
    seconds_without_progress: float | None = None  # with requests in flight; None = no request is pending
    seconds_still: float | None = None  # neither counters nor gauges moved with requests in flight
    http_moved: bool | None = None  # the API server answered requests since the last movement
    connections_dropped: bool | None = None  # most clients disconnected since the last output
    clients_came: bool | None = None  # clients connected since the last output
    ever_produced: bool | None = None  # this process has produced a token
    # The last change admitted a prompt whose prefill no gauge shows
    prompt_at_once: bool = False
    prefill_usual_seconds: float | None = None  # mean since the start, or the longest silence that ended with output
    at_rest: bool | None = None  # no client is connected, by the API server's descriptors
    connected_seconds: float | None = None  # several clients have been connected though nothing is in flight
    asleep: bool | None = None  # sleep mode has offloaded the weights
    paused: bool | None = None  # told to stand still, or to update its weights
    fresh_seconds: float | None = None  # age of the newest scrape
    pages_failing: float | None = None  # consecutive failed scrapes
    page_error: str | None = None  # why the last of them failed
    tokens_flow: bool | None = None  # in the last 15 s
    tokens_recently: bool | None = None  # in the last few seconds
    finished_flow: bool | None = None  # requests finished in the last 15 s
    queries_recently: bool | None = None  # prompts were looked up in the prefix cache in the last few seconds
    # Prompts were looked up in the prefix cache in the last 15 s: requests are admitted
    queries_flow: bool | None = None

    @publishes(
        gauge(
            "no_progress_seconds",
            "Seconds with requests in flight in which no token was produced and no request finished.",
            absent="the last scrape showed progress, or no request is pending",
        )
    )
    def no_progress(self) -> float | None:
        """Seconds without progress; ``None`` while there is some: a rule aggregates the few engines without."""
        return self.seconds_without_progress or None


@frozen
class MemorySignals:
    """GPU memory and its components (``signals.kv``)."""

    device_used_ratio: float | None = None  # largest of the engine's GPUs
    own_used_ratio: float | None = None  # the same without what other pods hold on them
    device_demand_ratio: float | None = None
    gpu_demands: tuple[tuple[float, float | None], ...] = ()  # of each GPU, with the share in use outside KV pools
    kv_pool_bytes: float | None = None  # per GPU
    kv_pool_used_bytes: float | None = None
    kv_block_waste_bytes: float | None = None
    allocator_reserved_bytes: float | None = None  # of the rank that has most of it unused
    allocator_allocated_bytes: float | None = None
    allocator_inactive_split_bytes: float | None = None
    components: Mapping[str, float] = published(
        gauge(
            "memory_component_bytes",
            "Device memory by component, per GPU: weights, kv_pool, activations (peak), graphs, context "
            "(what a worker holds outside torch: driver context, NCCL, libraries), other.",
            "component",
            absent="the component is not in the start-up log; component context needs the plugin, and per-process"
            " memory from the driver",
        ),
        default=dict,
    )
    idle_growth_bytes_per_hour: float | None = None

    @publishes(_FRAGMENTATION)
    def fragmentation(self) -> Mapping[str, float]:
        """Bytes reserved and not allocated, by scope."""
        used, waste = self.kv_pool_used_bytes, self.kv_block_waste_bytes
        scopes = {
            "allocator": (self.allocator_reserved_bytes, self.allocator_allocated_bytes),
            "kv_pool": (self.kv_pool_bytes, used),
            "kv_block": (used, None if waste is None or used is None else used - waste),
        }
        return {
            scope: max(0.0, reserved - allocated)
            for scope, (reserved, allocated) in scopes.items()
            if reserved is not None and allocated is not None
        }


@frozen
class HostSignals:
    """CPU, memory and restarts of the pod around the engine (``signals.hardware``)."""

    api_cpu_cores: float | None = None  # process_cpu_seconds rate of the API server
    cpu_used_ratio: float | None = None
    cpu_throttled_ratio: float | None = None
    cpu_pressure_ratio: float | None = None
    memory_used_ratio: float | None = None
    restarts: float | None = None
    restarts_recent: float | None = None  # in the last 30 minutes, as far as they are known
    restarts_all_known: bool = True  # not so in the first half hour after the exporter started
    terminated_seconds_ago: float | None = None  # when the container ended last
    last_termination_reason: str | None = None
    last_exit_code: float | None = None


@frozen
class ComputeSignals:
    """GPU activity as evidence, best level first (``signals.hardware``)."""

    gpu_utilization: float | None = None  # mean over the engine's working GPUs, last 15 s
    gpu_utilization_low: float | None = None  # smallest
    gpu_utilization_high: float | None = None  # largest
    gpus_shared: bool = False  # some of the pod's GPUs may not be this engine's
    gpus_of_others: bool = False  # other pods have some of them too
    sm_activity: float | None = None
    tensor_activity: float | None = None
    dram_activity: float | None = None
    power_ratio: float | None = None
    estimated_flops_per_second: float | None = None
    estimated_bytes_per_second: float | None = None
    estimated_peak_ratio: float | None = None  # the larger of both against the GPU's data sheet
    activity_level: str = NO_ACTIVITY  # of the evidence behind the score
    score_compute_factor: float | None = None  # how low GPU activity is, 0-1
    memory_high_compute_low_score: float | None = published(
        gauge(
            "memory_high_compute_low_score",
            "Product of three factors, 0-1: memory demand is high, GPU activity is low, requests are present.",
            absent="a factor is unknown",
        )
    )

    def of_gpus(self) -> ComputeSignals:
        """What the GPUs themselves report, without what the engine's metrics add."""
        return ComputeSignals(
            gpu_utilization=self.gpu_utilization,
            gpu_utilization_low=self.gpu_utilization_low,
            gpu_utilization_high=self.gpu_utilization_high,
            gpus_shared=self.gpus_shared,
            gpus_of_others=self.gpus_of_others,
            sm_activity=self.sm_activity,
            tensor_activity=self.tensor_activity,
            dram_activity=self.dram_activity,
            power_ratio=self.power_ratio,
            activity_level=NO_ACTIVITY if self.activity_level == ESTIMATED else self.activity_level,
        )


@frozen
class Signals:
    """All signals of one engine at ``time``."""

    time: float
    kv: KvSignals = KvSignals()
    tier: TierSignals = TierSignals()
    cache: CacheSignals = CacheSignals()
    batch: BatchSignals = BatchSignals()
    load: LoadSignals = LoadSignals()
    context: ContextSignals = ContextSignals()
    latency: LatencySignals = LatencySignals()
    throughput: ThroughputSignals = ThroughputSignals()
    transfers: TransferSignals = TransferSignals()
    requests: RequestSignals = RequestSignals()
    progress: ProgressSignals = ProgressSignals()
    memory: MemorySignals = MemorySignals()
    host: HostSignals = HostSignals()
    compute: ComputeSignals = ComputeSignals()
    events: Mapping[str, int] = field(default_factory=dict)  # log events in the last 10 minutes
    events_known: bool = False  # a log of this container has been seen
    oom: Mapping[str, float] = field(default_factory=dict)  # torch's numbers of the last such error, bytes
    gpu_faults: int | None = None  # XID and lost-GPU events of its GPUs recently
    kernel_faults: int = 0  # XID events recently that a kernel of some program on them caused
    dialect: str = ""  # the name of the engine's inference server in ``engines.registry``; "" = unknown

    def without_metrics(self) -> Signals:
        """What is known while the engine's metrics are not: its GPUs, its container, its log and the scrapes."""
        return Signals(
            time=self.time,
            dialect=self.dialect,
            host=self.host,
            progress=self.progress,
            compute=self.compute.of_gpus(),
            memory=MemorySignals(
                device_used_ratio=self.memory.device_used_ratio, own_used_ratio=self.memory.own_used_ratio
            ),
            events=self.events,
            events_known=self.events_known,
            oom=self.oom,
            gpu_faults=self.gpu_faults,
            kernel_faults=self.kernel_faults,
        )

    def groups(self) -> Iterator[object]:
        """Every group of signals, in fixed order."""
        yield from (getattr(self, name) for name in _GROUP_NAMES)

    def flat(self) -> dict[str, float | None]:
        """Every signal as name -> number; booleans as 0/1, mappings as ``name:key``, texts left out."""
        flat: dict[str, float | None] = {}
        for group in self.groups():
            for item in fields(group):  # type: ignore[arg-type]  # every group is a dataclass
                name, value = item.name, getattr(group, item.name)
                if isinstance(value, Mapping):
                    flat.update((f"{name}:{key}", float(number)) for key, number in value.items())
                elif value is None or isinstance(value, bool | int | float):
                    flat[name] = None if value is None else float(value)
        flat.update((f"log_events:{name}", float(count)) for name, count in self.events.items())
        flat.update((f"oom:{name}", value) for name, value in self.oom.items())
        return flat


GROUPS: Final[tuple[type[object], ...]] = (
    LoadSignals,
    KvSignals,
    TierSignals,
    CacheSignals,
    ThroughputSignals,
    TransferSignals,
    RequestSignals,
    ProgressSignals,
    ComputeSignals,
    BatchSignals,
    ContextSignals,
    LatencySignals,
    MemorySignals,
    HostSignals,
)
"""Every group, in the order in which their metrics are listed."""

_GROUP_NAMES: Final = (
    "kv",
    "tier",
    "cache",
    "batch",
    "load",
    "context",
    "latency",
    "throughput",
    "transfers",
    "requests",
    "progress",
    "memory",
    "host",
    "compute",
)
