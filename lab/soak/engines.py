"""Engines that fail on demand: one that answers in many wrong ways, and one in a process of its own that is stopped,
killed and started again.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

from tests.helpers.vllm_pages import text_of
from tests.helpers.waiting import until
from tests.sources.kubernetes.node import PodServer

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = "d_kv_pressure"


class Server(ThreadingHTTPServer):
    """One thread for each connection."""

    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients hang up; that is what this is for."""


def send(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200) -> None:
    """A whole answer."""
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


class Victim(PodServer):
    """An engine that does what ``mode`` says: answer, or fail in one of many ways."""

    def __init__(self) -> None:
        self.mode = "ok"
        self.turn = 0
        self.down = set()
        self.address = "127.0.0.9"
        page = text_of(PAGE).encode()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.turn += 1
                getattr(outer, f"_{outer.mode}")(self, page)

            def log_message(self, *_: object) -> None:
                """Silence."""

        self._server = Server((self.address, 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def _ok(self, handler: BaseHTTPRequestHandler, page: bytes) -> None:
        send(handler, page)

    def _hang(self, handler: BaseHTTPRequestHandler, _page: bytes) -> None:
        while self.mode == "hang":
            time.sleep(0.05)
        handler.close_connection = True

    def _slow(self, handler: BaseHTTPRequestHandler, page: bytes) -> None:
        time.sleep(0.6)
        send(handler, page)

    def _drip(self, handler: BaseHTTPRequestHandler, page: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(page)))
        handler.end_headers()
        for byte in page:
            if self.mode != "drip":
                break
            handler.wfile.write(bytes([byte]))
            time.sleep(0.02)
        handler.close_connection = True

    def _reset(self, handler: BaseHTTPRequestHandler, _page: bytes) -> None:
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # RST
        handler.close_connection = True

    def _error(self, handler: BaseHTTPRequestHandler, _page: bytes) -> None:
        send(handler, b"no", 500)

    def _html(self, handler: BaseHTTPRequestHandler, _page: bytes) -> None:
        send(handler, b"<html><script>alert(1)</script></html>")

    def _endless(self, handler: BaseHTTPRequestHandler, _page: bytes) -> None:
        handler.send_response(200)
        handler.end_headers()
        while self.mode == "endless":
            handler.wfile.write(b"x 1\n" * 4096)
        handler.close_connection = True

    def _renamed(self, handler: BaseHTTPRequestHandler, page: bytes) -> None:
        name = b'model_name="renamed-%d"' % (self.turn // 5)
        send(handler, re.sub(rb'model_name="[^"]*"', name, page))


class Stoppable(PodServer):
    """An engine in a process of its own. ``freeze``: the kernel accepts for it, and nothing answers."""

    def __init__(self) -> None:
        self.down = set()
        self.address = "127.0.0.10"
        with socket.socket() as probe:
            probe.bind((self.address, 0))
            self.port = int(probe.getsockname()[1])
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start the process, and wait until it listens."""
        command = [sys.executable, "-m", "lab.soak.engine_process", self.address, str(self.port)]
        self._process = subprocess.Popen(command, cwd=ROOT)
        until(self._listens, 120)

    def kill(self) -> None:
        """End the process as the kernel's out-of-memory killer does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)

    def freeze(self) -> None:
        """Stop the process where it is."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it."""
        self.kill()

    def _listens(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex((self.address, self.port)) == 0
