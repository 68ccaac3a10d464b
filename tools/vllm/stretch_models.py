"""Make what the stretches need beside ``make_model.py``'s models: a model with a sliding window, LoRA adapters. Runs in
.vllm.

Usage: stretch_models.py DIR. Writes DIR/window-mistral (77 M parameters, a window of 256 tokens in every layer) and
DIR/adapter-0 to adapter-2 for ``small`` (rank 8 on the attention's projections), all random: nothing is downloaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from make_model import SHAPES, VOCABULARY, tokenizer
from safetensors.torch import save_file
from transformers import MistralConfig, MistralForCausalLM

WINDOW = 256
RANK = 8
ADAPTERS = 3


def window_model(out: Path) -> None:
    """``small`` as a Mistral, whose every layer sees the last ``WINDOW`` tokens only."""
    tokenizer().save_pretrained(out)
    config = MistralConfig(
        vocab_size=VOCABULARY,
        head_dim=64,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
        sliding_window=WINDOW,
        **SHAPES["small"],
    )
    MistralForCausalLM(config).to(torch.bfloat16).save_pretrained(out, safe_serialization=True)


def adapter(out: Path, seed: int) -> None:
    """A LoRA adapter in PEFT's layout."""
    shape, generator = SHAPES["small"], torch.Generator().manual_seed(seed)
    hidden, values = shape["hidden_size"], shape["num_key_value_heads"] * 64
    weights = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, size in (("q_proj", hidden), ("k_proj", values), ("v_proj", values), ("o_proj", hidden)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{stem}.lora_A.weight"] = (
                torch.randn(RANK, hidden, generator=generator, dtype=torch.bfloat16) * 0.02
            )
            weights[f"{stem}.lora_B.weight"] = torch.randn(size, RANK, generator=generator, dtype=torch.bfloat16) * 0.02
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "adapter_model.safetensors")
    (out / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "r": RANK,
                "lora_alpha": 2 * RANK,
                "lora_dropout": 0.0,
                "bias": "none",
                "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
                "base_model_name_or_path": "small-llama",
            }
        )
    )


def main(folder: str) -> None:
    """Write the model and the adapters."""
    torch.manual_seed(0)
    window_model(Path(folder) / "window-mistral")
    for number in range(ADAPTERS):
        adapter(Path(folder) / f"adapter-{number}", number)


if __name__ == "__main__":
    main(sys.argv[1])
