"""Who holds the prefix cache, from the stores and evictions of its blocks."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.kvevents.contents import CLEARED, GPU, HYBRID, LATE, REMOVED, STORED, Contents, Event
from kvpressure.kvevents.holders import NONE, OTHER, TOP, UNKNOWN, Holders
from kvpressure.kvevents.reuse import ReuseEstimator
from kvpressure.model.readings import KV_AGAIN, KV_SEEN

BLOCK = 0x9E3779B97F4A7C15  # odd: multiples of it are spread over all numbers of 64 bits


def blocks(first: int, count: int) -> list[int]:
    return [number * BLOCK % 2**64 for number in range(first, first + count)]


def stored(first: int, count: int, salt: int | None = 0, *, parent: int | None = None, adapter: str = NONE, **more):
    return Event(STORED, blocks(first, count), parent, adapter, salt, 16, **more)


def full(*events) -> Contents:
    contents = Contents()
    contents.begin("")
    contents.take(1000.0, events)
    return contents


def test_an_event_counts_for_its_adapter_and_for_the_salt_of_its_chain():
    contents = full(
        stored(1, 300, salt=7, adapter="legal"),
        stored(301, 300, salt=None, parent=blocks(300, 1)[0], adapter="legal"),
        stored(1001, 400, salt=8),
    )
    adapters, salts = contents.holders.shares(1001.0)
    assert adapters == pytest.approx({"legal": 0.6, NONE: 0.4})
    assert salts == pytest.approx({"00007": 0.6, "00008": 0.4})


def test_a_chain_whose_beginning_was_not_seen_has_no_known_salt():
    contents = full(stored(1, 10, salt=7), stored(101, 10, salt=None, parent=blocks(9999, 1)[0]))
    assert contents.holders.shares(1001.0)[1] == pytest.approx({"00007": 0.5, UNKNOWN: 0.5})


def test_without_adapters_and_salts_there_are_no_shares():
    assert full(stored(1, 10)).holders.shares(1001.0) == ({}, {})


def test_a_block_stored_again_while_resident_keeps_its_owner_and_is_evicted_once():
    contents = full(stored(1, 10, adapter="a"), stored(1, 10, adapter="b"), stored(11, 10, adapter="b"))
    assert contents.holders.shares(1001.0)[0] == pytest.approx({"a": 0.5, "b": 0.5})
    contents.take(1000.0, [Event(REMOVED, blocks(1, 10))])
    assert contents.holders.shares(1600.0)[0]["b"] == pytest.approx(1.0, abs=1e-3)


def test_shares_are_means_of_a_minute():
    contents = full(stored(1, 100, adapter="a"))
    assert contents.holders.shares(1030.0)[0] == {"a": 1.0}
    contents.take(1030.0, [stored(101, 300, adapter="b")])
    assert contents.holders.shares(1031.0)[0] == {"a": 1.0}, "counted every few seconds"
    assert 0 < contents.holders.shares(1035.0)[0]["b"] < 0.2
    assert contents.holders.shares(1300.0)[0]["b"] == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("more", [{"medium": "CPU"}, {"group": 1, "spec": "sliding_window"}])
def test_other_media_and_groups_are_not_the_cache(more):
    contents = full(stored(1, 10, adapter="a", group=0, spec="full_attention"), stored(1, 10, adapter="b", **more))
    contents.take(1001.0, [Event(REMOVED, blocks(1, 10), medium=more.get("medium", GPU), group=more.get("group"))])
    assert contents.holders.shares(1001.0)[0] == {"a": 1.0}
    assert contents.reuse.resident == 10
    assert (not contents.counters()) == ("medium" in more)


def test_a_model_without_full_attention_is_refused():
    contents = full(stored(1, 10, group=0, spec="sliding_window"), stored(1, 10, group=1, spec="mamba"))
    assert contents.reason == HYBRID
    contents.take(1001.0, [stored(1, 10, group=2, spec="full_attention")])
    assert contents.reason == ""


def test_groups_without_their_kinds_are_refused_until_the_engine_begins_anew():
    contents = full(stored(1, 10, group=0), stored(1, 10, group=1))
    assert contents.reason == HYBRID
    contents.begin("")
    contents.take(1001.0, [stored(1, 10, group=2, spec="full_attention"), Event(REMOVED, blocks(1, 4), group=2)])
    assert (contents.reason, contents.reuse.resident) == ("", 6)


def test_who_came_late_knows_the_contents_after_they_turned_over():
    contents = Contents()
    contents.take(1000.0, [stored(1, 300), Event(REMOVED, blocks(10_001, 200))])
    assert contents.reason == LATE
    contents.take(1001.0, [Event(REMOVED, blocks(1, 200))])
    assert contents.reason == ""
    contents.begin("gap")
    assert contents.reason == "gap"
    contents.take(1002.0, [Event(CLEARED)])
    assert contents.reason == ""


def test_what_is_stored_again_counts_while_the_contents_are_known_and_so_does_the_time():
    contents = full(stored(1, 64), Event(REMOVED, blocks(1, 64)), stored(1, 64))
    contents.take(1010.0, [])
    assert (contents.counters()[KV_AGAIN], contents.counters()[KV_SEEN]) == (64 * 16, 10)
    contents.take(1200.0, [])
    assert contents.counters()[KV_SEEN] == 10, "blocks were filled, and nothing came"
    contents.begin("gap")
    contents.take(1210.0, [stored(1, 64), Event(REMOVED, blocks(1, 64)), stored(1, 64)])
    contents.take(1220.0, [Event(REMOVED, blocks(1, 64)), Event(REMOVED, blocks(901, 64))])
    assert contents.reason == "gap"
    contents.take(1230.0, [Event(CLEARED)])
    contents.take(1240.0, [])
    contents.take(1245.0, [stored(1, 1)])
    assert (contents.counters()[KV_AGAIN], contents.counters()[KV_SEEN]) == (64 * 16, 15)


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=300), st.integers(1, 60))
def test_the_number_of_holders_is_fixed(tenants, count):
    events = [stored(place * 100, count, salt=1 + tenant, adapter=f"a{tenant}") for place, tenant in enumerate(tenants)]
    for shares in full(*events).holders.shares(1001.0):
        assert len(shares) <= TOP + 3
        assert sum(shares.values()) == pytest.approx(1.0)
        assert max(shares.values()) == shares.get(OTHER) or len(shares) <= len(set(tenants)) + 1


@pytest.mark.slow
def test_holders_that_come_and_go_take_no_more_memory_and_stay_counted():
    blocks, sizes = ReuseEstimator(capacity=2000), []
    holders = Holders(blocks)
    blocks.stored(range(1000), ("legal", NONE))
    tracemalloc.start()
    for first in range(2000, 42_000, 1000):
        blocks.removed(range(first - 1000, first))
        for block in range(first, first + 1000):
            blocks.stored([block], (f"{block}", NONE))
        adapters, _ = holders.shares(1000.0 + first / 200)
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[-1] < sizes[16] + 500_000
    assert (adapters["legal"], adapters[OTHER]) == pytest.approx((0.5, 0.5), abs=0.02)
