"""Make a random Llama and its tokenizer in a folder: nothing is downloaded. Runs inside .vllm.

Usage: make_model.py DIR tiny|small. "tiny" has 0.6 M parameters (about 2 ms a step), "small" 77 M (20-40 ms a step on
two cores, like a large model on a GPU).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<pad>", "<unk>"]
VOCABULARY = 1024
SHAPES = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
    "small": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
}


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE over made-up sentences."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator((f"request {i} asks for page {i % 97} of volume {i % 13}" for i in range(4000)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=SPECIAL[0], eos_token=SPECIAL[1], pad_token=SPECIAL[2], unk_token=SPECIAL[3]
    )


def main(out: str, size: str) -> None:
    """Write tokenizer, configuration and random weights."""
    torch.manual_seed(0)
    tokenizer().save_pretrained(out)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        head_dim=64,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
        **SHAPES[size],
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out, safe_serialization=True)
    print(f"{size} model in {Path(out).resolve().name}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
