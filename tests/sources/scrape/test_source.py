"""The source as a whole: many targets, each failing by itself, none waiting for another."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace

import pytest

import tests.helpers.vllm_pages as pages
from kvpressure.model.pools import EnginePool
from kvpressure.model.readings import GpuOwner
from kvpressure.settings.settings import Settings
from kvpressure.sources.catalog import CollectorSettings
from kvpressure.sources.kubernetes.discovery_state import SharedDiscovery
from kvpressure.sources.kubernetes.pod import Pod, discovered
from kvpressure.sources.kubernetes.podspec import Policy, read_pod
from kvpressure.sources.scrape import layout
from kvpressure.sources.scrape.scanner import parse_scrape
from kvpressure.sources.scrape.source import EngineSource, Fetcher
from kvpressure.sources.scrape.targets import parse_target
from tests.helpers.failing import raising
from tests.helpers.vllm_server import RawServer, answering, response, saying
from tests.helpers.waiting import until
from tests.sources.kubernetes import objects

pytestmark = pytest.mark.live

TEXT = pages.text_of("l_dp2")
PAGE = response(TEXT.encode())

# A read then waits 0.8 s; otherwise as long as a busy machine may need.
EVERY_SECOND = {"engines": CollectorSettings(True, 1.0, 5.0)}
EVERY_FIVE = {"engines": CollectorSettings(True, 5.0, 5.0)}
USUAL = {"engine_timeout_seconds": 4.0, "engine_pace": "fixed", "collectors": EVERY_FIVE}


@pytest.fixture
def source_for():
    """Builds sources for servers or addresses, and closes them."""
    sources = []

    def build(*targets, **settings):
        texts = [target.address if isinstance(target, RawServer) else target for target in targets]
        source = EngineSource(Settings(engine_targets=tuple(map(parse_target, texts)), **USUAL | settings))
        sources.append(source)
        return source

    yield build
    for source in sources:
        source.close()


def read_until(source, enough, seconds=10.0):
    """Read again and again until ``enough(pages so far)``; the pages."""
    seen = []
    deadline = time.monotonic() + seconds
    while not enough(seen):
        assert time.monotonic() < deadline, seen
        seen.extend(source.read().pages)
    return seen


def test_a_page_is_what_its_text_gives(source_for):
    with answering(PAGE) as server:
        source = source_for(
            f"prod/chat-0={server.url};container=vllm;gpus=GPU-1;args=--max-num-seqs 64", keep_exposition=True
        )
        before = time.time()
        reading = source.read()
        (page,) = reading.pages
    assert before <= page.time <= time.time()
    assert 0 < page.duration_seconds < 4
    assert page.pool == EnginePool("chat")
    assert replace(page, pool=None) == parse_scrape(
        TEXT,
        target=server.url,
        time=page.time,
        namespace="prod",
        pod="chat-0",
        container="vllm",
        gpus=("GPU-1",),
        args=("--max-num-seqs", "64"),
        duration_seconds=page.duration_seconds,
        keep_text=True,
    )
    assert reading.targets == (server.url,)
    assert reading.errors == {}


@pytest.mark.attack(
    "answers that are HTML, JSON, no text, empty or another program's",
    "that target has its reason; the others are read",
)
def test_failures_are_pages_with_a_reason_and_do_not_touch_the_others(source_for):
    with (
        answering(PAGE) as good,
        answering(response(b"", "404 x")) as missing,
        answering(response(b"<html>")) as html,
        answering(response(b'{"a": 1}')) as json,
        answering(response(b"\xff")) as bytes_,
        answering(response(b"process_cpu_seconds_total 4\n")) as bare,
        answering(response(b"")) as empty,
    ):
        source = source_for(good, missing, html, json, bytes_, bare, empty)
        reading = source.read()
        errors = {page.target: page.error for page in reading.pages}
    assert errors == {
        good.url: None,
        missing.url: "http_404",
        html.url: "html",
        json.url: "json",
        bytes_.url: "invalid_utf8",
        bare.url: "no_engine_metrics",
        empty.url: "empty",
    }
    assert reading.errors == {reason: 1 for reason in errors.values() if reason}
    assert [page.target for page in reading.pages if page.engines] == [good.url]


@pytest.mark.fault(
    "engines",
    "one slow engine among many",
    "its own series are late; others on time",
    "`target_scrape_seconds`",
    "by itself",
)
def test_a_slow_target_delays_nobody_and_is_not_asked_twice_at_a_time(source_for):
    with answering(PAGE) as fast, saying(then="hang") as slow:
        source = source_for(fast, slow, engine_timeout_seconds=2.5, collectors=EVERY_SECOND)
        first = source.read()  # waits once, a little less than the interval
        started = time.monotonic()
        later = [source.read() for _ in range(5)]
        assert time.monotonic() - started < 1.5  # 4 s if each of them waited
        assert [[page.target for page in reading.pages] for reading in [first, *later]] == [[fast.url]] * 6
        assert slow.connections == 1
        seen = read_until(source, lambda seen: any(page.target == slow.url for page in seen))
        assert {page.error for page in seen if page.target == slow.url} == {"timeout"}


def test_many_hanging_targets_do_not_keep_a_good_one_from_being_read(source_for):
    with answering(PAGE) as good, saying(then="hang") as bad:
        others = [f"{bad.address}/{n}" for n in range(30)]
        source = source_for(*others[:15], good, *others[15:], engine_timeout_seconds=30, collectors=EVERY_SECOND)
        for _ in range(4):
            assert [page.target for page in source.read().pages] == [good.url]
        assert bad.connections == 30


def test_targets_can_be_replaced_while_it_runs(source_for):
    with answering(PAGE) as first, answering(PAGE) as second:
        source = source_for(first)
        source.read()
        known = parse_target(first.url)
        source.set_targets([known, parse_target(f"ns/pod={second.url}")])
        reading = source.read()
        assert {page.target: page.pod for page in reading.pages} == {first.url: first.address, second.url: "pod"}
        source.set_targets([replace(known, pod="renamed", gpus=("GPU-9",))])
        (page,) = source.read().pages
        assert (page.pod, page.gpus) == ("renamed", ("GPU-9",))
        assert source.read().targets == (known.name,)
        source.set_targets([])
        assert source.read().pages == source.read().targets == ()
    assert (first.connections, second.connections) == (1, 1)


def test_another_pod_at_an_address_has_nothing_of_the_one_before(source_for):
    """Not even its connection, nor a place among the engines that share the limits."""
    with answering(PAGE) as server:
        source = source_for()
        alone = source._bounds.engines.allowed(object())
        for uid in ("u1", "u2", "u2"):
            source.set_targets([replace(parse_target(f"ns/chat-{uid}={server.url}"), uid=uid)])
            (page,) = source.read().pages
            assert (page.pod, page.engines) == (f"chat-{uid}", parse_scrape(PAGE, target=page.target, time=0).engines)
        assert server.connections == 2
        source.set_targets([])
        assert source._bounds.engines.allowed(object()) == alone


def test_a_page_of_the_pod_before_is_not_returned_as_that_of_the_next(source_for):
    """It hangs while its pod is replaced at its address."""
    with saying(then="hang") as server:
        source = source_for(engine_timeout_seconds=1, collectors=EVERY_SECOND)
        target = parse_target(f"ns/chat-0={server.url}")
        source.set_targets([replace(target, uid="u1")])
        assert not source.read().pages
        source.set_targets([replace(target, uid="u2", pod="chat-1")])
        (page,) = until(lambda: source.read().pages, 10)
        assert (page.pod, page.error) == ("chat-1", "timeout")
        assert server.connections == 2


def test_what_discovery_finds_is_read_beside_what_was_given_of_which_it_knows_more(source_for):
    with answering(PAGE) as given, answering(PAGE) as found:
        shared = SharedDiscovery()
        source = source_for(given, shared=shared)
        assert source.read().targets == (given.url,)
        of_pods = [f"ns/{pod}={server.url}" for server in (found, given) for pod in (server.port, "second")]
        shared.targets = tuple(map(parse_target, of_pods))
        for _ in range(2):
            pods = {page.target: page.pod for page in source.read().pages}
            assert pods == {server.url: str(server.port) for server in (given, found)}, "the first of each address"
        shared.targets = ()
        reading = source.read()
        assert {page.target: page.pod for page in reading.pages} == {given.url: given.address}
        assert reading.targets == (given.url,)
    assert (given.connections, found.connections) == (1, 1)


def test_what_has_never_answered_is_listed_with_what_its_address_said(source_for):
    """Until then only the image names a server; what answered once is down when it stops."""
    answers = [response(b"x", status="404 Not Found")]

    def script(server, connection):
        while server.read_request(connection):
            connection.sendall(answers[-1])

    with RawServer(script) as server:
        wrapper = objects.container(command=["python", "serve.py"], ports=[{"containerPort": server.port}])
        found = read_pod(objects.pod(ip="127.0.0.1", containers=[wrapper]), Policy())
        source = source_for()
        source.set_targets(found.engines[0].targets)
        for answer, error, row in (
            (answers[0], "http_404", ("no_target", "never_answered", "HTTP 404 response")),
            (PAGE, None, ("engine", "image", "")),
            (response(b"", status="401 Unauthorized"), "unauthorized", ("engine", "image", "")),
        ):
            answers.append(answer)
            (page,) = read_until(source, len)
            (listed,) = discovered([found.without(source._shared.unread)])
            assert (page.error, page.assumed) == (error, True)
            assert (listed.result, listed.reason) == row[:2]
            assert listed.explanation.endswith(row[2])


@pytest.mark.fault(
    "engines",
    "more targets than allowed",
    "those with the weakest claims are down, and no more than as many as are scraped are listed",
    '`source_errors_total{source="engines",reason="target_limit"}`',
    "`--engine.max-targets`",
)
def test_a_target_without_a_gpu_takes_no_place_of_one_with_a_gpu(source_for):
    def read():
        """The pods of the pages, apart by whether they were asked for."""
        reading = source.read()
        assert {page.target for page in reading.pages} == set(reading.targets)
        assert reading.errors == {"target_limit": len(shared.unread)}
        asked = [page.pod for page in reading.pages if page.error is None]
        return asked, [page.pod for page in reading.pages if page.error == "target_limit"]

    shared = SharedDiscovery()
    shared.pods = (Pod("aaa", "evil", "1", "Running"), Pod("prod", "chat", "2", "Running"))
    with answering(PAGE) as server:
        source = source_for(engine_max_targets=4, shared=shared)
        evil = [parse_target(f"aaa/evil={server.address}/{n}") for n in range(9)]
        chat = [parse_target(f"prod/chat={server.address}/chat-{n}") for n in range(4)]
        shared.targets = (*evil, *chat)
        assert read() == (["evil", "evil", "chat", "chat"], ["evil", "evil", "chat", "chat"])  # in turns
        shared.owners = (GpuOwner("GPU-0", "prod", "chat", "vllm"),)
        assert read() == (["chat"] * 4, ["evil"] * 4)  # the others are only counted
    assert len(shared.unread) == 9


def test_engines_of_targets_without_a_gpu_push_none_off_the_page_of_one_with_a_gpu(source_for, monkeypatch):
    monkeypatch.setattr(layout, "MAX_ENGINES", 3)
    shared = SharedDiscovery()
    shared.owners = (GpuOwner("GPU-0", "prod", "chat", "vllm"),)
    with answering(PAGE) as server:
        source = source_for(shared=shared)
        shared.targets = tuple(parse_target(f"aaa/evil-{n}={server.address}/{n}") for n in range(3))
        source.read()
        shared.targets += (parse_target(f"prod/chat={server.address}/chat"),)
        engines = {page.pod: (len(page.engines), dict(page.cut)) for page in source.read().pages}
        assert engines["chat"] == (2, {})
        assert [engines[f"evil-{n}"] for n in range(3)] == 3 * [(1, {"engines": 1})]


def test_threads_and_memory_do_not_grow_with_churn(source_for):
    before = threading.active_count()
    with answering(PAGE) as server:
        source = source_for(engine_max_targets=4)
        for generation in range(12):
            source.set_targets(parse_target(f"{server.address}/{generation}-{n}") for n in range(4))
            assert len(source.read().pages) == 4
        until(lambda: threading.active_count() - before <= 4 + 1 + 8)  # pool, server, its open connections
        gc.collect()
        assert sum(isinstance(thing, Fetcher) for thing in gc.get_objects()) <= 8


def test_close_ends_what_hangs(source_for):
    with saying(then="hang") as server:
        source = source_for(server, engine_timeout_seconds=60, collectors=EVERY_SECOND)
        before = {thread for thread in threading.enumerate() if thread.name == "vllm-fetch"}
        source.read()
        mine = {thread for thread in threading.enumerate() if thread.name == "vllm-fetch"} - before
        started = time.monotonic()
        source.close()
        for thread in mine:
            thread.join(5)
        assert not any(thread.is_alive() for thread in mine)
        assert time.monotonic() - started < 2
        source.set_targets([parse_target(server.url)])
        assert source.read().pages == source.read().targets == ()


def test_a_read_asks_only_what_is_due(source_for) -> None:
    with answering(PAGE) as server:
        source = source_for(server, engine_pace="adaptive", collectors=EVERY_SECOND)
        begin = time.monotonic()
        pages = [*source.read().pages, *source.read().pages, *source.read().pages]
        assert time.monotonic() - begin > 0.9 or len(pages) == 1
        pages += read_until(source, lambda seen: seen)  # when its second is over
        assert time.monotonic() - begin > 0.8
        assert [page.error for page in pages] == [None, None]


@pytest.mark.fault(
    "engines",
    "no thread can be started (memory, limit of processes)",
    "scrapes share the existing threads and are late",
    "log",
    "next reading",
)
def test_a_thread_that_cannot_be_started_loses_no_target(source_for, monkeypatch, caplog):
    """A target that waited for a thread that never came was not asked again, ever."""
    start, refused = threading.Thread.start, []

    def no_thread(thread):
        if thread.name == "vllm-fetch" and len(refused) < 4:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with answering(PAGE) as first, answering(PAGE) as second:
        source = source_for(first, second, collectors=EVERY_SECOND)
        seen = read_until(source, lambda pages: {page.target for page in pages} == {first.url, second.url}, 20)
        assert all(page.error is None for page in seen)
        assert len(refused) == 4
        assert caplog.text.count("no thread for a scrape") == 1


@pytest.mark.parametrize("silent", [False, True], ids=["told", "not even told"])
def test_a_scrape_without_memory_is_a_failure_and_the_next_one_works(source_for, monkeypatch, silent):
    """Out of memory there is none to say so either: the target was taken for one that is still being read."""
    with answering(PAGE) as server:
        source = source_for(server, collectors=EVERY_SECOND)
        with monkeypatch.context() as patched:
            patched.setattr(Fetcher, "fetch", raising(MemoryError()))
            if silent:
                patched.setattr("kvpressure.sources.scrape.source.log.exception", raising(MemoryError()))
            seen = read_until(source, lambda pages: len(pages) >= 2, 20)
            assert [page.error for page in seen] == ["internal"] * len(seen)
        read_until(source, lambda pages: any(page.error is None for page in pages), 20)
