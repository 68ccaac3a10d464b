"""Every metric of the table from a full state, none from what is not known, and pages that Prometheus accepts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_classic

from kvpressure.advice.action import HARMS
from kvpressure.diagnosis import findings
from kvpressure.model.pools import EnginePool
from kvpressure.model.readings import EngineKey, GpuOwner, GpuReading
from kvpressure.model.signals import MemorySignals, ProgressSignals, TransferSignals
from kvpressure.model.state import GpuState, PodState, State
from kvpressure.publish.collector import LABEL_LIMIT, Families, clean, families, trouble
from kvpressure.publish.exposition import Encoder, wants_openmetrics
from kvpressure.publish.metrics import BY_NAME, METRICS, PREFIX
from kvpressure.publish.reference import ENGINE_SERIES, GPU_SERIES, render_metrics_reference
from tests.publish.states import NOW, full_engine, full_gpu, full_state, node, unknown_engine
from tests.recording.strategies import replayed

ROOT = Path(__file__).parents[2]


def samples(state: State) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families(state).collect()
        for sample in family.samples
    }


def named(state: State, name: str) -> dict[tuple[str, ...], float]:
    """Label values beyond the engine's own -> value."""
    metric = BY_NAME[name]
    own = 4 if metric.labels[:4] == ("namespace", "pod", "model_name", "engine") else 0
    return {
        tuple(dict(labels)[label] for label in metric.labels[own:]): value
        for (full, labels), value in samples(state).items()
        if full == PREFIX + name
    }


def test_a_full_state_emits_every_metric_of_the_table() -> None:
    emitted = {family.name for family in families(full_state()).collect()}
    wanted = {
        metric.full_name.removesuffix({"counter": "_total", "info": "_info"}.get(metric.kind, "\0")): metric.name
        for metric in METRICS
    }
    assert [name for full, name in wanted.items() if full not in emitted] == []


def test_every_published_finding_has_a_series() -> None:
    """Those that a rule or a dashboard reads (``test_rule_numbers.py``)."""
    every = dict.fromkeys(findings.PUBLISHED, False)
    engine = replace(full_engine(), diagnosis=replace(full_engine().diagnosis, published=every))
    published = {key[-1] for key in named(State(time=NOW, engines=(engine,)), "finding")}
    assert every.keys() - published == set()


def test_a_harm_that_a_rule_reads_has_a_series_while_it_lasts() -> None:
    text = (ROOT / "alerts" / "kvpressure-rules.yaml").read_text("utf-8")
    read = set(re.findall(r'kvpressure_harm\{harm="(\w+)",level="(\w+)"\}', text))
    assert read == {(harm.name, harm.level) for harm in HARMS.values()}
    signals = replace(
        full_engine().signals,
        progress=ProgressSignals(seconds_without_progress=700.0),
        transfers=TransferSignals(read_after_expiry=6.0),
    )
    for holds in (False, True):
        every = dict.fromkeys(HARMS, holds)
        diagnosis = replace(full_engine().diagnosis, published=every)
        state = State(time=NOW, engines=(replace(full_engine(), diagnosis=diagnosis, signals=signals),))
        assert {key[-3:-1] for key in named(state, "harm")} == (read if holds else set())


def test_every_sample_carries_exactly_the_declared_labels() -> None:
    for family in families(full_state()).collect():
        metric = next(m for m in METRICS if m.full_name.startswith(family.name) and m.help == family.documentation)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels), sample


WHO_AND_VERDICT = (
    *("engine_up", "engine_info", "engine_gpu_info"),
    *("engine_trouble", "verdict", "verdict_confidence", "cause_info"),
)


def test_an_engine_about_which_nothing_is_known_has_identity_and_state_sets_only() -> None:
    state = State(time=NOW, engines=(unknown_engine(),))
    emitted = {full.removeprefix(PREFIX) for full, _ in samples(state)}
    assert emitted == {
        *WHO_AND_VERDICT,
        *("verdict_since_timestamp_seconds", "pool_answers"),
        *("ticks_total", "tick_lag_seconds", "build_info"),
    }


