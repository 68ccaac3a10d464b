"""The class that vLLM calls after every step, on the steps of a real vLLM and on statistics that make no sense.

vLLM itself is not installed here: a stand-in for its abstract base class has the methods that vLLM 0.32 demands. ``make
test-vllm`` runs the same class inside the real one.
"""

from __future__ import annotations

import gzip
import importlib
import json
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY, generate_latest

from kvpressure.model.readings import StepStats
from kvpressure.sources.plugin_metrics import read_plugin_metrics
from kvpressure_vllm import registry_gauges, report, steps
from kvpressure_vllm.steps import Frontend, StepCounts

RECORDED = Path(__file__).parents[1] / "fixtures/vllm/steps-0.32.0.jsonl.gz"


class StatLoggerBase(ABC):
    """As in vLLM 0.32, ``v1/metrics/loggers.py``."""

    @abstractmethod
    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

    @abstractmethod
    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None: ...

    @abstractmethod
    def log_engine_initialized(self) -> None: ...


@pytest.fixture
def frontend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """``StepLogger`` as vLLM would build it, reporting to the registry here; no thread, ``report`` is called here."""
    loggers = ModuleType("vllm.v1.metrics.loggers")
    loggers.StatLoggerBase = StatLoggerBase
    for name in ("vllm", "vllm.v1", "vllm.v1.metrics"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.metrics.loggers", loggers)
    monkeypatch.delitem(sys.modules, "kvpressure_vllm.stat_logger", raising=False)
    monkeypatch.setattr(steps, "FRONTEND", Frontend())
    monkeypatch.setattr(steps, "repeat", lambda _: None)
    monkeypatch.setenv("KVPRESSURE_PLUGIN", "1")
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    report._told.clear()
    registry_gauges._metrics.cache_clear()
    yield importlib.import_module("kvpressure_vllm.stat_logger").StepLogger
    sys.modules.pop("kvpressure_vllm.stat_logger", None)
    forget()


def forget() -> None:
    """Begin anew, as another process."""
    if registry_gauges._metrics.cache_info().currsize:
        for metric in (registry_gauges._metrics() or {}).values():
            REGISTRY.unregister(metric)
    registry_gauges._metrics.cache_clear()
    registry_gauges._shown.clear()


def thing(value: Any) -> Any:
    """JSON as objects with attributes, as vLLM hands them over."""
    if isinstance(value, dict):
        return SimpleNamespace(**{key: thing(item) for key, item in value.items()})
    return [thing(item) for item in value] if isinstance(value, list) else value


def engines() -> dict[str, StepStats]:
    """What the exporter reads on the page, by engine."""
    found = read_plugin_metrics(generate_latest(REGISTRY), "ns", "p", time.time())
    assert found is None or found.bad_lines == 0
    return {stats.engine: stats for stats in found.steps} if found else {}


class TestRecorded:
    def test_a_real_session_is_counted_as_it_was(self, frontend) -> None:
        """Steps of vLLM 0.32 as it logged them, with a full cache, preempted requests and prompts."""
        calls = [json.loads(line) for line in gzip.decompress(RECORDED.read_bytes()).splitlines()]
        logger = frontend(None, 0)
        for call in calls:
            logger.record(thing(call["scheduler_stats"]), thing(call["iteration_stats"]), None, call["engine_idx"])
        steps.FRONTEND.report()
        told = engines()["0"]
        outputs = [call["iteration_stats"] for call in calls if call["iteration_stats"]]
        batches = Counter(len(one["inter_token_latencies_iter"]) for one in outputs)
        assert (told.exact, told.sizes) == (True, {size: n for size, n in batches.items() if size})
        assert told.decoded == sum(size * n for size, n in batches.items())
        for name, counted in (("tokens", "num_generation_tokens"), ("preemptions", "num_preempted_reqs")):
            summed = REGISTRY.get_sample_value("kvpressure:engine_sums_total", {"engine": "0", "sum": name})
            assert summed == sum(one[counted] for one in outputs)
        assert told.kv_max == max(
            call["scheduler_stats"]["kv_cache_usage"] for call in calls if call["scheduler_stats"]
        )


class TestBuilding:
    def test_off_it_keeps_nothing_and_starts_nothing(self, frontend, monkeypatch) -> None:
        for value in ("0", "true", ""):
            monkeypatch.setenv("KVPRESSURE_PLUGIN", value)
            before = threading.active_count()
            frontend(None).record(*step(3))
            steps.FRONTEND.report()
            assert (threading.active_count(), steps.FRONTEND._engines, engines()) == (before, {}, {})

    def test_built_again_it_goes_on_counting(self, frontend) -> None:
        """A logger is built for each engine, and may be built anew."""
        for _ in range(3):
            frontend(None, 0).record(*step(2))
        frontend(vllm_config=None, engine_index=1).record(*step(5))
        steps.FRONTEND.report()
        assert {name: told.sizes for name, told in engines().items()} == {"0": {2: 3}, "1": {5: 1}}

    def test_no_thread_to_be_had_is_no_reason_to_fail(self, frontend, monkeypatch, caplog) -> None:
        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(steps.threading.Thread, "start", refuse)
        logger = frontend(None)
        logger.record(*step(3))
        logger.log_engine_initialized()
        assert [record.levelname for record in caplog.records] == ["WARNING"]


def step(batch: int) -> tuple[SimpleNamespace, SimpleNamespace]:
    """A step that makes sense."""
    return (
        SimpleNamespace(num_running_reqs=batch, kv_cache_usage=0.5),
        SimpleNamespace(inter_token_latencies_iter=[0.01] * batch, num_generation_tokens=batch, num_preempted_reqs=0),
    )


ODD = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.builds(object)
ODD |= st.lists(st.integers(), max_size=3) | st.sampled_from([10**400, float("nan")])


def of_odd(*names: str) -> st.SearchStrategy[Any]:
    """Anything, or an object with these attributes, each of which is anything."""
    return ODD | st.fixed_dictionaries(dict.fromkeys(names, ODD)).map(lambda parts: SimpleNamespace(**parts))


SCHEDULER = of_odd("num_running_reqs", "kv_cache_usage")
ITERATION = of_odd("inter_token_latencies_iter", "num_generation_tokens", "num_preempted_reqs")


class TestOdd:
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @example([(SimpleNamespace(num_running_reqs=2, kv_cache_usage=float("nan")), None)])
    @example([(SimpleNamespace(num_running_reqs=-2, kv_cache_usage=0.5), step(3)[1])])
    @given(st.lists(st.tuples(SCHEDULER, ITERATION), max_size=8))
    def test_nothing_is_raised_and_the_exporter_still_reads_the_report(self, frontend, calls) -> None:
        steps.FRONTEND._engines.clear()
        forget()
        logger = frontend(None)
        logger.record(*step(3))
        for scheduler, iteration in calls:
            logger.record(scheduler, iteration, object(), engine_idx=0, something_new=1)
        logger.record(*step(4))
        steps.FRONTEND.report()
        [stats] = engines().values()
        assert stats.sizes[3] >= 1
        assert stats.sizes[4] >= 1

    def test_a_step_that_makes_no_sense_is_left_out_as_a_whole(self) -> None:
        counts = StepCounts()
        below = SimpleNamespace(inter_token_latencies_iter=[1], num_generation_tokens=-1, num_preempted_reqs=0)
        unknown = SimpleNamespace(num_running_reqs=3, kv_cache_usage=None)
        for scheduler, iteration in ((unknown, step(3)[1]), (SimpleNamespace(), step(3)[1]), (step(3)[0], below)):
            with pytest.raises((AttributeError, TypeError, ValueError)):
                counts.record(scheduler, iteration)
        assert counts.report() == StepCounts().report()

    def test_its_own_exceptions_are_not_hidden_from_the_interpreter(self, frontend) -> None:
        """Ctrl-C in vLLM stays Ctrl-C."""

        class Interrupts:
            @property
            def num_running_reqs(self) -> int:
                raise KeyboardInterrupt

        logger = frontend(None)
        with pytest.raises(KeyboardInterrupt):
            logger.record(Interrupts(), None)


def test_reporting_while_steps_are_counted_loses_nothing(frontend) -> None:
    """The thread that reports and vLLM's event loop are two."""
    logger = frontend(None)
    stop = threading.Event()

    def reporting() -> None:
        while not stop.is_set():
            steps.FRONTEND.report()

    reporter = threading.Thread(target=reporting)
    reporter.start()
    for size in range(1, 3000):
        logger.record(*step(size % 97 + 1))
    stop.set()
    reporter.join(10)
    steps.FRONTEND.report()
    assert sum(engines()["0"].sizes.values()) == 2999
    assert not report._told
