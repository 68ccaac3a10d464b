"""KV events over a real socket: what is lost is repaired or said, and no publisher costs more than allowed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from time import monotonic, sleep

import msgspec
import pytest

from kvpressure.kvevents.contents import CONNECTING, FLOOD, GAP, LATE, SILENT
from kvpressure.model.readings import CacheReading
from kvpressure.sources.kvevents import subscription
from kvpressure.sources.kvevents.subscription import Subscription
from kvpressure.sources.kvevents.zmtp import MAX_FRAME_BYTES
from tests.helpers.kv_publisher import Publisher
from tests.helpers.vllm_server import RawServer

pytestmark = pytest.mark.live


def stored(*blocks: int, parent: int | None = None, **more: object) -> dict[str, object]:
    row = {"type": "BlockStored", "block_hashes": blocks, "parent_block_hash": parent, "block_size": 16}
    return {**row, "token_ids": [7], "medium": "GPU", **more}


def removed(*blocks: int) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": blocks, "medium": "GPU"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription, "_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(subscription, "_minute", subscription.CpuMinute())
    monkeypatch.setattr(subscription, "_BEGIN_CPU_SECONDS", 0.0)


@pytest.fixture
def follow() -> Iterator[Callable[..., Subscription]]:
    started: list[Subscription] = []

    def start(publisher: Publisher, replay: bool = True) -> Subscription:
        addresses = [("127.0.0.1", port) for port in (publisher.port, publisher.replay_port)]
        started.append(Subscription(("t", "0"), (addresses[0], addresses[1] if replay else None)))
        publisher.wait()
        return started[-1]

    yield start
    for one in started:
        one.close()


def until(one: Subscription, holds: Callable[[CacheReading], bool]) -> CacheReading:
    end = monotonic() + 10
    while not holds(reading := one.reading()) and monotonic() < end:
        sleep(0.01)
    assert holds(reading), reading
    return reading


@pytest.mark.parametrize("replay", [True, False])
def test_from_the_first_batch_on_the_contents_are_known(follow, replay):
    with Publisher() as publisher:
        one = follow(publisher, replay)
        publisher.send(stored(1, 2, lora_name="legal"), stored(3))
        reading = until(one, lambda r: r.resident_tokens == 16 * 3)
        assert reading.reason == ""
        publisher.send(removed(1, 2))
        until(one, lambda r: r.resident_tokens == 16 * 1)


def test_blocks_that_are_filled_without_an_event_are_unknown(follow, monkeypatch):
    monkeypatch.setattr(subscription, "SILENT_SECONDS", 0.3)
    with Publisher() as publisher:
        one = follow(publisher)
        publisher.send(stored(1))
        until(one, lambda r: r.resident_tokens == 16)
        one.done = 32.0, 2.0  # two requests too short to fill a block
        until(one, lambda r: not r.reason)
        sleep(0.4)
        assert one.reading().reason == ""
        one.done = 49.0, 3.0
        assert until(one, lambda r: r.reason).counters == {}
        assert one.reading().reason == SILENT
        publisher.send(stored(2))
        until(one, lambda r: not r.reason)


@pytest.mark.parametrize(("kept", "reason"), [(True, ""), (False, LATE)])
def test_who_comes_late_is_told_the_past_where_it_is_kept(follow, kept, reason):
    with Publisher() as publisher:
        publisher.send(stored(1, 2), kept=kept)
        publisher.send(stored(3))
        one = follow(publisher)
        until(one, lambda r: r.reason != CONNECTING)  # which it is until all that is kept has been read
        assert until(one, lambda r: r.resident_tokens == 16 * (3 if kept else 1)).reason == reason


@pytest.mark.parametrize(("replay", "kept"), [(True, True), (True, False), (False, True)])
def test_a_gap_is_repaired_or_said(follow, replay, kept):
    with Publisher() as publisher:
        one = follow(publisher, replay)
        publisher.send(stored(1, 2))
        until(one, lambda r: r.resident_tokens == 16 * 2)
        publisher.send(stored(3), kept=kept, lost=True)
        publisher.send(stored(4))
        repaired = replay and kept
        reading = until(one, lambda r: r.resident_tokens == 16 * (4 if repaired else 1))
        assert reading.reason == ("" if repaired else GAP)


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("sent", [1, 3])
def test_a_restarted_engine_begins_with_an_empty_cache(follow, replay, sent):
    with Publisher() as publisher:
        one = follow(publisher, replay)
        for block in range(2):
            publisher.send(stored(block))
        until(one, lambda r: r.resident_tokens == 16 * 2)
    until(one, lambda r: r.reason == "refused")
    with Publisher(publisher.port, publisher.replay_port) as again:
        if replay:
            for block in range(10, 10 + sent):
                again.send(stored(block), time=2000.0)
        again.wait()
        again.send(stored(100), time=2001.0)
        until(one, lambda r: r.resident_tokens == 16 * (sent + 1 if replay else 1) and not r.reason)


def test_a_lost_connection_to_the_same_process_loses_nothing(follow):
    with Publisher() as publisher:
        one = follow(publisher)
        publisher.send(stored(1))
        until(one, lambda r: r.resident_tokens == 16 * 1)
        one._peers[0].close()
        publisher.send(stored(2), lost=True)
        until(one, lambda r: r.resident_tokens == 16 * 2 and r.reason == "")


def test_what_is_no_batch_resets_and_the_next_ones_count(follow):
    with Publisher() as publisher:
        one = follow(publisher, replay=False)
        publisher.send(stored(1))
        publisher.send_raw(b"\xc1")
        publisher.send(stored(2))
        assert until(one, lambda r: r.resident_tokens == 16 * 1 and r.reason != "").reason == "bad_events"
        publisher.send_raw(bytes(MAX_FRAME_BYTES + 1))
        publisher.send({"type": "AllBlocksCleared"}, stored(5, 6))
        assert until(one, lambda r: r.resident_tokens == 16 * 2).reason == ""


@pytest.mark.attack(
    "a publisher of KV events that sends without end",
    "all publishers may take six seconds of CPU in a minute; the one that took most is then left alone for a minute",
)
def test_a_flood_is_cut_off(follow, monkeypatch):
    monkeypatch.setattr(subscription, "_CPU_SECONDS", 0.02)
    with Publisher() as publisher:
        one = follow(publisher, replay=False)
        for number in range(500):
            publisher.send(stored(*range(number * 1000, number * 1000 + 1000)))
        reading = until(one, lambda r: r.reason == FLOOD)
        assert reading.resident_tokens == 0


@pytest.mark.parametrize("floods", [1, 2, 64])
def test_all_publishers_have_one_bound(floods):
    minute, taken, ended = subscription.CpuMinute(), 0.0, set()
    for _ in range(1000):
        for engine in range(64):
            if engine not in ended:
                seconds = 0.05 if engine < floods else 0.00005
                taken += seconds
                if not minute.allows(engine, seconds):
                    ended.add(engine)
    assert taken <= 2 * subscription._CPU_SECONDS + floods * 0.05
    assert ended == set(range(floods)), "the others go on"


def sending(data: bytes, pause: float) -> RawServer:
    """Greets and sends the same data again and again."""

    def serve(server: RawServer, connection: socket.socket) -> None:
        connection.sendall(GREETING)
        while not server.stopping.wait(pause):
            connection.sendall(data)

    return RawServer(serve)


BATCH = b"\x01\x00" + b"\x01\x08" + bytes(8) + b"\x00\x0c" + msgspec.msgpack.encode([1.0, [], 0])


@pytest.mark.parametrize("data", [BATCH * 1000, b"\x04\x00" * 10_000], ids=["one number", "commands"])
def test_whatever_is_sent_without_end_is_cut_off(monkeypatch, data):
    monkeypatch.setattr(subscription, "_CPU_SECONDS", 0.1)
    with sending(data, 0.0) as server:
        one = Subscription(("t", "0"), (("127.0.0.1", server.port), None))
        try:
            until(one, lambda r: r.reason == FLOOD)
        finally:
            one.close()


def test_a_replay_that_trickles_ends_with_the_subscription():
    with Publisher() as publisher, sending(b"\x04\x00", 0.01) as server:
        before = set(threading.enumerate())
        one = Subscription(("t", "0"), (("127.0.0.1", publisher.port), ("127.0.0.1", server.port)))
        (thread,) = [each for each in threading.enumerate() if each not in before and each.name == "kv-events"]
        publisher.wait()
        sleep(0.2)
        one.close()
        thread.join(5)
        assert not thread.is_alive()


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)


@pytest.mark.attack(
    "a publisher of KV events that sends a message without end, or of 2^63 bytes",
    "one batch of 3 MiB is held at most; the contents of that cache are unknown, with the reason",
)
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64),
        b"\xff" * 64,
        b"\xff" + bytes(63),
        GREETING.replace(b"NULL", b"PLAIN"[:4]),
        GREETING + b"\x01\x01x" * 1000,  # a message without end
        GREETING + b"\x00\x03abc",
        GREETING + b"\x02" + (2**63).to_bytes(8),
    ],
)
def test_what_speaks_something_else_is_no_publisher(answer):
    with RawServer(lambda _, connection: connection.sendall(answer)) as server:
        one = Subscription(("t", "0"), (("127.0.0.1", server.port), None))
        try:
            assert until(one, lambda r: r.reason != "connecting").reason in ("protocol", "reset")
        finally:
            one.close()
