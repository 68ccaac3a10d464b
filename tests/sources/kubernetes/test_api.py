"""The Kubernetes client against a server that lists, watches, forgets, refuses, hangs and lies."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpressure import __version__
from kvpressure.sources.base import SourceError
from kvpressure.sources.kubernetes import api as kube
from kvpressure.sources.kubernetes.api import REASONS, KubeApi, Watcher
from tests.helpers import failing
from tests.helpers.vllm_server import RawServer
from tests.helpers.waiting import until
from tests.sources.kubernetes.apiserver import FakeApi
from tests.sources.kubernetes.objects import pod

pytestmark = pytest.mark.live

PODS = "/api/v1/pods"
CACHED = {"limit": "50", "resourceVersion": "0", "resourceVersionMatch": "NotOlderThan"}


class Seen:
    """A collection as a watcher tells of it."""

    def __init__(self, api: KubeApi, **parameters: str) -> None:
        self.names: dict[str, str] = {}
        self.lists = 0
        self.watcher = Watcher(api, PODS, parameters, self._replace, self._change, (0.02, 0.1))

    def _replace(self, items: Iterator[dict[str, Any]]) -> None:
        names = {item["metadata"]["uid"]: item["metadata"]["name"] for item in items}
        self.lists += 1
        self.names = names

    def _change(self, kind: str, item: dict[str, Any]) -> None:
        uid = item["metadata"]["uid"]
        if kind == "DELETED":
            self.names.pop(uid, None)
        else:
            self.names[uid] = item["metadata"]["name"]

    def have(self, *names: str) -> bool:
        return sorted(self.names.values()) == sorted(names)


@contextmanager
def watching(client: KubeApi, **parameters: str) -> Iterator[Seen]:
    seen = Seen(client, **parameters)
    seen.watcher.start()
    try:
        yield seen
    finally:
        seen.watcher.close()


class Clock:
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Scripted:
    """An API server in one thread: ``watch`` ends as told. Stands for the watcher's stop event too, for a minute."""

    def __init__(
        self,
        clock: Clock,
        lasts: float = 0.0,
        events: int = 0,
        gone: bool = True,
        refusal: SourceError | None = None,
        seconds: float = 60.0,
    ) -> None:
        self.lists: list[float] = []
        self.asked: list[dict[str, str]] = []  # of the lists
        self.watches: list[float] = []
        self._clock, self._lasts, self._events, self._gone = clock, lasts, events, gone
        self._refusal, self._end = refusal, clock.now + seconds

    def items(self, _: str, parameters: dict[str, str]) -> Generator[dict[str, Any], None, dict[str, Any]]:
        self.lists.append(self._clock.now)
        self.asked.append(parameters)
        yield from ()
        if self._refusal is not None:
            raise self._refusal
        return {"resourceVersion": "1"}

    def watch(self, *_: object) -> Iterator[dict[str, Any]]:
        self.watches.append(self._clock.now)
        for _event in range(self._events):
            yield {"type": "ADDED", "object": pod("a")}
        self._clock.now += self._lasts
        if self._gone:
            raise kube.Gone

    def is_set(self) -> bool:
        return self._clock.now >= self._end

    def wait(self, seconds: float) -> None:
        self._clock.now += seconds


class Restarting(Scripted):
    """Each watch lasts as long as it was asked to, but at ``down`` the server ends them, answers 503 for two seconds
    and knows no older version then.
    """

    down = 2000.0

    def items(self, path: str, parameters: dict[str, str]) -> Generator[dict[str, Any], None, dict[str, Any]]:
        yield from super().items(path, parameters)
        return {"resourceVersion": str(self._clock.now)}

    def watch(self, _: str, parameters: dict[str, str], opened: Callable[[object], None]) -> Iterator[dict[str, Any]]:
        self.watches.append(self._clock.now)
        if self.down <= self._clock.now < self.down + 2:
            raise SourceError("api_error")
        if float(parameters["resourceVersion"]) < self.down <= self._clock.now:
            raise kube.Gone
        opened(None)
        end = self._clock.now + float(parameters["timeoutSeconds"])
        while self._clock.now < end:
            self._clock.now += 60.0
            if self.down <= self._clock.now < self.down + 60.0:
                self._clock.now = self.down
                return
            yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self._clock.now)}}}


