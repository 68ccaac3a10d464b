"""The request parser: strict, and nothing but ``Request`` or ``BadRequest`` comes out of it."""

from __future__ import annotations

import pytest

from kvpressure.publish.web.http import HEADERS_LIMIT, BadRequest, parse_head


def head(*lines: str) -> bytes:
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode("latin-1")


def test_paths() -> None:
    paths = {"/": "/", "/metrics?collect[]=x": "/metrics", "/a#b": "/a", "http://host:9846/metrics?x=1": "/metrics"}
    paths |= {"http://host": "/", "http://host?x": "/", "/%6detrics": "/%6detrics"}
    assert {target: parse_head(head(f"GET {target} HTTP/1.1", "Host: x")).path for target in paths} == paths


@pytest.mark.parametrize(
    ("version", "more", "keep"),
    [
        ("1.1", [], True),
        ("1.1", ["Connection: Keep-Alive, CLOSE"], False),
        ("1.0", [], False),
        ("1.0", ["Connection: keep-alive"], True),
    ],
)
def test_keep_alive(version: str, more: list[str], keep: bool) -> None:
    assert parse_head(head(f"GET / HTTP/{version}", "Host: x", *more)).keep_alive is keep


def test_header_names_ignore_case_and_lists_join() -> None:
    request = parse_head(head("GET / HTTP/1.1", "HOST:x", "Accept: a ", "aCCept: b"))
    assert request.headers == {"host": "x", "accept": "a, b"}


@pytest.mark.attack(
    "malformed requests: smuggling, traversal, long URLs, HTTP/0.9, endless headers, line feeds alone",
    "4xx, 5xx or a closed connection",
)
@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["GET /"], 400),
        (["GET  / HTTP/1.1"], 400),
        ([""], 400),
        (["G\x00T / HTTP/1.1", "Host: x"], 400),
        (["GET /\x7f HTTP/1.1", "Host: x"], 400),
        (["GET metrics HTTP/1.1", "Host: x"], 400),
        (["CONNECT host:80 HTTP/1.1", "Host: x"], 400),
        (["PRI * HTTP/2.0"], 505),
        (["GET / HTTP/1.1"], 400),
        (["GET / HTTP/1.1", "Host: x", "Host: y"], 400),
        (["GET / HTTP/1.1", "Host: x", " folded"], 400),
        (["GET / HTTP/1.1", "Host : x"], 400),
        (["GET / HTTP/1.1", "Host: a\x00b"], 400),
        (["GET / HTTP/1.1", "Host: x", "Authorization: a", "Authorization: b"], 400),
        (["GET / HTTP/1.1", "Host: x", *["X: y"] * HEADERS_LIMIT], 431),
    ],
)
def test_what_is_malformed_is_refused(lines: list[str], status: int) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_head(head(*lines))
    assert caught.value.status == status
