"""``python -m lab.soak.engine_process ADDRESS PORT``: an engine that can be stopped and killed."""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler

from tests.helpers.vllm_pages import text_of

from lab.soak.engines import PAGE, Server, send


def main(address: str, port: int) -> None:
    """Answer every request with the page."""
    page = text_of(PAGE).encode()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            send(self, page)

        def log_message(self, *_: object) -> None:
            """Silence."""

    Server((address, port), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
