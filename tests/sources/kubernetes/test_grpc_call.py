"""The gRPC call against a real gRPC server, and against servers that do everything wrong."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import StreamEnded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpressure.sources.base import SourceError
from kvpressure.sources.kubernetes.grpc_call import unary

METHOD = "/test.Service/Call"
LIMIT = 1 << 20
Answer = Callable[[socket.socket], None]


def refused(path: Path, seconds: float = 5.0, limit: int = LIMIT) -> str:
    with pytest.raises(SourceError) as caught:
        unary(path, METHOD, b"ask", seconds, limit)
    return caught.value.reason


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Answer], Path]]:
    """A socket whose every connection is given to a function."""
    listeners: list[socket.socket] = []

    def start(answer: Answer) -> Path:
        path = tmp_path / f"raw-{len(listeners)}.sock"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        listeners.append(listener)

        def work() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    answer(connection)

        threading.Thread(target=work, daemon=True).start()
        return path

    yield start
    for listener in listeners:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def answering(*parts: tuple[str, Any]) -> Answer:
    """A correct HTTP/2 server that sends these headers, data and trailers as the answer."""

    def answer(connection: socket.socket) -> None:
        http = H2Connection(H2Configuration(client_side=False))
        http.initiate_connection()
        connection.sendall(http.data_to_send())
        while not any(isinstance(event, StreamEnded) for event in http.receive_data(connection.recv(65536))):
            connection.sendall(http.data_to_send())
        for number, (kind, value) in enumerate(parts, 1):
            last = number == len(parts)
            if kind == "headers":
                http.send_headers(1, value, end_stream=last)
            elif kind == "data":
                http.send_data(1, value, end_stream=last)
            else:
                http.reset_stream(1, value)
        connection.sendall(http.data_to_send())
        connection.recv(65536)

    return answer


GOOD = [(":status", "200"), ("content-type", "application/grpc")]
ENDED = ("headers", [("grpc-status", "0")])


@pytest.mark.parametrize("size", [0, 1, 16_379, 65_535, 65_536, 700_000])
def test_a_message_of_any_size_comes_whole(tmp_path: Path, size: int) -> None:
    """Above 64 KiB the server waits for the client to open its windows. It is told the deadline."""
    asked: list[tuple[bytes, bool]] = []

    def call(request: bytes, context: Any) -> bytes:
        asked.append((request, 0 < context.time_remaining() <= 10))
        return bytes(size)

    server = grpc.server(ThreadPoolExecutor(1))
    handler = grpc.unary_unary_rpc_method_handler(call)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Call": handler}),))
    server.add_insecure_port(f"unix://{tmp_path / 'grpc.sock'}")
    server.start()
    try:
        assert unary(tmp_path / "grpc.sock", METHOD, b"ask", 10.0, LIMIT) == bytes(size)
        assert asked == [(b"ask", True)]
    finally:
        server.stop(0).wait()


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((("headers", GOOD), ("data", b"\0\0\0\0\2ok"), ENDED), None),
        ((("headers", GOOD), ("data", b"\0\0\0"), ("data", b"\0\2o"), ("data", b"k"), ENDED), None),
        ((("headers", GOOD), ("data", b"\1\0\0\0\2ok"), ENDED), "bad_answer"),  # compressed
        ((("headers", GOOD), ("data", b"\0\0\0\0\3ok"), ENDED), "bad_answer"),
        ((("headers", GOOD), ("data", b"\0\0\0\0\1ok"), ENDED), "bad_answer"),
        ((("headers", GOOD), ENDED), "bad_answer"),
        ((("headers", GOOD), ("data", b"\0\0\0\0\2ok")), "error"),  # no status
        ((("headers", [(":status", "404")]),), "error"),
        ((("headers", [*GOOD, ("grpc-status", "8"), ("grpc-message", "too%20many")]),), "throttled"),
        *(
            ((("headers", [*GOOD, ("grpc-status", status)]),), reason)
            for status, reason in (
                *(("7", "permission_denied"), ("12", "unimplemented"), ("13", "error"), ("14", "unavailable")),
                ("99", "error"),
            )
        ),
        ((("headers", [*GOOD, ("grpc-status", "-1")]),), "error"),
        ((("headers", [*GOOD, ("grpc-status", "9" * 5000)]),), "error"),
        ((("headers", GOOD), ("reset", 8)), "unavailable"),
    ],
)
def test_answers_of_an_http2_server(
    serve: Callable[[Answer], Path], parts: tuple[tuple[str, Any], ...], reason: str | None
) -> None:
    path = serve(answering(*parts))
    if reason is None:
        assert unary(path, METHOD, b"ask", 5.0, LIMIT) == b"ok"
    else:
        assert refused(path) == reason


def test_nobody_there(tmp_path: Path, serve: Callable[[Answer], Path]) -> None:
    assert refused(tmp_path / "none.sock") == "unavailable"
    (tmp_path / "file.sock").write_text("no socket")
    assert refused(tmp_path / "file.sock") == "unavailable"
    assert refused(serve(lambda _: None)) == "unavailable"
    assert refused(serve(lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"))) == "unavailable"


def test_a_server_that_drips_has_no_more_time_than_one_that_hangs(serve: Callable[[Answer], Path]) -> None:
    def drip(connection: socket.socket) -> None:
        connection.sendall(b"\0\0\0\4\0\0\0\0\0")
        while True:  # pings, a byte at a time
            for byte in b"\0\0\x08\6\0\0\0\0\0" + bytes(8):
                connection.sendall(bytes([byte]))
                time.sleep(0.02)

    began = time.monotonic()
    assert refused(serve(drip), seconds=0.5) == "timeout"
    assert refused(serve(lambda _: time.sleep(2)), seconds=0.3) == "timeout"
    assert time.monotonic() - began < 2


def test_a_server_that_sends_without_end_is_stopped(serve: Callable[[Answer], Path]) -> None:
    def flood(connection: socket.socket) -> None:
        connection.sendall(b"\0\0\0\4\0\0\0\0\0")
        while True:  # frames of a type that nobody knows
            connection.sendall((b"\0\x40\0\xff\0\0\0\0\0" + bytes(16384)) * 8)

    assert refused(serve(flood), limit=1000) == "too_large"
    body = ("data", b"\0\0\0\x20\0" + bytes(8192))
    assert refused(serve(answering(("headers", GOOD), body, ENDED)), limit=1000) == "too_large"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.binary(max_size=120), st.booleans())
def test_any_bytes_have_a_reason(serve: Callable[[Answer], Path], garbage: bytes, after_settings: bool) -> None:
    data = (b"\0\0\0\4\0\0\0\0\0" if after_settings else b"") + garbage
    assert refused(serve(lambda connection: connection.sendall(data))) in ("unavailable", "error", "bad_answer")
