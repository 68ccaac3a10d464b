"""One engine followed over time: feeds the windows and puts all its signals together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvpressure import readings as r
from kvpressure.args import EngineArgs
from kvpressure.readings import AllocatorReading, EnginePage, EngineReading
from kvpressure.signals import (
    batch,
    concurrency,
    context,
    host,
    kv,
    latency,
    limits,
    memory,
    prefill,
    progress,
    score,
    throughput,
)
from kvpressure.signals.batch import RunningHistogram
from kvpressure.signals.config import positive
from kvpressure.signals.context import LongestContext
from kvpressure.signals.host import ContainerWindow
from kvpressure.signals.latency import Baseline
from kvpressure.signals.memory import DeviceMemory, Held
from kvpressure.signals.model import KvSignals, LoadSignals, Signals
from kvpressure.signals.progress import Progress
from kvpressure.signals.score import GpuWindow
from kvpressure.signals.steps import StepWindow
from kvpressure.signals.throughput import Trend
from kvpressure.signals.window import MINUTE, EngineWindow
from kvpressure.thresholds import Thresholds


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the engine's signals need besides its own page, at one moment."""

    now: float
    gpus: Sequence[GpuWindow] = ()
    demand: float | None = None
    container: ContainerWindow | None = None
    allocator: Sequence[AllocatorReading] = ()
    processes: Sequence[int] = ()  # bytes of the pod's processes on each GPU that has some
    others: bool = False  # other pods have some of the GPUs too: time slices, MPS
    own_bytes: Sequence[int | None] = ()  # bytes of the pod's processes on each of ``gpus``
    facts: Mapping[str, float] = field(default_factory=dict)
    events: Mapping[str, int] = field(default_factory=dict)
    events_known: bool = False
    oom: Mapping[str, float] = field(default_factory=dict)
    gpu_faults: int | None = None
    max_num_seqs: float | None = None
    max_num_seqs_source: str | None = None
    max_model_len: float | None = None
    args: EngineArgs = field(default_factory=EngineArgs)


