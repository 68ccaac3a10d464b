"""Size of a model's weights: measured from its files if available, else estimated from its configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvpressure.capacity.shapes import ModelShape, number_of
from kvpressure.files import read_file
from kvpressure.model import ceilings

_MAX_INDEX_BYTES: Final = 64 * 1024 * 1024  # of one with 90 000 tensors: 9 MB
_SIXTEEN_BITS: Final = 2.0
_EIGHT_BIT_FLOATS: Final = ("fp8", "fbgemm_fp8")
_MXFP4: Final = 4.25 / 8  # 4 bits and an 8-bit scale for each 32
_NVFP4: Final = 4.5 / 8  # 4 bits and an 8-bit scale for each 16
_SCALES: Final = 0.02  # scales and zero points of 4- and 8-bit formats, bytes a parameter (groups of 128)
_UNGATED: Final = ("opt", "gpt2", "gpt_neox", "falcon", "bloom", "mpt", "gpt_bigcode", "starcoder2", "phi")

_Get = Callable[..., int]
"""Reads a number of a configuration, as ``number_of`` does."""


def measured(path: Path) -> int | None:
    """Bytes of the weights in a model's directory, None without any."""
    if not path.is_dir():
        return None
    index = path / "model.safetensors.index.json"
    try:
        total = json.loads(read_file(index, _MAX_INDEX_BYTES))["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError):
        total = None
    return (
        ceilings.whole(total, ceilings.BYTES) or sum(file.stat().st_size for file in path.glob("*.safetensors")) or None
    )


def estimated(shape: ModelShape) -> int | None:
    """Bytes of the weights by the configuration, None if it is insufficient, has unsupported layers, or is quantized to
    an unknown size.
    """
    if shape.recurrent_layers:
        return None
    linear, other = parameters(shape.config)
    each = _bytes_per_parameter(shape.config)
    return None if not linear or each is None else round(linear * each + other * _SIXTEEN_BITS)


def parameters(config: Mapping[str, Any]) -> tuple[int, int]:
    """Parameters in layers that quantization covers, and the others (embeddings; for MXFP4 all but the experts)."""
    get = partial(number_of, config)
    hidden, layers, vocab = get("hidden_size"), get("num_hidden_layers"), get("vocab_size")
    if not (hidden and layers and vocab):
        return 0, 0
    embeddings = vocab * hidden * (1 if _tied(config) else 2)
    if config.get("model_type") == "opt":
        embeddings += (get("max_position_embeddings") + 2) * hidden
    attention = layers * (_mla(get) if get("kv_lora_rank") else _attention(get))
    dense_layers, experts = _split_experts(config, get, layers)
    feed_forward = dense_layers * _feed_forward(
        config, get("intermediate_size_mlp", "intermediate_size", "ffn_dim"), hidden
    )
    if _quantization(config) == "mxfp4":
        return experts, attention + feed_forward + embeddings
    return attention + feed_forward + experts, embeddings


def _tied(config: Mapping[str, Any]) -> bool:
    default = str(config.get("model_type")).startswith(("gemma", "opt", "cohere"))
    return bool(config.get("tie_word_embeddings", default))


def _attention(get: _Get) -> int:
    hidden, heads = get("hidden_size"), get("num_attention_heads")
    head = get("head_dim") or (hidden // heads if heads else 0)
    return hidden * head * (2 * heads + 2 * (get("num_key_value_heads") or heads))


def _mla(get: _Get) -> int:
    """DeepSeek's low-rank projections of query, key and value, and the output."""
    hidden, heads, latent, rope = (
        get(n) for n in ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim")
    )
    nope, value, rank = get("qk_nope_head_dim"), get("v_head_dim"), get("q_lora_rank")
    query = hidden * rank + rank * heads * (nope + rope) if rank else hidden * heads * (nope + rope)
    return query + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden


def _split_experts(config: Mapping[str, Any], get: _Get, layers: int) -> tuple[int, int]:
    """Layers with a plain feed-forward part, and the parameters of all experts with their routers."""
    hidden = get("hidden_size")
    experts = get("n_routed_experts", "num_local_experts", "num_experts")
    if not experts:
        return layers, 0
    size = get("moe_intermediate_size", "intermediate_size")
    sparse = (layers - get("first_k_dense_replace")) // (get("interleave_moe_layer_step") or 1)
    each = _feed_forward(config, size, hidden)
    shared = (
        get("n_shared_experts") or int(str(config.get("model_type")).startswith("llama4"))
    ) * each + 3 * hidden * get("shared_expert_intermediate_size")
    return layers - sparse, sparse * (experts * each + shared + experts * hidden)


def _feed_forward(config: Mapping[str, Any], intermediate: int, hidden: int) -> int:
    return (2 if config.get("model_type") in _UNGATED else 3) * hidden * intermediate


def _quantization(config: Mapping[str, Any]) -> str:
    quantization = config.get("quantization_config")
    return str(quantization.get("quant_method", "")) if isinstance(quantization, Mapping) else ""


def _bytes_per_parameter(config: Mapping[str, Any]) -> float | None:
    """Of the layers that quantization covers; None where the configuration does not say."""
    quantization = config.get("quantization_config")
    if not quantization:
        return _SIXTEEN_BITS
    if not isinstance(quantization, Mapping):
        return None
    formats = {_quantization(config), str(quantization.get("quant_algo", "")).lower()}
    if "mxfp4" in formats:
        return _MXFP4
    if "nvfp4" in formats:
        return _NVFP4
    if formats.intersection(_EIGHT_BIT_FLOATS):
        return 1.0
    loaded = 4 if quantization.get("load_in_4bit") else 8 if quantization.get("load_in_8bit") else 0
    bits = ceilings.whole(quantization.get("bits") or loaded or _group_bits(quantization), 16, 1)
    return None if bits is None else bits / 8 + _SCALES


def _group_bits(quantization: Mapping[str, Any]) -> int:
    """Bits of the weights as compressed-tensors states them."""
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        bits = ceilings.whole(weights.get("num_bits"), 16) if isinstance(weights, Mapping) else None
        if bits is not None:
            return bits
    return 0
