"""The side of ZMTP 3.0 (ZeroMQ over TCP, no authentication) that a subscriber needs.

Anybody may have started the pod on the other side. ZeroMQ's own library bounds its queues by messages and a frame by
bytes, but not a message by frames, so what it holds has no bound; here one message is held at a time.
"""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Final

from kvpressure.model.reasons import DNS, PROTOCOL, REFUSED, RESET, TIMEOUT, UNREACHABLE
from kvpressure.sources.base import SourceError, reason_of

MAX_FRAME_BYTES: Final = 4 * 1024 * 1024  # a prefill of 800 000 tokens
"""One batch of KV events. Beyond: it is skipped, and the contents of the cache are unknown. Shown as:
`kv_events_complete{reason="bad_events"}`.
"""
_MAX_FRAMES: Final = 8
_PART_BYTES: Final = 64 * 1024
_CONNECT_SECONDS: Final = 5.0
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4
SUBSCRIBE_ALL: Final = b"\x01"

Address = tuple[str, int]
_FAILURES: Final = {
    socket.gaierror: DNS,
    UnicodeError: DNS,
    TimeoutError: TIMEOUT,
    ConnectionRefusedError: REFUSED,
    ConnectionError: RESET,
}


class Connection(AbstractContextManager["Connection"]):
    """A socket of type ``kind`` (SUB, DEALER), connected. ``timeout`` bounds each wait, ``None`` = none; ``close`` from
    any thread ends it. All methods raise ``SourceError``.
    """

    def __init__(self, address: Address, kind: bytes, timeout: float | None) -> None:
        try:
            self._socket = socket.create_connection(address, _CONNECT_SECONDS)
        except (OSError, UnicodeError) as error:
            raise _failure(error) from error
        self._buffer = bytearray()
        try:
            self._greet(kind)
        except SourceError:
            self._socket.close()
            raise
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket.settimeout(timeout)

    def _greet(self, kind: bytes) -> None:
        ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4) + kind
        self._write(_GREETING + bytes((_COMMAND, len(ready))) + ready)
        greeting = self._read(len(_GREETING))
        if greeting[:1] + greeting[9:10] != b"\xff\x7f" or greeting[10] < 3 or greeting[12:17] != b"NULL\0":
            raise SourceError(PROTOCOL, "no ZMTP 3 without authentication")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
        self._socket.close()

    def close(self) -> None:
        """End a wait for a message, which raises."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def send(self, *frames: bytes) -> None:
        """Send a message of frames of less than 256 bytes."""
        last = len(frames) - 1
        flagged = ((0 if number == last else _MORE, frame) for number, frame in enumerate(frames))
        self._write(b"".join(bytes((flags, len(frame))) + frame for flags, frame in flagged))

    def message(self) -> list[bytes]:
        """The frames of the next message; one that is too large is empty."""
        frames: list[bytes] = []
        while len(frames) < _MAX_FRAMES:
            flags = self._read(1)[0]
            frame = self._frame(int.from_bytes(self._read(8 if flags & _LONG else 1)))
            if not flags & _COMMAND:
                frames.append(frame)
                if not flags & _MORE:
                    return frames
        raise SourceError(PROTOCOL, "too many frames")

    def _frame(self, size: int) -> bytes:
        if size <= MAX_FRAME_BYTES:
            return self._read(size)
        while size:
            size -= len(self._read(min(size, _PART_BYTES)))
        return b""

    def _read(self, size: int) -> bytes:
        while len(self._buffer) < size:
            try:
                part = self._socket.recv(_PART_BYTES)
            except OSError as error:
                raise _failure(error) from error
            if not part:
                raise SourceError(RESET)
            self._buffer += part
        taken = bytes(memoryview(self._buffer)[:size])
        del self._buffer[:size]
        return taken

    def _write(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise _failure(error) from error


def _failure(error: Exception) -> SourceError:
    return SourceError(reason_of(error, _FAILURES, UNREACHABLE))
