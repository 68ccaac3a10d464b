"""Models known by name: the parts of their published ``config.json`` that memory depends on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from kvpressure.capacity import shapes
from kvpressure.capacity.errors import CapacityError
from kvpressure.capacity.shapes import ModelShape, from_config


def _llama(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, context: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        **more,
    }


def _opt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "hidden_size": hidden,
        "ffn_dim": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return _llama(
        2880,
        2880,
        layers,
        64,
        8,
        201088,
        131072,
        model_type="gpt_oss",
        head_dim=64,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        num_local_experts=experts,
        quantization_config={"quant_method": "mxfp4"},
        attention_bias=True,
    )


_DEEPSEEK_V3: Final = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8"},
}

CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000, 4096),
        "llama-2-13b": _llama(5120, 13824, 40, 40, 40, 32000, 4096),
        "llama-2-70b": _llama(8192, 28672, 80, 64, 8, 32000, 4096),
        "llama-3-8b": _llama(4096, 14336, 32, 32, 8, 128256, 8192),
        "llama-3-70b": _llama(8192, 28672, 80, 64, 8, 128256, 8192),
        "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8, 128256, 131072),
        "llama-3.1-70b": _llama(8192, 28672, 80, 64, 8, 128256, 131072),
        "mistral-7b": _llama(4096, 14336, 32, 32, 8, 32768, 32768, model_type="mistral"),
        "mixtral-8x7b": _llama(4096, 14336, 32, 32, 8, 32000, 32768, model_type="mixtral", num_local_experts=8),
        "qwen2.5-7b": _llama(3584, 18944, 28, 28, 4, 152064, 32768, model_type="qwen2"),
        "qwen2.5-72b": _llama(8192, 29568, 80, 64, 8, 152064, 32768, model_type="qwen2"),
        "qwen3-32b": _llama(5120, 25600, 64, 64, 8, 151936, 40960, model_type="qwen3", head_dim=128),
        "gemma-3-27b": _llama(
            5376,
            21504,
            62,
            32,
            16,
            262208,
            131072,
            model_type="gemma3_text",
            head_dim=128,
            sliding_window=1024,
            sliding_window_pattern=6,
            tie_word_embeddings=True,
        ),
        "gpt-oss-20b": _gpt_oss(24, 32),
        "gpt-oss-120b": _gpt_oss(36, 128),
        "deepseek-v3": _DEEPSEEK_V3,
        "deepseek-v3.2": {
            **_DEEPSEEK_V3,
            "model_type": "deepseek_v32",
            "index_topk": 2048,
            "index_head_dim": 128,
            "index_n_heads": 64,
        },
        "opt-1.3b": _opt(2048, 24, 32),
        "opt-2.7b": _opt(2560, 32, 32),
    }
)


def find(text: str, draft_layers: int = 0) -> tuple[ModelShape, Path | None]:
    """What a command line names: a ``config.json``, a model's directory (then with its path), or a known name. Raises ``CapacityError``."""
    path = Path(text)
    try:
        there = bool(text) and path.exists()
    except OSError:  # too long for a name, or in a directory that may not be looked into
        there = text.lower() not in CONFIGS and "/" in text
    if not there:
        return named(text, draft_layers), None
    return shapes.load(path, draft_layers), path


def named(name: str, draft_layers: int = 0) -> ModelShape:
    """The shape of a model by its exact name (small and capital letters count the same)."""
    key = name.lower()
    if key not in CONFIGS:
        raise CapacityError(
            f"{name!r:.100} is neither a file nor a known model; allowed: a config.json, a model's "
            f"directory, or one of {', '.join(CONFIGS)}"
        )
    return from_config(CONFIGS[key], key, draft_layers=draft_layers)
