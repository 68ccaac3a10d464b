"""A publisher of KV events as vLLM's: PUB with topic, sequence number and batch; ROUTER for what was lost."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import msgspec
import zmq


class Publisher(AbstractContextManager["Publisher"]):
    """``port`` and ``replay_port``: where it listens. ``kept``: batches that it sends again, by number."""

    def __init__(self, port: int = 0, replay_port: int = 0, first: int = 0) -> None:
        self._context = zmq.Context()
        self._pub, self._router = self._context.socket(zmq.XPUB), self._context.socket(zmq.ROUTER)
        self.port, self.replay_port = (self._bound(*one) for one in ((self._pub, port), (self._router, replay_port)))
        self.kept: dict[int, bytes] = {}
        self.number = first
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def _bound(self, socket: zmq.Socket[bytes], port: int) -> int:
        socket.linger, socket.sndhwm = 0, 100_000  # batches that wait for a subscriber, as in vLLM
        if port:
            socket.bind(f"tcp://127.0.0.1:{port}")
            return port
        return socket.bind_to_random_port("tcp://127.0.0.1")

    def wait(self) -> None:
        assert self._pub.poll(10_000), "nobody has subscribed"
        self._pub.recv()

    def send(self, *events: object, time: float = 1000.0, kept: bool = True, lost: bool = False) -> None:
        """Publish a batch. ``kept``: it can be asked for again; ``lost``: nobody gets it now."""
        self.send_raw(msgspec.msgpack.encode([time, events, 0]), kept, lost)

    def send_raw(self, payload: bytes, kept: bool = True, lost: bool = False) -> None:
        if kept:
            self.kept[self.number] = payload
        if not lost:
            self._pub.send_multipart([b"", self.number.to_bytes(8), payload])
        self.number += 1

    def _answer(self) -> None:
        while not self._ended.is_set():
            if self._router.poll(20):
                client, _, start = self._router.recv_multipart()
                for number, payload in list(self.kept.items()):
                    if number >= int.from_bytes(start):
                        self._router.send_multipart([client, b"", number.to_bytes(8), payload])
                self._router.send_multipart([client, b"", (-1).to_bytes(8, signed=True), b""])

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._context.destroy(linger=0)
