"""An audit in CI: accepted failures do not count, new ones do; SARIF carries both."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from kvpressure.cli import main
from tests.helpers.command import Capsys, refused

BAD = "--args=vllm serve meta-llama/Llama-3.1-8B --max-num-seqs 64"
WORSE = "--args=vllm serve meta-llama/Llama-3.1-8B"


def audit(capsys: Capsys, *options: str) -> tuple[int, str]:
    status = main(["audit", "--vllm-version", "0.11.2", "--gpu", "L40S:48", *options])
    return status, capsys.readouterr().out


def test_what_a_baseline_accepts_does_not_fail(capsys: Capsys, tmp_path: Path) -> None:
    file = str(tmp_path / "audit.json")
    assert audit(capsys, BAD)[0] == 1
    assert audit(capsys, BAD, "--write-baseline", file)[0] == 0
    status, text = audit(capsys, BAD, "--baseline", file)
    assert (status, "FAIL" in text, "accepted by the baseline" in text) == (0, False, True)
    status, text = audit(capsys, WORSE, "--baseline", file)
    assert status == 1
    assert [line for line in text.splitlines() if "FAIL" in line] == [
        "  FAIL max_num_seqs is explicitly set: 256 (default of vLLM 0.11.2)",
        "  FAIL concurrency limits are documented: not set: max_num_seqs, max_num_batched_tokens",
    ]


def failures(capsys: Capsys, tmp_path: Path, then: str, accepted: str, *, version: str = "0.11.2") -> list[str]:
    """Items that fail with the arguments ``then`` and the baseline of ``accepted``."""
    file, serve = str(tmp_path / "audit.json"), "vllm serve meta-llama/Llama-3.1-8B --max-num-seqs 64 "
    server = {"kind": "Deployment", "metadata": {"name": "chat"}}
    container = {"name": "vllm", "image": "vllm/vllm-openai"}
    for name, args in (("old.json", accepted), ("new.json", then)):
        pod = {"containers": [{**container, "command": (serve + args).split()}]}
        (tmp_path / name).write_text(json.dumps({**server, "spec": {"template": {"spec": pod}}}))
    audit(capsys, str(tmp_path / "old.json"), "--write-baseline", file)
    text = audit(capsys, str(tmp_path / "new.json"), "--baseline", file, "--format", "json", "--vllm-version", version)[
        1
    ]
    (audited,) = json.loads(text)["servers"]
    return [item["name"] for item in audited["items"] if item["result"] == "fail"]


@pytest.mark.parametrize(
    ("accepted", "then", "new"),
    [
        ("--max-num-sqs 9", "--max-num-sqs 9", []),
        ("--max-num-sqs 9", "--max-num-sqs 9 --max-model-lenn 4096", ["options_known"]),
        ("--gpu-memory-utilization 0.98", "--gpu-memory-utilization 0.98", []),
        ("--gpu-memory-utilization 0.98", "--gpu-memory-utilization 0.99", ["gpu_memory_utilization"]),
    ],
)
def test_a_baseline_accepts_the_fault_and_not_the_item(
    capsys: Capsys, tmp_path: Path, accepted: str, then: str, new: list[str]
) -> None:
    assert failures(capsys, tmp_path, then, accepted) == new


def test_a_baseline_survives_a_release_with_the_same_defaults(capsys: Capsys, tmp_path: Path) -> None:
    assert failures(capsys, tmp_path, "", "", version="0.11.1") == []


def test_a_baseline_of_an_earlier_release_is_refused(capsys: Capsys, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text('{"accepted": {"args/vllm:vllm": ["input_limit"]}}')
    said = refused(capsys, "audit", BAD, "--baseline", tmp_path / "old.json")
    assert "without the faults that were found; write it again with --write-baseline" in said


def test_sarif(capsys: Capsys, tmp_path: Path) -> None:
    file = str(tmp_path / "audit.json")
    audit(capsys, BAD, "--write-baseline", file)
    status, text = audit(capsys, WORSE, "--baseline", file, "--format", "sarif")
    (run,) = json.loads(text)["runs"]
    rules = {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    assert status == 1
    assert {result["ruleId"] for result in run["results"]} <= rules
    new = [result for result in run["results"] if "suppressions" not in result]
    assert [(one["ruleId"], one["level"]) for one in new] == [
        ("max_num_seqs_explicit", "error"),
        ("concurrency_limits_documented", "error"),
    ]
    assert len(run["results"]) > 1


_TWO = """\
# two servers
apiVersion: v1
kind: List
items:
- {kind: Service, metadata: {name: front}}
- kind: Deployment
  metadata: {name: chat}
  spec: &spec
    template:
      spec:
        containers:
        - name: proxy
          image: envoy
        - name: vllm
          image: vllm/vllm-openai:v0.11.2
          args: [--model, llama]
---
kind: InferenceService
metadata: {name: code}
spec:
  predictor:
    model:
      modelFormat: {name: vllm}
      args: [--model, llama]
"""


def locations(capsys: Capsys, *options: str) -> set[str]:
    _, text = audit(capsys, *options, "--format", "sarif")
    (run,) = json.loads(text)["runs"]
    return {json.dumps(location) for result in run["results"] for location in result["locations"]}


def test_sarif_names_the_file_and_the_line_of_the_container(
    capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my chat.yaml").write_text(_TWO)
    wanted = {
        json.dumps(
            {
                "physicalLocation": {"artifactLocation": {"uri": "my%20chat.yaml"}, "region": {"startLine": line}},
                "logicalLocations": [{"fullyQualifiedName": title}],
            }
        )
        for line, title in ((14, "deployment/chat:vllm"), (22, "inferenceservice/code:kserve-container"))
    }
    assert locations(capsys, "./my chat.yaml") == wanted
    assert all(
        f'"uri": "{(tmp_path / "my chat.yaml").as_uri()}"' in one
        for one in locations(capsys, str(tmp_path / "my chat.yaml"))
    )


def test_sarif_without_a_file_has_no_physical_location(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locations(capsys, BAD) == {json.dumps({"logicalLocations": [{"fullyQualifiedName": "args/vllm:vllm"}]})}
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(_TWO.encode())))
    assert not any("physicalLocation" in one for one in locations(capsys, "-"))


@pytest.mark.parametrize(
    "content", ["", "[]", '{"accepted": {"a": 1}}', '{"accepted": {"a": [1]}}', '{"accepted": {"a": {"b": 1}}}']
)
def test_another_file_is_refused(content: str, capsys: Capsys, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(content)
    said = refused(capsys, "audit", BAD, "--baseline", tmp_path / "other.json")
    assert "allowed: a file that --write-baseline wrote" in said
