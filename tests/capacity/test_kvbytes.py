"""KV bytes, blocks and capacity against vLLM's own numbers."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.capacity.kvbytes import CACHE_DTYPES, CacheLayout, Parallel, layer_bytes, layout
from kvpressure.capacity.models import CONFIGS, named
from kvpressure.capacity.shapes import Layer, ModelShape, from_config
from kvpressure.errors import InputError

FIXTURES = Path(__file__).parent.parent / "fixtures"
GIB, MIB, KIB = 2**30, 2**20, 2**10

#: The random Llamas of the captured servers (hidden 128 and 768; 2 and 12 layers).
TINY = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
SMALL = {"num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}


def kv_bytes_per_token(shape: ModelShape, *more: Any) -> float:
    """On each GPU of the fullest pipeline stage."""
    return layout(shape, *more).bytes_per_token


# --- worked numbers for plain models ------------------------------------------------------------------------------

TABLE = [
    ("llama-2-7b", 524_288, 2_048, (2.00, 4.00, 16.00, 64.0)),
    ("llama-2-13b", 819_200, 1_310, (3.13, 6.25, 25.00, 100.0)),
    ("llama-2-70b", 327_680, 3_276, (1.25, 2.50, 10.00, 40.0)),
    ("llama-3-8b", 131_072, 8_192, (0.50, 1.00, 4.00, 16.0)),
    ("deepseek-v3", 70_272, 15_279, (0.27, 0.54, 2.14, 8.58)),
]


@pytest.mark.parametrize(("name", "per_token", "per_gib", "gib"), TABLE, ids=[row[0] for row in TABLE])
def test_worked_table(name: str, per_token: int, per_gib: int, gib: tuple[float, ...]) -> None:
    shape = named(name)
    assert kv_bytes_per_token(shape) == per_token
    assert GIB // per_token == per_gib
    for tokens, size in zip((4_096, 8_192, 32_768, 131_072), gib, strict=True):
        assert layout(shape).request_bytes(tokens) / GIB == pytest.approx(size, abs=0.0051)


def test_tensor_parallel_divides_until_each_rank_has_one_head() -> None:
    shape = named("llama-2-70b")
    sizes = [kv_bytes_per_token(shape, Parallel(tp)) for tp in (1, 2, 4, 8, 16)]
    assert sizes == [327_680, 163_840, 81_920, 40_960, 40_960]
    assert kv_bytes_per_token(named("llama-2-13b"), Parallel(20)) == 2 * 2 * 128 * 2 * 40  # two heads a rank


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("llama-3-8b", (1, 2, 4, 8, 16, 32)),
        ("llama-2-13b", (1, 2, 4, 5, 8, 10, 20, 40)),
        ("qwen2.5-7b", (1, 2, 4, 28)),
        ("gpt-oss-20b", (1, 2, 4, 8, 16, 32, 64)),
        ("deepseek-v3", (1, 2, 4, 8, 16, 32, 64, 128)),
    ],
)
def test_tensor_parallel_sizes_that_vllm_starts_with(name: str, allowed: tuple[int, ...]) -> None:
    """Query heads must divide evenly, KV heads divide or be copied evenly; the vector of MLA lies on every rank."""
    shape = named(name)
    for size in range(1, 130):
        if size in allowed:
            assert kv_bytes_per_token(shape, Parallel(size)) > 0
        else:
            with pytest.raises(InputError, match=rf"tensor parallel {size}: .*allowed"):
                layout(shape, Parallel(size))


@pytest.mark.parametrize(
    ("name", "tensor", "context", "said"),
    [
        ("llama-3-8b", 8, 2, "keeps copies: 1"),
        ("llama-3-8b", 16, 2, None),
        ("llama-3-8b", 16, 4, "keeps copies: 2"),
        ("llama-3-8b", 32, 4, None),
        ("deepseek-v3", 8, 8, None),
    ],
)
def test_decode_context_parallel_needs_copies_of_the_kv_heads(
    name: str, tensor: int, context: int, said: str | None
) -> None:
    if said is None:
        assert layout(named(name), Parallel(tensor, decode_context=context)).decode_context == context
        return
    with pytest.raises(InputError, match=said):
        layout(named(name), Parallel(tensor, decode_context=context))


def test_decode_context_parallel_divides_the_queries_of_a_kv_head() -> None:
    config = {"num_hidden_layers": 1, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 64}
    odd = from_config({**config, "num_attention_heads": 48, "num_key_value_heads": 8}, "odd")
    with pytest.raises(InputError, match="6 attention heads for each KV head"):
        layout(odd, Parallel(48, decode_context=4))
    assert layout(from_config(config, "even"), Parallel(24, decode_context=3)).decode_context == 3


def test_a_configuration_without_query_heads_is_judged_by_what_it_says() -> None:
    mla = {"num_hidden_layers": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert kv_bytes_per_token(from_config(mla, "mla"), Parallel(3)) == 2 * 576


def test_sparse_attention_adds_its_indexer() -> None:
    assert kv_bytes_per_token(named("deepseek-v3.2"), Parallel(8), "fp8_ds_mla") == 61 * 656 + 61 * 132 == 48_068
    assert kv_bytes_per_token(named("deepseek-v3"), Parallel(8), "nvfp4_ds_mla") == 61 * 352


HEAD_128 = dict.fromkeys(("auto", "bfloat16", "float16"), 512) | {"float32": 1024}
HEAD_128 |= dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), 256) | {"nvfp4": 2 * (64 + 8)}
HEAD_128 |= dict.fromkeys(("int8_per_token_head", "fp8_per_token_head"), 256 + 8) | {"int4_per_token_head": 128 + 8}


@pytest.mark.parametrize(("dtype", "size"), HEAD_128.items())
def test_bytes_of_one_head_of_128(dtype: str, size: int) -> None:
    assert layer_bytes(Layer("full", 8, 128, 128), 8, dtype) == size
    assert layer_bytes(Layer("full", 8, 128, 128), 1, dtype) == 8 * size


@pytest.mark.parametrize(
    ("name", "dtype", "text"),
    [
        ("llama-3-8b", "fp8_ds_mla", "only for models with MLA"),
        ("deepseek-v3", "nvfp4", "not for models with MLA"),
        ("deepseek-v3", "int8_per_token_head", "not for models with MLA"),
        ("llama-3-8b", "int3", "allowed: auto"),
    ],
)
def test_a_dtype_that_does_not_fit_is_refused(name: str, dtype: str, text: str) -> None:
    with pytest.raises(InputError, match=text):
        layout(named(name), cache_dtype=dtype)


# --- hybrid models ------------------------------------------------------------------------------------------------


def mib(found: CacheLayout, tokens: int, in_flight: int = 1) -> float:
    return found.request_bytes(tokens, in_flight) / MIB


def test_gemma_3_has_seven_groups_of_ten() -> None:
    found = layout(named("gemma-3-27b"))
    assert [group.kind for group in found.groups].count("full") == 1
    assert len(found.groups) == 7
    assert found.block_bytes == 1.25 * MIB
    assert sum(len(group.layers) for group in found.groups) == 62  # 8 of 70 are padding
    assert [mib(found, n) for n in (1_024, 8_192, 32_768, 131_072)] == [567.5, 1_127.5, 3_047.5, 10_727.5]
    assert mib(found, 8_192, 16_384) == 4_487.5
    assert mib(layout(named("gemma-3-27b"), hybrid_manager=False), 8_192) == 3_968


def test_gpt_oss() -> None:
    found = layout(named("gpt-oss-120b"))
    assert len(found.groups) == 2
    assert found.block_bytes == 576 * KIB
    for tokens, size in {1_024: 41.1, 8_192: 293.1, 32_768: 1_157, 131_072: 4_613}.items():
        assert mib(found, tokens) == pytest.approx(size, abs=0.5 if size > 700 else 0.05)
    assert mib(layout(named("gpt-oss-120b"), hybrid_manager=False), 8_192) == 576


def test_sliding_layers_only() -> None:
    config = {**CONFIGS["mistral-7b"], "sliding_window": 4096}
    found = layout(from_config(config, "mistral"))
    assert not found.uniform
    assert found.blocks(4_096) == 257
    assert found.blocks(100_000) == 257
    assert found.blocks(1_000) == 64
    assert found.bytes_per_token == 131_072


def test_chunked_attention_ends_at_its_chunk() -> None:
    chunks = {"num_hidden_layers": 4, "attention_chunk_size": 8_192, "no_rope_layers": [1, 1, 1, 0]}
    found = layout(from_config({**CONFIGS["llama-3-8b"], **chunks}, "llama-4"))
    assert [group.kind for group in found.groups] == ["chunked"] * 3 + ["full"]
    assert found.blocks(1_000_000) == 3 * (8_192 // 16 + 1) + 62_500


def test_decode_context_parallel_is_refused_with_windows() -> None:
    with pytest.raises(InputError, match="sliding"):
        layout(named("gemma-3-27b"), Parallel(32, decode_context=2))
    layout(named("gemma-3-27b"), Parallel(32, decode_context=2), hybrid_manager=False)


# --- pipeline stages ----------------------------------------------------------------------------------------------


def test_the_fullest_stage_decides() -> None:
    shape = named("deepseek-v3")  # 61 layers over 4: the remainder goes to the stage before the last
    assert kv_bytes_per_token(shape, Parallel(1, 4)) == 16 * 576 * 2
    assert kv_bytes_per_token(named("llama-2-70b"), Parallel(1, 4)) == 327_680 / 4
    assert kv_bytes_per_token(named("nemotron-h-56b"), Parallel(1, 10)) == 2 * 2 * 8 * 128 * 2  # two of its ten


@given(pp=st.integers(1, 61), name=st.sampled_from(sorted(CONFIGS)))
def test_stages_together_hold_every_layer(pp: int, name: str) -> None:
    shape = named(name)
    if pp > shape.num_layers:
        return
    whole, part = layout(shape), layout(shape, Parallel(1, pp))
    assert part.block_bytes * pp >= whole.block_bytes >= part.block_bytes
    assert len(part.groups) == len(whole.groups)


# --- vLLM's own log lines -----------------------------------------------------------------------------------------

CAPTURES = [
    ("server-engine-core-killed.log", TINY, 32),
    ("server-full-0.27.0.log", SMALL, 32),
    ("server-startfail-too-few-blocks.log", TINY, 16),
]


def logged(file: str, pattern: str) -> tuple[int, ...] | None:
    match = re.search(pattern, (FIXTURES / "vllm-logs" / file).read_text(encoding="utf-8"))
    return tuple(int(group.replace(",", "")) for group in match.groups()) if match else None


@pytest.mark.parametrize(("file", "config", "block_size"), CAPTURES)
def test_blocks_size_and_concurrency_or_the_longest_request_as_the_server_logged(
    file: str, config: dict[str, int], block_size: int
) -> None:
    found = layout(from_config(config, "captured"), block_size=block_size)
    assert logged(file, r"Overriding num_gpu_blocks=(\d+) with") == (found.pool_blocks(GIB),)
    (override,) = logged(file, r"num_gpu_blocks_override=(\d+)")
    if tokens := logged(file, r"KV cache size: ([\d,]+) tokens"):
        length, times = logged(file, r"Maximum concurrency for ([\d,]+) tokens per request: (\d+)\.00x")
        assert tokens == (found.capacity_tokens(override, length, 4_096),)
        assert found.max_concurrency(override, length, 4_096) == times
    else:
        assert logged(file, r"maximum model length is (\d+)") == (found.longest(override, 2_048),) == (1_008,)


@pytest.mark.parametrize(
    ("page", "config", "engines"),
    [("c_steady.prom.gz", SMALL, 1), ("m_v0270_pressure.prom.gz", SMALL, 1), ("l_dp2.prom.gz", TINY, 2)],
)
def test_capacity_as_the_metrics_page_says(page: str, config: dict[str, int], engines: int) -> None:
    text = gzip.decompress((FIXTURES / "vllm" / page).read_bytes()).decode()
    labels = dict(
        re.findall(r'(\w+)="([^"]*)"', next(line for line in text.splitlines() if "cache_config_info{" in line))
    )
    found = layout(from_config(config, "captured"), block_size=int(labels["block_size"]))
    blocks = int(labels["num_gpu_blocks"]) // engines
    size, times = int(labels["kv_cache_size_tokens"]), float(labels["kv_cache_max_concurrency"])
    assert found.capacity_tokens(blocks, round(size / times)) == size
    assert found.max_concurrency(blocks, round(size / times)) == times
    assert found.pool_blocks(int(labels["kv_cache_memory_bytes"])) >= blocks


# --- laws ---------------------------------------------------------------------------------------------------------

SHAPES = st.sampled_from(sorted(CONFIGS)).map(named)


@given(SHAPES, st.integers(1, 100_000), st.integers(1, 200_000))
def test_the_longest_request_is_the_longest(shape: ModelShape, blocks: int, limit: int) -> None:
    found = layout(shape)
    longest = found.longest(blocks, limit)
    assert 0 <= longest <= limit
    assert longest == 0 or found.blocks(longest) <= blocks - 1
    assert longest == limit or found.blocks(longest + 1) > blocks - 1


@given(SHAPES, st.sampled_from(CACHE_DTYPES), st.sampled_from([1, 16, 32, 64]))
def test_every_dtype_is_computed_or_refused(shape: ModelShape, dtype: str, block_size: int) -> None:
    try:
        found = layout(shape, cache_dtype=dtype, block_size=block_size)
    except InputError:
        assert dtype != "auto"
        return
    assert found.block_bytes > 0
    assert found.pool_blocks(-1) == 0


@pytest.mark.parametrize("bad", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (4, 1, 3), (-1, 1, 1)])
def test_impossible_parallel_sizes_are_refused(bad: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match="allowed"):
        Parallel(*bad)


# --- layers of different size -------------------------------------------------------------------------------------


def mixed(*layers: Layer) -> ModelShape:
    return ModelShape("mixed", layers, tuple(range(len(layers))), len(layers), None, None, 2, {})


def test_smaller_pages_hold_more_tokens() -> None:
    found = layout(mixed(Layer("full", 8, 128, 128), Layer("sliding", 8, 64, 64, 1024)))
    assert found.block_bytes == 16 * 8 * 256 * 2
    assert [group.block_size for group in found.groups] == [16, 32]
    assert found.blocks(8_192) == 512 + 32 + 1


@pytest.mark.parametrize(
    "layers",
    [
        (Layer("full", 8, 128, 128), Layer("sliding", 8, 96, 96, 1024)),
        (Layer("full", 8, 128, 128), Layer("full", 8, 64, 64), Layer("sliding", 8, 128, 128, 1024)),
    ],
)
def test_pages_that_do_not_divide_one_another_are_refused(layers: tuple[Layer, ...]) -> None:
    with pytest.raises(InputError, match="kv_cache_size_tokens"):
        layout(mixed(*layers))


def test_full_layers_keys_and_values_of_different_size_share_one_block() -> None:
    found = layout(mixed(Layer("full", 8, 128, 128), Layer("full", 4, 64, 64)))
    assert found.uniform
    assert found.bytes_per_token == 8 * 256 * 2 + 4 * 128 * 2
    assert layer_bytes(Layer("full", 1, 192, 128), 1, "auto") == 2 * (192 + 128)


def test_groups_of_nearly_equal_counts_are_not_split() -> None:
    def kinds(sliding: int, full: int) -> CacheLayout:
        types = ["sliding_attention"] * sliding + ["full_attention"] * full
        config = {**CONFIGS["gpt-oss-20b"], "num_hidden_layers": sliding + full, "layer_types": types}
        return layout(from_config(config, "x"))

    assert len(kinds(3, 2).groups) == 3  # 3 is 1.5 times 2: groups of 2, one padded
    found = kinds(4, 3)
    assert len(found.groups) == 2
    assert found.block_bytes == 4 * 16 * 8 * 128 * 2
