"""Batches of KV events as vLLM and SGLang send them, in MessagePack: arrays up to vLLM 0.23, maps from 0.26.

Only wanted fields are decoded, token ids never. What identifies tenants becomes a number of 20 bits, keyed anew in each
process, so that it cannot be confirmed.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Any, Final

import msgspec

from kvpressure.kvevents.contents import BAD_EVENTS, CLEARED, GPU, REMOVED, STORED, Event
from kvpressure.kvevents.holders import NONE
from kvpressure.sources.base import SourceError

_NAME_CHARS: Final = 256
_BOUND: Final = msgspec.Meta(
    max_length=32_768
)  # checked before memory is taken; a step stores and evicts 16 384 SGLang pages
_KEY: Final = secrets.token_bytes(32)


class _Keys(msgspec.Struct, array_like=True):
    """What tells blocks of the same tokens apart: of the first block only."""

    first: Annotated[list[msgspec.Raw], _BOUND] | None = None


class _WireEvent(msgspec.Struct):
    """What is wanted of an event of any kind."""

    type: str
    block_hashes: Annotated[list[int | bytes], _BOUND] = msgspec.field(default_factory=list)
    parent_block_hash: int | bytes | None = None
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: _Keys | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: str | None = None


_ROWS: Final[Mapping[str, tuple[str, ...]]] = {
    STORED: (
        *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind"),
    ),
    REMOVED: ("type", "block_hashes", "medium", "group_idx"),
    CLEARED: ("type",),
}
"""Fields of events that are arrays, in their order."""


_Row = _WireEvent | Annotated[list[msgspec.Raw], msgspec.Meta(max_length=64)]


class _Batch(msgspec.Struct, array_like=True):
    time: float
    events: Annotated[list[_Row], _BOUND]


class _RawBatch(msgspec.Struct, array_like=True):
    time: float
    events: Annotated[list[msgspec.Raw], _BOUND]


_AT_ONCE_BYTES: Final = 96 * 1024  # a step of 16 384 tokens; what a larger batch contains is decoded event by event
_BATCH: Final = msgspec.msgpack.Decoder(_Batch)
_RAW_BATCH: Final = msgspec.msgpack.Decoder(_RawBatch)
_EVENT: Final[msgspec.msgpack.Decoder[_Row]] = msgspec.msgpack.Decoder(_Row)
_TEXT_BYTES: Final = (*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB)  # with which MessagePack begins a text
_TEXT: Final = msgspec.msgpack.Decoder(str)
_DECODERS: Final = {field.name: msgspec.msgpack.Decoder(field.type) for field in msgspec.structs.fields(_WireEvent)}


def decode(payload: bytes | bytearray) -> tuple[float, Iterator[Event]]:
    """Time (Unix seconds) and events of a batch, without those of kinds that no release had yet. Both raise
    ``SourceError``, without what the payload contains.
    """
    try:
        batch = (_BATCH if len(payload) <= _AT_ONCE_BYTES else _RAW_BATCH).decode(payload)
    except (msgspec.MsgspecError, RecursionError):
        raise SourceError(BAD_EVENTS) from None
    return batch.time, _events(batch.events)


def _events(rows: Sequence[_Row | msgspec.Raw]) -> Iterator[Event]:
    try:
        for row in rows:
            event = _event(_EVENT.decode(row) if isinstance(row, msgspec.Raw) else row)
            if event is not None:
                yield event
    except (msgspec.MsgspecError, LookupError, RecursionError):
        raise SourceError(BAD_EVENTS) from None


def _event(row: _WireEvent | list[msgspec.Raw]) -> Event | None:
    given = row if isinstance(row, _WireEvent) else _of_array(row)
    if given.type not in _ROWS:
        return None
    adapter = given.lora_name or (NONE if given.lora_id is None else f"id {given.lora_id}")
    return Event(
        given.type,
        _numbers(given.block_hashes),
        None if given.parent_block_hash is None else _numbers([given.parent_block_hash])[0],
        adapter[:_NAME_CHARS],
        _salt(given),
        given.block_size,
        given.medium or GPU,
        given.group_idx,
        given.kv_cache_spec_kind,
    )


def _of_array(row: list[msgspec.Raw]) -> _WireEvent:
    names = _ROWS.get(_DECODERS["type"].decode(row[0]), ("type",))
    return _WireEvent(
        **{name: _DECODERS[name].decode(raw) for name, raw in zip(names, row, strict=False) if name in _DECODERS}
    )


def _numbers(hashes: Sequence[Any]) -> Sequence[int]:
    """Hashes as numbers: the last 64 bits of longer ones, as the engines shorten them."""
    if bytes not in map(type, hashes):
        return hashes
    return [int.from_bytes(one[-8:]) if isinstance(one, bytes) else one for one in hashes]


def _salt(given: _WireEvent) -> int | None:
    """The salt as a number, 0 = none; ``None`` where it is that of the block before. Of the keys of a request's first
    block, the salt is the text that is not the adapter's name: images are pairs, embeddings bytes.
    """
    if given.cache_salt is None and given.parent_block_hash is not None:
        return None
    first = (given.extra_keys and given.extra_keys.first) or ()
    texts = (_TEXT.decode(key) for key in first if memoryview(key)[0] in _TEXT_BYTES)
    salts = (given.cache_salt, *(text for text in texts if text != given.lora_name))
    return next((_keyed(salt) for salt in salts if salt is not None), 0)


def _keyed(salt: str) -> int:
    return int.from_bytes(blake2b(salt.encode(errors="replace"), key=_KEY, digest_size=3).digest()) >> 4 or 1
