"""The side of ZMTP 3.0 (ZeroMQ over TCP, no authentication) that a subscriber needs.

Anybody may have started the pod on the other side. ZeroMQ's own library bounds its queues by messages and a frame by
bytes, but not a message by frames, so what it holds has no bound; here one message is held at a time.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kvpressure.model.reasons import PROTOCOL, RESET
from kvpressure.sources.base import SourceError
from kvpressure.sources.kvevents.addresses import Address

MAX_FRAME_BYTES: Final = 3 * 1024 * 1024  # a step of 600 000 tokens, or of 16 384 SGLang pages of one token
"""One batch of KV events. Beyond: it is skipped, and the contents of the cache are unknown. Shown as:
`kv_events_complete{reason="bad_events"}`.
"""
_MAX_FRAMES: Final = 8
_PART_BYTES: Final = 4096
_CONNECT_SECONDS: Final = 5.0
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4
SUBSCRIBE_ALL: Final = b"\x01"


class Peer:
    """A connected socket. All methods but ``close`` raise ``SourceError`` or ``OSError``. ``pay`` is called before more
    is read, whatever it is.
    """

    def __init__(self, address: Address, pay: Callable[[], None]) -> None:
        self._pay = pay
        self._socket = socket.create_connection(address, _CONNECT_SECONDS)
        self._buffer = bytearray()

    def greet(self, kind: bytes, timeout: float | None) -> None:
        """Be a socket of type ``kind`` (SUB, DEALER). ``timeout`` bounds each wait from now on, ``None`` = none."""
        ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4) + kind
        self._socket.sendall(_GREETING + bytes((_COMMAND, len(ready))) + ready)
        greeting = self._read(len(_GREETING))
        if greeting[:1] + greeting[9:10] != b"\xff\x7f" or greeting[10] < 3 or greeting[12:17] != b"NULL\0":
            raise SourceError(PROTOCOL, "no ZMTP 3 without authentication")
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket.settimeout(timeout)

    def close(self) -> None:
        """End a wait in another thread, too."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def send(self, *frames: bytes) -> None:
        """Send a message of frames of less than 256 bytes."""
        flags = [_MORE] * (len(frames) - 1) + [0]
        self._socket.sendall(
            b"".join(bytes((flag, len(frame))) + frame for flag, frame in zip(flags, frames, strict=True))
        )

    def pending(self) -> bool:
        """Whether something came that was not read; for a socket without a timeout."""
        with suppress(BlockingIOError):
            return bool(self._buffer or self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        return False

    def batch(self) -> tuple[int, bytes | bytearray]:
        """Sequence number and payload of the next batch, the last two frames of a message; b"" if it is too large."""
        frames: list[bytes | bytearray] = []
        flags = _MORE
        while flags & (_MORE | _COMMAND) and len(frames) < _MAX_FRAMES:
            flags = self._read(1)[0]
            frame = self._frame(int.from_bytes(self._read(8 if flags & _LONG else 1)))
            if not flags & _COMMAND:
                frames.append(frame)
        if len(frames) < 2 or len(frames[-2]) != 8:
            raise SourceError(PROTOCOL, "no batch of KV events")
        return int.from_bytes(frames[-2], signed=True), frames[-1]

    def _frame(self, size: int) -> bytes | bytearray:
        if size <= MAX_FRAME_BYTES:
            return self._read(size)
        while size:
            size -= len(self._read(min(size, _PART_BYTES)))
        return b""

    def _read(self, size: int) -> bytearray:
        taken = bytearray(size)
        filled = min(size, len(self._buffer))
        taken[:filled] = self._buffer[:filled]
        del self._buffer[:filled]
        while filled < size:
            self._pay()
            if size - filled > _PART_BYTES:  # of a batch: wake up once, and copy it once
                came = self._socket.recv_into(memoryview(taken)[filled:], 0, socket.MSG_WAITALL)
            else:
                self._buffer += self._socket.recv(_PART_BYTES)
                came = min(size - filled, len(self._buffer))
                taken[filled : filled + came] = self._buffer[:came]
                del self._buffer[:came]
            if not came:
                raise SourceError(RESET)
            filled += came
        return taken
