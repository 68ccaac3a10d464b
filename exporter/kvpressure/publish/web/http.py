"""A minimal, strict HTTP/1.1 parser for a server that answers GET and HEAD without request bodies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

HEAD_LIMIT: Final = 16 * 1024  # bytes of request line and headers together
HEADERS_LIMIT: Final = 100

_REQUEST: Final = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]{1,32}) ([\x21-\x7e]+) HTTP/(\d)\.(\d)")
_HEADER: Final = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_ONCE: Final = ("host", "content-length", "authorization")


class BadRequest(Exception):
    """The request is malformed or unsupported; the connection closes after an answer with ``status``."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request without a body. Header names are lower case; ``path`` is without the query."""

    method: str
    path: str
    headers: Mapping[str, str]
    keep_alive: bool
    has_body: bool = False


@dataclass(frozen=True, slots=True)
class Response:
    """``headers``: those beyond type and length."""

    status: int
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)


def text_response(status: int, text: str = "", headers: Mapping[str, str] | None = None) -> Response:
    """A response of one line of text; by default the status's phrase."""
    return Response(status, f"{text or HTTPStatus(status).phrase}\n".encode(), headers=headers or {})


def parse_head(head: bytes) -> HttpRequest:
    """The request of a head that ends with its empty line. Raises ``BadRequest``."""
    first, *rest = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    match = _REQUEST.fullmatch(first)
    if match is None:
        raise BadRequest(400, "malformed request line")
    if match[3] != b"1":
        raise BadRequest(505, "only HTTP/1.0 and HTTP/1.1 are supported")
    headers = _headers(rest)
    http_1_0 = match[4] == b"0"
    if not http_1_0 and "host" not in headers:
        raise BadRequest(400, "no Host header")
    connection = {token.strip().lower() for token in headers.get("connection", "").split(",")}
    keep_alive = "keep-alive" in connection if http_1_0 else "close" not in connection
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    return HttpRequest(match[1].decode(), _path(match[2].decode()), headers, keep_alive and not has_body, has_body)


def _headers(lines: list[bytes]) -> dict[str, str]:
    if len(lines) > HEADERS_LIMIT:
        raise BadRequest(431, f"more than {HEADERS_LIMIT} headers")
    headers: dict[str, str] = {}
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None:
            raise BadRequest(400, "malformed header")
        name, value = match[1].decode().lower(), match[2].decode("latin-1").strip(" \t")
        if name in headers:
            if name in _ONCE:
                raise BadRequest(400, f"more than one {name} header")
            value = f"{headers[name]}, {value}"
        headers[name] = value
    return headers


def _path(target: str) -> str:
    """Path of a target in origin form (``/metrics?x``) or absolute form (``http://host/metrics``)."""
    if not target.startswith("/"):
        match = re.fullmatch(r"https?://[^/?#]*(/[^?#]*)?.*", target, re.IGNORECASE)
        if match is None:
            raise BadRequest(400, "malformed request target")
        target = match[1] or "/"
    return target.split("?", 1)[0].split("#", 1)[0]


def head_of(response: Response, *, keep_alive: bool) -> bytes:
    """Status line and headers."""
    headers = {
        "Content-Type": response.content_type,
        "Content-Length": str(len(response.body)),
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
        **response.headers,
        "Connection": "keep-alive" if keep_alive else "close",
    }
    lines = [f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
