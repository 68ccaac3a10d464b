"""What a model stores per token, layer by layer, read from its ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from kvpressure.errors import InputError, refused_file, shown
from kvpressure.files import read_file
from kvpressure.model import ceilings
from kvpressure.parsed import json_of

Kind = Literal["full", "sliding", "chunked", "mla", "indexer"]

MAX_LAYERS: Final = 2048
_MAX_CONFIG_BYTES: Final = 4_000_000
_INDEXER_SCALE_BYTES: Final = 4  # one fp32 scale beside the fp8 key of DeepSeek's sparse-attention indexer

# : Keys of models that keep a recurrent state instead of (or beside) a KV cache; its size is not computed here, and
# their other layers
#: only where the configuration says which they are.
_RECURRENT_KEYS: Final = (
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_num_key_heads",
    "linear_attn_config",
    "attn_layer_period",
)
#: Keys by which layers differ in a way that is not computed: head sizes, KV heads or compressed caches of their own.
_UNEVEN_KEYS: Final = (
    "block_configs",
    "global_head_dim",
    "num_global_key_value_heads",
    "swa_head_dim",
    "swa_num_key_value_heads",
    "attention_other_setting",
    "compress_ratios",
    "sparse_attention_config",
)
_RECURRENT_TYPES: Final = frozenset({"linear_attention", "mamba", "mamba2", "recurrent", "conv", "kda"})
_ATTENTION_TYPES: Final = frozenset({"attention", "full_attention", "hybrid"})
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KIND_BY_LAYER_TYPE: Final[Mapping[str, Kind]] = {
    "full_attention": "full",
    "attention": "full",
    "global": "full",
    "sliding_attention": "sliding",
    "sliding_window": "sliding",
    "local": "sliding",
    "chunked_attention": "chunked",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """KV of one layer. ``kv_heads`` is the whole model's, before tensor parallelism. For ``mla`` and ``indexer``
    ``kv_heads`` is 1 and ``head_size_k`` the length of the one shared vector (for ``indexer``: bytes), which every
    rank holds. ``window`` is the sliding window or the chunk in tokens.
    """

    kind: Kind
    kv_heads: int
    head_size_k: int
    head_size_v: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's shape, as far as memory depends on it. ``layers``: in order; an MLA model with an indexer has two
    entries per layer. ``positions``: transformer layer of each entry. ``max_model_len``: context of the configuration;
    ``attention_heads``: query heads (None = unknown). ``recurrent_layers``: layers with a fixed-size state per request,
    which are not in ``layers``.
    """

    name: str
    layers: tuple[Layer, ...]
    positions: tuple[int, ...]
    num_layers: int
    max_model_len: int | None
    attention_heads: int | None
    dtype_bytes: int
    config: Mapping[str, Any]
    recurrent_layers: int = 0


def load(path: Path) -> ModelShape:
    """The shape from a ``config.json`` or a directory that holds one. Raises ``InputError``."""
    file = path
    try:
        file = path / "config.json" if path.is_dir() else path
        text = read_file(file, _MAX_CONFIG_BYTES + 1, pipe=True)
    except OSError as error:
        raise InputError(refused_file(str(file), error, "a model's config.json")) from error
    if len(text) > _MAX_CONFIG_BYTES:
        raise InputError(f"{file}: larger than {_MAX_CONFIG_BYTES} bytes; allowed: a model's config.json")
    config = json_of(text)
    if not isinstance(config, dict):
        raise InputError(f"{file}: no JSON object; allowed: a model's config.json")
    folder = file.resolve().parent.name
    return from_config(config, folder if file.name == "config.json" else file.stem, str(file))


