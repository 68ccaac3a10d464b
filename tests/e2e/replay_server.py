"""Recorded pages over HTTP: each scrape gets the next one, then the last one again."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

RECORDINGS = Path(__file__).parents[1] / "fixtures" / "recordings"


def recorded_pages(name: str) -> list[str]:
    """The pages of a recording of one target, in order."""
    with gzip.open(RECORDINGS / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        next(lines)
        return [text for line in lines if (text := json.loads(line)["engines"][0]["exposition"])]


class ReplayServer:
    """Serves ``pages`` on loopback; ``url`` and ``served`` (how many scrapes so far)."""

    def __init__(self, pages: Sequence[str], content_type: str = "text/plain; version=1.0.0; charset=utf-8") -> None:
        outer = self
        self.pages = [page.encode() for page in pages]
        self.served = 0

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = outer.pages[min(outer.served, len(outer.pages) - 1)]
                outer.served += 1
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Stay quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}/metrics"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
