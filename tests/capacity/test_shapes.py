"""Reading a model's configuration, and the size of its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.capacity import weights
from kvpressure.capacity.kvbytes import layout
from kvpressure.capacity.models import CONFIGS
from kvpressure.capacity.shapes import from_config, load
from kvpressure.errors import InputError

LLAMA = dict(CONFIGS["llama-3-8b"])


@pytest.mark.parametrize(
    ("quantization", "gigabytes"),
    [
        (None, 16.06),
        ({"quant_method": "fp8"}, 9.1),
        ({"quant_method": "awq", "bits": 4}, 5.7),
        ({"quant_method": "gptq", "bits": 8}, 9.2),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 5.7),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, 5.7),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 9.2),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 9.1),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 6.03),
        ({"quant_method": "modelopt"}, None),
        ({"quant_method": "compressed-tensors"}, None),
        ({"quant_method": "unheard-of"}, None),
        ("nonsense", None),
        ({"quant_method": "awq", "bits": "x"}, None),
    ],
)
def test_quantized_weights_have_their_size_or_none(quantization: object, gigabytes: float | None) -> None:
    shape = from_config({**LLAMA, "quantization_config": quantization}, "x")
    size = weights.estimated(shape)
    assert (None if size is None else size / 1e9) == (gigabytes and pytest.approx(gigabytes, rel=0.02))


def test_weights_are_measured_from_files(tmp_path: Path) -> None:
    assert weights.measured(tmp_path) is None
    assert weights.measured(tmp_path / "config.json") is None
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "model-2.safetensors").write_bytes(b"x" * 500)
    assert weights.measured(tmp_path) == 1500
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1234}}))
    assert weights.measured(tmp_path) == 1234
    index.write_text("{")
    assert weights.measured(tmp_path) == 1500


# --- forms of configurations --------------------------------------------------------------------------------------


def per_token(**config: Any) -> float:
    return layout(from_config(config, "x")).bytes_per_token


def test_names_of_other_families() -> None:
    gpt2 = per_token(n_layer=12, n_head=12, n_embd=768)
    assert gpt2 == 12 * 12 * 128 * 2
    falcon = {"num_hidden_layers": 60, "num_attention_heads": 128, "hidden_size": 8192, "multi_query": True}
    assert per_token(**falcon, num_kv_heads=8, new_decoder_architecture=True) == 60 * 8 * 128 * 2
    small = falcon | {"num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544}
    assert per_token(**small) == 32 * 1 * 128 * 2
    glm = per_token(num_layers=28, num_attention_heads=32, hidden_size=4096, multi_query_group_num=2)
    assert glm == 28 * 2 * 256 * 2
    assert per_token(n_layers=40, n_heads=48, d_model=6144, attn_config={"kv_n_heads": 8}) == 40 * 8 * 256 * 2


def test_multimodal_configurations_hold_the_text_model_inside() -> None:
    assert per_token(model_type="gemma3", vision_config={}, text_config=dict(CONFIGS["gemma-3-27b"])) == 81_920
    assert per_token(text_config={"text_config": LLAMA}) == per_token(**LLAMA)


def test_a_sliding_window_counts_where_it_is_used_and_from_the_layer_on_where_it_is() -> None:
    assert layout(from_config({**LLAMA, "sliding_window": 4096, "use_sliding_window": False}, "qwen")).uniform
    assert layout(from_config({**LLAMA, "sliding_window": None}, "mistral")).uniform
    shape = from_config({**LLAMA, "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28}, "qwen")
    assert [layer.kind for layer in shape.layers].count("sliding") == 4
    assert shape.layers[27].kind == "full"


@pytest.mark.parametrize(("model_type", "full"), [("gemma2", 16), ("cohere2", 8), ("gemma3_text", 5)])
def test_alternation_by_model_type(model_type: str, full: int) -> None:
    shape = from_config({**LLAMA, "sliding_window": 512, "model_type": model_type}, "x")
    assert [layer.kind for layer in shape.layers].count("full") == full
    assert shape.layers[0].kind == "sliding"


def test_layers_that_share_the_cache_of_others_take_none() -> None:
    assert per_token(**{**LLAMA, "num_kv_shared_layers": 16}) == per_token(**LLAMA) / 2


# --- bad input ----------------------------------------------------------------------------------------------------

REFUSED = [
    ({}, "num_hidden_layers is missing"),
    ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers is missing"),
    ({**LLAMA, "num_hidden_layers": "32"}, "num_hidden_layers is '32'; allowed"),
    ({**LLAMA, "num_hidden_layers": 3.5}, "num_hidden_layers is 3.5; allowed"),
    ({**LLAMA, "num_hidden_layers": -1}, "num_hidden_layers is -1; allowed"),
    ({**LLAMA, "num_hidden_layers": 10**7}, "allowed: up to 2048"),
    ({**LLAMA, "num_key_value_heads": 10**12}, "a whole number from 0 to 1000000000"),
    ({**LLAMA, "hidden_size": 4097}, "not a multiple"),
    ({**LLAMA, "torch_dtype": "int8"}, "dtype is 'int8'"),
    ({**LLAMA, "is_encoder_decoder": True}, "encoder-decoder"),
    ({**LLAMA, "mamba_d_state": 128}, "mamba_d_state: layers with a recurrent"),
    (
        {**LLAMA, "layer_types": ["holographic", "full_attention"] * 16},
        "holographic: layers with a recurrent",
    ),
    ({**LLAMA, "layer_types": ["full_attention"]}, "layer_types has 1 entries; needed: 32"),
    ({**LLAMA, "layer_types": ["sliding_attention"] * 32}, "no window size"),
    ({**LLAMA, "attention_chunk_size": 8, "no_rope_layers": [1]}, "no_rope_layers"),
    ({**LLAMA, "block_configs": [{}]}, "block_configs"),
    ({**LLAMA, "num_kv_shared_layers": 32}, "num_kv_shared_layers 32 is not allowed; allowed: fewer"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_computed_is_refused_with_its_place(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        from_config(config, "x", "/models/x/config.json")
    assert str(caught.value).startswith("/models/x/config.json: ")
    assert "\n" not in str(caught.value)


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(" " * 4_000_001)
    with pytest.raises(InputError, match="larger than"):
        load(tmp_path)


VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-10, 10**10)
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.integers(0, 3), max_size=3)
    | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim"),
                *("v_head_dim",),
                *("kv_lora_rank", "qk_rope_head_dim", "index_topk", "index_head_dim", "sliding_window"),
                *("sliding_window_pattern",),
                *("layer_types", "torch_dtype", "attention_chunk_size", "no_rope_layers", "text_config"),
                *("attn_config",),
                *("num_kv_shared_layers", "quantization_config", "max_window_layers", "use_sliding_window"),
                *("max_position_embeddings", "num_experts", "vocab_size", "intermediate_size"),
            ]
        ),
        VALUES,
    )
)
def test_whatever_a_configuration_holds_it_is_computed_or_refused(changes: dict[str, Any]) -> None:
    try:
        shape = from_config({**LLAMA, **changes}, "x")
        found = layout(shape)
    except InputError:
        return
    assert found.block_bytes > 0
    assert (weights.estimated(shape) or 1) > 0
