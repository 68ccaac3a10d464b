"""The KV pool's size from configuration and model shape; the H100 figures are those of the recorded runs."""

from __future__ import annotations

import pytest

from kvpressure.engines.vllm.command_line import read
from kvpressure.engines.vllm.limits import pool
from kvpressure.model.readings import EngineReading
from kvpressure.signals import kv as pools

GIB = 2**30


def from_configuration(args, config, engines_on_page):
    return pools.PoolSizes().of(args, pool(args, EngineReading("m", "0", cache_config=config), engines_on_page))


CONFIG = {"num_gpu_blocks": "5646", "block_size": "16", "cache_dtype": "auto"}


def test_tensor_parallel_splits_and_data_parallel_shares_the_count():
    args = read(["--model", "llama-2-7b", "--tensor-parallel-size", "2"]).args
    assert from_configuration(args, CONFIG, 2) == 2823 * 16 * 262_144


def test_an_explicit_pool_is_the_pool_unless_blocks_are_overridden():
    args = read(["--model", "x", "--kv-cache-memory-bytes", str(4 * GIB)]).args
    assert from_configuration(args, {}, 1) == 4 * GIB
    assert from_configuration(args, {"num_gpu_blocks_override": "256"}, 1) is None


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_gpu_blocks": "None", "block_size": "16"},
        {"num_gpu_blocks": "0", "block_size": "16"},
        CONFIG | {"cache_dtype": "no-such-type"},
        CONFIG | {"num_gpu_blocks": "1e999"},
    ],
)
def test_what_cannot_be_known_is_absent(config):
    assert from_configuration(read(["--model", "llama-2-7b"]).args, config, 1) is None
