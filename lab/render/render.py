"""Draw every dashboard from the demo's incident and report what is wrong: ``make -C lab render-dashboards``.

Starts the demo (with a real Prometheus), serves the page, the dashboards and Prometheus' interface from
one address on loopback, and lets Chromium take a picture of each. Exit status 1 when a query is refused, a query
without a declared reason is empty, or a panel fails.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from chrome import browse, picture
from playing import incident

from kvpressure.bundle.dashboards import optional_queries
from kvpressure.bundle.dashboards.builder import BundleValues, DashboardContext
from kvpressure.settings.thresholds import builtin

HERE = Path(__file__).parent
WIDTH = 1600  # pixels of a picture
SECONDS = 110  # that its graphs show
SETTLE = 60  # seconds from the incident's begin to the picture
DEMO_SECONDS = 900  # a busy machine takes a minute for each dashboard
HEADER, ROW = 130, 38  # pixels above the panels, and of a grid row: as in dashboard.jsx
DASHBOARDS = HERE.parents[1] / "dashboards"
TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css", ".json": "application/json"}
PAGE = (
    "<!doctype html><meta charset=utf-8><link rel=stylesheet href=/dashboard.css><body style=margin:0><div"
    " id=root></div><script type=module src=/dashboard.js></script>"
)


def handler(prometheus: str) -> type[BaseHTTPRequestHandler]:
    """Serves the drawing page and the dashboards, and passes queries on to ``prometheus``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, body = self.find()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def find(self) -> tuple[int, str, bytes]:
            path = self.path.split("?")[0]
            if path.startswith("/api/"):
                try:
                    with urlopen(prometheus + self.path, timeout=20) as answer:
                        return 200, TYPES[".json"], answer.read()
                except HTTPError as error:
                    return error.code, TYPES[".json"], error.read()
            if path == "/":
                return 200, TYPES[".html"], PAGE.encode()
            file = (DASHBOARDS if path.startswith("/dashboards/") else HERE / "build") / Path(path).name
            return (200, TYPES[file.suffix], file.read_bytes()) if file.is_file() else (404, "text/plain", b"")

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    return Handler


@contextmanager
def serving(prometheus: str) -> Iterator[str]:
    """Address of the drawing page."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(prometheus))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def draw(base: str, dashboard: Path, out: Path, height: int, optional: set[tuple[str, str, str]]) -> list[str]:
    """Picture of ``dashboard`` in ``out``, of its upper ``height`` pixels or (0) the whole; returns what is
    wrong with it.
    """
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in json.loads(dashboard.read_text())["panels"])
    url = f"{base}/?dashboard={dashboard.stem}&seconds={SECONDS}&width={WIDTH}&end={time.time():.0f}"
    picture(url, out, WIDTH, height or HEADER + rows * ROW + 10)
    found = re.search(
        r'<script type="application/json" id="report">(.*?)</script>', browse(url, "--dump-dom"), re.DOTALL
    )
    if found is None:
        return [f"{dashboard.stem}: nothing was drawn"]
    report = json.loads(found[1])
    empty = [one for one in report["empty"] if (dashboard.stem, one["panel"], one["refId"]) not in optional]
    print(
        f"{dashboard.stem}: {report['queries']} queries, {len(report['errors'])} refused, {len(report['empty'])} empty "
        f"({len(empty)} without a reason), {len(report['react'])} panels failed, {report['canvases']} canvases",
        flush=True,
    )
    return [f"{dashboard.stem}: {json.dumps(one)}" for one in (*report["errors"], *empty, *report["react"])]


def declared() -> set[tuple[str, str, str]]:
    """Queries that may be empty, each with a reason on its panel."""
    return set(optional_queries(DashboardContext(builtin(), BundleValues())))


def installed() -> bool:
    """Whether there is a Chromium; says so if not."""
    if shutil.which("chromium") is None:
        print("render-dashboards: chromium is not installed (Debian: apt install chromium)", file=sys.stderr)
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=HERE / "build", help="where pictures go (default: lab/render/build)"
    )
    parser.add_argument("--scenario", default="kv_pressure")
    parser.add_argument(
        "--height", type=int, default=0, help="pixels of each dashboard that are pictured (default: all)"
    )
    options = parser.parse_args()
    if not installed():
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    with incident(options.scenario, DEMO_SECONDS, tell=True) as demo:
        time.sleep(SETTLE)
        with serving(demo.prometheus) as base:
            for dashboard in sorted(DASHBOARDS.glob("*.json"), key=lambda path: path.stem != "kvpressure-incident"):
                out = options.out / f"{dashboard.stem.replace('kvpressure', 'dashboard')}.webp"
                problems += draw(base, dashboard, out, options.height, declared())
    print("\n".join(problems) or "nothing is wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
