"""The names of services for the pods of a node: A records from the API server, everything else does not exist."""

from __future__ import annotations

import socketserver
import struct
from collections.abc import Callable
from typing import Final

_A: Final = 1
_NO_SUCH_NAME: Final = 3
Find = Callable[[str, str], list[str]]
"""Addresses by namespace and service."""


def answer(query: bytes, find: Find) -> bytes:
    """The answer to one query (RFC 1035) for ``SERVICE.NAMESPACE.svc`` with or without ``cluster.local``."""
    labels, at = [], 12
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode("ascii", "replace"))
        at += 1 + length
    question = query[12 : at + 5]
    kind = struct.unpack(">H", question[-4:-2])[0]
    known = len(labels) >= 3 and labels[2:] in (["svc"], ["svc", "cluster", "local"])
    addresses = find(labels[1], labels[0]) if known else []
    shown = addresses if kind == _A else []
    flags = 0x8400 | (0 if addresses else _NO_SUCH_NAME)
    head = query[:2] + struct.pack(">HHHHH", flags, 1, len(shown), 0, 0)
    records = [
        b"\xc0\x0c" + struct.pack(">HHIH", _A, 1, 1, 4) + bytes(map(int, address.split("."))) for address in shown
    ]
    return head + question + b"".join(records)


class Server(socketserver.ThreadingUDPServer):
    """Answers on one address until it is shut down."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], find: Find) -> None:
        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                """One query."""
                query, sock = self.request
                sock.sendto(answer(query, find), self.client_address)

        super().__init__(address, Handler)
