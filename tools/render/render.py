"""Draw every board from the demo's incident and report what is wrong: ``make render-dashboards``.

Starts ``kvpressure demo`` (with a real Prometheus), serves the bundled page, the boards and Prometheus' interface from one
address on loopback, and lets Chromium take a picture of each board. Exit status 1 when a query is refused, a query without a
declared reason is empty, or a panel fails.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from kvpressure.bundle.boards import optional_queries
from kvpressure.bundle.boards.builder import Site, Values
from kvpressure.thresholds import builtin

HERE = Path(__file__).parent
WIDTH = 1880  # of a board on a usual screen
BOARDS = HERE.parents[1] / "dashboards"
TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css", ".json": "application/json"}
PAGE = "<!doctype html><meta charset=utf-8><link rel=stylesheet href=/board.css><body style=margin:0><div id=root></div><script type=module src=/board.js></script>"
BROWSER = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
           "--disable-component-update", "--disable-sync", "--hide-scrollbars")


def handler(prometheus: str) -> type[BaseHTTPRequestHandler]:
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
            file = (BOARDS if path.startswith("/boards/") else HERE / "build") / Path(path).name
            return (200, TYPES[file.suffix], file.read_bytes()) if file.is_file() else (404, "text/plain", b"")

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    return Handler


def browse(url: str, *flags: str) -> str:
    with tempfile.TemporaryDirectory() as profile:
        command = ["chromium", *BROWSER, f"--user-data-dir={profile}", "--virtual-time-budget=20000", *flags, url]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def draw(base: str, board: Path, out: Path, height: int, optional: set[tuple[str, str, str]]) -> list[str]:
    """Picture of ``board`` in ``out``, of its upper ``height`` pixels or (0) the whole; returns what is wrong with it."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in json.loads(board.read_text())["panels"])
    url = f"{base}/?board={board.stem}&seconds=75&width={WIDTH}"
    browse(url, f"--window-size={WIDTH},{height or 60 + rows * 36}", f"--screenshot={out / board.stem}.png")
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', browse(url, "--dump-dom"), re.DOTALL)
    if found is None:
        return [f"{board.stem}: nothing was drawn"]
    report = json.loads(found[1])
    empty = [one for one in report["empty"] if (board.stem, one["panel"], one["refId"]) not in optional]
    print(f"{board.stem}: {report['queries']} queries, {len(report['errors'])} refused, {len(report['empty'])} empty "
          f"({len(empty)} without a reason), {len(report['react'])} panels failed, {report['canvases']} canvases")
    return [f"{board.stem}: {json.dumps(one)}" for one in (*report["errors"], *empty, *report["react"])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "build", help="where pictures go (default: tools/render/build)")
    parser.add_argument("--scenario", default="kv_pressure")
    parser.add_argument("--height", type=int, default=0, help="pixels of each board that are pictured (default: all)")
    options = parser.parse_args()
    if shutil.which("chromium") is None:
        print("render-dashboards: chromium is not installed (Debian: apt install chromium)", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    demo = subprocess.Popen([sys.executable, "-u", "-m", "kvpressure.cli", "demo", "--scenario", options.scenario, "--for", "480", "--speed", "2"],
                            stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    problems: list[str] = []
    try:
        prometheus = ""
        for line in demo.stdout:
            print(line, end="", flush=True)
            if match := re.match(r"  Prometheus +(http://\S+?)/?\s", line):
                prometheus = match[1]
            if "== incident" in line:
                break
        threading.Thread(target=lambda: [None for _ in demo.stdout or ()], daemon=True).start()
        time.sleep(25)
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler(prometheus))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        optional = set(optional_queries(Site(builtin(), Values(), frozenset())))
        for board in sorted(BOARDS.glob("*.json"), key=lambda path: path.stem != "kvpressure-incident"):
            problems += draw(f"http://127.0.0.1:{server.server_address[1]}", board, options.out, options.height, optional)
        server.shutdown()
    finally:
        demo.terminate()
        demo.wait()
    print("\n".join(problems) or "nothing is wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
