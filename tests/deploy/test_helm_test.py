"""``helm test``: the script of its pod, run against an exporter's answers."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.deploy.chart import Json, helm_test_objects, only, problems, render

pytestmark = pytest.mark.slow

ANSWERS: dict[str, tuple[int, bytes]] = {
    "/metrics": (200, b'kvpressure_build_info{version="0.1.0"} 1\n'),
    "/other": (200, b"go_goroutines 7\n"),
    "/-/ready": (503, b"no tick yet\n"),
}


@pytest.fixture
def port() -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = ANSWERS.get(self.path, (404, b""))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def run(port: int, path: str) -> subprocess.CompletedProcess[str]:
    (pod,) = helm_test_objects()
    script = pod["spec"]["containers"][0]["args"][0]
    return subprocess.run(
        [sys.executable, "-c", script, "127.0.0.1", str(port), path], capture_output=True, text=True, timeout=30
    )


@pytest.mark.parametrize(
    ("path", "passed"), [("/metrics", True), ("/other", False), ("/-/ready", False), ("/x", False)]
)
def test_it_passes_only_if_the_exporter_answers(port: int, path: str, passed: bool) -> None:
    tried = run(port, path)
    assert (tried.returncode == 0) is passed, tried.stdout + tried.stderr
    assert tried.stdout.splitlines()[-1] == f"{int(passed)} of 1 exporters answer"


@pytest.mark.parametrize(
    ("values", "asked"),
    [
        ({}, ["9846", "/metrics"]),
        ({"config": {"web.telemetry-path": "/m"}}, ["9846", "/m"]),
        ({"webConfigSecret": "web"}, ["9847", "/-/ready"]),
    ],
)
def test_it_asks_where_no_password_is_wanted(values: Json, asked: list[str]) -> None:
    (pod,) = helm_test_objects(values)
    host, *rest = pod["spec"]["containers"][0]["args"][1:]
    service = only(render(values), "Service")["metadata"]
    assert host == f"{service['name']}.{service['namespace']}.svc"
    assert rest == asked
    assert problems([pod]) == []


def test_the_network_policy_lets_it_in() -> None:
    (pod,) = helm_test_objects()
    policy = only(render({"networkPolicy": {"enabled": True, "ingressFrom": [{"podSelector": {}}]}}), "NetworkPolicy")
    peers = policy["spec"]["ingress"][0]["from"]
    assert any(
        peer["podSelector"].get("matchLabels", {"x": ""}).items() <= pod["metadata"]["labels"].items() for peer in peers
    )
    selector = only(render(), "Service")["spec"]["selector"]
    assert not selector.items() <= pod["metadata"]["labels"].items()  # it is no exporter
