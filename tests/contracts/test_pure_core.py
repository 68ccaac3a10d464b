"""The pure core under anything: pages that lack fields, lie, restart, rename and vanish; clocks that jump; whole nodes
that churn.

Whatever comes, it never raises, never publishes what no database or reader can use, never is confident about an engine
of which it cannot see what the verdict rests on, and says the same again of the same snapshots.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpressure.diagnosis.conditions import NAMES as CONDITION_NAMES
from kvpressure.engines.registry import log_line
from kvpressure.model import readings as r
from kvpressure.model.readings import (
    AllocatorReading,
    ContainerReading,
    EngineReading,
    GpuOwner,
    GpuProcess,
    GpuReading,
    Histogram,
    Scrape,
    Snapshot,
    StepStats,
    Termination,
)
from kvpressure.model.reasons import REASONS
from kvpressure.model.state import SIGNATURE_CONDITIONS, STAGES, VERDICTS, EngineState, State
from kvpressure.pipeline.pipeline import Pipeline
from kvpressure.publish.collector import families
from kvpressure.publish.exposition import Encoder
from kvpressure.settings.thresholds import builtin
from tests.signals.build import GAUGES

pytestmark = pytest.mark.slow

T = builtin()
INF = float("inf")
GIB = 2**30
RATIOS = (
    *("kv_used_ratio", "kv_used_ratio_max", "kv_used_ratio_recent_max", "batch_collapse_ratio", "prefix_hit_ratio:1"),
    *("memory_high_compute_low_score", "score_memory_factor", "score_compute_factor", "score_demand_factor"),
    *("prefill_repeated_ratio", "cpu_throttled_ratio", "outside_engine_share", "estimated_peak_ratio"),
    "throughput_trend_ratio",
)
SIGNED = {"kv_slope_per_second", "idle_growth_bytes_per_hour", "last_exit_code"}
COUNTERS = (
    *(r.PREEMPTIONS, r.PROMPT_TOKENS, r.PROMPT_TOKENS_COMPUTED, r.GENERATION_TOKENS, r.PREFIX_QUERIES, r.PREFIX_HITS),
    *(r.ESTIMATED_FLOPS, r.ESTIMATED_READ_BYTES, r.ESTIMATED_WRITE_BYTES, r.KV_AGAIN, r.KV_AGAIN_AGE),
    *(r.FINISHED_PREFIX + "stop", r.FINISHED_PREFIX + "abort", r.REJECTED_PREFIX + "queue"),
    *(r.KV_GAIN_PREFIX + "2", r.KV_GAIN_PREFIX + "8"),
)
HISTOGRAMS = (
    *(r.TTFT, r.INTER_TOKEN, r.E2E, r.QUEUE, r.INFERENCE, r.ITERATION_TOKENS, r.KV_IDLE, r.KV_REUSE_GAP),
    *(r.REQUEST_PROMPT, r.REQUEST_OUTPUT, r.REQUEST_MAX_TOKENS),
)
PAGE = (r.PROCESS_CPU_SECONDS, r.PROCESS_START, r.PROCESS_OPEN_FDS, r.HTTP_PREFIX + "2xx", r.HTTP_PREFIX + "5xx")
LINES = (
    "Available KV cache memory: 40.00 GiB",
    "Available KV cache memory: -3.00 GiB",
    "Model loading took 26.00 GiB and 5 seconds",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB.",
    "non-default args: {'max_num_seqs': 0}",
    "Using max model len 0",
    "GPU KV cache size: 0 tokens",
    "EngineCore encountered a fatal error.",
    "hello",
    "Chunked prefill is enabled with max_num_batched_tokens=0.",
)
CONFIGS = (
    {},
    {"kv_cache_size_tokens": "8192"},
    {"num_gpu_blocks": "512", "block_size": "16"},
    {"num_gpu_blocks": "0", "block_size": "0"},
    {"kv_cache_size_tokens": "nan", "block_size": "x"},
    {"num_gpu_blocks": "1e308", "block_size": "1e308"},
    {"kv_cache_size_tokens": "1", "kv_cache_max_concurrency": "1e300", "gpu_memory_utilization": "inf"},
)
ARGS = (
    (),
    ("--max-num-seqs", "64"),
    ("--max-num-seqs", "0"),
    ("--max-num-seqs", "-1", "--max-model-len", "x"),
    ("--model", "meta-llama/Llama-2-7b-hf", "--kv-cache-memory-bytes", "0"),
)


class Node:
    """A small node on which anything may be missing, drawn from a seed: thousands of ticks a second, unlike
    drawn objects.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._t = 1_700_000_000.0

    def ticks(self, count: int) -> Iterator[Snapshot]:
        """A second apart, with jumps of the clock in both directions."""
        for _ in range(count):
            self._t += self._random.choice([1.0] * 8 + [5.0, 20.0, 0.0, -3.0, 90.0, 700.0, -3600.0, 1e7])
            yield self._snapshot(self._t)

    def _maybe(self, value: Any) -> Any:
        return None if self._random.random() < 0.3 else value

    def _number(self) -> float:
        return self._random.choice(
            [0.0, 1.0, 0.5, 1e-300, 250.0, 1e6, 1e15, self._random.uniform(0, 1e4), self._random.uniform(0, 1e12)]
        )

    def _level(self) -> float:
        return self._random.choice([0.0, 0.3, 0.85, 0.99, 1.0, self._random.random()])

    def _whole(self) -> Any:
        return self._maybe(self._random.choice([0, 1, 80 * GIB, self._random.randrange(2**50)]))

    def _amount(self) -> float:
        return float(self._random.choice([0, 0, 1, self._random.randrange(300)]))

    def _some(self, names: Sequence[str]) -> list[str]:
        return self._random.sample(names, self._random.randrange(len(names) + 1))

    def _several(self, build: Callable[[], Any], most: int = 2) -> tuple[Any, ...]:
        return tuple(build() for _ in range(self._random.randrange(most + 1)))

    def _pod(self) -> str:
        return self._random.choice("ab")

    def _histogram(self) -> Histogram:
        """Cumulative as on a page, with or without buckets; bounds may change from one page to the next."""
        bounds = self._random.choice([(), (INF,), (0.1, 1.0, INF), (100.0, 1000.0, 10_000.0, INF)])
        counts = tuple(accumulate(self._amount() for _ in bounds))
        return Histogram(
            bounds, counts, self._maybe(self._number()), counts[-1] if counts else self._maybe(self._amount())
        )

    def _engine(self) -> EngineReading:
        draw = self._random
        return EngineReading(
            draw.choice(["m", "m", "other", ""]),
            draw.choice("01"),
            {name: self._level() if name == r.KV_USAGE else self._amount() for name in self._some(sorted(GAUGES))},
            {name: self._number() for name in self._some(COUNTERS)},
            {name: self._histogram() for name in self._some(HISTOGRAMS)},
            draw.choice(CONFIGS),
        )

    def _page(self) -> Scrape:
        draw, pod = self._random, self._pod()
        error = draw.choice([None, None, None, *REASONS])
        engines = {} if error else {(one.model_name, one.engine): one for one in self._several(self._engine)}
        return Scrape(
            f"http://{pod}",
            self._t - draw.choice([0.0, 0.0, 0.0, 0.5, 30.0]),
            "n",
            pod,
            "vllm",
            gpus=draw.choice([(), ("G0",)]),
            args=draw.choice(ARGS),
            engines=tuple(engines.values()),
            error=error,
            page={} if error else {name: self._number() for name in self._some(PAGE)},
            version=draw.choice([None, "0.9.1", "0.32.0", "x"]),
            flavour=draw.choice([None, "v0", "v1"]),
        )

    def _gpu(self) -> GpuReading:
        draw = self._random
        shares = ("utilization_ratio", "sm_activity_ratio", "tensor_activity_ratio", "dram_activity_ratio")
        return GpuReading(
            draw.choice(["G0", "G1"]),
            0,
            "nvidia",
            name=draw.choice([None, "NVIDIA H100 80GB HBM3"]),
            xid_errors={xid: draw.randrange(4) for xid in (13, 79)},
            error=draw.choice([None, None, "lost"]),
            processes=self._several(lambda: GpuProcess(draw.randrange(1, 4), self._whole())),
            **{name: self._whole() for name in ("memory_total_bytes", "memory_used_bytes")},
            **{name: self._maybe(self._number()) for name in ("power_watts", "power_limit_watts")},
            **{name: self._maybe(self._level()) for name in shares},
        )

    def _container(self) -> ContainerReading:
        draw = self._random
        ended = Termination(draw.choice([None, "OOMKilled"]), self._maybe(draw.randrange(-1, 138)))
        whole = ("cpu_periods", "cpu_throttled_periods", "memory_working_set_bytes", "memory_limit_bytes")
        return ContainerReading(
            "n",
            self._pod(),
            "vllm",
            restarts=self._maybe(draw.randrange(6)),
            ready=draw.choice([None, True, False]),
            last_termination=self._maybe(ended),
            **{name: self._maybe(self._number()) for name in ("cpu_usage_seconds", "cpu_limit_cores")},
            **{name: self._whole() for name in whole},
        )

    def _steps(self) -> StepStats:
        draw = self._random
        began, steps, tokens = draw.choice([1.0, 2.0]), draw.randrange(10**6), draw.randrange(10**6)
        sizes = {draw.randrange(64): draw.randrange(10**6) for _ in range(draw.randrange(4))}
        exact, level = draw.random() < 0.5, self._maybe(self._level())
        return StepStats("n", self._pod(), "0", began, self._t, steps, tokens, exact, level, sizes)

    def _snapshot(self, t: float) -> Snapshot:
        draw = self._random
        return Snapshot(
            t,
            gpus=self._several(self._gpu),
            pages=self._several(self._page, 3),
            containers=self._several(self._container),
            owners=self._several(
                lambda: GpuOwner(draw.choice(["G0", "G1"]), "n", self._pod(), "vllm", draw.random() < 0.5)
            ),
            logs=self._several(lambda: log_line("n", self._pod(), "vllm", draw.choice(LINES))),
            allocator=self._several(
                lambda: AllocatorReading("n", self._pod(), draw.randrange(4), *(self._whole() for _ in range(3)))
            ),
            steps=self._several(self._steps),
            expected_gpus={"nvidia": draw.randrange(8)},
            targets=draw.choice([None, None, ("http://a", "http://b"), ("http://a",), ()]),
            process_pods={pid: ("n", self._pod()) for pid in range(1, 4)},
        )


