"""Which engines' KV events are followed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

import tests.helpers.vllm_pages as pages
from kvpressure.kvevents.contents import SHARED
from kvpressure.model.readings import CacheReading
from kvpressure.sources.kvevents import following
from kvpressure.sources.kvevents.following import MAX_FOLLOWED, EventFollower
from kvpressure.sources.scrape.scanner import parse_scrape
from kvpressure.sources.scrape.targets import parse_target

TARGET = parse_target("http://10.0.0.5:8000;kv-events=tcp://10.0.0.5:5557,tcp://10.0.0.5:5600")
PAGE = parse_scrape(pages.text_of("l_dp2").encode(), target=TARGET.name, time=1000.0)


@dataclass
class Followed:
    of: tuple[str, str]
    addresses: Any
    capacity_tokens: float | None = None
    done: tuple[float, float] = (0.0, 0.0)
    closed: bool = False

    def close(self) -> None:
        self.closed = True

    def reading(self) -> CacheReading:
        return CacheReading(*self.of, 1000.0)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Followed]:
    made: list[Followed] = []
    monkeypatch.setattr(following, "_subscribed", lambda *given: made.append(Followed(*given)) or made[-1])
    return made


def test_each_rank_of_a_server_is_followed_at_its_own_ports(started):
    follower = EventFollower()
    for _ in range(2):
        follower.follow(TARGET, PAGE)
    assert [one.addresses for one in started] == [
        (("10.0.0.5", 5557 + rank), ("10.0.0.5", 5600 + rank)) for rank in (0, 1)
    ]
    assert all(one.capacity_tokens and min(one.done) > 0 for one in started)
    assert [(one.target, one.engine) for one in follower.readings()] == [(TARGET.name, "0"), (TARGET.name, "1")]


def test_an_endpoint_is_followed_once(started):
    follower = EventFollower()
    other = parse_target("http://10.0.0.6:8000;kv-events=tcp://10.0.0.5:5557")
    one_engine = replace(PAGE, engines=PAGE.engines[:1])
    follower.follow(TARGET, one_engine)
    for _ in range(2):
        follower.follow(other, replace(one_engine, target=other.name))
    assert [reading.reason for reading in follower.readings()] == ["", SHARED]
    follower.keep((other.name,))
    follower.follow(other, replace(one_engine, target=other.name))
    assert [(reading.target, reading.reason) for reading in follower.readings()] == [(other.name, "")]
    assert len(started) == 2


def test_what_is_gone_or_has_moved_is_followed_no_more(started):
    follower = EventFollower()
    follower.follow(TARGET, PAGE)
    follower.follow(TARGET, replace(PAGE, engines=(), error="timeout"))
    assert not any(one.closed for one in started)  # it failed, and is still there
    follower.follow(TARGET, replace(PAGE, engines=PAGE.engines[:1]))
    assert [one.closed for one in started] == [False, True]
    follower.follow(parse_target("http://10.0.0.5:8000;kv-events=tcp://10.0.0.5:6000"), PAGE)
    assert [one.closed for one in started] == [True, True, False, False]
    follower.keep(())
    assert all(one.closed for one in started)
    assert follower.readings() == ()


def test_engines_without_an_endpoint_or_a_rank_are_not_followed_nor_too_many(started):
    follower = EventFollower()
    follower.follow(parse_target("http://10.0.0.5:8000"), PAGE)
    follower.follow(TARGET, replace(PAGE, engines=(replace(PAGE.engines[0], engine="0/r1"),)))
    assert started == []
    many = tuple(replace(PAGE.engines[0], engine=str(number)) for number in range(2 * MAX_FOLLOWED))
    follower.follow(TARGET, replace(PAGE, engines=many))
    assert len(started) == MAX_FOLLOWED