def a_minute(
    monkeypatch: pytest.MonkeyPatch, server_of: type[Scripted] = Scripted, **behaviour: Any
) -> tuple[Scripted, Watcher]:
    clock = Clock()
    monkeypatch.setattr(kube, "time", clock)
    server = server_of(clock, **behaviour)
    watcher = Watcher(server, PODS, {}, lambda items: [*items], lambda *_: None)
    watcher._stop = server
    watcher._run()
    return server, watcher


@pytest.mark.attack(
    "an API server that answers 410 at once, or ends each watch", "asked less and less, shown as an error"
)
@pytest.mark.fault(
    "sources",
    "API server answers 410 or ends watches",
    "pods are seen later",
    '`source_errors_total{source="pods"}`',
    "the exporter lists pods again, with back-off",
)
def test_a_server_that_forgets_at_once_is_asked_less_and_less_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    server, watcher = a_minute(monkeypatch)
    assert 3 <= len(server.lists) <= 6
    assert watcher.errors == {"api_gone": len(server.watches)}
    assert watcher.error == "api_gone"


def test_sixty_watchers_of_a_restarted_server_list_from_its_cache_and_not_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again = []
    for _ in range(60):
        server, watcher = a_minute(monkeypatch, Restarting, seconds=1800.0)
        assert all(asked == CACHED for asked in server.asked)
        assert (watcher.error, watcher.errors["api_gone"]) == (None, 1)
        again.append(server.lists[1])
        assert len(server.lists) == 2
    assert Restarting.down + 10 < min(again) < min(again) + 10 < max(again) < Restarting.down + 35


def test_two_collections_cost_fifteen_requests_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Restarting, "down", float("inf"))
    hours = 10
    server, _ = a_minute(monkeypatch, Restarting, seconds=hours * 3600.0)
    assert 2 * (len(server.lists) + len(server.watches)) <= 15 * hours


def test_a_watch_that_ends_at_once_is_begun_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    server, watcher = a_minute(monkeypatch, gone=False)
    assert (len(server.lists), watcher.error, watcher.errors) == (1, None, {})
    assert len(server.watches) <= 6