Series = tuple[str, tuple[tuple[str, str], ...]]
NEVER_FALL = {
    f"kvpressure_{name}_total"
    for name in ("generation_tokens", "prompt_tokens", "preemptions", "requests_finished", "log_events")
}


def published(state: State) -> dict[Series, float]:
    """Every sample of the page; none may be there twice."""
    found: dict[Series, float] = {}
    for family in families(state).collect():
        for sample in family.samples:
            series = sample.name, tuple(sorted(sample.labels.items()))
            assert series not in found, f"{series} twice"
            assert math.isfinite(sample.value), f"{series} {sample.value}"
            assert family.type != "counter" or sample.value >= 0, f"{series} {sample.value}"
            found[series] = sample.value
    return found


def check_published(state: State, page: Mapping[Series, float], before: dict[Series, float]) -> None:
    """One verdict an engine; counters never fall while what they count is followed."""
    verdicts: Counter[tuple[tuple[str, str], ...]] = Counter()
    for (name, labels), value in page.items():
        if name == "kvpressure_verdict":
            verdicts[tuple(pair for pair in labels if pair[0] != "verdict")] += value
    assert len(verdicts) == len(state.engines)
    assert set(verdicts.values()) <= {1.0}
    followed = {(engine.key.pod, engine.key.model_name, engine.key.engine) for engine in state.engines}
    for series in [series for series in before if not _followed(dict(series[1]), followed, state)]:
        del before[series]
    for series, value in page.items():
        if series[0] in NEVER_FALL:
            assert value >= before.get(series, 0.0), f"{series} fell from {before.get(series)} to {value}"
            before[series] = value


