"""What sixteen hostile engines at once may cost the real process: a budget of memory, and nothing to the honest one."""

from __future__ import annotations

import gzip
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import pytest

from publish.clients import eventually
from serve_process import LISTEN, QUIET, Process

HOSTILE = 15
BUDGET_MIB = 80.0  # measured 40 to 67; 565 when each bound held for one page alone
HONEST = gzip.decompress((Path(__file__).parent / "fixtures/vllm/d_kv_pressure.prom.gz").read_bytes())
LARGEST = 4 * 1024 * 1024 - 1
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "e2e_request_latency_seconds",
    "inter_token_latency_seconds",
    "request_queue_time_seconds",
)


def new_lines(version: int) -> bytes:
    """As much as may be sent, worth remembering, and never seen before."""
    lines = (f'x_bucket{{le="{n}",label="{version}-{n}-{"y" * 20}"}} {n}\n' for n in range(60_000))
    return HONEST + "".join(lines).encode()


def wide_characters(version: int) -> bytes:
    """Text that takes four bytes a character as soon as it is looked at."""
    lines = (f'x{{label="{version}-{n}-{chr(0x1F600) * 200}"}} {n}\n' for n in range(4_800))
    return HONEST + "".join(lines).encode()


def new_engines(version: int) -> bytes:
    """As many engines as a page may have, with as many buckets as a histogram may have, and other ones each time."""
    labels = [f'engine="{version}-{engine}",model_name="m{"z" * 100}"' for engine in range(64)]
    lines = [f"vllm:num_requests_running{{{label}}} 1\n" for label in labels]
    lines += [
        f'vllm:{name}_bucket{{{label},le="{bound}"}} {number}\n'
        for name in HISTOGRAMS
        for label in labels
        for number, bound in enumerate((*range(59), "+Inf"))
    ]
    return "".join(lines).encode()


def many_figures_of_the_plugin(version: int) -> bytes:
    """What only the plugin inside vLLM writes, for engines that are not there."""
    lines = (
        f'kvpressure:engine_steps_total{{engine="{version}-{n}",count="batch",size="{n}"}} 1\n' for n in range(50_000)
    )
    return HONEST + b"".join(line.encode() for line in lines)


@pytest.fixture
def hostile() -> Iterator[Callable[[Callable[[int], bytes]], str]]:
    """Starts a server whose page is another one every time; its address. Every path is a page."""
    servers: list[ThreadingHTTPServer] = []

    def start(page: Callable[[int], bytes]) -> str:
        bodies = [
            body if len(body) < LARGEST else body[: body.rindex(b"\n", 0, LARGEST) + 1] for body in map(page, range(3))
        ]
        turn = count()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                body = HONEST if self.path.startswith("/honest") else bodies[next(turn) % len(bodies)]
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

            def handle(self) -> None:
                """The exporter hangs up when it has no room for the answer."""
                try:
                    super().handle()
                except OSError:
                    self.close_connection = True

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def value(page: str, series: str) -> float:
    found = re.search(rf"^{re.escape(series)} (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize(
    ("page", "cut"),
    [
        (new_lines, None),
        (wide_characters, None),
        (new_engines, "engines"),
        (many_figures_of_the_plugin, "plugin"),
    ],
)
def test_sixteen_engines_stay_within_the_budget_and_the_honest_one_is_read(
    hostile: Callable[[Callable[[int], bytes]], str], page: Callable[[int], bytes], cut: str | None
) -> None:
    address = hostile(page)
    targets = [f"bad/hostile-{number}={address}/{number}" for number in range(HOSTILE)]
    arguments = [flag for target in [*targets, f"good/chat-0={address}/honest"] for flag in ("--vllm.target", target)]
    process = Process(*QUIET, *LISTEN, "--vllm.pace", "fixed", *arguments)
    try:
        largest, until = 0.0, time.monotonic() + 5
        while time.monotonic() < until:
            time.sleep(0.2)
            largest = max(largest, process.memory_mib())
        assert eventually(lambda: process.scrape().count("kvpressure_target_scrape_seconds{") == HOSTILE + 1, 20)
        seen = process.scrape()
        assert value(seen, 'kvpressure_requests_running{engine="0",model_name="m",namespace="good",pod="chat-0"}') >= 0
        assert re.search(r'^kvpressure_engine_up\{.*pod="chat-0".*\} 1\.0$', seen, re.MULTILINE)
        assert value(seen, f'kvpressure_target_errors_total{{reason="timeout",target="{address}/honest"}}') == 0
        assert max(largest, process.memory_mib()) < BUDGET_MIB
        if cut is not None:
            assert f'kvpressure_page_cut{{reason="{cut}",target="{address}/' in seen
        assert process.stop() == 0
    finally:
        process.child.kill()
        process.child.wait(10)
