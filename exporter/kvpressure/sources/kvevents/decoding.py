"""Batches of KV events as vLLM and SGLang send them, in MessagePack: arrays up to vLLM 0.23, maps from 0.26.

Token ids are not decoded. What identifies tenants becomes a number of 20 bits, keyed anew in each process, so that it
cannot be confirmed.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec

from kvpressure.kvevents.contents import BAD_EVENTS, GPU, Cleared, Event, Removed, Stored
from kvpressure.kvevents.holders import NONE
from kvpressure.sources.base import SourceError

_MOST: Final = 2**64 - 1
_NAME_CHARS: Final = 256
_KEY: Final = secrets.token_bytes(32)

_Block = int | bytes


class _StoredMap(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: list[_Block]
    parent_block_hash: _Block | None = None
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: str | None = None


class _RemovedMap(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[_Block]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _StoredRow(msgspec.Struct, tag="BlockStored", array_like=True, gc=False):
    block_hashes: list[_Block]
    parent_block_hash: _Block | None
    token_ids: msgspec.Raw  # skipped
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None

    cache_salt = None


class _RemovedRow(msgspec.Struct, tag="BlockRemoved", array_like=True, gc=False):
    block_hashes: list[_Block]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedRow(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


_Row = _StoredMap | _RemovedMap | _ClearedMap | _StoredRow | _RemovedRow | _ClearedRow


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_StoredMap | _RemovedMap | _ClearedMap]


class _BatchOfRows(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_StoredRow | _RemovedRow | _ClearedRow]


class _BatchOfAny(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Any]


_DECODERS: Final[tuple[msgspec.msgpack.Decoder[Any], ...]] = (
    msgspec.msgpack.Decoder(_Batch),
    msgspec.msgpack.Decoder(_BatchOfRows),
)
_ANY: Final = msgspec.msgpack.Decoder(_BatchOfAny)
_TAGS: Final = ("BlockStored", "BlockRemoved", "AllBlocksCleared")


def decode(payload: bytes) -> tuple[float, list[Event]]:
    """Time (Unix seconds) and events of a batch. Raises ``SourceError``, without what the payload contains."""
    for decoder in _DECODERS:
        try:
            batch = decoder.decode(payload)
        except msgspec.MsgspecError:
            continue
        return batch.ts, [_event(row) for row in batch.events]
    return _without_new_kinds(payload)


def _without_new_kinds(payload: bytes) -> tuple[float, list[Event]]:
    """The batch without events of kinds that no release had yet."""
    try:
        batch = _ANY.decode(payload)
        tags = [row["type"] if isinstance(row, dict) else row[0] for row in batch.events]
        kept = [row for row, tag in zip(batch.events, tags, strict=True) if tag in _TAGS]
        if len(kept) < len(tags):
            return decode(msgspec.msgpack.encode([batch.ts, kept]))
    except (msgspec.MsgspecError, LookupError, TypeError, RecursionError):
        pass
    raise SourceError(BAD_EVENTS)


def _event(row: _Row) -> Event:
    if isinstance(row, _StoredMap | _StoredRow):
        parent = row.parent_block_hash
        adapter = NONE if row.lora_name is None and row.lora_id is None else row.lora_name or f"id {row.lora_id}"
        return Stored(
            _numbers(row.block_hashes),
            None if parent is None else _numbers([parent])[0],
            adapter[:_NAME_CHARS],
            _salt(row),
            row.block_size,
            row.medium or GPU,
            row.group_idx,
            row.kv_cache_spec_kind,
        )
    if isinstance(row, _RemovedMap | _RemovedRow):
        return Removed(_numbers(row.block_hashes), row.medium or GPU, row.group_idx)
    return Cleared()


def _numbers(hashes: Sequence[_Block]) -> Sequence[int]:
    """Hashes as numbers of 64 bits: the last of longer ones, as the engines shorten them."""
    try:
        if min(hashes, default=0) >= 0:  # type: ignore[operator]  # what is not a number raises
            return hashes  # type: ignore[return-value]  # all are numbers
    except TypeError:
        pass
    return [(int.from_bytes(one[-8:]) if isinstance(one, bytes) else one) & _MOST for one in hashes]


def _salt(row: _StoredMap | _StoredRow) -> int | None:
    """The salt as a number, 0 = none; ``None`` where it is that of the block before. Of the keys of a request's first
    block, the salt is the text that is not the adapter's name: images are pairs, embeddings bytes.
    """
    if row.cache_salt is not None:
        return _keyed(row.cache_salt)
    if row.parent_block_hash is not None:
        return None
    first = row.extra_keys[0] if row.extra_keys else None
    return next((_keyed(key) for key in first or () if isinstance(key, str) and key != row.lora_name), 0)


def _keyed(salt: str) -> int:
    return int.from_bytes(blake2b(salt.encode(errors="replace"), key=_KEY, digest_size=3).digest()) >> 4 or 1
