"""Published states made by hand: one where everything is known, one where nothing is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import count
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from kvpressure.diagnosis.conditions import NAMES
from kvpressure.diagnosis.finding import Recent, View
from kvpressure.diagnosis.findings import Gathered, Values
from kvpressure.model.isolation import Failure
from kvpressure.model.pools import EnginePool
from kvpressure.model.readings import (
    ContainerReading,
    Discovered,
    EngineKey,
    GpuOwner,
    GpuProcess,
    GpuReading,
    NodeCondition,
    SourceHealth,
    Termination,
)
from kvpressure.model.signals import Signals, Slow
from kvpressure.model.state import (
    LIMITS,
    SIGNATURE_CONDITIONS,
    Cause,
    ContainerState,
    Diagnosis,
    EngineState,
    Found,
    GpuState,
    Limit,
    Objective,
    OutOfMemory,
    PodState,
    RecorderHealth,
    State,
    TargetState,
)
from kvpressure.settings.thresholds import Thresholds, builtin

NOW = 1_700_000_000.0
QUANTILES = {"0.5": 0.25, "0.95": 0.75, "0.99": 1.5}
MAPPINGS: Mapping[str, Mapping[Any, Any]] = MappingProxyType(
    {
        "limits": {"args": 256.0, "kv": 40.0},
        "baseline_ratios": {"ttft": 1.25, "inter_token": 2.5},
        "components": {"weights": 35e9, "kv_pool": 30e9},
    }
)
COUNTERS = {
    "preemptions": 4.0,
    "prompt_tokens": 1234567.0,
    "generation_tokens": 987654.0,
    "finished:stop": 40.0,
    "finished:length": 3.0,
    "rejected:queue_full": 2.0,
    "http:2xx": 900.0,
    "http:4xx": 7.0,
    "http:5xx": 1.0,
    "prefix_hits": 5.0,
}


def with_findings(engine: EngineState, t: Thresholds | None = None) -> EngineState:
    """The engine with every finding about its signals."""
    values = Values(View(engine.signals, Recent(()), t or builtin(), 9))
    values["page_fresh"] = True
    return replace(engine, diagnosis=replace(engine.diagnosis, evidence=Gathered(values)))


def full_signals() -> Signals:
    """Signals in which every field is known, each with a number of its own."""
    numbers = count(1)
    groups = {}
    for group in fields(Signals):
        kind = get_type_hints(Signals)[group.name]
        if not hasattr(kind, "__dataclass_fields__"):
            continue
        hints = get_type_hints(kind)
        groups[group.name] = kind(
            **{item.name: _value(item.name, hints[item.name], next(numbers)) for item in fields(kind)}
        )
    return Signals(time=NOW, events={"out_of_memory": 2}, **groups)


def _value(name: str, hint: Any, number: int) -> Any:
    kinds = get_args(hint)
    if name == "activity_level":
        return "power"
    if bool in kinds:
        return True
    if (float in kinds and type(None) in kinds) or hint is float:
        return number + 0.5
    if str in kinds and type(None) in kinds:
        return "args"
    return MAPPINGS.get(name, QUANTILES)


def full_engine(pod: str = "chat-0", model: str = "org/model", engine: str = "0") -> EngineState:
    """An engine under KV pressure about which everything is known."""
    names = ("kv_full", "requests_waiting", "gpu_idle")
    diagnosis = Diagnosis(
        verdict="kv_pressure",
        confidence=0.9,
        stage="saturated",
        since=NOW - 90,
        slow=Slow("ttft", 41.0, 0.1, badly=True),
        evidence={
            name: Found(name, value, f"{name} sentence") for name, value in zip(names, (True, False, True), strict=True)
        },
        supporting=("KV usage reached 99 %.",),
        opposing=("Few preemptions.",),
        missing=("the start-up log",),
        inputs=("the start-up log",),
        conditions={name: index % 2 == 0 for index, name in enumerate(NAMES)},
        published={"slow_badly": True, "wait_too_long": None},
        documented={"concurrency": 0.9},
        grade="strong",
        beside={name: Found(name, index % 2 == 0, f"{name} sentence") for index, name in enumerate(NAMES)},
        documented_signature={name: index % 2 == 1 for index, name in enumerate(SIGNATURE_CONDITIONS)},
        documented_signature_met=False,
        signature_note="The cache is preallocated.",
        reasons={"kv": 99.0, "waiting": 12.0},
    )
    return EngineState(
        key=EngineKey("prod", pod, model, engine),
        explain=lambda _: Cause("requests wait for KV cache", "Lower max_num_seqs"),
        target=f"http://10.0.0.5:8000/{pod}",
        container="vllm",
        gpus=("GPU-1",),
        up=True,
        error=None,
        version="0.11.0",
        flavour="v1",
        reading=None,
        counters=COUNTERS,
        signals=full_signals(),
        diagnosis=diagnosis,
        limits={name: Limit(name, 256.0, True, "args", 128.0) for name in LIMITS},
        objectives=(Objective("ttft", 95.0, 100.0, 2.0, 0.99),),
    )


def full_gpu(index: int = 0, uuid: str = "GPU-1") -> GpuState:
    """A GPU that answers every call."""
    reading = GpuReading(
        uuid,
        index,
        "nvidia",
        name="NVIDIA H100",
        driver="570.1",
        memory_total_bytes=80 * 2**30,
        memory_used_bytes=72 * 2**30,
        utilization_ratio=0.97,
        sm_activity_ratio=0.6,
        tensor_activity_ratio=0.3,
        dram_activity_ratio=0.8,
        power_watts=512.5,
        power_limit_watts=700.0,
        throttle_reasons=("sw_power_cap",),
        xid_errors={79: 1},
        xid_last_times={79: NOW - 60},
        processes=(GpuProcess(7, 2**30),),
    )
    return GpuState(
        reading, demand_ratio=0.55, floor_ratio=0.35, process_bytes={("prod", "chat-0"): 70 * 2**30, ("", ""): 2**30}
    )


def full_state() -> State:
    container = ContainerReading(
        "prod",
        "chat-0",
        "vllm",
        restarts=3,
        ready=True,
        last_termination=Termination("OOMKilled", 137, NOW - 600),
        alerts="ticket",
    )
    found = Discovered(
        *("prod", "chat-0", "vllm", "engine", "command", "command"),
        "its command starts vLLM",
        "http://10.0.0.5:8000/metrics",
        True,
    )
    return State(
        time=NOW,
        engines=(replace(full_engine(), group="LeaderWorkerSet/chat/0", pool=EnginePool("chat", "decode", "args")),),
        gpus=(full_gpu(),),
        owners=(
            GpuOwner("GPU-1", "prod", "chat-0", "vllm"),
            GpuOwner("GPU-1", "prod", "other-0", "vllm", True, "RayCluster/other"),
        ),
        discovered=(found,),
        containers=(
            ContainerState(
                *(container, 0.25, 0.5, 0.75, {"out_of_memory": 2}, (OutOfMemory("host", NOW - 600, True),)),
                *("org/model", EnginePool("chat", "decode", "args")),
            ),
        ),
        pods=(
            PodState("prod", "chat-0", EnginePool("chat", "decode", "args"), True, False, 240.0, NOW - 300, ever=True),
            PodState("prod", "chat-1", EnginePool("chat", "decode", "args", "7d4b9"), starting=True),
            PodState("prod", "chat-2", EnginePool("chat", "decode", "args"), False, reason="connection refused"),
        ),
        targets=(TargetState("http://10.0.0.5:8000/metrics", True, 0.004, 0, {"timeout": 2}, {"engines": 3}),),
        node_conditions=(NodeCondition("MemoryPressure", False),),
        health={
            "engines": SourceHealth("engines", True, None, NOW, 0.01, {"timeout": 2}),
            "nvidia": SourceHealth("nvidia", False, "library_missing", None, 0.001, {"library_missing": 9}),
        },
        expected_gpus={"nvidia": 1},
        ticks=42,
        lag_seconds=0.001,
        recorder=RecorderHealth("recorder", False, "disk_full", NOW, errors={"disk_full": 3}, dropped=30),
        web_refused={"address": 7},
        failures={Failure("engine", "prod/chat-1/org/model/0", "tick", "arithmetic"): 2},
    )


def unknown_engine(up: bool = True) -> EngineState:
    """An engine that is listed and about which nothing is known."""
    diagnosis = Diagnosis(
        "unknown",
        0.0,
        None,
        NOW,
        conditions=dict.fromkeys(NAMES),
        beside={name: Found(name, None, f"{name}: unknown") for name in NAMES},
        documented_signature=dict.fromkeys(SIGNATURE_CONDITIONS),
        evidence={"kv_full": Found("kv_full", None, "")},
    )
    return replace(
        full_engine(),
        up=up,
        error=None if up else "refused",
        version=None,
        flavour=None,
        counters={},
        signals=Signals(time=NOW),
        diagnosis=diagnosis,
        limits={name: Limit(name) for name in LIMITS},
        objectives=(),
    )


def node(engines: int, gpus: int) -> State:
    """A node with many of both, for sizes and times."""
    return replace(
        full_state(),
        gpus=tuple(full_gpu(i, f"GPU-{i}") for i in range(gpus)),
        engines=tuple(full_engine(f"chat-{i}") for i in range(engines)),
    )
