"""Batches of KV events in every format that vLLM and SGLang had."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpressure.kvevents.contents import CLEARED, REMOVED, STORED, Contents, Event
from kvpressure.kvevents.holders import NONE
from kvpressure.sources.base import SourceError
from kvpressure.sources.kvevents.decoding import decode
from kvpressure.sources.kvevents.zmtp import MAX_FRAME_BYTES

BATCHES = defaultdict(list)
FIXTURES = Path(__file__).parents[2] / "fixtures/kv-events"
for line in (FIXTURES / "batches.jsonl").read_text().splitlines():
    row = json.loads(line)
    BATCHES[row["vllm"]].append(bytes.fromhex(row["payload"]))
WITH_SALT = {"0.20.0", "0.23.0", "0.26.0", "0.29.0", "0.31.0", "0.33.0"}


def batch(*events: object) -> bytes:
    return msgspec.msgpack.encode([1000.0, events, 0])


def listed(payload: bytes) -> list[Event]:
    return list(decode(payload)[1])


@pytest.mark.parametrize("version", BATCHES)
def test_every_version_tells_the_same_story(version):
    contents, resident = Contents(), []
    contents.begin("")
    contents.set_capacity(160)
    salted, loads_seen = False, []
    for payload in BATCHES[version]:
        (time, _), events = decode(payload), listed(payload)
        contents.take(time, events)
        resident.append(contents.reuse.resident)
        salted = salted or any(len(name) == 5 for name in contents.holders.shares(time + 1)[1])
        assert "1000" not in repr(events)  # the first token id
        loads_seen.append(not contents.counters())
    assert resident[:6] == [2, 3, 3, 2, 1, 2]
    assert resident[-1] == 0
    assert (contents.reuse.again, contents.block_size) == (1, 16)
    assert loads_seen[5:7] == [False, False] or version == "0.9.1"
    assert loads_seen[-1] == (version != "0.9.1")
    assert salted == (version in WITH_SALT)


def test_a_real_server_shares_its_cache_as_its_clients_say():
    contents, numbers = Contents(), []
    contents.begin("")
    with gzip.open(FIXTURES / "vllm-0.32-cpu.jsonl.gz", "rt") as lines:
        for line in lines:
            row = json.loads(line)
            contents.take(*decode(bytes.fromhex(row["payload"])))
            numbers.append(row["seq"])
    assert numbers == list(range(254))
    assert (contents.reason, contents.reuse.resident) == ("", 509)
    adapters, salts = contents.holders.shares(2e9)  # long after: the mean is the present
    assert adapters == pytest.approx({"a": 0.409, NONE: 0.252, "c": 0.227, "b": 0.112}, abs=0.005)
    assert sorted(salts.values()) == pytest.approx([0.117, 0.362, 0.521], abs=0.005)


def test_what_sglang_adds_is_read():
    event = {"type": "BlockStored", "block_hashes": [-2, 3], "parent_block_hash": None, "block_size": 64}
    event |= {"token_ids": [1], "medium": "GPU"}
    (stored,) = listed(batch({**event, "cache_salt": "tenant", "lora_name": "legal", "session_id": "s"}))
    assert (stored.blocks, stored.adapter, stored.block_size) == ([-2, 3], "legal", 64)
    assert stored.salt == listed(batch({**event, "cache_salt": "tenant"}))[0].salt
    assert stored.salt != listed(batch({**event, "cache_salt": "other"}))[0].salt


def test_the_salt_is_told_from_adapter_images_and_embeddings():
    keys = [["legal", ["image", 0], b"embeddings", "tenant"], None]
    event = {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "block_size": 16}
    salts = [
        listed(batch({**event, "lora_name": name, "extra_keys": extra}))[0].salt
        for name, extra in (("legal", keys), (None, [["tenant"]]), ("legal", [["legal"], None]))
    ]
    assert salts[0] == salts[1] != salts[2] == 0


def test_a_kind_of_event_that_is_new_is_skipped():
    events = [
        {"type": "BlockMoved", "x": 1},
        {"type": "BlockRemoved", "block_hashes": [7]},
        {"type": "AllBlocksCleared"},
    ]
    assert listed(batch(*events)) == [Event(REMOVED, [7]), Event(CLEARED, [])]
    assert listed(batch(["BlockMoved", 1], ["BlockRemoved", [7]])) == [Event(REMOVED, [7])]


def filled(row: bytes, around: bytes = b"") -> bytes:
    """A batch of the most bytes that consists of one row again and again."""
    count = (MAX_FRAME_BYTES - 100) // len(row)
    return msgspec.msgpack.encode([1000.0, []])[:-1] + around + b"\xdd" + count.to_bytes(4) + row * count


STORED_KEYS = b"\x91\x82\xa4type\xabBlockStored\xaaextra_keys\x91"
REMOVED_HASHES = b"\x91\x82\xa4type\xacBlockRemoved\xacblock_hashes"


@pytest.mark.slow
@pytest.mark.attack(
    "a batch of KV events that consists of empty arrays, of nested ones or of hashes only",
    "what it holds is counted before memory is taken",
)
@pytest.mark.parametrize(
    "payload",
    [
        filled(b"\x90"),
        filled(b"\x92\xc0\xc0"),
        filled(msgspec.msgpack.encode({"type": "BlockRemoved", "block_hashes": [2**63] * 10})),
        filled(b"\x90", STORED_KEYS),
        filled(b"\xcd\x80\x80", REMOVED_HASHES),
    ],
    ids=["empty", "rows", "events", "keys", "hashes"],
)
def test_no_batch_takes_much_memory(payload):
    tracemalloc.start()
    with suppress(SourceError):
        for _ in decode(payload)[1]:
            pass
    _, used = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 8 * 2**20


@settings(max_examples=30)
@given(
    st.binary(max_size=200)
    | st.builds(batch, st.recursive(st.none() | st.text() | st.integers(-(2**63), 2**63), st.lists))
)
def test_anything_is_decoded_or_refused(payload):
    with suppress(SourceError):
        time, events = decode(payload)
        Contents().take(time, events)


def test_an_adapter_of_old_versions_has_its_number():
    row = ["BlockStored", [1], None, [5] * 16, 16, 3]
    assert listed(batch(row)) == [Event(STORED, [1], None, "id 3", 0, 16)]
    assert listed(batch([*row[:5], None]))[0].adapter == NONE
