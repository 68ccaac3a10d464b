"""The KV cache and GPU memory: use, capacity, slope, time to exhaustion, over-commit, preemption, required memory,
growth while idle, fragmentation; the pool's size where no log line reports it; and what a KV tier beyond it does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import pairwise
from math import inf
from typing import Final

from kvpressure.capacity.kvbytes import Parallel, pool_bytes
from kvpressure.capacity.own_models import ModelShapes
from kvpressure.capacity.shapes import ModelShape
from kvpressure.engines.base import Pool, Tier
from kvpressure.kvevents.reuse import FACTORS
from kvpressure.model import ceilings
from kvpressure.model import readings as r
from kvpressure.model.arguments import EngineArgs
from kvpressure.model.frozen import frozen
from kvpressure.model.readings import AllocatorReading, GpuReading
from kvpressure.model.signals import KvSignals, MemorySignals, TierSignals
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals.hardware import EngineContext
from kvpressure.signals.requests import BASELINE_VALUES, Shape
from kvpressure.signals.window import (
    FIVE_MINUTES,
    HALF_MINUTE,
    HOUR,
    JITTER_SECONDS,
    MINUTE,
    QUARTER_HOUR,
    QUARTER_MINUTE,
    EngineWindow,
    Sample,
    slope,
)


def kv_recorded(window: EngineWindow, ever_positive: bool, t: Thresholds) -> bool | None:
    """Whether the KV gauge can be trusted.

    False when it is missing, or exactly 0 while requests run and tokens flow (a running request always holds a
    block). ``None`` while nothing has run yet.
    """
    last = window.last
    if last is None:
        return None
    if r.KV_USAGE not in last.gauges:
        return False
    if ever_positive:
        return True
    recent = [s for s in window.since(HALF_MINUTE) if s.gauges.get(r.RUNNING, 0.0) > 0]
    if len(recent) < t["values_min"] or recent[-1].t - recent[0].t < t["kv_unrecorded_seconds"]:
        return None
    generated = recent[-1].counters.get(r.GENERATION_TOKENS, 0.0) - recent[0].counters.get(r.GENERATION_TOKENS, 0.0)
    return False if generated > 0 else None


def inferred_preemptions(window: EngineWindow, t: Thresholds) -> list[tuple[Sample, float]] | None:
    """Preemptions of the last minute inferred from queue movement: (sample before, number) where running falls,
    waiting rises by about as much, and nothing finishes. ``None`` where running, waiting or finished requests are not
    published.
    """
    if not any(before.requests and after.requests for before, after in pairwise(window.since(MINUTE))):
        return None
    most = t["most_ratio"]  # of the fall are in the queue, and most that joined it are of the fall, but for one
    return [
        (before, min(fell, rose))
        for before, fell, rose in window.falls_of_minute()
        if most * fell <= rose and most * (rose - 1) <= fell
    ]


def confirmed_share(signs: Sequence[tuple[Sample, float]], samples: Sequence[Sample], t: Thresholds) -> float:
    """Share of inferred preemptions that the counter confirms, 0 to 1, because clients that disconnect and return
    together look the same.

    vLLM counts a preemption with the next output of the preempted request, so the counter lags as long as that
    request waits. An inference is judged only once the queue has become shorter (preempted requests are admitted
    first) and ``preemption_counter_lag_seconds`` have passed; the share found for these applies to all. 1 without a
    counter.
    """
    last = samples[-1]
    old = _to_be_counted(signs, samples, t)
    counted = last.counters.get(r.PREEMPTIONS)
    if not old or counted is None:
        return 1.0
    begin = old[0][0].counters.get(r.PREEMPTIONS)
    return 1.0 if begin is None else min(1.0, max(0.0, counted - begin) / sum(amount for _, amount in old))


def _to_be_counted(
    signs: Sequence[tuple[Sample, float]], samples: Sequence[Sample], t: Thresholds
) -> list[tuple[Sample, float]]:
    """Inferences that the counter must contain by now: the queue became shorter since, and the counter had its time."""
    due = samples[-1].t - t["preemption_counter_lag_seconds"]
    later, shortest = reversed(samples), inf  # the queue since the inference, for the newest first
    sample, counted = next(later), []
    for before, amount in reversed(signs):
        while sample.t > before.t:
            if sample.t <= due and sample.waiting is not None and sample.waiting < shortest:
                shortest = sample.waiting
            sample = next(later)
        if shortest < (before.waiting or 0.0) + amount:
            counted.append((before, amount))
    return counted[::-1]


class HitRatio:
    """The prefix cache's hit ratio per half minute, and the usual one: the median of those before it collapsed, the
    highest while these are few, because the first are of an empty cache.

    The cache evicts what was used last of all last. So a ratio that falls before as much was written as was free is no
    eviction: other prompts come, or the process has restarted. What was usual before is forgotten then.
    """

    __slots__ = ("_known", "_thresholds", "_usual")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._known: deque[tuple[float, float, float]] = deque(maxlen=BASELINE_VALUES)  # time, ratio, tokens written
        self._usual: float | None = None

    def observe(self, window: EngineWindow, room: float | None) -> tuple[float | None, float | None]:
        """The ratio of the last half minute, ``None`` with too few tokens looked up, and the usual one. ``room``:
        tokens that no request holds now.
        """
        last, known, t = window.last, self._known, self._thresholds
        recent = _hit_ratio(window, HALF_MINUTE, t["hit_ratio_min_tokens"])
        if last is None or recent is None:
            return recent, self._usual
        fell = self._usual is not None and recent <= t["hit_ratio_collapsed_ratio"] * self._usual
        if fell and room is not None and _written(last) - self._written_when_it_began_to_fall() < room:
            known.clear()
            fell = False
        if not fell and (not known or not 0 <= last.t - known[-1][0] < HALF_MINUTE):
            known.append((last.t, recent, _written(last)))
            values = sorted(ratio for _, ratio, _ in known)
            few = len(values) < t["baseline_min_values"]
            self._usual = values[-1] if few else values[(len(values) - 1) // 2]
        return recent, self._usual

    def _written_when_it_began_to_fall(self) -> float:
        before = self._known[-1]
        for entry in reversed(self._known):
            if entry[1] < before[1]:
                break
            before = entry
        _, _, written = before
        return written


MEASURED: Final = "1"  # the factor of the KV memory that there is
_FACTORS: Final = {factor: f"{factor:g}" for factor in FACTORS}
UNTIL: Final = ("eviction", "reuse")


@frozen
class Reuse:
    """What the prefix cache keeps and would keep with more memory, as in ``KvSignals``."""

    hit_ratio: Mapping[str, float]
    repeated_ratio: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    estimated: Mapping[str, float] = field(default_factory=dict)

    def working_set(self, capacity: float | None, t: Thresholds) -> float | None:
        """The smallest of the capacities in tokens that gives nearly the hit ratio of the largest."""
        now, most = self.hit_ratio.get(MEASURED), self.hit_ratio.get(_FACTORS[FACTORS[-1]])
        if now is None or most is None or capacity is None:
            return None
        nearly = most - t["trend_change_ratio"] * (most - now)
        enough = (factor for factor, name in _FACTORS.items() if self.hit_ratio.get(name, 0.0) >= nearly)
        return capacity if now >= nearly else capacity * min(enough)


def reuse(window: EngineWindow, room: float | None, context: float | None, loads: bool) -> Reuse:
    """Reuse over five minutes. ``room``: tokens that no request holds now; ``context``: tokens of a mean request;
    ``loads``: what is stored may come from other servers or tiers, so that it was not computed, nor lost.
    """
    now = _hit_ratio(window, FIVE_MINUTES)
    ratios, kept = {} if now is None else {MEASURED: now}, _residence(window, room)
    again = window.rate(r.KV_AGAIN, FIVE_MINUTES, r.KV_SEEN)
    if window.last is None or again is None or now is None or loads:
        return Reuse(ratios, estimated=kept)
    asked = window.rate(r.PREFIX_QUERIES, FIVE_MINUTES)
    preempted = (window.rate(r.PREEMPTIONS, FIVE_MINUTES) or 0.0) * (context or 0.0)  # stored again, and not asked for
    for name in _FACTORS.values():
        gain = window.rate(r.KV_GAIN_PREFIX + name, FIVE_MINUTES, r.KV_SEEN)
        if gain is not None and asked:
            ratios[name] = min(1.0, now + max(0.0, gain - preempted) / asked)
    age, gap = (window.rate(name, FIVE_MINUTES, r.KV_SEEN) or 0.0 for name in (r.KV_AGAIN_AGE, r.KV_AGAIN_GAP))
    seconds = dict(zip(UNTIL, (age / again, (age + gap) / again), strict=True)) if again else {}
    computed = window.rate(r.PROMPT_TOKENS_COMPUTED, FIVE_MINUTES)
    computed = (1.0 - now) * (asked or 0.0) if computed is None else computed
    share = min(1.0, max(0.0, again - preempted) / computed) if computed else None
    return Reuse(ratios, share, seconds, kept)


def _residence(window: EngineWindow, room: float | None) -> Mapping[str, float]:
    """Seconds until an unused block is evicted, and until a block is used again, without KV events."""
    idle, gaps = (window.quantiles(name, QUARTER_HOUR) for name in (r.KV_IDLE, r.KV_REUSE_GAP))
    pair = window.pair(FIVE_MINUTES)
    if idle:
        return dict(zip(UNTIL, (idle["0.5"], *([gaps["0.95"]] if gaps else [])), strict=False))
    written = 0.0 if pair is None else _written(pair[1]) - _written(pair[0])
    return {} if pair is None or room is None or written <= 0 else {UNTIL[0]: room * (pair[1].t - pair[0].t) / written}


def kv_signals(
    window: EngineWindow,
    capacity: float | None,
    ever_positive: bool,
    shape: Shape,
    max_num_seqs: float | None,
    hit_ratio: HitRatio,
    t: Thresholds,
    loads: bool = False,
) -> KvSignals:
    """All KV signals of one engine now; ``capacity`` in tokens; ``loads``: as for ``reuse``."""
    recorded = kv_recorded(window, ever_positive, t)
    counted, silent, rate, recent_preemptions, lately = _preemptions(window, t)
    running = window.gauge_values(r.RUNNING, MINUTE)
    mean_running = sum(running) / len(running) if running else None
    context, reach = shape.mean_context, requests_reached(window, shape, max_num_seqs)
    usage = window.gauge(r.KV_USAGE) if recorded is not False else None
    room = None if usage is None or capacity is None else (1.0 - usage) * capacity
    hits, usual_hits = hit_ratio.observe(window, room)
    again = reuse(window, room, context, loads)
    peak = recent_max = beside_queue = rise = seconds = None
    if usage is not None:
        peak = max(window.gauge_values(r.KV_USAGE, MINUTE))
        recent_max = max(window.gauge_values(r.KV_USAGE, t["kv_recent_seconds"]))
        recent = window.since(t["recent_window_seconds"])
        waited = [s.gauges[r.KV_USAGE] for s in recent if s.waiting and r.KV_USAGE in s.gauges]
        beside_queue = sum(waited) / len(waited) if waited else None
        rise = slope([(s.t, s.gauges[r.KV_USAGE]) for s in window.since(QUARTER_MINUTE) if r.KV_USAGE in s.gauges])
        seconds = seconds_to_full(usage, rise, t)
    return KvSignals(
        kv_recorded=recorded,
        kv_used_ratio=usage,
        kv_used_ratio_max=peak,
        kv_used_ratio_recent_max=recent_max,
        kv_used_ratio_waiting=beside_queue,
        kv_capacity_tokens=capacity,
        kv_used_tokens=None if usage is None or capacity is None else usage * capacity,
        kv_slope_per_second=rise,
        kv_seconds_to_full=seconds,
        kv_overcommit_ratio=None
        if reach is None or context is None or capacity is None
        else reach * context / capacity,
        requests_reached=reach,
        preemption_rate=rate,
        preemptions_counted=counted,
        preemptions_inferred=silent,
        preemptions_recent=recent_preemptions,
        preemptions_recently=lately,
        preemptions_per_running_minute=None if rate is None or not mean_running else rate * MINUTE / mean_running,
        recomputed_tokens_rate=_recomputed(window, rate, shape),
        prefix_hit_ratio=again.hit_ratio,
        prefix_hit_ratio_recent=hits,
        prefix_hit_ratio_usual=usual_hits,
        prefill_repeated_ratio=again.repeated_ratio,
        kv_working_set_tokens=again.working_set(capacity, t),
        reuse_seconds=again.seconds,
        reuse_seconds_estimated=again.estimated,
    )


def full_from(name: str, watermark: float | None, t: Thresholds) -> float:
    """A threshold of KV usage lowered by the watermark, because a cache that keeps a tenth of its blocks free admits
    nothing at 0.9; never below the warm threshold.
    """
    return max(min(t[name], t["most_ratio"]), t[name] - (watermark or 0.0))


def seconds_to_full(usage: float, rise: float | None, t: Thresholds) -> float | None:
    """Seconds until the cache is full at the current slope; ``None`` when not rising, or beyond the forecast
    horizon: of an hour, and below the warm threshold of ``kv_seconds_to_full_warning``.
    """
    if rise is None or rise <= t["kv_rise_min_per_second"]:
        return None
    seconds = max(0.0, 1.0 - usage) / rise
    return seconds if seconds <= (HOUR if usage >= t["most_ratio"] else t["kv_seconds_to_full_warning"]) else None


def _preemptions(
    window: EngineWindow, t: Thresholds
) -> tuple[float | None, float | None, float | None, float | None, float | None]:
    """(counted in the last minute, inferred in the last minute, the larger per second, the larger in the last
    seconds, the larger in the last half minute).
    """
    counted = window.increase_within(r.PREEMPTIONS, MINUTE)
    lately = window.increase_within(r.PREEMPTIONS, t["recent_window_seconds"])
    samples = window.since(MINUTE)
    half = window.increase_within(r.PREEMPTIONS, HALF_MINUTE)
    silent = fresh = fresh_half = None
    if (signs := inferred_preemptions(window, t)) is not None:
        share, last = confirmed_share(signs, samples, t), samples[-1].t
        ages, amounts = [before.t - last for before, _ in signs], [amount for _, amount in signs]
        silent = share * sum(amounts)
        if len(window.since(t["recent_window_seconds"])) > 1:
            fresh = share * sum(amounts[bisect_left(ages, -t["recent_window_seconds"] - JITTER_SECONDS) :])
        fresh_half = share * sum(amounts[bisect_left(ages, -HALF_MINUTE - JITTER_SECONDS) :])
    span = samples[-1].t - samples[0].t if samples else 0.0
    known = [amount for amount in (counted[0] if counted else None, silent) if amount is not None]
    rate = max(known) / span if known and span > 0 else None
    recent = max((amount for amount in (lately[0] if lately else None, fresh) if amount is not None), default=None)
    within = max((amount for amount in (half[0] if half else None, fresh_half) if amount is not None), default=None)
    return (counted[0] if counted else None), silent, rate, recent, within


def _recomputed(window: EngineWindow, preemptions: float | None, shape: Shape) -> float | None:
    """Tokens per second computed again after preemptions: the outputs, and of the prompts the share that is computed
    and not found in a cache or loaded from a tier; the whole prompts where that is unknown.
    """
    if preemptions is None or shape.prompt is None:
        return None
    computed, prompts = (window.increase(name, FIVE_MINUTES) for name in (r.PROMPT_TOKENS_COMPUTED, r.PROMPT_TOKENS))
    share = 1.0 if computed is None or not prompts or prompts[0] <= 0 else min(1.0, computed[0] / prompts[0])
    return preemptions * (shape.prompt * share + (shape.output or 0.0))


def requests_reached(window: EngineWindow, shape: Shape, max_num_seqs: float | None) -> float | None:
    """Requests that the load can run at once within the limits; ``None`` without load.

    It is what the load reaches (requests in flight, or arrival rate times service time), never max_num_seqs itself:
    with its default nearly every configuration would be over-committed on paper.
    """
    in_flight = window.in_flight(MINUTE)
    if not in_flight:
        return None
    reach = max(sum(in_flight) / len(in_flight), shape.arrivals_times_service or 0.0)
    return reach if max_num_seqs is None else min(reach, max_num_seqs)


def _written(sample: Sample) -> float:
    """Tokens of prompts computed and of outputs since the start of the process, all of which take blocks."""
    counted = sample.counters
    prompts = counted.get(r.PREFIX_QUERIES, 0.0) - counted.get(r.PREFIX_HITS, 0.0)
    return prompts + counted.get(r.GENERATION_TOKENS, 0.0)


def _hit_ratio(window: EngineWindow, seconds: float, least: float = 0.0) -> float | None:
    """Share of the prompt tokens looked up that were in the prefix cache; ``None`` unless more than ``least`` were
    looked up.
    """
    queries, hits = window.increase(r.PREFIX_QUERIES, seconds), window.increase(r.PREFIX_HITS, seconds)
    if queries is None or hits is None or queries[0] <= least:
        return None
    return min(1.0, hits[0] / queries[0])


_OF_TIERS: Final = ("tier_", r.CACHED_PREFIX, r.PROMPT_TOKENS_COMPUTED)  # how counters begin that say what a tier does


def tier_signals(
    window: EngineWindow, tier: Tier, capacity: float | None, gpus: int | None, t: Thresholds
) -> TierSignals:
    """All signals of a KV tier, over five minutes. ``capacity``: tokens of the GPU's KV cache; ``gpus``: of the engine,
    whose transfer times add up.
    """
    last = window.last
    if last is None or (r.TIER_STORED not in last.counters and r.TIER_REFUSED not in last.counters):
        return TierSignals(tier_configured=tier.configured)
    counters, size, each = last.counters, tier.size, tier.tokens
    grown = {name: window.increase(name, FIVE_MINUTES) for name in counters if name.startswith(_OF_TIERS)}
    amounts = {name: found[0] for name, found in grown.items() if found}
    rates = {name: found[0] / found[1] for name, found in grown.items() if found}
    behind = [r.CACHED_PREFIX + where for where in ("host", "disk", "storage", "external_unspecified")]
    prefill, total = window.observed(r.PREFILL, FIVE_MINUTES), counters.get(r.TIER_STORED)
    # a counter with labels appears with the first event
    refused = amounts.get(r.TIER_REFUSED) if r.TIER_REFUSED in counters else 0.0
    return TierSignals(
        tier_configured=True,
        tier_capacity_tokens=None if size is None or each is None else size * each,
        tier_pinned_ratio=last.gauges.get(r.TIER_PINNED),
        tier_used_ratio=_ratio(last.gauges.get(r.TIER_USED), size),
        tier_stored=_by_place(rates, r.TIER_STORED_PREFIX, each),
        tier_loaded=_by_place(rates, r.TIER_LOADED_PREFIX, each),
        cached=_by_place(rates, r.CACHED_PREFIX, 1.0),
        tier_reloaded_ratio=_ratio(amounts.get(r.TIER_LOADED), amounts.get(r.TIER_STORED)),
        tier_turnover_seconds=_ratio(size, rates.get(r.TIER_STORED)),
        tier_refused=refused,
        tier_served=None if total is None else any(counters.get(name) for name in (r.TIER_LOADED, *behind)),
        tier_stored_ratio=None if total is None or each is None else _ratio(total * each, capacity),
        load_seconds_per_token=_ratio(
            amounts.get(r.TIER_LOAD_SECONDS),
            sum(amounts.get(name, 0.0) for name in behind),
            t["hit_ratio_min_tokens"],
        ),
        tier_gpus=gpus,
        prefill_seconds_per_token=_ratio(prefill[0].sum if prefill else None, amounts.get(r.PROMPT_TOKENS_COMPUTED)),
    )


def _ratio(part: float | None, whole: float | None, least: float = 0.0) -> float | None:
    """``part`` of ``whole``; ``None`` unless that is above ``least``."""
    return None if part is None or whole is None or whole <= least else part / whole


def _by_place(rates: Mapping[str, float], prefix: str, each: float | None) -> dict[str, float]:
    """Rates of this prefix, in tokens, by where KV lies; empty where the tokens in one unit are unknown."""
    names = (name for name in rates if name.startswith(prefix))
    return {} if each is None else {name.removeprefix(prefix): rates[name] * each for name in names}


IDLE_STEP_SECONDS: Final = 30.0
IDLE_POINTS: Final = 240
COMPONENT_EVENTS: Final = (
    ("weights", "weights_bytes"),
    ("graphs", "graphs_bytes"),
    ("activations", "activations_bytes"),
)


class DeviceMemory:
    """Follows the device memory of one engine while it is idle."""

    __slots__ = ("_idle", "_thresholds")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._idle: deque[tuple[float, float]] = deque(maxlen=IDLE_POINTS)

    def observe(self, t: float, used: float | None, idle: bool) -> None:
        """Take the used bytes; work ends the idle period."""
        if used is None:
            return
        if not idle:
            self._idle.clear()
        elif not self._idle or t - self._idle[-1][0] >= IDLE_STEP_SECONDS:
            self._idle.append((t, used))

    def forget(self) -> None:
        """Begin anew: the process or the set of counted bytes changed."""
        self._idle.clear()

    def idle_growth_per_hour(self) -> float | None:
        """Bytes per hour gained in the present idle period; ``None`` until it is long enough."""
        idle, t = self._idle, self._thresholds
        if len(idle) < t["trend_min_samples"] or idle[-1][0] - idle[0][0] < t["leak_min_idle_seconds"]:
            return None
        rise = slope(list(idle))
        return None if rise is None else rise * HOUR


@frozen
class Held:
    """Bytes in use on one GPU, and its total."""

    bytes: int
    total: int | None


def held(gpus: Sequence[GpuReading], own: Sequence[int | None] | None) -> list[Held]:
    """Bytes held on each GPU: all in use, or only ``own`` (the pod's processes) where other pods share the GPUs. GPUs
    where the driver reports neither are left out.
    """
    used = [gpu.memory_used_bytes for gpu in gpus] if own is None else own
    return [Held(size, gpu.memory_total_bytes) for size, gpu in zip(used, gpus, strict=False) if size is not None]


def demand_ratio(gpu: GpuReading, empty_pool_bytes: Sequence[float | None]) -> float | None:
    """Required share of device memory: used minus the empty parts of the KV pools on it. ``empty_pool_bytes`` has one
    entry per engine on the GPU; ``None`` if one of them is ``None``. Without an engine, all used memory is required.
    """
    if gpu.memory_used_bytes is None or not gpu.memory_total_bytes:
        return None
    known = [value for value in empty_pool_bytes if value is not None]
    if len(known) < len(empty_pool_bytes):
        return None
    return max(0.0, gpu.memory_used_bytes - sum(known)) / gpu.memory_total_bytes


def memory_signals(
    kv: KvSignals,
    context: EngineContext,
    device: DeviceMemory,
    on_gpus: Sequence[Held] = (),
    *,
    demand: float | None = None,
    demands: tuple[tuple[float, float | None], ...] = (),
    running: float | None = None,
    block_size: float | None = None,
) -> MemorySignals:
    """Memory of one engine in bytes; pool and components are per GPU. ``on_gpus``: what its GPUs hold, without other
    pods.
    """
    facts, allocator = context.log.facts, context.allocator
    ratios = [ratio for gpu in context.gpus.readings if (ratio := gpu.memory_used_ratio) is not None]
    most = max((gpu.bytes for gpu in on_gpus), default=None)
    pool = facts.get("pool_bytes")
    pool_used = None if pool is None or kv.kv_used_ratio is None else pool * kv.kv_used_ratio
    waste = None
    if pool and kv.kv_capacity_tokens and block_size and running is not None:
        waste = running * (block_size - 1) / 2 * pool / kv.kv_capacity_tokens
    worst = max(
        (a for a in allocator if a.reserved_bytes is not None and a.allocated_bytes is not None),
        key=lambda a: (a.reserved_bytes or 0) - (a.allocated_bytes or 0),
        default=None,
    )
    return MemorySignals(
        device_used_ratio=max(ratios, default=None),
        device_demand_ratio=demand,
        gpu_demands=demands,
        own_used_ratio=max((gpu.bytes / gpu.total for gpu in on_gpus if gpu.total), default=None),
        kv_pool_bytes=pool,
        kv_pool_used_bytes=pool_used,
        kv_block_waste_bytes=waste,
        allocator_reserved_bytes=worst.reserved_bytes if worst else None,
        allocator_allocated_bytes=worst.allocated_bytes if worst else None,
        allocator_inactive_split_bytes=worst.inactive_split_bytes if worst else None,
        components=components(facts, outside_torch(context.gpus.processes, allocator), most),
        idle_growth_bytes_per_hour=device.idle_growth_per_hour(),
    )


def outside_torch(processes: Sequence[int], allocator: Sequence[AllocatorReading]) -> float | None:
    """Bytes that a worker holds outside torch's allocator (driver context, NCCL, libraries): the mean over GPUs with
    one worker each. ``None`` unless the driver reports memory per process and the plugin runs in every worker.
    """
    reserved = [rank.reserved_bytes for rank in allocator if rank.reserved_bytes is not None]
    if not processes or not len(processes) == len(allocator) == len(reserved):
        return None
    held = sum(processes) - sum(reserved)
    return held / len(processes) if held >= 0 else None


def components(facts: Mapping[str, float], context: float | None, used: float | None) -> Mapping[str, float]:
    """Device memory in bytes by component, as far as start-up lines, driver and plugin report it; ``other`` only when
    weights and pool are known.
    """
    found = {name: facts[key] for name, key in COMPONENT_EVENTS if key in facts}
    if "pool_bytes" in facts:
        found["kv_pool"] = facts["pool_bytes"]
    if context is not None:
        found["context"] = context
    if used is not None and {"weights", "kv_pool"} <= set(found):
        resident = sum(value for name, value in found.items() if name != "activations")
        if used >= resident:
            found["other"] = used - resident
    return found


MAX_SIZES: Final = 256  # cached results


class PoolSizes:
    """KV pool sizes in bytes by model shape, cached."""

    def __init__(self, shapes: ModelShapes | None = None) -> None:
        self._shapes = shapes or ModelShapes()
        self._sizes: dict[tuple[object, ...], float | None] = {}

    def of(
        self, args: EngineArgs, pool: Pool, target: str = "", served: str = "", several_gpus: bool = False
    ) -> float | None:
        """Bytes of the KV pool on each GPU: as set in the arguments, else blocks times the block size of the model's
        shape; ``None`` if unknown. ``target`` and ``served`` (its name in the metrics) identify the model;
        ``several_gpus``: the server has, or may have, more than one.
        """
        if pool.bytes is not None:
            return pool.bytes
        split = _split(args, several_gpus)
        if split is None or not pool.blocks or not pool.block_size:
            return None
        names = tuple(name for name in (args.model, args.served_model_name, served) if name)
        key = (target, names, split, pool)
        if key not in self._sizes:
            if len(self._sizes) >= MAX_SIZES:
                self._sizes.clear()
            shape = self._shapes.find(names, target)
            self._sizes[key] = None if shape is None else _size(shape, pool.blocks, pool.block_size, pool.dtype, split)
        return self._sizes[key]


def _split(args: EngineArgs, several_gpus: bool) -> tuple[int, int, int] | None:
    """Tensor, pipeline and decode-context parallel sizes; ``None`` where several GPUs are there and arguments that are
    not visible may split the model.
    """
    sizes = (args.tensor_parallel_size, args.pipeline_parallel_size, args.decode_context_parallel_size)
    if not args.complete and not any(sizes) and several_gpus:
        return None
    tensor, pipeline, decode_context = (size or 1 for size in sizes)
    return tensor, pipeline, decode_context


def _size(shape: ModelShape, blocks: int, block_size: int, dtype: str, split: tuple[int, int, int]) -> float | None:
    if shape.recurrent_layers and len(shape.layers) > shape.recurrent_layers:
        return None  # the pool's blocks are as large as those layers need
    try:
        size = pool_bytes(shape, blocks, Parallel(*split), dtype, block_size)
    except ValueError:
        return None
    return ceilings.number(size, ceilings.BYTES)
