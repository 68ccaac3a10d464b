"""One unary gRPC call over a unix socket, each on its own connection.

gRPC is HTTP/2 with a five-byte prefix before each message and the status in the trailers. ``h2`` implements HTTP/2;
the gRPC library would cost 14 MiB of memory and its own threads. Total time and size are bounded.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from kvpressure.sources.base import SourceError

PREFIX_BYTES: Final = 5  # compressed or not, and the length
OVERHEAD_BYTES: Final = 1 << 20  # of frames and headers, beside the message; a server that sends more is stopped
READ_BYTES: Final = 1 << 16

OK: Final = 0
STATUS_NAMES: Final = {
    4: "timeout",
    7: "permission_denied",
    8: "throttled",
    12: "unimplemented",
    14: "unavailable",
}
"""Reasons by gRPC status code (grpc/grpc, doc/statuscodes.md). Other codes are an ``error``; without a message also
bad_answer and too_large.
"""


def unary(path: Path, method: str, request: bytes, seconds: float, most_bytes: int) -> bytes:
    """The answer's message as bytes. Raises ``SourceError``."""
    deadline = time.monotonic() + seconds
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.settimeout(seconds)
            connection.connect(str(path))
            return _Call(connection, deadline, most_bytes).run(method, request, seconds)
        except PermissionError as error:
            raise SourceError("permission_denied", f"{path}: {error.strerror}") from error
        except TimeoutError as error:
            raise SourceError("timeout", f"{path}: no answer within {seconds:g} s") from error
        except OSError as error:
            raise SourceError("unavailable", f"{path}: {error.strerror or error}") from error


class _Call:
    """State of one call."""

    def __init__(self, connection: socket.socket, deadline: float, most_bytes: int) -> None:
        from h2.config import H2Configuration
        from h2.connection import H2Connection

        self._connection = connection
        self._deadline = deadline
        self._most_bytes = most_bytes
        self._http = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._ended = False

    def run(self, method: str, request: bytes, seconds: float) -> bytes:
        """Send the request and read until the stream ends."""
        from h2.exceptions import ProtocolError

        try:
            self._ask(method, request, seconds)
            received = 0
            while not self._ended:
                data = self._receive()
                received += len(data)
                if received > self._most_bytes + OVERHEAD_BYTES:
                    raise SourceError("too_large", f"more than {self._most_bytes} bytes")
                self._take(data)
        except ProtocolError as error:
            raise SourceError("unavailable", f"no HTTP/2 server: {error}") from error
        return self._message()

    def _ask(self, method: str, request: bytes, seconds: float) -> None:
        self._http.initiate_connection()
        stream = self._http.get_next_available_stream_id()
        headers = (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", "localhost"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("grpc-timeout", f"{max(1, round(seconds * 1000))}m"),
            ("user-agent", "kvpressure"),
        )
        self._http.send_headers(stream, headers)
        self._http.send_data(stream, b"\0" + len(request).to_bytes(4, "big") + request, end_stream=True)
        self._connection.sendall(self._http.data_to_send())

    def _receive(self) -> bytes:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        data = self._connection.recv(READ_BYTES)
        if not data:
            raise SourceError("unavailable", "the server hung up")
        return data

    def _take(self, data: bytes) -> None:
        from h2 import events

        for event in self._http.receive_data(data):
            if isinstance(event, events.DataReceived):
                self._body += event.data or b""
                if len(self._body) > self._most_bytes + PREFIX_BYTES:
                    raise SourceError("too_large", f"more than {self._most_bytes} bytes")
                if event.flow_controlled_length and event.stream_id is not None and not self._ended:
                    self._http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, (events.ResponseReceived, events.TrailersReceived)):
                self._headers.update((str(name), str(value)) for name, value in event.headers or ())
            elif isinstance(event, events.StreamEnded):
                self._ended = True
            elif isinstance(event, (events.StreamReset, events.ConnectionTerminated)) and not self._ended:
                raise SourceError("unavailable", f"the server ended the call: code {event.error_code}")
        if answer := self._http.data_to_send():
            self._connection.sendall(answer)

    def _message(self) -> bytes:
        """The received message. The status is checked first, because a refused call has no message."""
        code = self._headers.get("grpc-status", "")
        detail = unquote(self._headers.get("grpc-message", ""))
        if not code.isascii() or not code.isdecimal() or len(code) > 3:
            raise SourceError("error", f"no gRPC status, HTTP status {self._headers.get(':status', 'unknown')}")
        if int(code) != OK:
            raise SourceError(STATUS_NAMES.get(int(code), "error"), f"gRPC status {code}: {detail}")
        compressed, length = self._body[:1], int.from_bytes(self._body[1:PREFIX_BYTES], "big")
        if compressed != b"\0" or len(self._body) != PREFIX_BYTES + length:
            raise SourceError("bad_answer", "not one whole message")
        return bytes(self._body[PREFIX_BYTES:])