@pytest.mark.parametrize("behaviour", [{"lasts": 31.0}, {"lasts": 1.0, "events": 1}])
@pytest.mark.parametrize("gone", [False, True])
def test_a_watch_that_worked_is_begun_again_and_its_view_is_current_meanwhile(
    gone: bool, behaviour: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soon, but after 410 with a list."""
    server, watcher = a_minute(monkeypatch, gone=gone, seconds=600.0, **behaviour)
    waits = [
        later - earlier - behaviour["lasts"] for earlier, later in zip(server.watches, server.watches[1:], strict=False)
    ]
    assert waits
    assert max(waits) <= kube.BACKOFF_SECONDS[gone]
    assert watcher.error is None
    if not gone:
        return
    assert min(waits) >= 10
    assert len(server.lists) == len(server.watches)
    assert len(server.watches) - watcher.errors["api_gone"] in (0, 1)  # the last one may end when nobody wants to know


@pytest.mark.attack("an API server that answers 429 with Retry-After", "waits as long as told")
@pytest.mark.parametrize(("asked", "least", "most"), [(20.0, 20.0, 25.0), (120.0, 120.0, 150.0), (0.0, 0.0, 30.0)])
def test_retry_after_is_honoured(asked: float, least: float, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    server, watcher = a_minute(monkeypatch, refusal=kube.Throttled("api_throttled", "", asked), seconds=1000.0)
    waits = [later - earlier for earlier, later in zip(server.lists, server.lists[1:], strict=False)]
    assert len(waits) >= 5
    assert least <= min(waits)
    assert max(waits[:4]) <= max(most, 8 * kube.BACKOFF_SECONDS[0])
    assert watcher.errors == {"api_throttled": len(server.lists)}


@pytest.mark.parametrize(
    ("header", "expected"),
    [("20", 20.0), ("0", 0.0), ("99999", kube.RETRY_AFTER_SECONDS), ("-1", None), ("1e9", None), ("9" * 99, None)],
)
def test_retry_after_is_read_and_bounded(api: FakeApi, header: str, expected: float | None) -> None:
    api.status[PODS] = 429
    api.retry_after = header
    with pytest.raises(SourceError) as caught:
        list(KubeApi(api.url).items(PODS, {}))
    assert caught.value.reason == "api_throttled"
    assert getattr(caught.value, "retry_after", None) == expected


def test_a_watch_may_ask_to_wait_too() -> None:
    error = {"code": 429, "message": "slow down", "details": {"retryAfterSeconds": 20}}
    body = json.dumps({"type": "ERROR", "object": error}).encode() + b"\n"
    with speaking(lambda c: c.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))) as url:
        with pytest.raises(kube.Throttled) as caught:
            list(KubeApi(url).watch(PODS, {}, lambda _: None))
        assert (caught.value.reason, caught.value.retry_after) == ("api_throttled", 20.0)


def lists_of(api: FakeApi) -> list[dict[str, str]]:
    return [query for path, query in api.requests if path == PODS and "watch" not in query]


@pytest.mark.parametrize("pages_from_cache", [False, True])
def test_the_first_list_comes_from_the_cache_in_pages_where_the_server_makes_them(
    api: FakeApi, pages_from_cache: bool
) -> None:
    api.pages_from_cache = pages_from_cache
    for number in range(120):
        api.apply(pod(f"p{number}"))
    with watching(KubeApi(api.url)) as seen:
        until(lambda: len(seen.names) == 120)
        api.apply(pod("late"))
        until(lambda: len(seen.names) == 121)
        assert seen.lists == 1
    asked = lists_of(api)
    assert asked[0] == CACHED
    assert [query.get("continue", "")[:3] for query in asked[1:]] == (["50/", "100"] if pages_from_cache else [])


def test_a_continuation_that_is_forgotten_begins_a_list_without_pages(api: FakeApi) -> None:
    api.pages_from_cache = True
    api.expired_pages = 1
    for number in range(60):
        api.apply(pod(f"p{number}"))
    with watching(KubeApi(api.url)) as seen:
        until(lambda: len(seen.names) == 60)
        assert seen.watcher.errors == {"api_gone": 1}
    assert lists_of(api)[2] == {}


@pytest.mark.attack("lists without end, one that drips", "given up at a limit")
def test_pages_without_end_are_given_up(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "MAX_PAGES", 3)
    api.pages_from_cache = True
    for number in range(201):
        api.apply(pod(f"p{number}"))
    with watching(KubeApi(api.url)) as seen:
        until(lambda: seen.watcher.error == "api_bad_answer")
        assert seen.names == {}


def test_a_list_may_be_slow_but_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "REQUEST_SECONDS", 0.6)
    body = json.dumps({"metadata": {"resourceVersion": "1"}, "items": [pod(f"p{n}") for n in range(10)]}).encode()

    def slow(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
        for at in range(0, len(body), len(body) // 10 + 1):
            connection.sendall(body[at : at + len(body) // 10 + 1])
            time.sleep(0.1)

    def stuck(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body[:500]))
        time.sleep(2)

    with speaking(slow) as url:
        began = time.monotonic()
        assert len(list(KubeApi(url).items(PODS, {}))) == 10
        assert time.monotonic() - began > 0.9
    with speaking(stuck) as url:
        assert reason_of(url) == "api_timeout"
    monkeypatch.setattr(kube, "LIST_SECONDS", 0.4)
    with speaking(slow) as url:
        assert reason_of(url) == "api_timeout"


def test_bookmarks_move_the_version_so_that_no_list_is_needed_after_compaction(api: FakeApi) -> None:
    with watching(KubeApi(api.url), fieldSelector="spec.nodeName=node-1") as seen:
        until(lambda: api.count(PODS, watch="1") == 1)
        api.apply(pod("elsewhere", node="node-2"))  # invisible here, but a bookmark tells its version
        time.sleep(0.2)
        api.oldest = api.version
        api.cut()
        until(lambda: api.count(PODS, watch="1") >= 2)
        api.apply(pod("a"))
        until(lambda: seen.have("a"))
        assert seen.lists == 1


@pytest.mark.parametrize("as_event", [False, True])
def test_gone_lists_again(api: FakeApi, as_event: bool) -> None:
    api.gone_as_event = as_event
    api.apply(pod("a"))
    api.apply(pod("b"))
    with watching(KubeApi(api.url)) as seen:
        until(lambda: seen.have("a", "b"))
        api.status[PODS] = 429  # out of reach while things happen that will be forgotten
        api.cut()
        until(lambda: seen.watcher.error == "api_throttled")
        api.delete(pod("a"))
        api.compact()
        api.status.clear()
        until(lambda: seen.have("b"))
        assert seen.lists == 2
        assert [query for query in lists_of(api) if query != CACHED] == []
        until(lambda: seen.watcher.error is None)


def test_a_version_that_the_server_does_not_like_is_dropped(api: FakeApi) -> None:
    with watching(KubeApi(api.url)) as seen:
        until(lambda: api.count(PODS, watch="1") == 1)
        api.status["watch"] = 500
        api.cut()
        until(lambda: seen.lists >= 2)
        api.status.clear()
        api.apply(pod("a"))
        until(lambda: seen.have("a"))


@pytest.mark.attack(
    "an API server that breaks a watch off while pods go", "the next watch tells of them, without a list"
)
@pytest.mark.parametrize("reset", [False, True], ids=["ended", "broken off"])
def test_a_pod_that_goes_while_the_watch_is_cut_is_gone(api: FakeApi, reset: bool) -> None:
    """The next watch begins where the last one ended, so no list is needed to miss nothing."""
    with watching(KubeApi(api.url)) as seen:
        for name in ("a", "b"):
            api.apply(pod(name))
        until(lambda: seen.have("a", "b"))
        api.resets = reset
        api.cut()
        api.delete(pod("a"))
        api.apply(pod("c"))
        until(lambda: seen.have("b", "c"))
        assert seen.lists == 1


def test_refusals_have_reasons(api: FakeApi) -> None:
    reasons = {401: "unauthorized", 403: "forbidden", 404: "not_found", 429: "throttled", 500: "error", 302: "error"}
    for status, reason in reasons.items():
        api.status[PODS] = status
        assert reason_of(api.url) == f"api_{reason}", status


def reason_of(url: str | None, **fields: Any) -> str:
    return failing.reason_of(lambda: list(KubeApi(url, **fields).items(PODS, {})), REASONS)


def test_unreachable_and_outside() -> None:
    assert reason_of("http://127.0.0.1:1") == "api_unreachable"
    assert reason_of(None, environ={}) == "not_in_cluster"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "api_bad_answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "api_bad_answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{}", "api_bad_answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100_000, "api_bad_answer"),
        (b"nonsense\r\n\r\n", "api_bad_answer"),
        (b"", "api_unreachable"),
    ],
)
def test_bad_answers(answer: bytes, reason: str) -> None:
    with speaking(lambda connection: connection.sendall(answer)) as url:
        assert reason_of(url) == reason


@contextmanager
def speaking(say: Callable[[socket.socket], object]) -> Iterator[str]:
    """A server that reads the request, says something and hangs up."""

    def script(server: RawServer, connection: socket.socket) -> None:
        server.read_request(connection)
        say(connection)

    with RawServer(script) as server:
        yield f"http://{server.address}"


def test_too_much_is_too_much(monkeypatch: pytest.MonkeyPatch, api: FakeApi) -> None:
    monkeypatch.setattr(kube, "MAX_LIST_BYTES", 1000)
    for i in range(3):
        api.apply(pod(f"p{i}"))
    assert reason_of(api.url) == "api_bad_answer"


def test_a_watch_event_that_never_ends_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "MAX_EVENT_BYTES", 1000)
    with speaking(lambda c: c.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + b"x" * 5000)) as url:
        with pytest.raises(SourceError) as caught:
            list(KubeApi(url).watch(PODS, {}, lambda _: None))
        assert caught.value.reason == "api_bad_answer"


def test_a_silent_watch_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "SILENCE_SECONDS", 0.2)

    def silent(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n")
        time.sleep(2)

    with speaking(silent) as url:
        started = time.monotonic()
        assert list(KubeApi(url).watch(PODS, {}, lambda _: None)) == []
        assert time.monotonic() - started < 1.5


def test_tls_is_verified_with_the_clusters_ca(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    with FakeApi(certificate) as api:
        assert list(KubeApi(api.url, ca_file=certificate[0]).items(PODS, {})) == []
        assert reason_of(api.url, ca_file=tmp_path / "missing") == "api_tls"
        (tmp_path / "other").write_bytes(b"no certificate")
        assert reason_of(api.url, ca_file=tmp_path / "other") == "api_tls"
        host, port = api.url.removeprefix("https://").split(":")
        inside = KubeApi(
            ca_file=certificate[0], environ={"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        )
        assert list(inside.items(PODS, {})) == []


@pytest.mark.attack("a certificate of somebody else, a token that expires", "refused; read again")
@pytest.mark.fault(
    "sources",
    "service account token expires",
    "nothing, or one refused request",
    '`source_errors_total{source="pods"}`',
    "the token file is read again",
)
def test_a_volume_that_is_swapped_is_read_again(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    """As the kubelet renews a projected volume: everything behind one link, which is swapped."""
    from tests.sources import conftest

    other = conftest.self_signed(tmp_path)
    for name, authority, token in (
        ("one", other[0], "old"),
        ("two", certificate[0], "old"),
        ("three", certificate[0], "new"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ca.crt").write_bytes(authority.read_bytes())
        (tmp_path / name / "token").write_text(token)
    for name in ("ca.crt", "token"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    with FakeApi(certificate) as api:
        api.tokens = {"new"}
        client = KubeApi(api.url, tmp_path / "token", ca_file=tmp_path / "ca.crt")
        for name, reason in (("one", "api_tls"), ("two", "api_unauthorized"), ("three", None)):
            (tmp_path / "..new").symlink_to(name)
            (tmp_path / "..new").rename(tmp_path / "..data")
            if reason:
                assert failing.reason_of(lambda: list(client.items(PODS, {})), REASONS) == reason
        assert list(client.items(PODS, {})) == []


def test_the_token_goes_to_no_other_machine_in_the_clear(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    client = KubeApi("http://api.example", tmp_path / "token")
    connection = client._connect(1)
    assert client._headers(connection) == {"Accept": "application/json", "User-Agent": f"kvpressure/{__version__}"}
    assert "Authorization" in KubeApi("https://api.example", tmp_path / "token", environ={})._headers(
        kube.http.client.HTTPSConnection("api.example")
    )


def test_close_ends_a_watch_at_once(api: FakeApi) -> None:
    seen = Seen(KubeApi(api.url))
    seen.watcher.start()
    until(lambda: api.count(PODS, watch="1") == 1)
    time.sleep(0.05)
    started = time.monotonic()
    seen.watcher.close()
    seen.watcher._thread.join(5)
    assert not seen.watcher._thread.is_alive()
    assert time.monotonic() - started < 1


@pytest.mark.fault(
    "sources",
    "API server unreachable, answers HTML, 429, 5xx",
    "the last pods stay for a while, then absent",
    '`source_errors_total{source="pods"}`',
    "back-off, then a new list",
)
def test_failures_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    server, watcher = a_minute(monkeypatch, refusal=SourceError("api_error"))
    assert 3 <= len(server.lists) <= 10
    assert watcher.errors == {"api_error": len(server.lists)}
