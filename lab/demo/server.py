"""The API servers of the simulated pods: small HTTP servers on loopback that answer as vLLM does."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lab.demo.node import SimulatedNode
from lab.demo.page import CONTENT_TYPE, VLLM_VERSION


class _Listener(ThreadingHTTPServer):
    """An HTTP server that ignores scrapers which hang up during an answer."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that is gone."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class PodServer:
    """Serves one pod of ``node``, by default on ``127.0.0.1`` at a free port. A pod that is away hangs up without an
    answer.
    """

    def __init__(self, node: SimulatedNode, pod: str, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self._server = _Listener(address, _handler(node, pod))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name=f"pod-{pod}", daemon=True)

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """URL without a path."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Serve in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(node: SimulatedNode, pod: str) -> type[BaseHTTPRequestHandler]:
    class _ServerAnswers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            """Answer as vLLM's API server."""
            metrics = node.metrics(pod)
            if metrics is None:
                self.close_connection = True
                return
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, CONTENT_TYPE, metrics.encode())
            elif path in ("/health", "/ping"):
                self._answer(200, "text/plain", b"")
            elif path in ("/version", "/v1/models"):
                self._answer(200, "application/json", json.dumps(_facts(node, pod)[path]).encode())
            else:
                self._answer(404, "application/json", b'{"detail":"Not Found"}')

        def _answer(self, status: int, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Write no access log."""

    return _ServerAnswers


def _facts(node: SimulatedNode, pod: str) -> dict[str, Any]:
    config = node.pods[pod].config
    return {
        "/version": {"version": VLLM_VERSION},
        "/v1/models": {
            "object": "list",
            "data": [
                {
                    "id": config.served_name,
                    "object": "model",
                    "owned_by": "vllm",
                    "root": config.model.name,
                    "max_model_len": config.max_model_len,
                }
            ],
        },
    }