def from_config(config: Mapping[str, Any], name: str, where: str = "") -> ModelShape:
    """The shape that a Hugging Face configuration describes. Raises ``InputError`` for what vLLM stores in a form that
    is not computed here.
    """
    fields = _Fields(text_config(config), where or name)
    fields.refuse_unsupported()
    count = fields.integer("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if count > MAX_LAYERS:
        raise InputError(f"{fields.where}: num_hidden_layers {count} is not allowed; allowed: up to {MAX_LAYERS}")
    per_layer = _mla_layers(fields) if fields.has("kv_lora_rank") and fields.has("qk_rope_head_dim") else None
    attending, recurrent = _attending(fields, count)
    kinds: Sequence[_KindWindow] = _kinds(fields, count) if attending is None else [("full", None)] * count
    plain = None if per_layer is not None else _attention(fields)
    shared = fields.optional("num_kv_shared_layers") or 0
    if shared >= count:
        raise InputError(
            f"{fields.where}: num_kv_shared_layers {shared} is not allowed; allowed: fewer than the {count} layers"
        )
    layers: list[Layer] = []
    positions: list[int] = []
    for position in range(count - shared):
        if attending is not None and position not in attending:
            continue
        kind, window = kinds[position]
        entries = per_layer or (Layer(kind, *(plain or (1, 1, 1)), window),)
        layers += entries
        positions += [position] * len(entries)
    length = fields.optional("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
    return ModelShape(
        name,
        tuple(layers),
        tuple(positions),
        count,
        length,
        fields.optional(*_HEADS),
        _dtype_bytes(fields),
        fields.values,
        recurrent,
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a multimodal configuration, with the keys beside it as fall-back."""
    for key in ("text_config", "llm_config", "language_config", "thinker_config"):
        inner = config.get(key)
        if isinstance(inner, Mapping):
            return text_config({**{k: v for k, v in config.items() if k != key}, **inner})
    return config


def number_of(config: Mapping[str, Any], *names: str) -> int:
    """The first of the named integers that is given and above 0; 0 without one. What is no such number is passed over,
    unlike by ``from_config``.
    """
    return next((number for name in names if (number := ceilings.whole(config.get(name), ceilings.LABEL))), 0)


class _Fields:
    """Access to a configuration, with errors that name the place."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def optional(self, *names: str) -> int | None:
        """The first present of the named integers; 0 counts as absent."""
        for name in names:
            value = self.values.get(name)
            if value is None or value is False:
                continue
            number = ceilings.whole(value, 10**9)
            if number is None:
                raise InputError(
                    f"{self.where}: {name} is {shown(value)}; allowed: a whole number from 0 to 1000000000"
                )
            if number:
                return number
        return None

    def integer(self, *names: str) -> int:
        found = self.optional(*names)
        if found is None:
            raise InputError(f"{self.where}: {names[0]} is missing; needed: a positive whole number")
        return found

    def refuse_unsupported(self) -> None:
        """Raise for models whose memory the formulas do not describe."""
        if self.values.get("is_encoder_decoder") is True:
            raise InputError(f"{self.where}: encoder-decoder models are not supported; allowed: decoder models")
        uneven = next((key for key in _UNEVEN_KEYS if self.has(key)), None)
        if uneven is not None:
            raise InputError(f"{self.where}: {uneven}: layers of different shape are not computed")


def _attending(fields: _Fields, count: int) -> tuple[frozenset[int] | None, int]:
    """The layers with attention of a model that has layers with a recurrent state, and how many those are; ``None`` =
    it has none.

    Raises ``InputError`` where there are such layers, or unknown ones, and the configuration does not say which.
    """
    kinds = _layer_kinds(fields, count)
    if kinds is None:
        sign = next((key for key in _RECURRENT_KEYS if fields.has(key)), None)
        if sign is None:
            return None, 0
        raise _not_computed(fields, sign)
    if len(kinds) < count:
        raise InputError(f"{fields.where}: {len(kinds)} layers are described; needed: {count}")
    attending = frozenset(i for i, kind in enumerate(kinds[:count]) if kind == "attention")
    recurrent = kinds[:count].count("recurrent")
    if not attending:
        raise _not_computed(fields, "no layer with attention")
    return attending, recurrent


def _not_computed(fields: _Fields, sign: str) -> InputError:
    return InputError(
        f"{fields.where}: {sign}: layers with a recurrent or unknown state are not computed; "
        "read the label kv_cache_size_tokens in the server's metrics instead"
    )


def _layer_kinds(fields: _Fields, count: int) -> list[str] | None:
    """``attention``, ``recurrent`` or ``none`` for each layer of a model that mixes them; ``None`` where
    nothing says it does.
    """
    pattern = fields.values.get("hybrid_override_pattern")
    if isinstance(pattern, str):  # M = Mamba, * = attention, - and E = feed forward
        return [{"*": "attention", "M": "recurrent"}.get(sign, "none") for sign in pattern]
    for key in ("layer_types", "layers_block_type"):
        types = fields.values.get(key)
        if not isinstance(types, list) or all(isinstance(t, str) and t in _KIND_BY_LAYER_TYPE for t in types):
            continue
        unknown = next(
            (t for t in types if not isinstance(t, str) or t not in _RECURRENT_TYPES | _ATTENTION_TYPES), None
        )
        if unknown is not None:
            raise _not_computed(fields, str(unknown)[:50])
        return ["recurrent" if t in _RECURRENT_TYPES else "attention" for t in types]
    interval, period = fields.optional("full_attention_interval"), fields.optional("attn_layer_period")
    if fields.has("linear_num_key_heads") and interval:
        return ["attention" if (i + 1) % interval == 0 else "recurrent" for i in range(count)]
    if period:
        offset = fields.optional("attn_layer_offset") or 0
        return ["attention" if i % period == offset else "recurrent" for i in range(count)]
    return None


def _dtype_bytes(fields: _Fields) -> int:
    """Bytes of the model's own element type as vLLM runs it: float32 checkpoints are run in 16 bits."""
    name = str(fields.values.get("dtype") or fields.values.get("torch_dtype") or "bfloat16")
    if name.removeprefix("torch.") not in ("bfloat16", "float16", "float32", "auto", "half"):
        raise InputError(f"{fields.where}: dtype is {shown(name)}; allowed: bfloat16, float16 or float32")
    return 2


def _attention(fields: _Fields) -> tuple[int, int, int]:
    """KV heads and the sizes of a key and a value."""
    heads = fields.integer(*_HEADS)
    head = fields.optional("head_dim")
    if head is None:
        hidden = fields.integer("hidden_size", "n_embd", "d_model")
        if hidden % heads:
            raise InputError(f"{fields.where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        head = hidden // heads
    return _kv_heads(fields, heads), head, fields.optional("v_head_dim") or head


def _kv_heads(fields: _Fields, heads: int) -> int:
    nested = fields.values.get("attn_config")
    inner = (
        _Fields(nested, f"{fields.where}: attn_config").optional("kv_n_heads") if isinstance(nested, Mapping) else None
    )
    multi_query = fields.values.get("multi_query") is True and fields.values.get("new_decoder_architecture") is not True
    return (
        fields.optional("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
        or inner
        or (1 if multi_query else heads)
    )


def _mla_layers(fields: _Fields) -> tuple[Layer, ...]:
    latent = Layer("mla", 1, fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim"), 0)
    if not fields.has("index_topk"):
        return (latent,)
    return latent, Layer("indexer", 1, fields.integer("index_head_dim") + _INDEXER_SCALE_BYTES, 0)


_KindWindow = tuple[Kind, int | None]


def _kinds(fields: _Fields, count: int) -> Sequence[_KindWindow]:
    """Kind and window of every layer."""
    window = None if fields.values.get("use_sliding_window") is False else fields.optional("sliding_window")
    context = fields.optional("max_position_embeddings")
    if window is not None and context is not None and window >= context:
        window = None  # as wide as a request can be
    chunk = fields.optional("attention_chunk_size")
    types = fields.values.get("layer_types")
    if isinstance(types, list) and types:
        if len(types) < count:
            raise InputError(f"{fields.where}: layer_types has {len(types)} entries; needed: {count}")
        return [_kind_of(fields, str(types[i]), window, chunk) for i in range(count)]
    if chunk is not None and (fields.has("no_rope_layers") or fields.values.get("model_type") == "llama4_text"):
        interval = fields.optional("no_rope_layer_interval") or 4
        flags = fields.values.get("no_rope_layers") or [(i + 1) % interval for i in range(count)]
        if not isinstance(flags, list) or len(flags) < count:  # Llama 4: 0 = no rotary positions = sees all
            raise InputError(f"{fields.where}: no_rope_layers is not a list of {count} numbers")
        return [("chunked", chunk) if flag else ("full", None) for flag in flags[:count]]
    if window is None:
        return [("full", None)] * count
    return _by_pattern(fields, window, count)


def _kind_of(fields: _Fields, name: str, window: int | None, chunk: int | None) -> _KindWindow:
    kind = _KIND_BY_LAYER_TYPE[name]
    size = {"sliding": window, "chunked": chunk}.get(kind)
    if kind == "full":
        return "full", None
    if size is None:
        raise InputError(f"{fields.where}: layer_types has {shown(name)} but there is no window size")
    return kind, size


def _by_pattern(fields: _Fields, window: int, count: int) -> Sequence[_KindWindow]:
    """Models that alternate by a rule of their own instead of listing their layers."""
    pattern = fields.optional("sliding_window_pattern")
    if pattern is None:
        pattern = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4}.get(str(fields.values.get("model_type")))
    first = fields.optional("max_window_layers") if fields.values.get("use_sliding_window") is True else None
    if pattern is not None:
        return [("full", None) if (i + 1) % pattern == 0 else ("sliding", window) for i in range(count)]
    return [("full", None) if first is not None and i < first else ("sliding", window) for i in range(count)]