def test_an_engine_that_is_down_keeps_what_it_is_and_what_is_concluded_but_no_values() -> None:
    down = replace(full_engine(), up=False, error="refused")
    emitted = {
        full.removeprefix(PREFIX)
        for full, labels in samples(State(time=NOW, engines=(down,)))
        if dict(labels).get("pod") == "chat-0"
    }
    assert emitted == {
        *WHO_AND_VERDICT,
        *("verdict_since_timestamp_seconds", "verdict_reason", "finding", "limit"),
        *("limit_explicit", "limit_recommended"),
    }
    assert named(State(time=NOW, engines=(down,)), "engine_up") == {("", "", ""): 0.0}


def test_of_two_engines_with_one_verdict_the_longer_queue_is_more_trouble() -> None:
    engine = full_engine()
    few, many = (
        replace(engine, signals=replace(engine.signals, load=replace(engine.signals.load, waiting=waiting)))
        for waiting in (1.0, 9.0)
    )
    assert trouble(few) < trouble(many)


def test_what_joins_an_engine_with_its_gpus_on_other_nodes_needs_both_nodes_only() -> None:
    leader = replace(full_engine(), up=False, error="refused", group="RayCluster/chat")
    assert named(State(time=NOW, engines=(leader,)), "engine_group_info") == {("RayCluster/chat",): 1.0}
    worker = GpuOwner("GPU-7", "prod", "chat-worker-x", "ray-worker", group="RayCluster/chat")
    state = State(time=NOW, owners=(worker, GpuOwner("GPU-8", "prod", "chat-1", "vllm")))
    assert named(state, "worker_gpu_info") == {("GPU-7", "prod", "chat-worker-x", "RayCluster/chat"): 1.0}
    assert len(named(state, "gpu_pod_info")) == 2


def test_a_pool_answers_where_an_engine_with_a_model_does_in_a_pod_that_does() -> None:
    pool = EnginePool("chat", "decode", "args", "r1")
    engine = replace(full_engine(), pool=pool)
    key = ("prod", "chat", engine.key.model_name, "decode", "r1")
    for up, model, answers, expected in (
        *((True, engine.key.model_name, answers, answers is not False) for answers in (True, False, None)),
        (False, engine.key.model_name, True, False),
        (True, "", True, False),
    ):
        one = replace(engine, up=up, key=replace(engine.key, model_name=model))
        pod = PodState(one.key.namespace, one.key.pod, pool, answers)
        assert named(State(time=NOW, engines=(one,), pods=(pod,)), "pool_answers") == ({key: 1.0} if expected else {})


