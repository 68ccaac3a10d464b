"""Fetching from servers that are slow, broken or hostile: always one reason of the closed set, always in time."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.helpers.vllm_pages as pages
from kvpressure.model.reasons import REASONS
from kvpressure.sources.scrape import fetch as fetch_module
from kvpressure.sources.scrape.fetch import MAX_BODY_BYTES, Fetcher
from kvpressure.sources.scrape.targets import parse_target
from tests.helpers import failing
from tests.helpers.vllm_server import RawServer, answering, reset, response, saying

pytestmark = pytest.mark.live

PAGE = pages.text_of("d_kv_pressure").encode()
TLS = Path(pages.ROOT) / "tls"
SLACK = 1.5  # seconds a busy machine may add to a deadline


def fetcher_for(server: RawServer, timeout: float = 5.0, options: str = "") -> Fetcher:
    return Fetcher(parse_target(server.url + options), timeout)


def reason_of(fetcher: Fetcher) -> str:
    return failing.reason_of(fetcher.fetch, REASONS)


def reason_from(server: RawServer, timeout: float = 5.0) -> str:
    with server:
        return reason_of(fetcher_for(server, timeout))


# --- the normal case -------------------------------------------------------------------------------------


def test_the_page_comes_as_it_is_and_the_connection_is_kept():
    with answering(response(PAGE)) as server:
        fetcher = fetcher_for(server)
        for _ in range(3):
            assert fetcher.fetch() == PAGE
        fetcher.close()
    assert (server.connections, len(server.requests)) == (1, 3)


def test_the_request_says_no_more_than_needed(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with answering(response(PAGE, headers=["set-cookie: a=b"])) as server:
        fetcher = Fetcher(parse_target(f"{server.address}/some/path?x=y"), 5)
        fetcher.fetch()
        fetcher.fetch()
        fetcher.close()
    assert (
        server.requests
        == [
            (
                f"GET /some/path?x=y HTTP/1.1\r\nHost: {server.address}\r\nUser-Agent: kvpressure\r\n"
                "Accept: text/plain;version=0.0.4\r\nAccept-Encoding: identity\r\n\r\n"
            ).encode()
        ]
        * 2
    )


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nabcd\r\n2;x=y\r\nef\r\n0\r\ntrailer: x\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + response(b"abcdef"),
        response(b"abcdef", headers=["connection: close"]),
        b"HTTP/1.0 200 OK\r\n\r\nabcdef",
        b"HTTP/1.1 200 OK\r\n\r\nabcdef",
        response(b"abcdef", headers=["content-encoding: Identity"]),
    ],
)
def test_ways_to_send_a_page(answer):
    with saying(answer) as server:
        fetcher = fetcher_for(server)
        assert fetcher.fetch() == b"abcdef"
        fetcher.close()


# --- connections that end --------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "reset"])
def test_a_connection_that_ended_while_idle_is_replaced_silently(end):
    ended = threading.Semaphore(0)

    def script(server, connection):
        server.read_request(connection)
        connection.sendall(response(PAGE))
        if end == "reset":
            reset(connection)
        connection.close()
        ended.release()

    with RawServer(script) as server:
        fetcher = fetcher_for(server)
        for _ in range(3):
            assert fetcher.fetch() == PAGE
            ended.acquire(timeout=5)
        fetcher.close()
    assert server.connections == 3


def test_a_server_that_never_answers_on_a_kept_connection_is_asked_once_more_only():
    def script(server, connection):
        server.read_request(connection)
        if server.connections == 1:
            connection.sendall(response(PAGE))
            server.read_request(connection)

    with RawServer(script) as server:
        fetcher = fetcher_for(server)
        fetcher.fetch()
        assert reason_of(fetcher) == "reset"
    assert (server.connections, len(server.requests)) == (2, 3)


@pytest.mark.fault(
    "engines",
    "connection breaks",
    "as above",
    '`target_errors_total{reason="reset"}`',
    "new connection at the next scrape",
)
@pytest.mark.parametrize("how", ["close", "reset"])
def test_an_answer_that_breaks_off_is_not_asked_for_again(how):
    def script(server, connection):
        server.read_request(connection)
        connection.sendall(response(PAGE))
        server.read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\n" if how == "reset" else response(PAGE[:100], length=len(PAGE)))
        time.sleep(0.1)
        if how == "reset":
            reset(connection)

    with RawServer(script) as server:
        fetcher = fetcher_for(server)
        fetcher.fetch()
        assert reason_of(fetcher) == "reset"
        assert server.connections == 1
        assert fetcher.fetch() == PAGE  # a new connection
        fetcher.close()
    assert server.connections == 2


# --- answers that are no page ----------------------------------------------------------------------------


def test_statuses():
    reasons = {"301": "redirect", "304": "redirect", "400": "http_4xx", "401": "unauthorized", "403": "unauthorized"}
    reasons |= {"404": "http_404", "429": "http_4xx", "500": "http_5xx", "503": "http_5xx"}
    reasons |= {"201": "protocol", "999": "protocol"}
    assert {status: reason_from(answering(response(PAGE, f"{status} Words"))) for status in reasons} == reasons


@pytest.mark.attack("redirects to other machines", "not followed")
def test_redirects_are_not_followed():
    with (
        answering(response(PAGE)) as elsewhere,
        answering(response(b"", "302 Found", headers=[f"location: {elsewhere.url}"])) as server,
    ):
        assert reason_of(fetcher_for(server)) == "redirect"
    assert elsewhere.connections == 0


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/9.9 200 OK\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"".join(b"a%d: b\r\n" % n for n in range(200)) + b"\r\n",
        b"HTTP/1.1 200 OK\r\na: " + b"b" * 65_600 + b"\r\n\r\n",
    ],
)
def test_what_is_not_http(said):
    assert reason_from(saying(said)) in ("protocol", "too_large")


@pytest.mark.attack("gzip bombs", "refused unread")
@pytest.mark.parametrize("encoding", ["gzip", "X-GZIP ", "br"])
def test_a_packed_page_that_nobody_asked_for_is_refused_unread(encoding):
    endless_body = b"x" * (2 * MAX_BODY_BYTES)
    with answering(response(endless_body, headers=[f"content-encoding: {encoding}"])) as server:
        started = time.thread_time()
        assert reason_of(fetcher_for(server)) == "bad_encoding"
        assert time.thread_time() - started < 0.3


def endless(part: bytes, head: bytes = b"HTTP/1.1 200 OK\r\n\r\n") -> RawServer:
    def script(server, connection):
        server.read_request(connection)
        connection.sendall(head)
        while not server.stopping.is_set():
            connection.sendall(part)

    return RawServer(script)


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.attack("endless answers, headers without end, wrong lengths", "`too_large`, `bad_http`")
@pytest.mark.parametrize(
    "server",
    [
        lambda: endless(b"x" * 65536),
        lambda: endless(b"10000\r\n" + b"x" * 65536 + b"\r\n", CHUNKED),
        lambda: endless(b"x" * 65536, CHUNKED + b"ffffffffffffffff\r\n"),
        lambda: endless(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, b""),
        lambda: endless(b"a" * 65536, CHUNKED + b"0\r\n"),
        lambda: saying(response(b"", length=MAX_BODY_BYTES + 1), then="hang"),
        lambda: saying(response(b"x" * (MAX_BODY_BYTES + 1))),
    ],
    ids=["body", "chunks", "one chunk", "1xx", "trailer", "announced", "sent"],
)
def test_too_much(server):
    assert reason_from(server()) in ("too_large", "protocol")


def test_as_much_as_allowed():
    body = b"x" * MAX_BODY_BYTES
    with saying(response(body)) as server:
        fetcher = fetcher_for(server)
        assert fetcher.fetch() == body
        fetcher.close()
        assert reason_of(fetcher) == "reset", "closed for good"


@pytest.mark.parametrize(
    "server",
    [
        lambda: saying(),
        lambda: saying(then="reset"),
        lambda: saying(b"HTTP/1.1 200 OK\r\ncontent-le", then="reset"),
        lambda: saying(response(PAGE[:1000], length=5000)),
        lambda: saying(response(PAGE[:1000], length=5000), then="reset", pause=0.05),
        lambda: saying(CHUNKED + b"ff\r\nabc"),
        lambda: saying(CHUNKED + b"3\r\nabc\r\n"),
        lambda: saying(CHUNKED + b"zz\r\nabc\r\n"),
    ],
)
def test_connections_that_break(server):
    assert reason_from(server()) == "reset"


# --- time ------------------------------------------------------------------------------------------------


def dripping(head: bytes, drip: bytes) -> RawServer:
    def script(server, connection):
        server.read_request(connection)
        connection.sendall(head)
        while not server.stopping.wait(0.02):
            connection.sendall(drip)

    return RawServer(script)


@pytest.mark.fault(
    "engines",
    "engine hangs or drips its answer",
    "one timeout is tolerated, then `engine_up` 0; the verdict treats timeouts as evidence",
    '`target_errors_total{reason="timeout"}`',
    "next successful scrape",
)
@pytest.mark.writer(
    "anyone who may start a pod on the node",
    "a metrics endpoint that answers anything",
    "series of their own pod; CPU and memory of the exporter up to the limits below",
    "one deadline for the whole scrape, byte limits before and after unpacking, no redirects, no credentials sent",
)
@pytest.mark.parametrize(
    "server",
    [
        lambda: RawServer(lambda server, _connection: server.hang()),
        lambda: saying(then="hang"),
        lambda: saying(b"HTTP/1.1 200 OK\r\n", then="hang"),
        lambda: saying(response(PAGE[:1000], length=len(PAGE)), then="hang"),
        lambda: dripping(b"", b"H"),
        lambda: dripping(b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
        lambda: dripping(response(b"", length=100_000), b"x"),
        lambda: dripping(CHUNKED, b"1\r\nx\r\n"),
        lambda: dripping(b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
    ],
)
def test_the_deadline_is_for_everything_together(server):
    with server() as running:
        fetcher = fetcher_for(running, timeout=0.4)
        started = time.monotonic()
        assert reason_of(fetcher) == "timeout"
        assert 0.35 < time.monotonic() - started < 0.4 + SLACK


def test_a_server_that_does_not_accept_is_unreachable_because_nothing_is_known_of_it():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:  # the queue of connections is full now: further ones get no answer
            filler.setblocking(False)
            filler.connect_ex(address)
        time.sleep(0.05)
        fetcher = Fetcher(parse_target(f"127.0.0.1:{address[1]}"), 0.4)
        started = time.monotonic()
        assert reason_of(fetcher) == "unreachable"
        assert time.monotonic() - started < 0.4 + SLACK
        for filler in fillers:
            filler.close()


# --- below HTTP ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "reason"), [("127.0.0.1:1", "refused"), ("http://a..b/", "dns"), ("255.255.255.255", "unreachable")]
)
def test_nobody_there(address, reason):
    assert reason_of(Fetcher(parse_target(address), 5)) == reason


def test_the_next_address_of_a_name_is_tried(monkeypatch):
    with answering(response(PAGE)) as server, socket.create_server(("127.0.0.1", 0)) as listener:
        closed = listener.getsockname()
        listener.close()
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        monkeypatch.setattr(
            socket, "getaddrinfo", lambda *_args, **_more: [(*kind, closed), (*kind, ("127.0.0.1", server.port))]
        )
        fetcher = Fetcher(parse_target("vllm.example"), 5)
        assert fetcher.fetch() == PAGE
        fetcher.close()


# --- https -----------------------------------------------------------------------------------------------


def tls_server() -> RawServer:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(TLS / "cert.pem", TLS / "key.pem")

    def script(server, connection):
        with context.wrap_socket(connection, server_side=True) as secured:
            server.read_request(secured)
            secured.sendall(response(PAGE))
            if server.stopping.wait(0):
                return
            server.read_request(secured)
            secured.sendall(response(PAGE))

    return RawServer(script)


def https_fetcher(server: RawServer, options: str = "", timeout: float = 5) -> Fetcher:
    return Fetcher(parse_target(f"https://{server.address}{options}"), timeout)


@pytest.mark.parametrize("options", [f";ca={TLS / 'cert.pem'}", ";tls=insecure"])
def test_https(options):
    with tls_server() as server:
        fetcher = https_fetcher(server, options)
        for _ in range(5):  # the server ends each connection after two answers
            assert fetcher.fetch() == PAGE
        fetcher.close()
    assert server.connections == 3


def test_an_unknown_certificate_is_refused():
    with tls_server() as server:
        assert reason_of(https_fetcher(server)) == "tls"
    assert server.requests == []


def test_a_certificate_for_another_name_is_refused(monkeypatch):
    with tls_server() as server:
        real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", lambda _host, *more, **named: real("127.0.0.1", *more, **named))
        target = parse_target(f"https://elsewhere:{server.port};ca={TLS / 'cert.pem'}")
        assert reason_of(Fetcher(target, 5)) == "tls"


@pytest.mark.fault(
    "engines",
    "certificate renewed",
    "nothing, or one failed scrape",
    '`target_errors_total{reason="tls"}`',
    "trusted certificates are read again",
)
def test_renewed_certificates_are_read_without_a_restart(tmp_path):
    trusted = tmp_path / "ca.pem"
    trusted.write_text("not yet")
    with tls_server() as server:
        fetcher = https_fetcher(server, f";ca={trusted}")
        assert reason_of(fetcher) == "tls"
        trusted.unlink()
        assert reason_of(fetcher) == "tls"
        trusted.write_bytes((TLS / "other.pem").read_bytes())
        assert reason_of(fetcher) == "tls"
        trusted.write_bytes((TLS / "cert.pem").read_bytes())
        assert fetcher.fetch() == PAGE
        fetcher.close()


def test_https_to_a_server_without_tls():
    with saying(b"HTTP/1.1 400 Bad Request\r\n\r\n") as server:
        server.script = lambda _server, connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        assert reason_of(https_fetcher(server)) == "tls"


def test_a_handshake_that_hangs_or_drips_ends_in_time():
    def drip(server, connection):
        while not server.stopping.wait(0.02):
            connection.sendall(b"\x16")

    for script in (lambda server, _connection: server.hang(), drip):
        with RawServer(script) as server:
            started = time.monotonic()
            assert reason_of(https_fetcher(server, timeout=0.4)) in ("timeout", "tls")
            assert time.monotonic() - started < 0.4 + SLACK


NAMES = ("Content-Length", "content-length", "Transfer-Encoding", "Connection", "Content-Encoding", "X")
VALUES = ("chunked", "Chunked", "close", "keep-alive", "Close, x", "12", "-1", "1e3", "", " 7 ", "gzip", "a: b")
HEADERS = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)), max_size=6)


@given(
    HEADERS,
    st.sampled_from(["HTTP/1.1", "HTTP/1.0", "HTTP/1.7"]),
    st.sampled_from([200, 204, 301, 404, 500]),
    st.booleans(),
    st.sampled_from(["\r\n", "\n"]),
)
def test_headers_mean_what_they_mean_to_the_library(
    headers: list[tuple[str, str]], version: str, status: int, first_continue: bool, end: str
) -> None:
    lines = [f"{version} {status} Words", *(f"{name}: {value}" for name, value in headers), ""]
    before = ["HTTP/1.1 100 Continue", "X: y", ""] if first_continue else []
    text = "".join(line + end for line in (*before, *lines)).encode()
    peer = SimpleNamespace(makefile=lambda _: io.BytesIO(text))
    ours = fetch_module._HttpResponse(peer, method="GET")
    theirs = http.client.HTTPResponse(peer, method="GET")
    ours.begin()
    theirs.begin()
    names = ("status", "version", "chunked", "length", "will_close")
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
    first = theirs.headers.get("Content-Encoding")
    assert ours.headers.get("content-encoding") == (None if first is None else first.strip())
