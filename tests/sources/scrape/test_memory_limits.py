"""What all pages together may take: equal parts, what others leave, and room for large pages."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.sources.base import SourceError
from kvpressure.sources.vllm import PageFetcher, parse_target
from kvpressure.sources.vllm.bounds import SMALL_PAGE_BYTES, Room, Share
from vllm_server import answering, response


def test_one_alone_may_have_everything_and_two_half_each_at_least():
    share = Share(10)
    share.join("a")
    assert share.allowed("a") == 10
    share.join("b")
    assert (share.allowed("a"), share.allowed("b")) == (10, 10), "nobody uses anything yet"
    share.use("a", 10)
    assert share.allowed("b") == 5
    share.use("b", 5)
    assert share.allowed("a") == 5
    share.use("a", 2)
    assert share.allowed("b") == 8
    share.leave("a")
    assert share.allowed("b") == 10


def test_what_has_left_uses_nothing():
    share = Share(10)
    share.use("gone", 7)
    share.join("a")
    assert share.allowed("a") == 10


@given(
    total=st.integers(1, 1000),
    each=st.integers(1, 20),
    wanted=st.lists(st.integers(0, 2000), min_size=1, max_size=40),
    rounds=st.integers(1, 3),
)
def test_however_much_is_wanted_the_sum_stays_bounded_and_everybody_gets_a_part(total, each, wanted, rounds):
    share = Share(total, each)
    for user in range(len(wanted)):
        share.join(user)
    least = max(each, total // len(wanted))
    for _ in range(rounds):
        for user, amount in enumerate(wanted):
            allowed = share.allowed(user)
            assert allowed >= least
            share.use(user, min(amount, allowed))
    used = sum(share._used.values())
    assert used <= max(total, least * len(wanted)) + (total if rounds == 1 else 0)


def test_a_large_page_waits_for_room_and_says_so_when_none_comes():
    room = Room(100)
    with room.lease() as first, room.lease() as second:
        first.grow(60, 0)
        with pytest.raises(SourceError) as caught:
            second.grow(50, 0.01)
        assert caught.value.reason == "crowded"
        second.grow(40, 0)
    with room.lease() as third:
        third.grow(100, 0)


def test_room_that_comes_free_is_taken_at_once():
    room = Room(100)
    took = []

    def later():
        with room.lease() as lease:
            began = time.monotonic()
            lease.grow(100, 10)
            took.append(time.monotonic() - began)

    with room.lease() as first:
        first.grow(100, 0)
        thread = threading.Thread(target=later)
        thread.start()
        time.sleep(0.1)
    thread.join(5)
    assert 0.05 < took[0] < 5


@pytest.mark.parametrize("size", [1000, SMALL_PAGE_BYTES - 1])
def test_a_small_page_needs_no_room(size):
    room = Room(0)
    with answering(response(b"x" * size)) as server, room.lease() as lease:
        fetcher = PageFetcher(parse_target(server.url), 5)
        assert len(fetcher.fetch(lease)) == size
        assert lease.taken == 0
        fetcher.close()


def test_a_large_page_claims_what_it_takes_before_it_is_read():
    room = Room(4 * 2**20)
    with answering(response(b"x" * 2**20)) as server, room.lease() as lease:
        fetcher = PageFetcher(parse_target(server.url), 5)
        assert len(fetcher.fetch(lease)) == 2**20
        assert lease.taken == 2 * (2**20 - SMALL_PAGE_BYTES)
        fetcher.close()


def test_a_large_page_without_room_is_crowded_and_the_next_one_is_read():
    room = Room(2**20)
    with answering(response(b"x" * 2**20)) as server:
        fetcher = PageFetcher(parse_target(server.url), 0.3)
        with room.lease() as lease, pytest.raises(SourceError) as caught:
            fetcher.fetch(lease)
        assert caught.value.reason == "crowded"
        assert len(fetcher.fetch()) == 2**20, "without a lease it is read in any case"
        fetcher.close()
