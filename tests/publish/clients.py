"""Raw clients for the web server: what a library would hide is what is tested."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """A response as it came. ``headers`` in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


def connect(port: int, tls: ssl.SSLContext | None = None, timeout: float = 5.0) -> socket.socket:
    raw = socket.create_connection(("127.0.0.1", port), timeout=timeout)
    return raw if tls is None else tls.wrap_socket(raw, server_hostname="localhost")


def receive(client: socket.socket, *, head: bool = False) -> Answer:
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(65536)
        if not part:
            raise ConnectionError(f"closed after {data!r}")
        data += part
    top, _, body = data.partition(b"\r\n\r\n")
    first, *lines = top.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while not head and len(body) < int(headers["content-length"]):
        part = client.recv(65536)
        if not part:
            raise ConnectionError("closed within the body")
        body += part
    return Answer(int(first.split()[1]), headers, body)


def ask(
    port: int,
    path: str = "/metrics",
    *,
    method: str = "GET",
    headers: str = "",
    tls: ssl.SSLContext | None = None,
    timeout: float = 5.0,
) -> Answer:
    """One request on a connection of its own."""
    with connect(port, tls, timeout) as client:
        client.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n".encode())
        return receive(client, head=method == "HEAD")


def closed_within(client: socket.socket, seconds: float) -> bool:
    """Whether the server ends the connection in time, whatever it says before."""
    client.settimeout(seconds)
    try:
        while client.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True
