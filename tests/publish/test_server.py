"""The web server against polite and hostile clients, over real sockets on loopback."""

from __future__ import annotations

import contextlib
import gzip
import resource
import socket
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvpressure.publish.exposition import CLASSIC_TYPE
from kvpressure.publish.web import server as server_module
from kvpressure.publish.web.http import HttpRequest, Response, text_response
from kvpressure.publish.web.server import CONNECTIONS, ListenError, Server
from kvpressure.settings.kinds import ListenAddress
from tests.helpers.waiting import until
from tests.publish.clients import ask, closed_within, connect, receive
from tests.publish.conftest import Published, Start

pytestmark = pytest.mark.live

BIG = b"x" * 2**23  # more than any socket buffer takes
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Big:
    """A handler whose /big does not fit into socket buffers."""

    def answer(self, request: HttpRequest) -> Response:
        return Response(200, BIG) if request.path == "/big" else text_response(200)


def slow_client(port: int) -> socket.socket:
    """A client that asked for much and takes nothing."""
    client = socket.socket()
    client.settimeout(5)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    client.connect(("127.0.0.1", port))
    client.sendall(b"GET /big HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    return client


class TestSite:
    @pytest.mark.parametrize(
        ("path", "kind"),
        [
            ("/metrics", CLASSIC_TYPE),
            ("/", "text/html; charset=utf-8"),
            ("/api/v1/diagnosis", "application/json"),
            ("/-/healthy", "text/plain; charset=utf-8"),
            ("/-/ready", "text/plain; charset=utf-8"),
        ],
    )
    def test_every_path_answers_get_and_head_alike(self, start: Start, path: str, kind: str) -> None:
        port = start()
        got, headed = ask(port, path), ask(port, path, method="HEAD")
        assert (got.status, headed.status) == (200, 200)
        assert got.headers["content-type"] == kind
        assert len(got.body) == int(got.headers["content-length"])
        assert headed.body == b""
        assert headed.headers == got.headers

    @pytest.mark.parametrize(
        ("header", "packed"), [("deflate, gzip;q=0.5", True), ("*", True), ("gzip;q=0", False), ("", False)]
    )
    @pytest.mark.parametrize("path", ["/metrics", "/"])
    def test_gzip_when_accepted(self, start: Start, path: str, header: str, packed: bool) -> None:
        port = start()
        answer = ask(port, path, headers=f"Accept-Encoding: {header}\r\n" if header else "")
        assert ("content-encoding" in answer.headers) is packed
        assert "Accept-Encoding" in answer.headers["vary"]
        plain = ask(port, path).body
        assert (gzip.decompress(answer.body) if packed else answer.body) == plain

    @pytest.mark.parametrize(
        ("path", "method", "status"),
        [
            ("/metrics/", "GET", 404),
            ("/../metrics", "GET", 404),
            ("/nothing", "POST", 404),
            ("/metrics", "POST", 405),
            ("/-/ready", "OPTIONS", 405),
        ],
    )
    def test_other_paths_and_methods_are_refused(self, start: Start, path: str, method: str, status: int) -> None:
        answer = ask(start(), path, method=method)
        assert answer.status == status
        assert (answer.headers.get("allow") == "GET, HEAD") is (status == 405)

    def test_checks_say_what_is_wrong(self, start: Start, published: Published) -> None:
        port = start()
        published.unhealthy, published.not_ready = "no tick for 99 s", "waiting for vllm"
        assert ask(port, "/-/healthy").status == 503
        assert ask(port, "/-/ready").body == b"waiting for vllm\n"

    def test_a_state_is_rendered_once_and_a_new_state_anew(
        self, start: Start, published: Published, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from kvpressure.publish import routes

        rendered = []
        real = routes.collect
        monkeypatch.setattr(routes, "collect", lambda *args: (rendered.append(1), real(*args))[1])
        port = start()
        first = [ask(port).body for _ in range(3)]
        assert len(rendered) == 1
        assert first[0] == first[2]
        published.state = replace(published.state, ticks=43)
        assert b"kvpressure_ticks_total 43.0" in ask(port).body
        assert len(rendered) == 2

    def test_an_answer_that_fails_is_a_500_and_the_server_goes_on(self, start: Start) -> None:
        class Broken:
            def answer(self, request: HttpRequest) -> Response:
                raise RuntimeError(f"template of {request.path} broken")

        port = start(Broken())
        assert [ask(port).status for _ in range(2)] == [500, 500]


class TestConnections:
    def test_one_connection_serves_many_requests_also_pipelined(self, start: Start) -> None:
        with connect(start()) as client:
            client.sendall(REQUEST)
            assert receive(client).status == 200
            client.sendall(b"HEAD /-/ready HTTP/1.1\r\nHost: x\r\n\r\nGET /no HTTP/1.1\r\nHost: x\r\n\r\n")
            data = b""
            while b"Not Found\n" not in data:
                data += client.recv(65536)
            assert data.startswith(b"HTTP/1.1 200")
            assert data.count(b"HTTP/1.1 404") == 1

    def test_the_tail_of_an_answer_does_not_wait_for_an_acknowledgement(self, start: Start) -> None:
        """Head and body in two packets with Nagle's algorithm cost 40 ms each time."""
        seconds = []
        with connect(start()) as client:
            for _ in range(10):
                began = time.monotonic()
                client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\n\r\n")
                receive(client)
                seconds.append(time.monotonic() - began)
        assert min(seconds[1:]) < 0.03

    @pytest.mark.attack("a request with a body", "refused without reading the body")
    def test_a_body_is_not_read_and_the_refusal_arrives(self, start: Start) -> None:
        with connect(start()) as client:
            client.sendall(b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 40000\r\n\r\n" + b"x" * 40000)
            assert receive(client).status == 405
            assert closed_within(client, 2)

    @pytest.mark.parametrize(
        ("data", "status"),
        [
            (b"nonsense\r\n\r\n", 400),
            (b"PRI * HTTP/2.0\r\n\r\n", 505),
            (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 20000 + b"\r\n\r\n", 431),
            (b"GET /" + b"y" * 20000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        ],
    )
    def test_bad_requests_are_answered_and_closed(self, start: Start, data: bytes, status: int) -> None:
        with connect(start()) as client:
            client.sendall(data)
            assert receive(client).status == status
            assert closed_within(client, 2)

    def test_a_silent_client_is_closed_after_its_deadline(
        self, start: Start, monkeypatch: pytest.MonkeyPatch, published: Published
    ) -> None:
        monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.2)
        with connect(start()) as client:
            assert closed_within(client, 3)
        assert published.refused == {"request_timeout": 1}

    @pytest.mark.attack("a request that drips in, line by line", "closed at the deadline of the whole head")
    def test_dripping_does_not_prolong_the_deadline(
        self, start: Start, monkeypatch: pytest.MonkeyPatch, published: Published
    ) -> None:
        monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.4)
        port = start()
        began = time.monotonic()
        with connect(port) as client, contextlib.suppress(OSError):
            client.sendall(b"GET / HTTP/1.1\r\n")
            while time.monotonic() < began + 5:
                client.sendall(b"X: y\r\n")
                time.sleep(0.05)
        assert time.monotonic() - began < 2
        assert published.refused == {"request_timeout": 1}

    def test_an_idle_connection_is_closed(
        self, start: Start, monkeypatch: pytest.MonkeyPatch, published: Published
    ) -> None:
        monkeypatch.setattr(server_module, "IDLE_SECONDS", 0.2)
        with connect(start()) as client:
            client.sendall(REQUEST)
            receive(client)
            assert closed_within(client, 3)
        assert published.refused == {}, "a connection may wait for its next request"


class TestHostileCrowds:
    def scrape_seconds(self, port: int) -> float:
        began = time.monotonic()
        assert ask(port).status == 200
        return time.monotonic() - began

    @pytest.mark.attack(
        "406 silent connections, or as many with half a request", "scrapes are answered within a second"
    )
    @pytest.mark.parametrize("crowd", [200, CONNECTIONS + 150])
    @pytest.mark.parametrize(
        "opening", [b"", b"GET /metrics HTTP/1.1\r\nHost: x\r\n"], ids=["silent", "half a request"]
    )
    def test_silent_clients_delay_no_scrape(self, start: Start, crowd: int, opening: bytes) -> None:
        port = start()
        threads = threading.active_count()
        clients = [connect(port) for _ in range(crowd)]
        try:
            for client in clients:
                client.sendall(opening)
            assert min(self.scrape_seconds(port) for _ in range(5)) < 1  # whoever waits for the crowd waits each time
            assert threading.active_count() == threads
        finally:
            for client in clients:
                client.close()

    def test_with_all_places_taken_the_address_with_the_most_loses_one(
        self, start: Start, published: Published, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server_module, "CONNECTIONS", 6)
        monkeypatch.setattr(server_module, "PEER_CONNECTIONS", 4)
        port = start()
        crowd = [connect(port) for _ in range(4)]
        others = [socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0)) for _ in range(3)]
        until(lambda: published.refused == {"connections": 1})
        assert closed_within(crowd[0], 2)
        for client in (*crowd, *others):
            client.close()

    def test_clients_that_vanish_leave_no_descriptor(self, start: Start) -> None:
        port = start()
        self.scrape_seconds(port)
        before = descriptors()
        for number in range(100):
            client = connect(port)
            client.sendall(REQUEST[: number % len(REQUEST)])
            if number % 2:  # half of them go with a reset
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        until(lambda: descriptors() <= before)

    @pytest.mark.attack("clients that leave their answers unread", "the peer with the most answers loses one")
    @pytest.mark.fault(
        "web",
        "clients that never send or read",
        "nothing: they displace each other",
        "`web_refused_total{reason}`",
        "by itself",
    )
    def test_clients_that_take_no_answer_delay_no_scrape(self, start: Start, published: Published) -> None:
        """Two dozen every 0.4 s kept all places of answers for a second each."""
        port = start(Big(), max_requests=20)
        clients: list[socket.socket] = []
        try:
            for _ in range(4):
                clients += [slow_client(port) for _ in range(25)]
                for _ in range(3):
                    assert ask(port).status == 200
            assert published.refused["answers"] > 25
        finally:
            for client in clients:
                client.close()

    @pytest.mark.fault(
        "web",
        "more answers under way than allowed",
        "the slowest client's answer is closed",
        '`web_refused_total{reason="answers"}`',
        "that client asks again",
    )
    def test_the_answer_whose_client_is_slowest_makes_room_for_one_more(
        self, start: Start, published: Published
    ) -> None:
        port = start(Big(), max_requests=1)
        with slow_client(port) as slow:
            assert slow.recv(10)
            assert ask(port).status == 200
            got = 0
            with contextlib.suppress(ConnectionError):
                while part := slow.recv(2**20):
                    got += len(part)
            assert got < len(BIG)
        assert published.refused == {"answers": 1}

    @pytest.mark.writer(
        "anyone who can reach the port",
        "connections, requests, unread answers",
        "their own connections are closed first",
        "places for each address, deadlines for each phase, no request body is read",
    )
    def test_a_peer_with_many_connections_loses_its_own(self, start: Start, published: Published) -> None:
        port = start()
        scraper = socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))
        scraper.settimeout(5)
        crowd = [connect(port) for _ in range(2 * CONNECTIONS)]
        try:
            scraper.sendall(REQUEST)
            assert receive(scraper).status == 200, "it waited longest of all"
            until(lambda: published.refused == {"address": 2 * CONNECTIONS - server_module.PEER_CONNECTIONS})
            until(lambda: sum(not closed_within(client, 0.002) for client in crowd) <= server_module.PEER_CONNECTIONS)
        finally:
            for client in (scraper, *crowd):
                client.close()

    def test_an_answer_nobody_takes_is_given_up(
        self, start: Start, monkeypatch: pytest.MonkeyPatch, published: Published
    ) -> None:
        monkeypatch.setattr(server_module, "WRITE_SECONDS", 0.3)
        with slow_client(start(Big())) as slow:
            time.sleep(0.6)
            got = 0
            while part := slow.recv(2**20):
                got += len(part)
            assert got < len(BIG)
        assert published.refused == {"answer_timeout": 1}


