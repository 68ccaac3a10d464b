"""One engine followed over time: feeds its windows and computes all its signals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

from kvpressure.engines.registry import dialect
from kvpressure.model import readings as r
from kvpressure.model.frozen import frozen
from kvpressure.model.pools import KV_ROLES
from kvpressure.model.readings import CacheReading, EngineReading, Scrape
from kvpressure.model.signals import CacheSignals, KvSignals, LoadSignals, ProgressSignals, Signals, ThroughputSignals
from kvpressure.settings.thresholds import Thresholds
from kvpressure.signals import batch, hardware, kv, progress, requests
from kvpressure.signals import hardware as score
from kvpressure.signals.batch import SequenceLimit, StepWindow
from kvpressure.signals.hardware import EngineContext
from kvpressure.signals.kv import DeviceMemory, Held
from kvpressure.signals.progress import Progress, Trend
from kvpressure.signals.requests import Baseline, LongestContext
from kvpressure.signals.window import HALF_MINUTE, MINUTE, QUARTER_HOUR, EngineWindow


@frozen
class CacheState:
    """KV signals and request shape, computed before the required memory of the GPUs is known."""

    kv: KvSignals
    shape: requests.Shape


class EngineTracker:
    """History of one engine and the state of its signals."""

    __slots__ = (
        "_baseline",
        "_cache",
        "_device",
        "_fastest",
        "_hits",
        "_longest",
        "_others",
        "_progress",
        "_running",
        "_thresholds",
        "_trend",
        "engines_on_page",
        "error",
        "ever_positive",
        "failing",
        "page",
        "process_start",
        "reading",
        "rival_label",
        "steps",
        "window",
    )

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self.window = EngineWindow()
        self.reading: EngineReading | None = None
        self.page: Scrape | None = None
        self.failing = 0
        self.error: str | None = None
        self.rival_label = ""
        self.ever_positive = False
        self.engines_on_page = 1
        self._baseline = Baseline(thresholds)
        self.process_start: float | None = None
        self._others = False
        self._begin()

    def _begin(self) -> None:
        """Begin anew with everything that measures elapsed time."""
        t = self._thresholds
        self.steps = StepWindow(t)
        self._longest = LongestContext(t["context_window_seconds"])
        self._trend = Trend(t)
        self._hits = kv.HitRatio(t)
        self._fastest = batch.FastestStep(t)
        self._progress = Progress(t)
        self._device = DeviceMemory(t)
        self._cache: CacheReading | None = None

    def take_cache(self, cache: CacheReading) -> None:
        """Take what the engine's KV events add up to."""
        self._cache = cache

    def observe(self, page: Scrape, reading: EngineReading) -> bool:
        """Take a successful scrape. False if it is not newer than the last one and was ignored."""
        before, cache = self.window.last, self._fresh_cache(page.time)
        if cache is not None:
            reading = replace(reading, counters={**reading.counters, **cache.counters})
        if not self.window.observe(page.time, reading.gauges, reading.counters, reading.histograms, page.page):
            return False
        if before is not None and page.time < before.t:
            self._begin()
        self.page, self.reading = page, reading
        self.failing, self.error, self.rival_label = 0, None, ""
        self.engines_on_page = page.engines_of_server(reading)
        start = page.page.get(r.PROCESS_START)
        if start is not None and self.process_start is not None and start != self.process_start:
            self._device.forget()
            self._trend = Trend(self._thresholds)  # the minute before a restart produced nothing
            self._progress.begin_process()
            self.ever_positive = False
        self.process_start = start if start is not None else self.process_start
        sample = self.window.last
        if sample is None:
            return True
        self.ever_positive = self.ever_positive or sample.gauges.get(r.KV_USAGE, 0.0) > 0
        self._progress.observe(sample)
        self._longest.observe(sample)
        return True

    def fail(self, reason: str, rival_label: str = "") -> None:
        """Count a failed scrape, or one without this engine; ``rival_label``: in which its series collide."""
        self.failing += 1
        self.error, self.rival_label = reason, rival_label

    def queue(self) -> tuple[list[float], list[float] | None, list[float]]:
        """Requests waiting, by sample: over ``recent_window_seconds``, and in the newest ``values_min``, however old
        (``None`` = there are not so many); and those running over half a minute.
        """
        t = self._thresholds
        recent, several = self.window.waiting(t["recent_window_seconds"]), round(t["values_min"])
        newest = recent[-several:] if len(recent) >= several else self.window.waiting(QUARTER_HOUR)[-several:]
        running = self.window.gauge_values(r.RUNNING, HALF_MINUTE)
        return recent, newest if len(newest) == several else None, running

    def kv_signals(self, around: EngineContext) -> CacheState:
        """KV signals and mean request shape; computed first, because required GPU memory depends on them."""
        shape = requests.shape(self.window, self._thresholds)
        shown = self.reading and dialect(self.reading.dialect).capacity_tokens(self.reading, self.engines_on_page)
        found = kv.kv_signals(
            self.window,
            shown or around.log.facts.get("capacity_tokens") or None,
            self.ever_positive,
            shape,
            around.limits.max_num_seqs,
            self._hits,
            self._thresholds,
            around.limits.features.kv_role not in (None, "kv_producer") or around.limits.tier.configured is True,
        )
        if around.limits.args.watermark is not None:
            found = replace(found, kv_watermark_ratio=around.limits.args.watermark)
        return CacheState(self._with_exact_maxima(around.now, found), shape)

    def _with_exact_maxima(self, now: float, found: KvSignals) -> KvSignals:
        """The KV maxima raised to those of every step where the plugin reports them, so that no peak between two
        scrapes is lost.
        """
        if found.kv_used_ratio_max is None or found.kv_used_ratio_recent_max is None:
            return found
        lately = self.steps.kv_max(now, self._thresholds["kv_recent_seconds"]) or 0.0
        minute = self.steps.kv_max(now, MINUTE) or 0.0
        if minute <= found.kv_used_ratio_max and lately <= found.kv_used_ratio_recent_max:
            return found
        return replace(
            found,
            kv_used_ratio_max=max(found.kv_used_ratio_max, minute),
            kv_used_ratio_recent_max=max(found.kv_used_ratio_recent_max, lately),
        )

    def signals(
        self,
        around: EngineContext,
        cache: CacheState,
        demand: float | None,
        demands: tuple[tuple[float, float | None], ...] = (),
    ) -> Signals:
        """All signals now; ``demand`` is the largest share of required memory among its GPUs, ``demands`` those known,
        each with the share in use outside KV pools.
        """
        window, t = self.window, self._thresholds
        load = self._load(around, cache)
        held = kv.held(around.gpus.readings, around.gpus.own_bytes if around.gpus.others else None)
        self._follow_device(around, held, load)
        lost, baseline = self._lost(), self._baseline
        ended = requests.ended(window, lost)
        flow = self._throughput(load)
        pace = progress.transfer_pace(window, t) if load.has_peer else (None, None)
        accepted = None if flow.step_output_tokens is None else flow.step_output_tokens - 1.0
        beside = {
            requests.ABANDONED: requests.abandoned_ratio(ended, t),
            requests.TRANSFER: pace[1],
            requests.ACCEPTED: accepted,
        }
        known = {name: value for name, value in beside.items() if value is not None}
        times = requests.latency_signals(window, baseline, self._calm(cache.kv, load), known, t)
        usual = baseline.value(requests.ACCEPTED)
        return Signals(
            time=around.now,
            dialect=self.reading.dialect if self.reading else "",
            kv=cache.kv,
            tier=kv.tier_signals(
                window, around.limits.tier, cache.kv.kv_capacity_tokens, around.limits.args.engine_gpus, t
            ),
            cache=self._contents(around.now),
            load=load,
            batch=batch.batch_signals(
                window,
                load.max_num_seqs,
                t,
                self.steps,
                around.now,
                self._fastest,
                bool(cache.kv.preemptions_counted or cache.kv.preemptions_inferred),
                flow,
            ),
            context=requests.context_signals(window, self._longest, cache.shape, around.limits.max_model_len, t),
            latency=times,
            throughput=flow if usual is None else replace(flow, drafts_accepted_usual=usual),
            transfers=progress.transfer_signals(
                window,
                self._progress.loads_stuck,
                load,
                cache.kv,
                around.limits.args.engine_gpus or 1,
                (*pace, baseline.value(requests.TRANSFER)),
            ),
            requests=requests.request_signals(window, lost, ended, baseline.value(requests.ABANDONED), t),
            progress=progress.progress_signals(window, self._progress, self._beside_samples(around), t),
            memory=kv.memory_signals(
                cache.kv,
                around,
                self._device,
                held,
                demand=demand,
                demands=demands,
                running=load.running,
                block_size=_block_size(self.reading),
            ),
            host=hardware.host_signals(window, around.container, around.now, t),
            compute=score.compute_signals(
                window,
                around.gpus.windows,
                score.SharedGpus(self._gpus_shared(around), around.gpus.others),
                score.Pressing(cache.kv, load, demand),
                t,
            ),
            events=around.log.events,
            events_known=around.log.known,
            oom=around.log.oom,
            gpu_faults=around.gpus.faults,
            kernel_faults=around.gpus.kernel_faults,
        )

    def _fresh_cache(self, now: float) -> CacheReading | None:
        cache = self._cache
        return cache if cache and abs(now - cache.time) <= self._thresholds["stale_page_seconds"] else None

    def _contents(self, now: float) -> CacheSignals:
        """What is in the prefix cache; unknown without a recent reading."""
        cache = self._fresh_cache(now)
        return CacheSignals(cache.adapters, cache.salts, {cache.reason: not cache.reason}) if cache else CacheSignals()

    def _load(self, around: EngineContext, cache: CacheState) -> LoadSignals:
        limits = around.limits
        configured = SequenceLimit(limits.max_num_seqs, limits.max_num_seqs_source)
        has, pool = limits.features, self.page.pool if self.page else None
        shown = self.reading is not None and r.LEASES_EXPIRED in self.reading.counters
        has_peer = True if shown else has.has_peer
        return batch.load_signals(
            self.window,
            configured,
            cache.kv,
            cache.shape.mean_context,
            self._thresholds,
            _block_size(self.reading),
            max_num_batched_tokens=limits.max_num_batched_tokens,
            lora=has.lora,
            kv_role=KV_ROLES.get(pool.role, has.kv_role) if has_peer and pool else has.kv_role,
            has_peer=has_peer,
            waits_for_blocks=has.waits_for_blocks or bool(has_peer),
        )

    def _throughput(self, load: LoadSignals) -> ThroughputSignals:
        flow = progress.throughput_signals(self.window, self._trend)
        if load.kv_role not in (None, "kv_producer") and r.PROMPT_TOKENS_COMPUTED not in (
            self.window.last.counters if self.window.last else {}
        ):
            flow = replace(flow, prompt_tokens_computed_per_second=None)  # another server may have computed them
        return flow

    def _beside_samples(self, around: EngineContext) -> ProgressSignals:
        """What the samples do not show of the engine's progress."""
        age = 0.0 if self.window.last is None else max(0.0, around.now - self.window.last.t)
        return ProgressSignals(
            ever_produced=self._ever_useful(),
            prompt_at_once=self._prompt_at_once(around),
            prefill_usual_seconds=progress.usual_seconds(self.window.last),
            paused=self._paused(around),
            fresh_seconds=age,
            pages_failing=float(self.failing),
            page_error=self.error,
        )

    def _lost(self) -> requests.Lost:
        """How requests without an answer are counted on this server."""
        page, reading = self.page, self.reading
        if page is None or reading is None:
            return requests.Lost()
        return requests.Lost(page.flavour in dialect(reading.dialect).own_aborts, len(page.engines) == 1)

    def _paused(self, around: EngineContext) -> bool | None:
        """Whether the server was told to stand still: by the requests that it accepted, in its log or as it counts
        them, unless tokens came long after, because the one that ends a pause may be missed; or by a sleep or weight
        update in flight.
        """
        values = self.page.page if self.page else {}
        operations = [count for name, count in values.items() if name.startswith(r.OPERATIONS_PREFIX)]
        if any(operations):
            return True
        paused, at = max(around.log.told, self._progress.told, key=itemgetter(1))
        return paused and (self._progress.progressed_at or 0.0) - at < self._thresholds["prefill_patience_seconds"]

    def _gpus_shared(self, around: EngineContext) -> bool:
        """Whether some of the pod's GPUs may belong to another engine or to none: the pod has more than this engine
        needs.
        """
        needs = around.limits.args.engine_gpus
        return len(around.gpus.windows) > 1 and (
            self.engines_on_page > 1 if needs is None else len(around.gpus.windows) > needs
        )

    def _prompt_at_once(self, around: EngineContext) -> bool:
        """Whether a prompt may be in prefill without any gauge moving."""
        if self.window.last is None or self._progress.seconds_without <= 0 or not around.limits.features.whole_prompts:
            return False
        return progress.admitted_last(self.window.since(self._thresholds["prefill_patience_seconds"]))

    def _ever_useful(self) -> bool | None:
        """Whether this process has computed or generated a token; ``None`` if it publishes no token counters."""
        counters = self.reading.counters if self.reading else {}
        counts = [counters[name] for name in (r.PROMPT_TOKENS, r.GENERATION_TOKENS) if name in counters]
        return any(count > 0 for count in counts) if counts else None

    def _follow_device(self, around: EngineContext, held: Sequence[Held], load: LoadSignals) -> None:
        if around.gpus.others is not self._others:  # from here on other bytes are followed than before
            self._device.forget()
            self._others = around.gpus.others
        idle = load.in_flight == 0
        used = max((float(gpu.bytes) for gpu in held), default=None)
        self._device.observe(around.now, used, idle)

    def _calm(self, found: KvSignals, load: LoadSignals) -> bool:
        """Whether this minute may enter the latency baseline: hardly a queue, cache not near full, tokens flowing."""
        if found.kv_used_ratio_max is not None and found.kv_used_ratio_max >= self._thresholds["kv_near_full_ratio"]:
            return False
        if self._progress.seconds_without > 0 or load.running is None:
            return False
        waiting = self.window.waiting(MINUTE)
        running = self.window.gauge_values(r.RUNNING, MINUTE)
        return bool(waiting) and sum(waiting) <= self._thresholds["calm_queue_ratio"] * sum(running) + 1


def _block_size(reading: EngineReading | None) -> float | None:
    return dialect(reading.dialect).block_size(reading) if reading else None
