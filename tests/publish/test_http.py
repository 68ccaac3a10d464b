"""The request parser: strict, and nothing but ``Request`` or ``BadRequest`` comes out of it."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpressure.publish.web.http import HEADERS_LIMIT, BadRequest, Response, head_of, parse_head


def head(*lines: str) -> bytes:
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode("latin-1")


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/", "/"),
        ("/metrics", "/metrics"),
        ("/metrics?collect[]=x", "/metrics"),
        ("/a#b", "/a"),
        ("http://host:9846/metrics?x=1", "/metrics"),
        ("http://host", "/"),
        ("http://host?x", "/"),
        ("/%6detrics", "/%6detrics"),
    ],
)
def test_paths(target: str, path: str) -> None:
    assert parse_head(head(f"GET {target} HTTP/1.1", "Host: x")).path == path


@pytest.mark.parametrize(
    ("version", "connection", "keep"),
    [
        ("1.1", None, True),
        ("1.1", "close", False),
        ("1.1", "Keep-Alive, CLOSE", False),
        ("1.0", None, False),
        ("1.0", "keep-alive", True),
    ],
)
def test_keep_alive(version: str, connection: str | None, keep: bool) -> None:
    lines = [f"GET / HTTP/{version}", "Host: x", *([f"Connection: {connection}"] if connection else [])]
    assert parse_head(head(*lines)).keep_alive is keep


def test_header_names_ignore_case_and_lists_join() -> None:
    request = parse_head(head("GET / HTTP/1.1", "HOST:x", "Accept: a ", "aCCept: b"))
    assert request.headers == {"host": "x", "accept": "a, b"}


@pytest.mark.parametrize("line", ["Content-Length: 5", "Transfer-Encoding: chunked"])
def test_a_body_is_noticed_and_ends_the_connection(line: str) -> None:
    request = parse_head(head("POST / HTTP/1.1", "Host: x", line))
    assert (request.has_body, request.keep_alive) == (True, False)


@pytest.mark.attack(
    "malformed requests: smuggling, traversal, long URLs, HTTP/0.9, endless headers, line feeds alone",
    "4xx, 5xx or a closed connection",
)
@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["GET /"], 400),
        (["GET  / HTTP/1.1"], 400),
        (["GET / HTTP/1.1 "], 400),
        (["GET / http/1.1"], 400),
        ([""], 400),
        (["G\x00T / HTTP/1.1", "Host: x"], 400),
        (["GET /\x7f HTTP/1.1", "Host: x"], 400),
        (["GET metrics HTTP/1.1", "Host: x"], 400),
        (["GET ftp://x/ HTTP/1.1", "Host: x"], 400),
        (["CONNECT host:80 HTTP/1.1", "Host: x"], 400),
        (["PRI * HTTP/2.0"], 505),
        (["GET / HTTP/1.1"], 400),
        (["GET / HTTP/1.1", "Host: x", "Host: y"], 400),
        (["GET / HTTP/1.1", "Host: x", " folded"], 400),
        (["GET / HTTP/1.1", "Host : x"], 400),
        (["GET / HTTP/1.1", "Host: a\x00b"], 400),
        (["GET / HTTP/1.1", "nonsense"], 400),
        (["GET / HTTP/1.1", "Host: x", "Authorization: a", "Authorization: b"], 400),
        (["GET / HTTP/1.1", "Host: x", *["X: y"] * HEADERS_LIMIT], 431),
    ],
)
def test_what_is_malformed_is_refused(lines: list[str], status: int) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_head(head(*lines))
    assert caught.value.status == status


@given(
    st.binary(max_size=300)
    | st.lists(
        st.sampled_from(
            [b"GET ", b"/", b" HTTP/1.1", b"\r\n", b"Host: x", b":", b" ", b"\x00", b"\xff", b"Content-Length: 1"]
        )
    ).map(b"".join)
)
def test_any_bytes_give_a_request_or_a_refusal(data: bytes) -> None:
    with contextlib.suppress(BadRequest):
        assert parse_head(data + b"\r\n\r\n").path.startswith("/")


def test_configured_headers_win_but_cannot_change_the_framing() -> None:
    text = head_of(
        Response(200, b"abc", headers={"X-Frame-Options": "deny"}),
        keep_alive=True,
        extra={"X-Frame-Options": "sameorigin"},
    ).decode()
    assert text.startswith("HTTP/1.1 200 OK\r\n")
    assert "Content-Length: 3\r\n" in text
    assert "X-Frame-Options: sameorigin\r\n" in text
    assert "deny" not in text
    assert text.endswith("Connection: keep-alive\r\n\r\n")