class EngineTracker:
    """History of one engine and everything derived from it."""

    __slots__ = (
        "_baseline",
        "_device",
        "_longest",
        "_others",
        "_process_start",
        "_progress",
        "_running",
        "_thresholds",
        "_trend",
        "engines_on_page",
        "error",
        "ever_positive",
        "failing",
        "page",
        "reading",
        "steps",
        "window",
    )

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self.window = EngineWindow()
        self.reading: EngineReading | None = None
        self.page: EnginePage | None = None
        self.failing = 0
        self.error: str | None = None
        self.ever_positive = False
        self.engines_on_page = 1
        self._running = RunningHistogram()
        self._baseline = Baseline(thresholds)
        self._process_start: float | None = None
        self._others = False
        self._begin()

    def _begin(self) -> None:
        """Everything that looks back on times."""
        t = self._thresholds
        self.steps = StepWindow(t)
        self._longest = LongestContext(t["context_window_seconds"])
        self._trend = Trend(t)
        self._progress = Progress(t)
        self._device = DeviceMemory(t)

    def observe(self, page: EnginePage, reading: EngineReading) -> bool:
        """Take a good page. False if it is not newer than what is known, unless the clock stepped back far."""
        before = self.window.last
        if not self.window.observe(page.time, reading.gauges, reading.counters, reading.histograms, page.page):
            return False
        if before is not None and page.time < before.t:
            self._begin()
        self.page, self.reading = page, reading
        self.failing, self.error = 0, None
        self.engines_on_page = len(page.engines)
        start = page.page.get(r.PROCESS_START)
        if start is not None and self._process_start is not None and start != self._process_start:
            self._device.forget()
            self.ever_positive = False
        self._process_start = start if start is not None else self._process_start
        sample = self.window.last
        if sample is None:
            return True
        self.ever_positive = self.ever_positive or sample.gauges.get(r.KV_USAGE, 0.0) > 0
        if r.RUNNING in sample.gauges:
            self._running.add(sample.gauges[r.RUNNING])
        self._progress.observe(sample)
        self._longest.observe(sample)
        return True

    def fail(self, reason: str) -> None:
        """The page could not be read this time, or does not have this engine."""
        self.failing += 1
        self.error = reason

    def recent_waiting(self) -> list[float]:
        """Requests waiting in the samples of the last seconds."""
        return self.window.waiting(self._thresholds["recent_window_seconds"])

    def kv_signals(self, around: Surroundings) -> tuple[KvSignals, context.Shape]:
        """KV signals and mean request shape; needed first, because device memory depends on them."""
        shape = context.shape(self.window, self._thresholds)
        config = self.reading.cache_config if self.reading else {}
        found = kv.compute(
            self.window,
            config,
            self.engines_on_page,
            self.ever_positive,
            around.facts.get("capacity_tokens"),
            shape,
            around.max_num_seqs,
            self._thresholds,
        )
        if around.args.watermark is not None:
            found = replace(found, kv_watermark_ratio=around.args.watermark)
        return self._with_exact_maxima(around.now, found), shape

    def _with_exact_maxima(self, now: float, found: KvSignals) -> KvSignals:
        """The maxima over every step where the plugin tells them: a peak between two pages is a peak."""
        if found.kv_used_ratio_max is None or found.kv_used_ratio_recent_max is None:
            return found
        lately = self.steps.kv_max(now, self._thresholds["kv_recent_seconds"]) or 0.0
        minute = self.steps.kv_max(now, self._thresholds["kv_window_seconds"]) or 0.0
        if minute <= found.kv_used_ratio_max and lately <= found.kv_used_ratio_recent_max:
            return found
        return replace(
            found,
            kv_used_ratio_max=max(found.kv_used_ratio_max, minute),
            kv_used_ratio_recent_max=max(found.kv_used_ratio_recent_max, lately),
        )

    def signals(self, around: Surroundings, found: KvSignals, shape: context.Shape) -> Signals:
        """All signals now."""
        window, t = self.window, self._thresholds
        load = concurrency.compute(
            window,
            around.max_num_seqs,
            around.max_num_seqs_source,
            found.kv_capacity_tokens,
            shape.mean_context,
            kv.full_from("kv_near_full_ratio", found.kv_watermark_ratio, t),
            t,
        )
        lora, role = limits.takes_lora(around.args), limits.kv_role(around.args)
        if lora or role is not None:
            load = replace(load, lora=lora, kv_role=role, waits_for_blocks=limits.waits_for_blocks(around.args))
        flow = throughput.compute(window, self._trend)
        if load.kv_role not in (None, "kv_producer") and r.PROMPT_TOKENS_COMPUTED not in (
            window.last.counters if window.last else {}
        ):
            flow = replace(flow, prompt_tokens_computed_per_second=None)  # another server may have computed them
        age = None if window.last is None else max(0.0, around.now - window.last.t)
        gpus = [gpu.last for gpu in around.gpus if gpu.last is not None]
        held = memory.held(gpus, around.own_bytes if around.others else None)
        self._follow_device(around, held, load)
        return Signals(
            time=around.now,
            kv=found,
            load=load,
            batch=batch.compute(window, self._running, load.max_num_seqs, t, self.steps, around.now),
            context=context.compute(window, self._longest, shape, around.max_model_len, t),
            latency=latency.compute(window, self._baseline, self._calm(found, load), t),
            throughput=flow,
            progress=progress.compute(
                window,
                self._progress,
                age if age is not None else 0.0,
                self.failing,
                t,
                self.error,
                self._ever_useful(),
                self._prompt_at_once(around),
            ),
            memory=memory.compute(
                found,
                gpus,
                self._device,
                around.facts,
                around.allocator,
                around.processes,
                around.demand,
                load.running,
                _block_size(self.reading),
                held,
            ),
            host=host.compute(window, around.container, around.now, t),
            compute=score.compute(
                window, around.gpus, found, load, around.demand, t, self._cards_shared(around), around.others
            ),
            events=around.events,
            events_known=around.events_known,
            oom=around.oom,
            gpu_faults=around.gpu_faults,
        )

    def _cards_shared(self, around: Surroundings) -> bool:
        """Whether some of these cards may belong to another engine of the pod, or to none: it has more than this one needs."""
        needs = around.args.engine_gpus
        return len(around.gpus) > 1 and (self.engines_on_page > 1 if needs is None else len(around.gpus) > needs)

    def _prompt_at_once(self, around: Surroundings) -> bool:
        """Whether a prompt may be computed that no gauge shows growing."""
        last, flavour = self.window.last, self.page.flavour if self.page else None
        if (
            last is None
            or self._progress.seconds_without <= 0
            or not prefill.whole_prompts(around.args, flavour, tuple(last.gauges))
        ):
            return False
        return prefill.admitted_last(self.window.since(self._thresholds["prefill_patience_seconds"]))

    def _ever_useful(self) -> bool | None:
        """Whether this process has computed or generated a token; ``None`` if its page does not count them."""
        counters = self.reading.counters if self.reading else {}
        counts = [counters[name] for name in (r.PROMPT_TOKENS, r.GENERATION_TOKENS) if name in counters]
        return any(count > 0 for count in counts) if counts else None

    def _follow_device(self, around: Surroundings, held: Sequence[Held], load: LoadSignals) -> None:
        if around.others is not self._others:  # from here on other bytes are followed than before
            self._device.forget()
            self._others = around.others
        idle = load.in_flight == 0
        used = max((float(card.bytes) for card in held), default=None)
        self._device.observe(around.now, used, idle, ready=self.window.last is not None)

    def _calm(self, found: KvSignals, load: LoadSignals) -> bool:
        """Whether this minute may teach the latency baseline: hardly a queue, cache not near full, tokens flowing."""
        if found.kv_used_ratio_max is not None and found.kv_used_ratio_max >= self._thresholds["kv_near_full_ratio"]:
            return False
        if self._progress.seconds_without > 0 or load.running is None:
            return False
        waiting = self.window.waiting(MINUTE)
        running = self.window.gauge_values(r.RUNNING, MINUTE)
        return bool(waiting) and sum(waiting) <= self._thresholds["calm_queue_ratio"] * sum(running) + 1


def _block_size(reading: EngineReading | None) -> float | None:
    return positive(reading.cache_config.get("block_size")) if reading else None
