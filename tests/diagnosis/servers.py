"""Made-up vLLM servers, played through the pipeline second by second.

``play`` takes what the server is like as values: a number holds all the time, a function of the second changes with it.
Counters and histograms of the page follow from them, so that a test shows only the numbers it is about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from kvpressure.model import readings as r
from kvpressure.model.pools import EnginePool
from kvpressure.model.readings import (
    ContainerReading,
    EngineReading,
    GpuOwner,
    GpuProcess,
    GpuReading,
    Histogram,
    Scrape,
    Snapshot,
)
from kvpressure.model.state import Diagnosis, EngineState, State
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.settings.thresholds import builtin

CONFIDENT = builtin()["confident"]
LIMIT = ("--max-num-seqs", "256")
CAPACITY = 100_000
LONGEST = 32_768  # max_model_len
SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, inf)
TOKENS = (*(digit * 10.0**power for power in range(5) for digit in (1, 2, 5)), 200_000.0, inf)
GIB = 2**30

Value = float | None | Callable[[int], float | None]


def cycle(*values: float) -> Callable[[int], float]:
    return lambda second: values[second % len(values)]


def after(second: int, before: float | None, then: float | None) -> Callable[[int], float | None]:
    """``before`` until that second, ``then`` from it on."""
    return lambda now: before if now < second else then


@dataclass
class Played:
    """What was said of one engine, tick by tick."""

    states: list[EngineState] = field(default_factory=list)

    @property
    def last(self) -> Diagnosis:
        return self.states[-1].diagnosis

    @property
    def verdict(self) -> str:
        return self.last.verdict

    @property
    def confidence(self) -> float:
        return self.last.confidence

    def confidently(self, since: int = 0) -> set[str]:
        """Verdicts that were said with confidence, from a second on."""
        return {s.diagnosis.verdict for s in self.states[since:] if s.diagnosis.confidence >= CONFIDENT}

    def said(self, since: int = 0) -> set[str]:
        return {s.diagnosis.verdict for s in self.states[since:]}


class _Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = tuple(bounds), [0.0] * len(bounds), 0.0

    def add(self, value: float, times: float) -> None:
        self.sum += value * times
        self.counts = [
            count + (times if value <= bound else 0) for bound, count in zip(self.bounds, self.counts, strict=True)
        ]

    def reading(self) -> Histogram:
        return Histogram(self.bounds, tuple(self.counts), self.sum, self.counts[-1])


class _Engine:
    """One engine of the page: what its counters and histograms have come to."""

    def __init__(self, number: str) -> None:
        self.number = number
        self.counters = dict.fromkeys(
            (r.PROMPT_TOKENS, r.GENERATION_TOKENS, r.PREEMPTIONS, r.FINISHED_PREFIX + "stop"), 0.0
        )
        self.histograms = {name: _Histogram(SECONDS) for name in (r.QUEUE, r.E2E, r.INFERENCE, r.TTFT)}
        self.histograms |= {name: _Histogram(TOKENS) for name in (r.REQUEST_PROMPT, r.REQUEST_OUTPUT)}
        self.histograms |= {r.INTER_TOKEN: _Histogram((0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, inf))}
        self._begun = 0.0

    def step(self, seconds: float, now: dict[str, float | None], absent: Sequence[str] = ()) -> EngineReading:
        def of(name: str, missing: float = 0.0) -> float:
            value = now.get(name)
            return missing if value is None else value

        prompt, counters = of("prompt") * seconds, self.counters
        counters[r.PROMPT_TOKENS] += prompt
        counters[r.GENERATION_TOKENS] += of("generated") * seconds
        counters[r.PREEMPTIONS] += of("preemptions") * seconds
        if "computed" in now:
            counters[r.PROMPT_TOKENS_COMPUTED] = counters.get(r.PROMPT_TOKENS_COMPUTED, 0.0) + of("computed") * seconds
        if "hits" in now:
            counters[r.PREFIX_QUERIES] = counters.get(r.PREFIX_QUERIES, 0.0) + prompt
            counters[r.PREFIX_HITS] = counters.get(r.PREFIX_HITS, 0.0) + prompt * of("hits")
        if "queries" in now:
            counters[r.PREFIX_QUERIES] = counters.get(r.PREFIX_QUERIES, 0.0) + of("queries") * seconds
            counters[r.PREFIX_HITS] = counters.get(r.PREFIX_HITS, 0.0) + of("queries") * of("cached") * seconds
        for name, rate in now.items():  # by KV events, as the canonical names
            if name.startswith("kv_"):
                counters[name] = counters.get(name, 0.0) + (rate or 0.0) * seconds
        for name, times in ((r.KV_IDLE, "idle"), (r.KV_REUSE_GAP, "gap")):
            if times in now:
                self.histograms.setdefault(name, _Histogram(SECONDS)).add(of(times), seconds)
        self._begun += of("finished") * seconds
        done, self._begun = int(self._begun), self._begun % 1
        counters[r.FINISHED_PREFIX + "stop"] += done
        self._finish(done, of, of("queue", 0.01), of("inference", 6.0))
        if of("generated"):
            self.histograms[r.INTER_TOKEN].add(of("token", 0.03), of("generated") * seconds)
        if of("steps"):
            steps = self.histograms.setdefault(r.ITERATION_TOKENS, _Histogram(TOKENS))
            steps.add((of("prompt") + of("generated")) / of("steps"), of("steps") * seconds)
        words = {"running": r.RUNNING, "waiting": r.WAITING, "kv": r.KV_USAGE, "swapped": r.SWAPPED, "asleep": r.ASLEEP}
        gauges = {name: value for word, name in words.items() if (value := now.get(word)) is not None}
        if now.get("deferred") is not None and now.get("waiting") is not None:
            gauges |= {r.WAITING_DEFERRED: of("deferred"), r.WAITING_CAPACITY: of("waiting") - of("deferred")}
        capacity = of("capacity", CAPACITY)  # 0 = the page does not tell
        config = {"block_size": "16", "gpu_memory_utilization": "0.92"}
        if capacity:
            config |= {"kv_cache_size_tokens": str(capacity), "kv_cache_max_concurrency": str(capacity / LONGEST)}
        return EngineReading(
            "m",
            self.number,
            gauges,
            dict(counters),
            {name: item.reading() for name, item in self.histograms.items() if name not in absent},
            config,
        )

    def _finish(self, done: int, of: Callable[[str, float], float], queue: float, inference: float) -> None:
        for name, value in (
            (r.QUEUE, queue),
            (r.INFERENCE, inference),
            (r.E2E, queue + inference + of("outside", 0.0)),
            (r.TTFT, queue + of("prefill", 0.2)),
            (r.REQUEST_PROMPT, of("length", 500.0)),
            (r.REQUEST_OUTPUT, of("output", 200.0)),
        ):
            self.histograms[name].add(value, done)


def play(
    seconds: int,
    *,
    args: Sequence[str] = LIMIT,
    gpus: Sequence[Value] = (0.95,),
    gpu: dict[str, Value] | None = None,
    step: float = 1.0,
    name: str = "NVIDIA H100 80GB HBM3",
    others: Sequence[dict[str, Value]] = (),
    host: dict[str, Value] | None = None,
    page: dict[str, Value] | None = None,
    neighbour: bool = False,
    used: Value = 74.0,
    own: Value = None,
    absent: Sequence[str] = (),
    **values: Value,
) -> Played:
    """Play a server for that many ticks of ``step`` seconds and tell what was said of its first engine.

    ``gpus``: NVML utilization of each GPU of the pod; ``gpu``: further fields of each. ``others``: further engines on
    the page. ``host``: fields of the container, as totals. ``page``: values of the whole page. ``neighbour``: another
    pod has slices of the GPUs. ``used``: GiB of each GPU, ``own``: those that the driver says are the pod's.
    ``absent``: histograms that the page lacks.
    """
    engines = [_Engine(str(number)) for number in range(1 + len(others))]
    pipeline, played = Pipeline(), Played()
    for i in range(seconds):
        t = 1000.0 + i * step
        readings = tuple(
            engine.step(step, _at(i, {"deferred": 0.0} | kind), absent)
            for engine, kind in zip(engines, (values, *others), strict=True)
        )
        devices = tuple(
            GpuReading(
                f"GPU-{n}",
                n,
                "nvidia",
                name,
                memory_total_bytes=80 * GIB,
                memory_used_bytes=_bytes(i, used),
                processes=(GpuProcess(7, _bytes(i, own)),) if own is not None else (),
                **({"utilization_ratio": _one(i, busy)} | _at(i, gpu or {})),
            )
            for n, busy in enumerate(gpus)
        )
        pods = ("chat-0", "train-0") if neighbour else ()
        owners = tuple(GpuOwner(device.uuid, "ns", pod, "vllm", True) for device in devices for pod in pods)
        containers = (ContainerReading("ns", "chat-0", "vllm", **_at(i, host)),) if host else ()
        known = {key: value for key, value in _at(i, page or {}).items() if value is not None}
        answered = Scrape(
            "http://10.0.0.5:8000/metrics",
            t,
            "ns",
            "chat-0",
            "vllm",
            args=tuple(args),
            engines=readings,
            gpus=tuple(device.uuid for device in devices),
            page=known,
        )
        seen = {"gpus": devices, "owners": owners, "containers": containers, "pages": (answered,)}
        state = pipeline.observe(Snapshot(t, **seen, process_pods={7: ("ns", "chat-0")}))
        played.states.append(next(engine for engine in state.engines if engine.key.engine == "0"))
    return played


def _bytes(second: int, gib: Value) -> int | None:
    value = _one(second, gib)
    return None if value is None else int(value * GIB)


def _one(second: int, value: Value) -> float | None:
    return value(second) if callable(value) else value


@dataclass(frozen=True)
class Pod:
    """A server of a pool: what each of its ranks is like, and the limit that its arguments set."""

    pool: EnginePool
    ranks: Sequence[dict[str, Value]]
    args: Sequence[str] = LIMIT


def play_pods(seconds: int, pods: Mapping[str, Pod]) -> dict[tuple[str, str], EngineState]:
    """Play these pods, seen by one exporter, and return what is said of each engine in the end, by pod and rank."""
    engines = {name: [_Engine(str(n)) for n in range(len(pod.ranks))] for name, pod in pods.items()}
    pipeline, state = Pipeline(), State(0.0)
    for i in range(seconds):
        t = 1000.0 + i
        pages = (
            Scrape(
                f"http://{name}:8000/metrics",
                t,
                "ns",
                name,
                "vllm",
                args=tuple(pod.args),
                engines=tuple(
                    engine.step(1.0, _at(i, {"deferred": 0.0} | rank))
                    for engine, rank in zip(engines[name], pod.ranks, strict=True)
                ),
                pool=pod.pool,
            )
            for name, pod in pods.items()
        )
        state = pipeline.observe(Snapshot(t, pages=tuple(pages)))
    return {(engine.key.pod, engine.key.engine): engine for engine in state.engines}


def _at(second: int, values: dict[str, Value]) -> dict[str, float | None]:
    return {name: _one(second, value) for name, value in values.items()}
