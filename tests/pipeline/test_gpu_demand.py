"""Required memory of a GPU without an engine of its own: all that is used, where no engine may explain the use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpressure.engines.registry import log_line
from kvpressure.model.readings import Discovered, GpuOwner, GpuReading, Scrape, Snapshot
from kvpressure.pipeline.pipeline import Pipeline
from tests.pipeline.test_pipeline import GIB, busy

FULL = GpuReading("GPU-1", 0, "nvidia", memory_total_bytes=80 * GIB, memory_used_bytes=72 * GIB)
TRAINING = GpuOwner("GPU-1", "train", "t-0", "main")


def demand(
    *owners: GpuOwner,
    gpus: tuple[GpuReading, ...] = (FULL,),
    pages: tuple[Scrape, ...] = (),
    discovered: tuple[Discovered, ...] = (),
) -> list[float | None]:
    state = Pipeline().observe(Snapshot(1000.0, gpus=gpus, owners=owners, pages=pages, discovered=discovered))
    return [gpu.demand_ratio for gpu in state.gpus]


def container(result: str, pod: str = "t-0", name: str = "main") -> Discovered:
    return Discovered("train", pod, name, result, "", "", "", "", None)


@pytest.mark.parametrize("owners", [(), (TRAINING,)], ids=["nobody's", "another pod's"])
def test_without_an_engine_all_used_memory_is_required(owners: tuple[GpuOwner, ...]) -> None:
    assert demand(*owners) == [pytest.approx(0.9)]


def test_a_gpu_whose_memory_is_not_read_needs_an_unknown_share() -> None:
    assert demand(gpus=(replace(FULL, memory_used_bytes=None),)) == [None]
    assert demand(gpus=(replace(FULL, memory_total_bytes=None),)) == [None]


def test_an_engine_that_is_not_scraped_may_have_its_pool_there() -> None:
    assert demand(TRAINING, discovered=(container("no_target"),)) == [None]
    for other in (container("not_engine"), container("no_target", pod="t-1"), container("no_target", name="side")):
        assert demand(TRAINING, discovered=(other,)) == [pytest.approx(0.9)]


def test_a_worker_has_the_pool_of_an_engine_on_another_node() -> None:
    assert demand(replace(TRAINING, group="LeaderWorkerSet/vllm/0")) == [None]


def test_an_engine_without_a_gpu_may_have_any_that_nobody_owns() -> None:
    engine = busy(1000.0)
    second = replace(FULL, uuid="GPU-2", index=1)
    assert demand(TRAINING, gpus=(FULL, second), pages=(engine,)) == [pytest.approx(0.9), None]
    mapped = GpuOwner("GPU-2", "inference", "chat-0", "vllm")
    third = replace(FULL, uuid="GPU-3", index=2)
    found = demand(mapped, gpus=(second, third), pages=(engine,))
    assert found == [None, pytest.approx(0.9)], "the engine has its GPU, so the other is anybody's; its pool is unknown"


def test_a_split_gpu_is_judged_by_its_parts() -> None:
    part = replace(FULL, uuid="MIG-1", parent_uuid="GPU-1")
    assert demand(gpus=(FULL, part)) == [None, pytest.approx(0.9)]


def test_an_engine_needs_an_unknown_share_if_one_of_its_gpus_is_unknown() -> None:
    config = {"num_gpu_blocks": "5646", "block_size": "16", "kv_cache_size_tokens": "90336"}
    second = replace(FULL, uuid="GPU-2", index=1)
    page = replace(busy(1000.0), gpus=("GPU-1", "GPU-2"))
    page = replace(page, engines=tuple(replace(engine, cache_config=config) for engine in page.engines))
    facts = log_line("inference", "chat-0", "vllm", "Available KV cache memory: 40.0 GiB")

    def shares(*gpus: GpuReading, page: Scrape = page) -> float | None:
        (engine,) = Pipeline().observe(Snapshot(1000.0, gpus=gpus, pages=(page,), logs=(facts,))).engines
        return engine.signals.memory.device_demand_ratio

    assert shares(FULL, second) is not None
    assert shares(FULL, replace(second, memory_used_bytes=None)) is None
    assert shares(FULL, second, page=replace(page, args=("vllm", "serve", "m", "-tp", "2"))) is not None
    elsewhere = replace(page, args=("vllm", "serve", "m", "-tp", "2", "-pp", "2"))
    assert shares(FULL, second, page=elsewhere) is None, "another node has two more, which may require more"


def test_what_is_in_use_outside_the_kv_pool_is_required_without_a_request() -> None:
    page, facts = (
        replace(busy(1000.0), gpus=("GPU-1",)),
        log_line("inference", "chat-0", "vllm", "Available KV cache memory: 40.0 GiB"),
    )
    (gpu,) = Pipeline().observe(Snapshot(1000.0, gpus=(FULL,), pages=(page,), logs=(facts,))).gpus
    assert gpu.floor_ratio == pytest.approx((72 - 40) / 80)
    (gpu,) = Pipeline().observe(Snapshot(1000.0, gpus=(FULL,))).gpus
    assert (gpu.demand_ratio, gpu.floor_ratio) == (pytest.approx(0.9), None)


def test_ranks_of_one_pod_require_of_their_own_gpus() -> None:
    first, gpus = busy(1000.0).engines[0], (FULL, replace(FULL, uuid="GPU-2", index=1))
    page = replace(busy(1000.0), args=("vllm", "serve", "m", "-tp", "1", "-dp", "2"), gpus=("GPU-1", "GPU-2"))
    page = replace(page, engines=(first, replace(first, engine="1")))
    facts = log_line("inference", "chat-0", "vllm", "Available KV cache memory: 40.0 GiB")
    state = Pipeline().observe(Snapshot(1000.0, gpus=gpus, pages=(page,), logs=(facts,)))
    assert [len(engine.signals.memory.gpu_demands) for engine in state.engines] == [1, 1]