def _followed(labels: Mapping[str, str], engines: set[tuple[str, str, str]], state: State) -> bool:
    if "engine" in labels:
        return (labels["pod"], labels["model_name"], labels["engine"]) in engines
    return any(labels["pod"] == container.reading.pod for container in state.containers)


def check_engine(engine: EngineState) -> None:
    answer = engine.diagnosis
    assert answer.verdict in VERDICTS
    assert 0 <= answer.confidence <= 1
    assert (answer.stage is not None) == (answer.verdict == "kv_pressure")
    assert answer.stage is None or answer.stage in STAGES
    assert set(answer.conditions) == set(CONDITION_NAMES)
    assert set(answer.documented_signature) == set(SIGNATURE_CONDITIONS)
    for name, value in engine.signals.flat().items():
        assert value is None or math.isfinite(value), f"{name} {value}"
        if name in RATIOS:
            assert value is None or 0 <= value <= 1, f"{name} {value}"
        if name not in SIGNED:
            assert value is None or value >= 0, f"{name} {value}"
    for limit in engine.limits.values():
        assert limit.recommended is None or limit.recommended > 0
    check_confidence(engine)


def check_confidence(engine: EngineState) -> None:
    """What a verdict rests on has to be seen before anybody is told to believe it."""
    answer, s = engine.diagnosis, engine.signals
    if answer.confidence < T["confident"]:
        return
    assert engine.up, "confident about an engine that nobody can read"
    assert answer.verdict != "unknown"
    assert answer.supporting
    if answer.verdict == "idle":
        assert (s.load.running, s.load.waiting) == (0, 0)
    if answer.verdict == "concurrency_limited":
        assert s.load.max_num_seqs is not None


def settled(engine: EngineState) -> tuple[Any, ...]:
    answer = engine.diagnosis
    said = (answer.verdict, answer.confidence, answer.stage, answer.supporting, answer.missing)
    return (engine.key, *said, tuple(sorted(engine.signals.flat().items())), tuple(sorted(engine.limits)))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 20))
