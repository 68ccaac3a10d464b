"""Which browsers are answered: a page of the open web must not read the exporter under its own name."""

from __future__ import annotations

import json

import pytest

from kvpressure.publish.web.hosts import Hosts
from tests.publish.clients import connect, receive
from tests.publish.conftest import Start

BROWSER = {"accept-language": "en", "user-agent": "Mozilla/5.0"}
PATHS = ["/", "/api/v1/diagnosis", "/metrics"]


def status(port: int, path: str, host: str, *headers: str) -> int:
    with connect(port) as client:
        lines = "".join(f"{header}\r\n" for header in headers)
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{lines}\r\n".encode())
        answer = receive(client)
    if answer.status == 421:
        assert b"--web.allowed-hosts" in answer.body
        assert b"kvpressure_" not in answer.body
    elif path.startswith("/api"):
        json.loads(answer.body)
    return answer.status


@pytest.mark.attack("DNS rebinding, requests of other origins", "status 421, no CORS header")
@pytest.mark.writer(
    "the author of a web page that a user opens",
    "requests under a host name that resolves to the exporter (DNS rebinding)",
    "nothing: status 421",
    "browsers are answered only under known host names",
)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "header",
    [
        "Accept-Language: en",
        "Sec-Fetch-Site: same-origin",
        "Origin: http://evil.example",
        "Referer: http://evil.example/",
        "User-Agent: Mozilla/5.0 (X11)",
    ],
)
def test_a_page_that_rebinds_its_name_reads_nothing(start: Start, path: str, header: str) -> None:
    assert status(start(), path, "evil.example:9846", header) == 421


@pytest.mark.parametrize("path", PATHS)
def test_prometheus_may_use_any_name(start: Start, path: str) -> None:
    assert status(start(), path, "gpu-1.example.com:9846", "User-Agent: Prometheus/3.0.1") == 200


@pytest.mark.parametrize(
    "host",
    [
        *("10.0.0.7:9846", "10.0.0.7", "[fd00::7]:9846", "[fe80::1%25eth0]:9846", "localhost:9846"),
        *("node-1", "kvpressure:9846", "kvpressure.monitoring.svc:9846", "kvpressure.monitoring.svc.cluster.local."),
        *("KVPRESSURE.monitoring.SVC", "kv.example.com", "a.internal.example.com", "node.example.com"),
    ],
)
def test_addresses_services_and_named_hosts_stay_open_to_browsers(host: str) -> None:
    hosts = Hosts(("KV.example.com", ".internal.example.com", "node.example.com", ""))
    assert hosts.refuses({**BROWSER, "host": host}) is None


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "svc.evil.example", "a.svc.evil.example", "10.0.0.7.evil.example"),
        *("evilkv.example.com", "internal.example.com.evil.example", "0x7f.1", "1.2.3", ".."),
        *("localhost.evil.example", "evil.example:80:80"),
    ],
)
def test_no_other_name_passes(host: str) -> None:
    assert Hosts(("kv.example.com", ".internal.example.com")).refuses({**BROWSER, "host": host}) is not None
