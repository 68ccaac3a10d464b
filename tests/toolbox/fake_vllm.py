"""A small vLLM with a block pool: /metrics, /v1/models and streaming /v1/completions on loopback, with
faults to order.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN_SECONDS = 0.006


@dataclass
class FakeVllm:
    """Blocks are taken as tokens come and given back at the end. Faults: ``leak`` blocks a request keeps, ``factor`` of
    blocks for each token, ``factor_above`` the prompt length above which it counts, ``held`` blocks in use from the
    start, ``others`` running requests of other clients.
    """

    blocks: int = 4000
    block_size: int = 16
    max_model_len: int = 20000
    leak: int = 0
    factor: float = 1.0
    factor_above: int = 0
    held: int = 0
    others: int = 0
    status: int = 200
    key: str | None = None
    usage_chunks: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._used: dict[int, int] = {}
        self._leaked = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeVllm:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def page(self) -> str:
        with self._lock:
            used = sum(self._used.values()) + self._leaked + self.held
            running = len(self._used) + self.others
        labels = 'engine="0",model_name="small"'
        return (
            f"vllm:num_requests_running{{{labels}}} {running}\nvllm:num_requests_waiting{{{labels}}} 0\n"
            f"vllm:kv_cache_usage_perc{{{labels}}} {used / (self.blocks - 1)}\n"
            f'vllm:cache_config_info{{block_size="{self.block_size}",engine="0",gpu_memory_utilization="0.9",'
            f'num_gpu_blocks="{self.blocks}"}} 1.0\n'
        )

    def complete(self, body: dict[str, Any], write: Any) -> None:
        with self._lock:
            self.requests.append(body)
            number = len(self.requests)
        prompt = len(body["prompt"])
        for answered in range(1, body["max_tokens"] + 1):
            time.sleep(TOKEN_SECONDS)
            factor = self.factor if prompt > self.factor_above else 1.0
            with self._lock:
                self._used[number] = int(factor * -(-(prompt + answered) // self.block_size))
            chunk: dict[str, Any] = {"choices": [{"text": "x"}]}
            if self.usage_chunks:
                chunk["usage"] = {"completion_tokens": answered}
            write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        with self._lock:
            del self._used[number]
            self._leaked += self.leak
        write(b"data: [DONE]\n\n")


def _handler(fake: FakeVllm) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            models = {"data": [{"id": "small", "root": "small", "max_model_len": fake.max_model_len}]}
            body = fake.page() if self.path == "/metrics" else json.dumps(models)
            self._send(200 if self.path in ("/metrics", "/v1/models") else 404, body.encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if fake.key is not None and self.headers.get("Authorization") != f"Bearer {fake.key}":
                self._send(401, b'{"error":"Unauthorized"}')
                return
            if fake.status != 200:
                self._send(fake.status, b'{"error":{"message":"too long"}}')
                return
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            fake.complete(body, self.wfile.write)

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