def test_whatever_comes_the_answer_is_usable_honest_and_the_same_again(seed: int, count: int) -> None:
    first, second, counters = Pipeline(), Pipeline(), {}
    for snapshot in Node(seed).ticks(count):
        state, again = first.observe(snapshot), second.observe(snapshot)
        for engine in state.engines:
            check_engine(engine)
        check_published(state, published(state), counters)
        assert [settled(engine) for engine in state.engines] == [settled(engine) for engine in again.engines]


BUSY = {r.RUNNING: 40.0, r.WAITING: 30.0, r.KV_USAGE: 0.99}


SEEN = {  # gauges; tokens per second; limit
    "kv_pressure": ({**BUSY}, 900.0, "256"),
    "concurrency_limited": ({r.RUNNING: 64.0, r.WAITING: 30.0, r.KV_USAGE: 0.4}, 900.0, "64"),
    "healthy": ({r.RUNNING: 8.0, r.WAITING: 0.0, r.KV_USAGE: 0.3}, 300.0, "256"),
    "idle": ({r.RUNNING: 0.0, r.WAITING: 0.0, r.KV_USAGE: 0.0}, 0.0, "256"),
    "stalled": ({r.RUNNING: 8.0, r.WAITING: 5.0, r.KV_USAGE: 0.4}, 0.0, "256"),
}
HIDDEN = (*BUSY, r.PROMPT_TOKENS, r.GENERATION_TOKENS, "args")


def seen_by_less(scenario: str, hidden: frozenset[str]) -> tuple[str, float]:
    gauges, rate, limit = SEEN[scenario]
    pipeline = Pipeline()
    for i in range(0, 32, 2):
        counters = {r.GENERATION_TOKENS: rate * i + 1, r.PROMPT_TOKENS: rate / 10 * i + 1}
        seen = ({name: kind[name] for name in kind if name not in hidden} for kind in (gauges, counters))
        args = () if "args" in hidden else ("--max-num-seqs", limit)
        engines = (EngineReading("m", "0", *seen),)
        page = Scrape("http://a", 1000.0 + i, "n", "a", "vllm", args=args, engines=engines)
        state = pipeline.observe(Snapshot(1000.0 + i, pages=(page,)))
    return state.engines[0].diagnosis.verdict, state.engines[0].diagnosis.confidence


@pytest.mark.parametrize("scenario", SEEN)
def test_taking_fields_away_never_makes_a_confident_answer_another_one(scenario: str) -> None:
    """The same server seen by less, in every way: the verdict becomes unknown or unsure, never another one
    that is confident.
    """
    assert seen_by_less(scenario, frozenset())[0] == scenario
    wrong = {}
    for size in range(1, len(HIDDEN) + 1):
        for hidden in combinations(HIDDEN, size):
            verdict, confidence = seen_by_less(scenario, frozenset(hidden))
            if verdict != scenario and confidence >= T["confident"]:
                wrong[hidden] = (verdict, confidence)
    assert wrong == {}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=5, max_size=40), st.floats(0.1, 30))
def test_engines_that_come_and_go_do_not_touch_each_other(pods: list[str], step: float) -> None:
    """One engine among others that flicker says what it says alone."""

    def page(t: float, pod: str, i: int) -> Scrape:
        reading = EngineReading(
            "m", "0", {**BUSY, r.KV_USAGE: 0.4 if pod == "a" else 0.99}, {r.GENERATION_TOKENS: 900.0 * i}
        )
        return Scrape(f"http://{pod}", t, "n", pod, "vllm", engines=(reading,))

    alone, crowd = Pipeline(), Pipeline()
    for i, pod in enumerate(pods):
        t = 1000.0 + step * i
        mine = page(t, "a", i)
        others = () if pod == "a" else (page(t, pod, i),)
        one = alone.observe(Snapshot(t, pages=(mine,)))
        many = crowd.observe(Snapshot(t, pages=(mine, *others)))
        assert settled(one.engines[0]) == next(settled(engine) for engine in many.engines if engine.key.pod == "a")


def test_the_frozen_state_is_not_shared_with_the_next_tick() -> None:
    """What was published stays as it was: a scrape may still be rendering it."""
    pipeline = Pipeline()
    snapshot = Snapshot(
        1000.0,
        pages=(Scrape("http://a", 1000.0, "n", "a", "vllm", engines=(EngineReading("m", "0", BUSY),)),),
        logs=(log_line("n", "a", "vllm", LINES[3]),),
    )
    state = pipeline.observe(snapshot)
    before = Encoder().encode(families(state).collect(), openmetrics=False)
    for i in range(1, 20):
        later = dataclasses.replace(
            snapshot, time=1000.0 + i, pages=tuple(dataclasses.replace(p, time=1000.0 + i) for p in snapshot.pages)
        )
        pipeline.observe(later)
    assert Encoder().encode(families(state).collect(), openmetrics=False) == before
