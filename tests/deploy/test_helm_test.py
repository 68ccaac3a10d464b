"""``helm test``: the script of its pod, run against an exporter's answers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.deploy.chart import Json, helm_test_objects, only, problems, render
from tests.helpers.web import serving_pages

pytestmark = pytest.mark.slow

ANSWERS = {"/metrics": b'kvpressure_build_info{version="0.1.0"} 1\n', "/other": b"go_goroutines 7\n"}


@pytest.fixture
def port() -> Iterator[int]:
    with serving_pages(ANSWERS.get) as address:
        yield int(address.rpartition(":")[2])


def run(port: int, path: str) -> subprocess.CompletedProcess[str]:
    (pod,) = helm_test_objects()
    script = pod["spec"]["containers"][0]["args"][0]
    return subprocess.run(
        [sys.executable, "-c", script, "127.0.0.1", str(port), path], capture_output=True, text=True, timeout=30
    )


@pytest.mark.parametrize(("path", "passed"), [("/metrics", True), ("/other", False), ("/x", False)])
def test_it_passes_only_if_the_exporter_answers(port: int, path: str, passed: bool) -> None:
    tried = run(port, path)
    assert (tried.returncode == 0) is passed, tried.stdout + tried.stderr
    assert tried.stdout.splitlines()[-1] == f"{int(passed)} of 1 exporters answer"


@pytest.mark.parametrize(
    ("values", "asked"),
    [
        ({}, ["9846", "/metrics"]),
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
