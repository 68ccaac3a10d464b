"""Bytes, blocks and capacity of the KV cache per GPU, as vLLM lays it out.

``bytes per token`` is the cost of one more token of a request once sliding windows are full. It fully describes a
model with one kind of layers; hybrid models need ``CacheLayout.blocks`` (a linear model is wrong for them).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from math import ceil
from typing import Final

from kvpressure.capacity.shapes import Layer, ModelShape
from kvpressure.errors import InputError, shown

DEFAULT_BLOCK_SIZE: Final = 16
_DS_MLA_VECTOR: Final = 576  # 512 latent + 64 rotary: the only shape of the *_ds_mla formats

_Type = tuple[str, int | None]  # kind, window
_PlainBytes = Callable[[int, int, int], Fraction]


def _scaled(size: Fraction) -> _PlainBytes:
    return lambda k, v, _model: size * (k + v)


def _per_token_head(bits: int) -> _PlainBytes:
    """Quantised with one fp32 scale per key and per value of a head."""
    return lambda k, v, _model: Fraction(bits * (k + v), 8) + 8


#: Bytes of one head and token from (head_size_k, head_size_v, bytes of the model's element).
_HEAD_BYTES: Final[Mapping[str, _PlainBytes]] = {
    "auto": lambda k, v, model: Fraction(model * (k + v)),
    **dict.fromkeys(("bfloat16", "float16", "half"), _scaled(Fraction(2))),
    "float32": _scaled(Fraction(4)),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"), _scaled(Fraction(1))),
    **dict.fromkeys(("int8_per_token_head", "fp8_per_token_head"), _per_token_head(8)),
    "int4_per_token_head": _per_token_head(4),
    "nvfp4": _scaled(Fraction(1, 2) + Fraction(1, 16)),  # half a byte and an fp8 scale for every 16
}
#: Bytes of one token and layer of DeepSeek's 576-element vector.
_MLA_ONLY: Final = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
_MLA_PLAIN: Final = ("auto", "bfloat16", "float16", "half", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")

CACHE_DTYPES: Final = (*_HEAD_BYTES, *_MLA_ONLY)


@dataclass(frozen=True, slots=True)
class Parallel:
    """Tensor, pipeline and decode-context parallel sizes."""

    tensor: int = 1
    pipeline: int = 1
    decode_context: int = 1

    def __post_init__(self) -> None:
        if min(self.tensor, self.pipeline, self.decode_context) < 1:
            raise InputError("a parallel size is below 1; allowed: whole numbers of 1 or more")
        if self.tensor % self.decode_context:
            raise InputError(
                f"decode-context parallel {self.decode_context} is not allowed; allowed: a divisor of the tensor "
                f"parallel size {self.tensor}"
            )


def refuse_parallel(shape: ModelShape, parallel: Parallel) -> None:
    """Raise ``InputError`` for sizes with which vLLM refuses to start: every rank needs equally many query heads,
    and equally many KV heads or a shared one. MLA's vector is on every rank, so only its query heads count.
    """
    tensor, heads = parallel.tensor, shape.attention_heads
    if heads is not None and heads % tensor:
        raise InputError(
            f"tensor parallel {tensor}: {shape.name} has {heads} attention heads; allowed: a divisor of {heads}"
        )
    context = parallel.decode_context
    for kv_heads in sorted({layer.kv_heads for layer in shape.layers if layer.kind not in ("mla", "indexer")}):
        if kv_heads % tensor and tensor % kv_heads:
            raise InputError(
                f"tensor parallel {tensor}: {shape.name} has {kv_heads} KV heads; allowed: a divisor or a multiple of"
                f" {kv_heads}"
            )
        copies = max(1, tensor // kv_heads)
        if context > copies:
            raise InputError(
                f"decode-context parallel {context}: {shape.name} has {kv_heads} KV heads, of which tensor parallel"
                f" {tensor} keeps copies: {copies}; allowed: at most as many"
            )
        if heads is not None and (heads // kv_heads) % context:
            raise InputError(
                f"decode-context parallel {context}: {shape.name} has {heads // kv_heads} attention heads for each KV"
                " head; allowed: a divisor of that number"
            )


def layer_bytes(layer: Layer, tensor_parallel: int, cache_dtype: str, model_bytes: int = 2) -> Fraction:
    """Bytes of one token in one layer on one GPU. Raises ``InputError`` for a dtype that the layer does not
    support.
    """
    if cache_dtype not in CACHE_DTYPES:
        raise InputError(f"cache dtype {shown(cache_dtype)} is not allowed; allowed: {', '.join(CACHE_DTYPES)}")
    if layer.kind == "indexer":
        return Fraction(layer.head_size_k)
    if layer.kind == "mla":
        if cache_dtype in _MLA_ONLY:
            if layer.head_size_k != _DS_MLA_VECTOR:
                raise InputError(
                    f"cache dtype {cache_dtype}: the model's vector has {layer.head_size_k} elements; "
                    f"allowed: {_DS_MLA_VECTOR}"
                )
            return Fraction(_MLA_ONLY[cache_dtype])
        if cache_dtype not in _MLA_PLAIN:
            raise InputError(
                f"cache dtype {cache_dtype} is not for models with MLA; allowed: {', '.join((*_MLA_PLAIN, *_MLA_ONLY))}"
            )
    elif cache_dtype in _MLA_ONLY:
        raise InputError(f"cache dtype {cache_dtype} is only for models with MLA; allowed: {', '.join(_HEAD_BYTES)}")
    heads = max(1, layer.kv_heads // tensor_parallel)
    return heads * _HEAD_BYTES[cache_dtype](layer.head_size_k, layer.head_size_v, model_bytes)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share block tables. A request takes blocks in every group. ``kind`` is full (MLA included), sliding
    or chunked; ``layers`` are indices into the shape's.
    """

    kind: str
    window: int | None
    layers: tuple[int, ...]
    block_size: int

    def blocks(self, tokens: int, in_flight: int, decode_context: int) -> int:
        """Blocks that a request of ``tokens`` holds while ``in_flight`` tokens are being computed (1 = decoding)."""
        if self.kind == "sliding" and self.window is not None:
            return ceil(min(self.window - 1 + in_flight, tokens) / self.block_size) + 1
        if self.kind == "chunked" and self.window is not None:
            return ceil(min(self.window + in_flight, tokens) / self.block_size)
        return ceil(tokens / (self.block_size * decode_context))


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The cache of one GPU. ``block_bytes`` is one block of the pool on the fullest pipeline stage, which decides
    for all. Groups share the pool; ``uniform`` = one group.
    """

    groups: tuple[LayerGroup, ...]
    block_size: int
    block_bytes: int
    decode_context: int

    @property
    def uniform(self) -> bool:
        """Whether tokens and blocks are proportional."""
        return len(self.groups) == 1 and self.groups[0].kind not in ("sliding", "chunked")

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one more token of a request costs. For hybrid models: beyond the windows, where only the
        full-attention layers grow (padding included). For sliding layers only: within the window.
        """
        growing = sum(group.kind == "full" for group in self.groups) or len(self.groups)
        return self.block_bytes * growing / (self.block_size * self.decode_context)

    def blocks(self, tokens: int, in_flight: int = 1) -> int:
        """Blocks of the pool that one request of ``tokens`` tokens holds."""
        return sum(group.blocks(tokens, in_flight, self.decode_context) for group in self.groups)

    def request_bytes(self, tokens: int, in_flight: int = 1) -> int:
        """Bytes that one request of ``tokens`` tokens holds on each GPU."""
        return self.blocks(tokens, in_flight) * self.block_bytes

    def pool_blocks(self, pool_bytes: int) -> int:
        """Blocks of a pool of this many bytes; vLLM keeps one of them for itself."""
        return max(0, pool_bytes) // self.block_bytes

    def capacity_tokens(self, blocks: int, max_model_len: int, in_flight: int = 1) -> int:
        """``kv_cache_size_tokens`` and the logged "GPU KV cache size" of a pool of ``blocks`` blocks."""
        return int(self.max_concurrency(blocks, max_model_len, in_flight) * max_model_len)

    def max_concurrency(self, blocks: int, max_model_len: int, in_flight: int = 1) -> float:
        """The logged "Maximum concurrency for N tokens per request"."""
        return blocks / self.blocks(max_model_len, in_flight)

    def longest(self, blocks: int, limit: int, in_flight: int = 1) -> int:
        """The longest request up to ``limit`` tokens that ``blocks`` blocks hold, vLLM's own block set aside."""
        too_long = bisect_right(range(limit + 1), blocks - 1, key=lambda tokens: self.blocks(tokens, in_flight))
        return max(0, too_long - 1)


