"""Writes ``exporter/kvpressure/capacity/models.json``: what memory depends on in the ``config.json`` of models that
people deploy.

    python -m lab.model_shapes KEY MODEL SOURCE config.json

adds one model, or replaces it: KEY is its name in lower case without variants that keep the shape, MODEL its published
name, SOURCE where the file was read (repository, path, commit).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvpressure.capacity.shapes import from_config, text_config

FILE: Final = Path(__file__).parents[1] / "exporter" / "kvpressure" / "capacity" / "models.json"
KEPT: Final = (
    "model_type",
    "dtype",
    "torch_dtype",
    "num_hidden_layers",
    "n_layer",
    "hidden_size",
    "n_embd",
    "intermediate_size",
    "intermediate_size_mlp",
    "ffn_dim",
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_topk",
    "index_head_dim",
    "index_n_heads",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_local_experts",
    "num_experts",
    "n_shared_experts",
    "shared_expert_intermediate_size",
    "first_k_dense_replace",
    "interleave_moe_layer_step",
    "num_nextn_predict_layers",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "sliding_window_pattern",
    "attention_chunk_size",
    "no_rope_layers",
    "layer_types",
    "layers_block_type",
    "hybrid_override_pattern",
    "full_attention_interval",
    "linear_num_key_heads",
    "ssm_state_size",
    "attn_layer_period",
    "attn_layer_offset",
    "num_kv_shared_layers",
)


def reduced(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a configuration that count, of its language model."""
    text = text_config(config)
    kept = {key: text[key] for key in KEPT if text.get(key) is not None}
    quantization = text.get("quantization_config")
    if isinstance(quantization, Mapping) and isinstance(quantization.get("quant_method"), str):
        kept["quantization_config"] = {"quant_method": quantization["quant_method"]}
    return kept


def write(models: Mapping[str, Mapping[str, Any]]) -> None:
    """One line for each model, in the order of their names."""
    lines = (f"{json.dumps(key)}: {json.dumps(models[key], ensure_ascii=False)}" for key in sorted(models))
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main(key: str, model: str, source: str, config: str) -> None:
    """Add one model."""
    kept = reduced(json.loads(Path(config).read_text(encoding="utf-8")))
    from_config(kept, key)
    write({**json.loads(FILE.read_text(encoding="utf-8")), key: {"id": model, "source": source, "config": kept}})


if __name__ == "__main__":
    main(*sys.argv[1:5])
