"""Models known by name: the parts of their published ``config.json`` that determine memory, with their sources.

``lab/model_shapes.py`` writes ``models.json`` from the published configurations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from kvpressure.capacity import shapes
from kvpressure.capacity.shapes import ModelShape, from_config
from kvpressure.errors import InputError, nearest, shown

FILE: Final = Path(__file__).with_name("models.json")
MAX_NAME: Final = 128  # characters of the longest name of a model that is looked at

_ENTRIES: Final[Mapping[str, Mapping[str, Any]]] = json.loads(FILE.read_text(encoding="utf-8"))
CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {key: entry["config"] for key, entry in _ENTRIES.items()}
)
_R1: Final = "deepseek-ai/DeepSeek-R1 README.md 00f3296a1439"
_CODER: Final = "Qwen2.5-Coder Technical Report, arXiv 2409.12186, section 2"
_SAME_SHAPE: Final[Mapping[str, tuple[str, str]]] = {
    "llama-3.3-70b": ("llama-3.1-70b", "meta-llama/llama-models models/llama3_3/MODEL_CARD.md 8c88b8c0d75d"),
    "deepseek-r1-distill-llama-8b": ("llama-3.1-8b", _R1),
    "deepseek-r1-distill-llama-70b": ("llama-3.1-70b", _R1),
    "deepseek-r1-distill-qwen-14b": ("qwen2.5-14b", _R1),
    "deepseek-r1-distill-qwen-32b": ("qwen2.5-32b", _R1),
    "qwq-32b": ("qwen2.5-32b", "README.md of Qwen/QwQ-32B: 64 layers, 40 heads for queries and 8 for keys and values"),
    "qwen2.5-coder-1.5b": ("qwen2.5-1.5b", _CODER),
    "qwen2.5-coder-3b": ("qwen2.5-3b", _CODER),
    "qwen2.5-coder-7b": ("qwen2.5-7b", _CODER),
    "qwen2.5-coder-14b": ("qwen2.5-14b", _CODER),
    "qwen2.5-coder-32b": ("qwen2.5-32b", _CODER),
    "deepseek-v3.1-terminus": ("deepseek-v3.1", "README.md of deepseek-ai/DeepSeek-V3.1-Terminus: structure as V3"),
    "deepseek-v3.2-exp": ("deepseek-v3.2", "deepseek-ai/DeepSeek-V3.2-Exp README.md 114c2cb47f8c"),
}
"""Models that their publishers made from another one by further training, which keeps its shape: the key of that one,
and where it is said.
"""

# Names that differ from those of another shape by a variant only.
_OWN_SHAPE: Final = frozenset({"mistral-7b-v0.1", "mistral-7b-instruct-v0.1"})  # with a sliding window
# What names of one shape end with: chat tuning, quantized weights, dates.
_VARIANT: Final = re.compile(
    r"([-.](hf|chat|instruct|it|pt|base|thinking|v0\.\d|fp8|fp8-dynamic|fp8-kv|kv|dynamic|static|pertensor|nvfp4|mxfp4|awq|gptq"
    r"|bnb|4bit|8bit|int[48]|w\d+a\d+|quantized|bf16|fp16|\d{4}))+$"
)
# The words among them that say how weights are stored, and the number of bits where a word has one.
_STORED: Final = re.compile(
    r"(?<![a-z0-9])(?:bf16|fp16|fp8|nvfp4|mxfp4|awq|gptq|bnb|quantized|int(\d)|(\d)bit|w(\d+)a\d+)(?![a-z0-9])"
)
_SIXTEEN_BITS: Final = frozenset({"bf16", "fp16"})
_QUANTIZATIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "fp8": {"quant_method": "fp8", "bits": 8},
    "nvfp4": {"quant_method": "nvfp4", "bits": 4},
    "awq": {"quant_method": "awq", "bits": 4},
}
_UNKNOWN_QUANTIZATION: Final[Mapping[str, Any]] = {"quant_method": "unknown"}


@cache
def _names() -> Mapping[str, str]:
    """Every name under which a model is known -> its key."""
    published = {str(entry["id"]).rsplit("/", 1)[-1].lower(): key for key, entry in _ENTRIES.items()}
    return {
        **{_VARIANT.sub("", name): key for name, key in published.items()},
        **published,
        **{name: key for name, (key, _) in _SAME_SHAPE.items()},
        **{k: k for k in CONFIGS},
    }


def known(name: str) -> str | None:
    """The key of a model whose shape is known: by the last part of a published name, without variants that
    keep the shape.
    """
    base = name.rstrip("/").rsplit("/", 1)[-1].lower()
    if len(base) > MAX_NAME or base in _OWN_SHAPE:
        return None
    for publisher in ("", "meta-", "nvidia-"):
        plain = base.removeprefix(publisher)
        found = _names().get(plain) or _names().get(_VARIANT.sub("", plain))
        if found is not None:
            return found
    return None


def find(text: str) -> tuple[ModelShape, Path | None]:
    """The model of a command line: a ``config.json``, a model's directory (then with its path), or a known name.
    Raises ``InputError``.
    """
    path = Path(text)
    try:
        there = bool(text) and path.exists()
    except OSError:  # too long for a name, or in a directory that may not be looked into
        there = known(text) is None and "/" in text
    if not there:
        return named(text), None
    return shapes.load(path), path


def named(name: str) -> ModelShape:
    """The shape of a model by its published name, ignoring case. Raises ``InputError``."""
    key = known(name)
    if key is None:
        near = nearest(name.rsplit("/", 1)[-1].lower(), CONFIGS)
        raise InputError(
            f"{shown(name)} is neither a file nor a known model; allowed: a config.json, a model's directory, or a "
            f"name that kvpressure capacity --help lists{f', such as {near}' if near else ''}"
        )
    config = {**CONFIGS[key], "quantization_config": _quantization(name, key)}
    return from_config(config, key)


def _quantization(name: str, key: str) -> Mapping[str, Any] | None:
    """How the weights of the model ``name``, which has the shape of ``key``, are stored, as a configuration says it:
    None = in 16 bits. By the words of the name; without any, as those that ``key`` was read from, unless their own name
    has such words.
    """
    own: Mapping[str, Any] | None = CONFIGS[key].get("quantization_config")
    stored = _stored(name)
    if not stored:
        return _UNKNOWN_QUANTIZATION if _stored(str(_ENTRIES[key]["id"])) - _SIXTEEN_BITS else own
    if stored <= _SIXTEEN_BITS:
        return None
    if own is not None and own.get("quant_method") in stored:
        return own
    with_bits = [found for word in sorted(stored) if (found := _of_word(word)) is not None]
    return with_bits[0] if len({found["bits"] for found in with_bits}) == 1 else _UNKNOWN_QUANTIZATION


def _stored(name: str) -> set[str]:
    return {found[0] for found in _STORED.finditer(name.rstrip("/").rsplit("/", 1)[-1].lower()[:MAX_NAME])}


def _of_word(word: str) -> Mapping[str, Any] | None:
    """The quantization that a word says; None for one without a number of bits."""
    found = _STORED.fullmatch(word)
    bits = next((int(group) for group in found.groups() if group), None) if found else None
    return {"quant_method": word, "bits": bits} if bits else _QUANTIZATIONS.get(word)
