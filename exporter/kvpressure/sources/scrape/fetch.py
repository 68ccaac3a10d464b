"""Fetches a metrics endpoint over HTTP, with bounds on total time and bytes received.

Anybody may have started the pod on the other side. There are no redirects, proxies, credentials, cookies or
packed bodies, which nobody sends who is asked for plain ones.
``http.client`` reads the response; sockets are our own, because with a timeout per ``recv`` a server that drips one
byte a second could hold us for hours.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import ssl
import threading
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Final, cast

from kvpressure.files import checked
from kvpressure.model.readings import PageText
from kvpressure.model.reasons import (
    BAD_ENCODING,
    DNS,
    HTTP_4XX,
    HTTP_5XX,
    HTTP_404,
    PROTOCOL,
    REDIRECT,
    REFUSED,
    RESET,
    TIMEOUT,
    TLS,
    TOO_LARGE,
    UNAUTHORIZED,
    UNREACHABLE,
)
from kvpressure.sources.base import SourceError, reason_of
from kvpressure.sources.scrape.layout import SMALL_PAGE_BYTES, MemoryPool, Reservation
from kvpressure.sources.scrape.targets import Target

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MAX_HEADER_BYTES: Final = 64 * 1024
MAX_HEADERS: Final = 100
MAX_BODY_BYTES: Final = 4 * 1024 * 1024  # as sent; a page of 64 engines has 3.3 MiB
"""One scrape, as sent. Beyond: the scrape fails. Shown as: `target_errors_total{reason="too_large"}`."""
PART_BYTES: Final = 64 * 1024  # of a body of unknown length is read at once
_OF_STATUS: Final = {401: UNAUTHORIZED, 403: UNAUTHORIZED, 404: HTTP_404}
_OF_CLASS: Final = {3: REDIRECT, 4: HTTP_4XX, 5: HTTP_5XX}
GROWING: Final = 1.125  # a growing bytearray allocates this much more than it holds


class _Wire(io.RawIOBase):
    """The receiving side of a socket, with one deadline for all reads and a budget of bytes."""

    def __init__(self, sock: socket.socket, deadline: float, give_way: Callable[[], object]) -> None:
        self._sock = sock
        self._give_way = give_way
        self.deadline = deadline
        self.budget = MAX_HEADER_BYTES
        self.received = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        if self.budget <= 0:
            raise SourceError(TOO_LARGE, "more bytes than allowed")
        self._sock.settimeout(_remaining(self.deadline))
        count = self._sock.recv_into(buffer)
        self._give_way()
        self.budget -= count
        self.received = self.received or count > 0
        return count

    def makefile(self, _mode: str) -> io.BufferedReader:
        """What ``HTTPResponse`` asks of a socket."""
        return io.BufferedReader(self)


class _HttpResponse(http.client.HTTPResponse):
    """A response whose headers are a dictionary: lower case, the first of each name.

    The library uses the mail parser for headers, which costs as much as the rest of a fetch.
    """

    def begin(self) -> None:
        """Read status and headers, and determine how the body ends, as the library does (RFC 9112, 6.3)."""
        version, status, _ = self._read_status()  # type: ignore[attr-defined]  # not in the stubs
        while status == http.client.CONTINUE:
            _read_headers(self.fp)
            version, status, _ = self._read_status()  # type: ignore[attr-defined]  # not in the stubs
        if not version.startswith(("HTTP/1.", "HTTP/0.9")):
            raise http.client.UnknownProtocol(version)
        self.code = self.status = status
        self.version = 10 if version in ("HTTP/1.0", "HTTP/0.9") else 11
        fields = _read_headers(self.fp)
        self.headers = self.msg = cast(http.client.HTTPMessage, fields)
        self.chunked = fields.get("transfer-encoding", "").lower() == "chunked"
        self.chunk_left = None
        self.length = None if self.chunked else _length(fields.get("content-length", ""))
        if status == http.client.NO_CONTENT:
            self.length = 0
        unknown = self.length is None and not self.chunked
        self.will_close = unknown or self._check_close()  # type: ignore[attr-defined]  # not in the stubs


def _read_headers(lines: io.BufferedIOBase) -> dict[str, str]:
    """Headers up to the empty line; invalid lines are skipped."""
    headers: dict[str, str] = {}
    for _ in range(MAX_HEADERS):
        line = lines.readline(MAX_HEADER_BYTES + 1)
        if len(line) > MAX_HEADER_BYTES:
            raise http.client.LineTooLong("header line")
        if line in (b"\r\n", b"\n", b""):
            return headers
        name, colon, value = line.decode("latin-1").partition(":")
        if colon and name == name.strip():
            headers.setdefault(name.lower(), value.strip())
    raise http.client.HTTPException(f"more than {MAX_HEADERS} headers")


def _length(text: str) -> int | None:
    """``Content-Length``; None if missing or invalid (the body then ends with the connection)."""
    try:
        length = int(text)
    except ValueError:
        return None
    return length if length >= 0 else None


class Fetcher:
    """Fetches one target's metrics over a kept connection. One ``fetch`` at a time; ``close`` from any thread.
    ``give_way``, called between pieces of work, may wait.
    """

    def __init__(self, target: Target, timeout_seconds: float, give_way: Callable[[], object] = int) -> None:
        self._target = target
        self._give_way = give_way
        self._timeout = timeout_seconds
        self._request = _request(target)
        self._sock: socket.socket | None = None
        self._tls: ssl.SSLContext | None = None
        self._closed = False
        self._busy = threading.Lock()

    def fetch(self, lease: Reservation | None = None) -> PageText:
        """The body, still encoded text. Raises ``SourceError`` with one of ``REASONS``.

        A large body reserves its memory from ``lease`` before it is read; without a lease it is read in any case.
        """
        with self._busy:
            self._give_way()
            try:
                return self._fetch(lease or Reservation(MemoryPool()), monotonic() + self._timeout)
            except SourceError:
                self._drop()
                raise
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._drop()
                reason = reason_of(error, _FAILURES, PROTOCOL)
                if reason == TLS:
                    self._tls = None  # certificates may have been renewed: read them again next time
                raise SourceError(reason, str(error)) from error

    def close(self) -> None:
        """Close for good; a ``fetch`` in another thread fails at once."""
        self._closed = True
        if self._busy.acquire(blocking=False):
            self._drop()
            self._busy.release()
        elif (sock := self._sock) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _fetch(self, lease: Reservation, deadline: float) -> PageText:
        if self._sock is not None:
            kept = _Wire(self._sock, deadline, self._give_way)
            try:
                return self._exchange(self._sock, kept, lease)
            except (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
                if kept.received:
                    raise
                self._drop()  # the server had closed the idle connection, which is its right
        self._sock = sock = self._connect(deadline)
        if self._closed:
            raise SourceError(RESET, "closed")
        return self._exchange(sock, _Wire(sock, deadline, self._give_way), lease)

    def _exchange(self, sock: socket.socket, wire: _Wire, lease: Reservation) -> PageText:
        sock.settimeout(_remaining(wire.deadline))
        sock.sendall(self._request)
        response = _HttpResponse(cast(socket.socket, wire), method="GET")
        try:
            response.begin()
            _check(response)
            body = _read_body(response, wire, lease)
            keep = not response.will_close
        finally:
            response.close()
        if not keep:
            self._drop()
        return body

    def _connect(self, deadline: float) -> socket.socket:
        host, port = self._target.host, self._target.port
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError) as error:
            raise SourceError(DNS, str(error)) from error
        tls = self._tls_context() if self._target.scheme == "https" else None
        failure: Exception = OSError("no address")
        for family, kind, protocol, _, address in found:
            sock = socket.socket(family, kind, protocol)
            try:
                _reach(sock, address, deadline)
                if tls is None:
                    return sock
                sock.settimeout(_remaining(deadline))
                return tls.wrap_socket(sock, server_hostname=host)
            except (OSError, SourceError) as error:
                sock.close()
                failure = error
        raise failure

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            try:
                self._tls = tls_context(self._target)
            except OSError as error:
                raise SourceError(TLS, f"{self._target.ca}: {error}") from error
        return self._tls

    def _drop(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()


def _reach(sock: socket.socket, address: object, deadline: float) -> None:
    """Connect. No connection in time says nothing of the server: a policy, a full queue or the network may be why."""
    try:
        sock.settimeout(_remaining(deadline))
        sock.connect(cast(tuple[str, int], address))
    except TimeoutError as error:
        raise SourceError(UNREACHABLE, "no connection in time") from error


def tls_context(target: Target) -> ssl.SSLContext:
    """What a target's certificate is checked by. Raises ``OSError``."""
    context = ssl.create_default_context(cafile=target.ca and checked(target.ca))
    if not target.verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _request(target: Target) -> bytes:
    """The request. Identity encoding: compression would cost both sides more CPU than the bytes save."""
    return (
        f"GET {target.path} HTTP/1.1\r\nHost: {target.address}\r\nUser-Agent: kvpressure\r\n"
        "Accept: text/plain;version=0.0.4\r\nAccept-Encoding: identity\r\n\r\n"
    ).encode("ascii")