class TestLife:
    def test_every_address_is_served_until_the_server_stops(self, published: Published) -> None:
        """The empty host means IPv4 and, where it exists, IPv6."""
        server = Server([ListenAddress("127.0.0.1", 0), ListenAddress("", 0)], published.site())
        ports = [address.port for address in server.start()]
        assert [ask(port, "/-/ready").status for port in ports] == [200, 200]
        if socket.has_dualstack_ipv6():
            with socket.create_connection(("::1", ports[1]), timeout=5) as client:
                client.sendall(REQUEST)
                assert receive(client).status == 200
        server.stop()
        for port in ports:
            with pytest.raises(OSError):  # noqa: PT011 (refused)
                connect(port, timeout=1)

    def test_an_address_in_use_is_one_clear_line(self, start: Start, published: Published) -> None:
        port = start()
        before = descriptors()
        server = Server([ListenAddress("127.0.0.1", 0), ListenAddress("127.0.0.1", port)], published.site())
        with pytest.raises(ListenError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            server.start()
        server.stop()
        del server
        assert descriptors() <= before + 3  # its unused loop goes with the collector

    @pytest.mark.fault(
        "web", "SIGTERM while answers are under way", "they finish; silent clients are not waited for", "–", "–"
    )
    def test_stop_lets_an_answer_finish_and_does_not_wait_for_silent_clients(self) -> None:
        server = Server([ListenAddress("127.0.0.1", 0)], Big())
        port = server.start()[0].port
        silent = connect(port)
        with slow_client(port) as client:
            data = client.recv(1024)
            stopper = threading.Thread(target=server.stop)
            began = time.monotonic()
            stopper.start()
            while part := client.recv(2**20):
                data += part
            stopper.join(5)
        assert data.endswith(BIG)
        assert time.monotonic() - began < 2
        silent.close()


@pytest.mark.parametrize(
    ("allowed", "places"),
    [
        (resource.RLIM_INFINITY, CONNECTIONS),
        (2 * CONNECTIONS - 2, CONNECTIONS - 1),
        (1, 1),
    ],
)
def test_connections_take_half_of_the_descriptors_at_most(
    monkeypatch: pytest.MonkeyPatch, allowed: int, places: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (allowed, allowed))
    assert server_module._places() == places