def layout(
    shape: ModelShape,
    parallel: Parallel = Parallel(),
    cache_dtype: str = "auto",
    block_size: int = DEFAULT_BLOCK_SIZE,
    *,
    hybrid_manager: bool = True,
) -> CacheLayout:
    """How vLLM lays the cache out. ``hybrid_manager`` False = ``--disable-hybrid-kv-cache-manager``: every layer is
    kept like full attention. Raises ``InputError`` for a combination that vLLM refuses.
    """
    if block_size < 1:
        raise InputError(f"block size {block_size} is not allowed; allowed: a whole number of 1 or more")
    refuse_parallel(shape, parallel)
    stages = _stages(shape.num_layers, parallel.pipeline)
    if hybrid_manager and parallel.decode_context > 1 and any(layer.window for layer in shape.layers):
        raise InputError(
            f"decode-context parallel {parallel.decode_context}: {shape.name} has sliding-window layers; allowed: 1"
        )
    by_type: dict[_Type, list[int]] = {}
    for index, layer in enumerate(shape.layers):
        full = not hybrid_manager or layer.window is None
        by_type.setdefault(("full", None) if full else (layer.kind, layer.window), []).append(index)
    pages = [layer_bytes(layer, parallel.tensor, cache_dtype, shape.dtype_bytes) * block_size for layer in shape.layers]
    if len(by_type) == 1:
        (((kind, window), members),) = by_type.items()
        group = LayerGroup(kind, window, tuple(members), block_size)
        per_stage = [sum((pages[i] for i in members if shape.positions[i] in stage), Fraction()) for stage in stages]
        return CacheLayout((group,), block_size, ceil(max(per_stage)), parallel.decode_context)
    return _grouped(shape, by_type, pages, stages, block_size, parallel.decode_context)


