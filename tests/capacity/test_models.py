"""The models known by name: their figures give the sizes in their names, and published names find them."""

from __future__ import annotations

import re

import pytest

from kvpressure.capacity import kvbytes, models, weights
from kvpressure.capacity.models import CONFIGS, known, named
from kvpressure.errors import InputError

BILLIONS = re.compile(r"-(?:8x)?(\d+(?:\.\d+)?)b(?:-|$)")
EXACTLY = """
llama-2-7b 6.738, llama-2-13b 13.016, llama-2-70b 68.977, llama-3-8b 8.030, llama-3.1-70b 70.554, mistral-7b 7.248,
mixtral-8x7b 46.703, qwen2.5-7b 7.616, qwen2.5-72b 72.706, qwen3-32b 32.762, gemma-3-27b 27.009, gpt-oss-20b 20.91,
gpt-oss-120b 116.83, opt-1.3b 1.316, opt-2.7b 2.652, deepseek-v3 671.03
"""  # billions of parameters as the publishers state them
ABOUT = """
mixtral-8x22b 140.6, llama-4-scout-17b-16e 109, llama-4-maverick-17b-128e 400, mistral-nemo-2407 12.2,
deepseek-v3.1 671, deepseek-v3.2 671, deepseek-r1 671, deepseek-v2-lite 15.7, kimi-k2 1026, kimi-k2.5 1026,
kimi-k2.6 1026, glm-4.5 355, glm-5 744, minimax-m2.5 229, llama-3.2-1b 1.24, internlm2_5-7b 7.74, qwen3-vl-2b 1.72,
phi-3.5-mini 3.8, phi-4-mini 3.8, gemma-2b 2.5, gemma-2-2b 2.6
"""  # where the name says something else; qwen3-vl without the image encoder
ATTENTION = {key for key in CONFIGS if not named(key).recurrent_layers}


@pytest.mark.parametrize("key", sorted(ATTENTION))
def test_the_figures_give_the_published_size(key: str) -> None:
    exactly, about = (dict(re.findall(r"(\S+) ([\d.]+)", table)) for table in (EXACTLY, ABOUT))
    size = exactly.get(key) or about.get(key) or BILLIONS.search(key)[1]
    within = 0.001 if key in exactly else 0.10
    assert sum(weights.parameters(CONFIGS[key])) / 1e9 == pytest.approx(float(size), rel=within)


@pytest.mark.parametrize(
    ("key", "layers", "recurrent", "per_token"),
    [
        ("qwen3.5-27b", 16, 48, 16 * 2 * 4 * 256 * 2),
        ("qwen3-next-80b-a3b", 12, 36, 12 * 2 * 2 * 256 * 2),
        ("nemotron-3-nano-30b-a3b", 6, 23, 6 * 2 * 2 * 128 * 2),
        ("nemotron-h-56b", 10, 54, 10 * 2 * 8 * 128 * 2),
    ],
)
def test_a_hybrid_model_is_computed_in_its_attention_part(
    key: str, layers: int, recurrent: int, per_token: int
) -> None:
    shape = named(key)
    assert (len(shape.layers), shape.recurrent_layers) == (layers, recurrent)
    assert kvbytes.layout(shape).bytes_per_token == per_token
    assert weights.estimated(shape) is None


KEYS = {
    "meta-llama/Llama-3.3-70B-Instruct": "llama-3.1-70b",
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": "llama-3.1-8b",
    "unsloth/Llama-3.2-1B-Instruct-bnb-4bit": "llama-3.2-1b",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "llama-4-scout-17b-16e",
    "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8": "qwen3-30b-a3b",
    "Qwen/Qwen3-Next-80B-A3B-Thinking": "qwen3-next-80b-a3b",
    "zai-org/GLM-4.5-Air": None,
    "Qwen/QwQ-32B-AWQ": "qwen2.5-32b",
    "deepseek-ai/DeepSeek-R1-0528": "deepseek-r1",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": "llama-3.1-70b",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b",
    "mistralai/Mistral-Nemo-Instruct-2407": "mistral-nemo-2407",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron-3-nano-30b-a3b",
    "google/gemma-2-9b-it": "gemma-2-9b",
    "/models/gpt-oss-120b/": "gpt-oss-120b",
    "mistralai/Mistral-7B-Instruct-v0.1": None,
    "deepseek-ai/deepseek": None,
    "someone/Llama-3.1-8B-Legal": None,
    "NousResearch/Yarn-Llama-2-7b-128k": None,
    "": None,
}


def test_a_published_name_finds_its_shape_and_no_other() -> None:
    assert {name: known(name) for name in KEYS} == KEYS


def test_a_name_says_how_its_weights_are_stored() -> None:
    gigabytes = {  # as the repositories hold
        "Qwen/Qwen3-32B": 65.5,
        "Qwen/Qwen3-32B-FP8": 34.3,
        "Qwen/Qwen3-32B-AWQ": 19.3,
        "nvidia/Qwen3-32B-NVFP4": 20.6,
        "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8": 31.2,
        "Qwen/Qwen2.5-72B-Instruct-AWQ": 41.6,
        "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": 5.58,
        "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8": 8.87,
        "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": 5.7,
        "unsloth/Llama-3.2-1B-Instruct-bnb-4bit": 1.03,
        "deepseek-ai/DeepSeek-R1": 673,
        "someone/DeepSeek-R1-BF16": 1342,
        "someone/DeepSeek-R1-AWQ": 352,
        "openai/gpt-oss-20b": 13.76,
        "someone/gpt-oss-20b-MXFP4": 13.76,
        "someone/gpt-oss-20b-BF16": 41.8,
        **{f"someone/Qwen3-32B-{said}": 34.3 for said in ("FP8-dynamic", "FP8-KV", "quantized.w8a8", "8bit")},
        "someone/Qwen3-32B-int4": 19.3,
        "someone/Qwen3-32B-fp16": 65.5,
    }
    assert {name: weights.estimated(named(name)) / 1e9 for name in gigabytes} == pytest.approx(gigabytes, rel=0.02)
    unsaid = [f"someone/Qwen3-8B-{said}" for said in ("GPTQ", "bnb", "quantized", "MXFP4", "FP8-w4a16")]
    unsaid += ["deepseek-ai/DeepSeek-V3.1", "moonshotai/Kimi-K2.5"]  # its shape, its bits are not those of the weights
    assert {weights.estimated(named(name)) for name in unsaid} == {None}


@pytest.mark.parametrize(
    "uneven",
    [{"global_head_dim": 512}, {"swa_num_key_value_heads": 8}, {"compress_ratios": [0, 4]}, {"block_configs": []}],
)
def test_layers_of_different_shape_are_refused(uneven: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(uneven))):
        models.from_config({**CONFIGS["llama-3.1-8b"], **uneven}, "m")


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(InputError, match=r"lists, such as qwen3-32b$"):
        named("Qwen/Qwen3-33B")
    with pytest.raises(InputError, match=r"--help lists$"):
        named("zzzz")


def test_llama_4_keeps_a_chunk_in_three_of_four_layers() -> None:
    kinds = [layer.kind for layer in named("llama-4-scout-17b-16e").layers]
    assert kinds == ["chunked", "chunked", "chunked", "full"] * 12