def _optional_fields(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for item in fields(value):
        inner = getattr(value, item.name)
        if is_dataclass(inner):
            yield from _optional_fields(inner, (*path, item.name))
        elif inner is not None and item.name not in ("time", "activity_level"):
            yield (*path, item.name)


def _without(value: Any, path: tuple[str, ...]) -> Any:
    """A copy with the field at ``path`` not known: None, or an empty mapping."""
    name, *rest = path
    inner = getattr(value, name)
    if rest:
        return replace(value, **{name: _without(inner, tuple(rest))})
    empty: Any = type(inner)() if isinstance(inner, dict | tuple) else None
    return replace(value, **{name: empty})


SUMMED_UP = ("kvpressure_engine_trouble", "kvpressure_harm")  # of several signals


def test_a_missing_signal_removes_samples_and_changes_none() -> None:
    engine = full_engine()
    everything = samples(State(time=NOW, engines=(engine,)))
    for path in _optional_fields(engine.signals):
        less = samples(State(time=NOW, engines=(replace(engine, signals=_without(engine.signals, path)),)))
        less = {key: value for key, value in less.items() if key[0] not in SUMMED_UP}
        assert less.items() <= everything.items(), path


@pytest.mark.parametrize(
    "name",
    [
        item.name
        for item in fields(GpuReading)
        if not isinstance(getattr(full_gpu().reading, item.name), dict)
        and item.name not in ("uuid", "index", "vendor", "processes")
    ],
)
def test_a_missing_gpu_value_removes_samples_and_changes_none(name: str) -> None:
    everything = samples(State(time=NOW, gpus=(full_gpu(),)))
    gpu = full_gpu()
    less = samples(State(time=NOW, gpus=(replace(gpu, reading=replace(gpu.reading, **{name: None})),)))
    info = {key for key in less if key[0] == "kvpressure_gpu_info"}
    assert {key: value for key, value in less.items() if key not in info}.items() <= everything.items()
    assert len(info) == 1


@pytest.mark.parametrize(
    ("error", "xids", "faults"),
    [(None, {}, set()), ("lost", {}, {"lost"}), ("no_permission", {79: 1}, {"lost", "xid"}), (None, {13: 1}, {"xid"})],
)
def test_a_gpu_with_a_fault_alone_names_it_and_its_engine(
    error: str | None, xids: dict[int, int], faults: set[str]
) -> None:
    gpu = GpuState(
        GpuReading("GPU-1", 0, "nvidia", error=error, xid_errors=xids), engine=("prod", "chat-0", "m", "chat")
    )
    expected = {("GPU-1", "0", "nvidia", fault, "prod", "chat-0", "m", "chat"): 1.0 for fault in faults}
    assert named(State(time=NOW, gpus=(gpu,)), "faulty_gpu_info") == expected


@pytest.mark.parametrize(("used", "total"), [(None, 10), (10, None), (0, 0), (None, None)])
def test_the_used_ratio_needs_both_numbers(used: int | None, total: int | None) -> None:
    reading = GpuReading("GPU-1", 0, "nvidia", memory_used_bytes=used, memory_total_bytes=total)
    assert named(State(time=NOW, gpus=(GpuState(reading),)), "gpu_memory_used_ratio") == {}


def test_of_a_vendor_whose_gpus_are_all_gone_none_is_seen() -> None:
    state = State(time=NOW, gpus=(full_gpu(),), expected_gpus={"nvidia": 2, "amd": 3})
    assert named(state, "gpus_seen") == {("nvidia",): 1, ("amd",): 0}


def test_fragmentation_is_reserved_minus_allocated_in_every_scope() -> None:
    memory = MemorySignals(
        kv_pool_bytes=80.0,
        kv_pool_used_bytes=50.0,
        kv_block_waste_bytes=4.0,
        allocator_reserved_bytes=64.0,
        allocator_allocated_bytes=61.0,
    )
    assert memory.fragmentation() == {"allocator": 3.0, "kv_pool": 30.0, "kv_block": 4.0}
    assert MemorySignals(kv_pool_bytes=80.0).fragmentation() == {}


def test_a_second_sample_with_the_same_labels_is_dropped_because_it_would_void_the_page() -> None:
    owner = GpuOwner("GPU-1", "prod", "chat-0", "vllm")
    state = replace(full_state(), owners=(owner, owner), engines=(full_engine(), full_engine()))
    names = [(s.name, tuple(s.labels.items())) for f in families(state).collect() for s in f.samples]
    assert len(names) == len(set(names))


@given(st.text(max_size=600))
def test_label_values_are_bounded_and_printable(text: str) -> None:
    value = clean(text)
    assert len(value) <= LABEL_LIMIT
    assert value.isprintable()
    assert clean("plain") == "plain"
    assert clean(None) == ""


class Registry:
    """What prometheus_client's encoders take."""

    def __init__(self, state: State) -> None:
        self._state = state

    def collect(self) -> Iterator[Any]:
        return families(self._state).collect()


@pytest.mark.parametrize("make", [full_state, lambda: node(3, 2), lambda: State(time=NOW)])
def test_the_page_is_byte_for_byte_what_prometheus_client_writes(make: Any) -> None:
    state = make()
    assert Encoder().encode(families(state).collect(), openmetrics=False) == generate_latest(Registry(state))
    assert Encoder().encode(families(state).collect(), openmetrics=True) == generate_openmetrics(Registry(state))


hostile = st.text(st.characters(), max_size=300) | st.sampled_from(['a"b', "a\\", "a\nb", "{}", ""])


@pytest.mark.slow
@settings(max_examples=60)
@given(model=hostile, pod=hostile, value=st.floats())
def test_hostile_names_survive_both_dialects(model: str, pod: str, value: float) -> None:
    engine = full_engine()
    load = replace(engine.signals.load, running=value)
    engine = replace(engine, key=EngineKey("prod", pod, model, "0"), signals=replace(engine.signals, load=load))
    state = State(time=NOW, engines=(engine,))
    for openmetrics, parse in ((False, parse_classic), (True, parse_openmetrics)):
        page = Encoder().encode(families(state).collect(), openmetrics=openmetrics).decode()
        up = next(f for f in parse(page) if f.name == "kvpressure_engine_up")
        assert up.samples[0].labels["model_name"] == clean(model)
        assert up.samples[0].labels["pod"] == clean(pod)
        running = [s.value for f in parse(page) if f.name == "kvpressure_requests_running" for s in f.samples]
        assert running == ([value] if math.isfinite(value) else [])


OPENMETRICS = "application/openmetrics-text"
PROMETHEUS_2 = (
    f"{OPENMETRICS};version=1.0.0;q=0.5,{OPENMETRICS};version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_3 = f"{OPENMETRICS};version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;q=0.4,*/*;q=0.2"
PROTOBUF = "application/vnd.google.protobuf;encoding=delimited;q=0.7,text/plain;version=0.0.4;q=0.3"


def test_negotiation() -> None:
    versions = ("", "; version=1.0.0; charset=utf-8", ";version=0.0.1")
    for accept in (*(OPENMETRICS + version for version in versions), PROMETHEUS_2, PROMETHEUS_3):
        assert wants_openmetrics(accept), accept
    refused = (";version=2.0.0", ";version=1\x001", ";q=0", ";q=x", ";q=0.3,text/plain;q=0.9")
    for accept in ("", "*/*", "text/html", "text/plain", PROTOBUF, *(OPENMETRICS + more for more in refused)):
        assert not wants_openmetrics(accept), accept


def test_an_encoder_that_remembers_writes_what_a_new_one_writes() -> None:
    """Also when series change, go and come back, and when the two formats take turns."""
    encoder = Encoder()
    full, other = full_state(), node(3, 2)
    for state, openmetrics in [
        (full, False),
        (full, True),
        (other, True),
        (full, False),
        (State(time=NOW), False),
        (full, True),
    ]:
        page = encoder.encode(families(state).collect(), openmetrics=openmetrics)
        assert page == Encoder().encode(families(state).collect(), openmetrics=openmetrics)


def test_an_encoder_remembers_the_last_page_alone() -> None:
    encoder = Encoder()
    for number in range(50):
        out = Families()
        out.add("source_up", (f"source{number}",), 1)
        encoder.encode(out.collect(), openmetrics=False)
    assert [len(series) for series in encoder._series.values()] == [1]


def test_the_series_of_an_engine_and_a_gpu_are_stated_as_they_are() -> None:
    most = 0
    for state in replayed("vllm-cpu/d_kv_pressure"):
        shown = [sample for family in families(state).collect() for sample in family.samples]
        most = max(most, sum(1 for sample in shown if "engine" in sample.labels))
    assert abs(most - ENGINE_SERIES) <= 10, "ENGINE_SERIES in publish/reference.py, which is said to be about right"
    gpu = (ROOT / "tests/golden/gpu_h100.metrics").read_text().splitlines()
    assert sum(1 for line in gpu if line.startswith("kvpressure_gpu_")) == GPU_SERIES
    assert f"about {ENGINE_SERIES} series" in render_metrics_reference()
