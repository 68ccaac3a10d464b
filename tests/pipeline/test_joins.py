"""What the pipeline makes of what only a Kubernetes node tells: the environment of pods, the pods of processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpressure.engines.registry import log_line
from kvpressure.model import readings as r
from kvpressure.model.pools import EnginePool
from kvpressure.model.readings import EngineReading, GpuOwner, GpuProcess, GpuReading, Scrape, Snapshot
from kvpressure.pipeline.joins import join_owners
from kvpressure.pipeline.pipeline import Pipeline


def page(pod: str, seqs: str) -> Scrape:
    engine, args = EngineReading("m", "0", {"running": 1.0}), ("vllm", "serve", "m", "--max-num-seqs", "$(SEQS)")
    target = f"http://{pod}:8000/metrics"
    return Scrape(target, 1000.0, "inference", pod, "vllm", (), args, {"SEQS": seqs}, engines=(engine,))


def test_the_same_command_line_in_two_environments_gives_two_limits() -> None:
    state = Pipeline().observe(Snapshot(1000.0, pages=(page("a", "8"), page("b", "16"))))
    limits = {engine.key.pod: engine.limits["max_num_seqs"] for engine in state.engines}
    assert {pod: (limit.value, limit.explicit, limit.source) for pod, limit in limits.items()} == {
        "a": (8, True, "args"),
        "b": (16, True, "args"),
    }


def test_the_version_is_the_logs_else_the_images() -> None:
    pipeline = Pipeline()
    line = log_line(
        "inference", "a", "vllm", "Initializing a V1 LLM engine (v0.32.0) with config: model='m', max_seq_len=2048,"
    )
    pages = (replace(page("a", "8"), version="0.31.0"), replace(page("b", "8"), version="0.31.0"), page("c", "8"))
    state = pipeline.observe(Snapshot(1000.0, pages=pages, logs=(line,)))
    assert {engine.key.pod: engine.version for engine in state.engines} == {"a": "0.32.0", "b": "0.31.0", "c": None}


@pytest.mark.parametrize(
    ("group", "script", "pool"),
    [
        ("", "exec $CMD", 5646 * 16 * 524_288),
        ("RayCluster/m", "exec $CMD", None),
        ("RayCluster/m", "vllm serve llama-2-7b -tp 2", 5646 * 16 * 262_144),
    ],
    ids=["a pod by itself", "perhaps split over other nodes", "split as its arguments say"],
)
def test_the_pool_of_an_engine_with_gpus_on_other_nodes(group: str, script: str, pool: float | None) -> None:
    config = {"num_gpu_blocks": "5646", "block_size": "16", "cache_dtype": "auto"}
    engine = EngineReading("llama-2-7b", "0", {r.RUNNING: 1.0, r.WAITING: 0.0, r.KV_USAGE: 0.5}, cache_config=config)
    read = replace(page("a", "x"), args=("bash", "-c", script), gpus=("GPU-0",), engines=(engine,), group=group)
    pipeline = Pipeline()
    (found,) = pipeline.observe(Snapshot(1000.0, pages=(read,))).engines
    assert (found.signals.memory.kv_pool_bytes, found.group) == (pool, group)
    lost = replace(read, time=1001.0, engines=(), error="timeout")
    (found,) = pipeline.observe(Snapshot(1001.0, pages=(lost,))).engines
    assert (found.error, found.group) == ("timeout", group)


@pytest.mark.parametrize("told", [EnginePool("chat", "decode", "label"), None], ids=["discovered", "an old recording"])
def test_the_pool_of_an_engine_is_known_before_it_answers_and_stays(told: EnginePool | None) -> None:
    silent = replace(page("chat-0", "x"), engines=(), error="refused", pool=told)
    answers = replace(page("chat-0", "x"), time=1001.0, pool=told)
    pipeline = Pipeline()
    for t, read in ((1000.0, silent), (1001.0, answers), (1002.0, replace(silent, time=1002.0))):
        (engine,) = pipeline.observe(Snapshot(t, pages=(read,))).engines
        assert engine.pool == (told or EnginePool("chat"))


def test_owners_keep_their_group_whichever_source_tells_it() -> None:
    told = GpuOwner("GPU-0", "inference", "chat-0-1", "vllm", group="LeaderWorkerSet/chat/0")
    for owners in ((told, replace(told, group="")), (replace(told, group="", container=""), told)):
        assert join_owners(owners) == (told,)


def test_a_gpu_of_two_pods_is_shared_whatever_its_sources_say() -> None:
    one = GpuOwner("GPU-0", "inference", "chat-0", "vllm")
    other = GpuOwner("GPU-0", "train", "t-0", "main")
    alone = GpuOwner("GPU-1", "inference", "chat-0", "vllm")
    assert join_owners((one, other, alone)) == (replace(one, shared=True), replace(other, shared=True), alone)
    beside = replace(one, container="sidecar")
    assert join_owners((one, beside)) == (one, beside), "two containers of one pod share nothing with others"


def test_memory_of_processes_is_summed_by_pod() -> None:
    used = {1: 10, 2: 20, 3: 40, 4: 80, 5: None}
    gpu = GpuReading("GPU-0", 0, "nvidia", processes=tuple(GpuProcess(pid, size) for pid, size in used.items()))
    pods = {1: ("ns", "a"), 2: ("ns", "a"), 3: ("", ""), 5: ("ns", "a")}
    state = Pipeline().observe(Snapshot(1000.0, gpus=(gpu,), process_pods=pods))
    assert state.gpus[0].process_bytes == {("ns", "a"): 30, ("", ""): 40}
