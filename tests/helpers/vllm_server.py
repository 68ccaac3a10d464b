"""A server on loopback that does to a connection whatever a test wants, down to the byte."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable


class RawServer:
    """Gives every connection to ``script(server, connection)`` in a thread of its own, and closes it afterwards.

    ``connections`` counts them, ``requests`` holds what clients sent (as far as ``read_request`` was used), and
    ``stopping`` is set at the end, so that scripts that hang let go.
    """

    def __init__(self, script: Callable[[RawServer, socket.socket], None]) -> None:
        self.script = script
        self.connections = 0
        self.requests: list[bytes] = []
        self.stopping = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.address}/metrics"
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> RawServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)

    def _accept(self) -> None:
        while not self.stopping.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            self.script(self, connection)

    def read_request(self, connection: socket.socket) -> bytes:
        """One request up to its empty line; raises ``OSError`` when the client is gone."""
        data = b""
        while b"\r\n\r\n" not in data:
            part = connection.recv(65536)
            if not part:
                raise OSError("client is gone")
            data += part
        self.requests.append(data)
        return data

    def hang(self, seconds: float = 30) -> None:
        """Do nothing until the test is over."""
        self.stopping.wait(seconds)


def response(
    body: bytes = b"", status: str = "200 OK", length: int | None = None, headers: Iterable[str] = ()
) -> bytes:
    """A response with a Content-Length, that of ``body`` unless another is asked for."""
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body) if length is None else length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def answering(answer: bytes) -> RawServer:
    """Answers every request in the same way."""

    def script(server: RawServer, connection: socket.socket) -> None:
        while server.read_request(connection):
            connection.sendall(answer)

    return RawServer(script)


def saying(*parts: bytes, then: str = "close", pause: float = 0.0) -> RawServer:
    """Sends ``parts`` after a request, ``pause`` seconds apart; then closes, resets or hangs."""

    def script(server: RawServer, connection: socket.socket) -> None:
        server.read_request(connection)
        for part in parts:
            connection.sendall(part)
            time.sleep(pause)
        if then == "hang":
            server.hang()
        elif then == "reset":
            reset(connection)

    return RawServer(script)


def reset(connection: socket.socket) -> None:
    """Close with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
