"""Pods that run SGLang, and what is said of those that publish no metrics."""

from __future__ import annotations

from typing import Any

import pytest

from kvpressure.advice.wording import reason_text
from kvpressure.sources.kubernetes.podspec import Policy, read_pod
from tests.sources.kubernetes.objects import container, pod

LAUNCH = ["python3", "-m", "sglang.launch_server", "--model-path", "m", "--host", "0.0.0.0"]


def row(**fields: Any) -> tuple[str, str, str, str, bool]:
    """Result, reason, sign, address and completeness of the one container."""
    found = read_pod(pod(containers=[container("server", **fields)]), Policy())
    (one,) = found.rows
    return one.result, one.why, one.sign, "" if one.target is None else one.target.name, one.complete


@pytest.mark.parametrize(
    ("fields", "sign", "port"),
    [
        ({"command": [*LAUNCH, "--enable-metrics"], "image": "own"}, "command", 30000),
        ({"command": ["sh", "-c", f"exec {' '.join(LAUNCH)} --port 8000 --enable-metrics"]}, "command", 8000),
        ({"command": ["sglang", "serve", "m", "--enable-metrics"], "image": "own"}, "command", 30000),
        ({"command": None, "args": ["--model-path", "m", "--enable-metrics"]}, "arguments", 30000),
    ],
)
def test_a_server_is_found(fields: dict[str, Any], sign: str, port: int) -> None:
    address = f"http://10.0.0.5:{port}/metrics"
    assert row(**{"image": "lmsysorg/sglang:v0.5.9", "ports": [], **fields}) == ("engine", sign, sign, address, True)


def test_a_server_without_metrics_is_named_and_still_asked() -> None:
    result, why, sign, address, complete = row(command=LAUNCH, image="lmsysorg/sglang:v0.5.9", ports=[])
    assert (result, why, sign, complete) == ("engine", "metrics_off", "command", True)
    assert address == "http://10.0.0.5:30000/metrics"


def test_a_refused_scrape_names_the_switch_of_the_server_that_is_there() -> None:
    off = (
        "HTTP 404 response (another path, or the server's metrics are switched off: start SGLang with --enable-metrics)"
    )
    assert reason_text("http_404", "sglang") == off
    assert "--enable-metrics" not in reason_text("no_engine_metrics", "vllm")
    for reason in ("http_404", "no_engine_metrics"):
        assert "vLLM without --disable-log-stats, SGLang with --enable-metrics" in reason_text(reason)