def _grouped(
    shape: ModelShape,
    by_type: Mapping[_Type, Sequence[int]],
    pages: Sequence[Fraction],
    stages: Sequence[range],
    block_size: int,
    decode_context: int,
) -> CacheLayout:
    """Groups of equally many layers of one type; the last of a type may be padded."""
    counts = [len(members) for members in by_type.values()]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    largest = max(pages)
    groups: list[LayerGroup] = []
    for (kind, window), members in by_type.items():
        page = pages[members[0]]
        if any(pages[i] != page for i in members) or (largest / page).denominator != 1:
            raise InputError(
                "the KV cache cannot be computed: the layers' cache page sizes are not multiples of one another; read "
                "the label kv_cache_size_tokens in the server's metrics instead"
            )
        number = ceil(len(members) / size)
        groups += [
            LayerGroup(kind, window, tuple(members[g::number]), block_size * int(largest / page)) for g in range(number)
        ]
    deepest = max(sum(shape.positions[i] in stage for i in group.layers) for group in groups for stage in stages)
    return CacheLayout(tuple(groups), block_size, deepest * ceil(largest), decode_context)


def _stages(layers: int, pipeline: int) -> list[range]:
    """Layers of each pipeline stage: evenly, with the remainder in the stages before the last."""
    if pipeline > layers:
        raise InputError(
            f"pipeline parallel {pipeline} is not allowed; allowed: up to the {layers} layers of the model"
        )
    size, more = divmod(layers, pipeline)
    longer = range(pipeline - 1 - more, pipeline - 1)
    ends = accumulate(size + (stage in longer) for stage in range(pipeline))
    return [range(start, end) for start, end in pairwise((0, *ends))]


def pool_bytes(
    shape: ModelShape,
    num_gpu_blocks: int,
    parallel: Parallel = Parallel(),
    cache_dtype: str = "auto",
    block_size: int = DEFAULT_BLOCK_SIZE,
) -> int:
    """Bytes of the KV pool on each GPU from the number of its blocks (of one engine, not summed over several)."""
    return num_gpu_blocks * layout(shape, parallel, cache_dtype, block_size).block_bytes
