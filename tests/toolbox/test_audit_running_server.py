"""``audit`` of what runs: a vLLM server's own pages, and an exporter that watches it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import Capsys, answer, refused
from tests.toolbox.conftest import FIXTURES, ServeJson
from tests.toolbox.fake_vllm import FakeVllm
from tests.toolbox.test_diagnose import document_of

pytestmark = pytest.mark.live

PRESSURE = FIXTURES / "recordings/vllm-cpu/d_kv_pressure.jsonl.gz"


def audit(capsys: Capsys, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Status and the first server of the answer."""
    status, document = answer(capsys, "audit", *arguments)
    return status, document["servers"][0]


def item(server: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in server["items"] if one["name"] == name)
    return found


def test_a_bare_server_tells_little_and_says_so(capsys: Capsys) -> None:
    with FakeVllm() as vllm:
        status, server = audit(capsys, vllm.url)
    assert item(server, "max_num_seqs_explicit")["result"] == "cannot see"
    assert item(server, "observe_batch") | {"why": ""} == {
        "name": "observe_batch",
        "section": "5 signals",
        "text": "effective batch size (p95)",
        "result": "cannot see",
        "why": "",
        "measured": "",
        "found": "no scrape configuration seen",
        "set": "a PodMonitor, a ServiceMonitor or the kvpressure exporter",
    }
    assert item(server, "rejected_not_truncated")["result"] == "pass"
    assert "FAIL" not in str(server)
    assert status == (1 if server["failed"] else 0)
    assert server["cannot_see"] > 15


def test_stated_arguments_are_held_against_the_measured_cache(capsys: Capsys) -> None:
    with FakeVllm(blocks=1001, block_size=16, max_model_len=4000) as vllm:
        _, server = audit(capsys, vllm.url, "--args=--max-num-seqs 64 --max-model-len 4000", "--context", "1000")
        assert item(server, "max_num_seqs_explicit")["result"] == "pass"
        found = item(server, "concurrency_from_memory")
        assert (found["result"], found["set"]) == ("fail", "--max-num-seqs 16 (fits in the KV cache as it is)")
        _, server = audit(capsys, vllm.url, "--args=--max-num-seqs 16 --max-model-len 4000", "--context", "1000")
        assert item(server, "concurrency_from_memory")["result"] == "pass"


def test_an_exporter_tells_traffic_and_conditions(capsys: Capsys, serve_json: ServeJson) -> None:
    document = document_of(PRESSURE)
    document["engines"][0]["conditions"]["host_memory_near_limit"] = True
    document["engines"][0]["signals"]["bimodal_prompts"] = 1.0
    status, server = audit(capsys, serve_json({"/api/v1/diagnosis": document}))
    assert status == 1
    assert item(server, "max_num_seqs_explicit")["found"] == "64, set"
    assert item(server, "observe_latency")["found"].startswith("kvpressure exporter at http://")
    assert item(server, "observe_gpu_memory")["result"] == "cannot see"  # no GPU in this recording
    assert item(server, "bursts")["result"] == "pass"
    assert item(server, "separate_long_context")["result"] == "fail"
    assert item(server, "condition_host_memory_near_limit")["result"] == "fail"
    assert item(server, "concurrency_from_memory")["result"] == "fail"
    document["engines"][0]["limits"] = {}
    _, server = audit(capsys, serve_json({"/api/v1/diagnosis": document}))
    assert item(server, "max_num_seqs_explicit")["result"] == "cannot see"


def test_addresses_that_cannot_be_audited(capsys: Capsys, serve_json: ServeJson) -> None:
    empty = serve_json({"/api/v1/diagnosis": {"engines": []}})
    assert "has found no engine yet" in refused(capsys, f"audit {empty}")
    assert "files and addresses cannot be combined" in refused(capsys, f"audit {empty} -")
    assert "URL: " in refused(capsys, "audit http://")


def test_a_path_is_still_a_path(capsys: Capsys, tmp_path: Path) -> None:
    assert "No such file" in refused(capsys, "audit", tmp_path / "http:")