def _remaining(deadline: float) -> float:
    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError("deadline passed")
    return left


def _check(response: http.client.HTTPResponse) -> None:
    """Refuse what is no plain answer."""
    status = response.status
    if status not in (200, 204):
        raise SourceError(_OF_STATUS.get(status) or _OF_CLASS.get(status // 100, PROTOCOL), f"status {status}")
    encoding = (response.headers.get("content-encoding") or "identity").lower()
    if encoding != "identity":
        raise SourceError(BAD_ENCODING, f"encoding {encoding[:32]!r}")


def _read_body(response: http.client.HTTPResponse, wire: _Wire, lease: Reservation) -> PageText:
    """The body as sent; memory for its length, or its maximum, is reserved before it is read."""
    if response.length is not None and response.length > MAX_BODY_BYTES:
        raise SourceError(TOO_LARGE, f"{response.length} bytes announced")
    wire.budget = 2 * MAX_BODY_BYTES  # chunks need room around them
    if response.length is None:
        body: PageText = _growing(response, wire, lease)
    else:
        if response.length > SMALL_PAGE_BYTES:
            lease.grow(response.length, _remaining(wire.deadline))
        body = response.read(response.length)
    if response.length:
        raise SourceError(RESET, f"{response.length} bytes missing")
    return body


def _growing(response: http.client.HTTPResponse, wire: _Wire, lease: Reservation) -> bytearray:
    """A body of unknown length as one bytearray; joining its parts at the end would take their memory twice."""
    body = bytearray()
    while part := response.read(PART_BYTES):
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise SourceError(TOO_LARGE, "body")
        if len(body) > SMALL_PAGE_BYTES and not lease.taken:
            lease.grow(int(GROWING * MAX_BODY_BYTES), _remaining(wire.deadline))
    return body


_FAILURES: Final = {  # below HTTP, the more special first
    TimeoutError: TIMEOUT,
    ssl.SSLError: TLS,
    ConnectionRefusedError: REFUSED,
    ConnectionError: RESET,
    http.client.IncompleteRead: RESET,
    OSError: UNREACHABLE,
}
